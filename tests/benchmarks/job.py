"""What is trained while measurements are taken: the template's own model, optimizer and step."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from training.data import build_dataset
from training.group import Group
from training.model import build_model
from training.optimization import build_optimizer, take_step
from training.parallel import distribute, settle_buckets
from training.replica import Replica
from training.settings import TrainingSettings


@dataclass(frozen=True)
class Shape:
    """A model of about `millions` of parameters, and how many samples its steps see.

    The batches are far smaller than anyone's, so that a copy of the state has little time to hide.
    """

    millions: int
    width: int
    depth: int
    batch: int


SHAPES = {
    shape.millions: shape
    for shape in (
        Shape(1, 128, 5, 4),
        Shape(5, 256, 6, 4),
        Shape(20, 512, 6, 4),
        Shape(120, 768, 17, 2),
    )
}


@dataclass
class Job:
    """One rank that trains; `directory` is where its contenders may write."""

    settings: TrainingSettings
    group: Group
    replica: Replica
    dataset: Dataset[tuple[Tensor, ...]]
    directory: Path
    step: int = 0
    norm: Tensor = field(default_factory=lambda: torch.zeros(()))  # of the last gradient
    _batch: list[Any] = field(default_factory=list)

    def take_step(self) -> None:
        """One optimizer step, on the same samples as ever."""
        batch, device = [self._batch], self.group.device
        _, self.norm = take_step(self.replica, batch, 1e-4, self.settings, device)
        self.step += 1

    @property
    def state(self) -> dict[str, Any]:
        """The state as people save it, by reference."""
        return {
            "model": self.replica.plain_model.state_dict(),
            "optimizer": self.replica.optimizer.state_dict(),
            "step": self.step,
        }

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.replica.plain_model.parameters())

    @property
    def state_bytes(self) -> int:
        """Bytes of the model and of AdamW's two moments."""
        return 3 * sum(p.numel() * p.element_size() for p in self.replica.plain_model.parameters())

    def without_optimizer_state(self) -> Replica:
        """The same model with an optimizer as a process that has just started would have it."""
        self.replica.model.zero_grad(set_to_none=True)
        optimizer = build_optimizer(self.replica.model, self.settings)
        return Replica(self.replica.model, optimizer, self.replica.scaler)


def prepare(shape: Shape, group: Group, directory: Path, **overrides: Any) -> Job:
    """Build a job in `directory`, and warm it up."""
    settings = TrainingSettings(
        **{
            "total_steps": 1_000_000,
            "global_batch_size": shape.batch,
            "model_width": shape.width,
            "model_depth": shape.depth,
            "model_heads": shape.width // 64,
            "snapshot_seconds": 600.0,
            "snapshots_kept": 2,
            "log_every": 10,
            "train_dir": str(text(directory / "text")),
            "checkpoint_dir": str(directory / "snapshots"),
            "model_dir": str(directory / "model"),
            **overrides,
        }
    )
    dataset = build_dataset(settings, settings.train_dir)
    replica = distribute(build_model(settings), settings, group)
    settle_buckets(replica, dataset, settings, group)
    samples = [dataset[index] for index in range(shape.batch)]
    batch = [torch.stack(tensors) for tensors in zip(*samples, strict=True)]
    job = Job(settings, group, replica, dataset, directory, _batch=batch)
    for _ in range(3):
        job.take_step()
    return job


def text(directory: Path) -> Path:
    """A training channel: real text that every Python brings."""
    import pydoc_data.topics

    directory.mkdir(parents=True, exist_ok=True)
    topics = "".join(pydoc_data.topics.topics.values())
    (directory / "topics.txt").write_bytes(topics.encode()[: 2**19])
    return directory


def sync_directory(directory: Path) -> None:
    """Make what `directory` lists durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
