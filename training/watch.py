"""What a person sees of training: log lines, TensorBoard, and a stop at a loss that is none."""

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training.failure import TrainingError, say, sentence
from training.flops import peak_flops
from training.group import Group
from training.metrics import Pace, step_line
from training.optimization import mean_over_ranks
from training.settings import TrainingSettings
from training.snapshots.resume import Resumed

FOLDER = "tensorboard"


def tensorboard_problems(settings: TrainingSettings) -> list[str]:
    """A sentence if event files are asked for and cannot be written here."""
    if not settings.tensorboard or importlib.util.find_spec("tensorboard"):
        return []
    return [
        "tensorboard is true, but the package tensorboard is not installed; add it to "
        "training/requirements.txt, or set tensorboard to false"
    ]


class Watch:
    """Follows one attempt; rank 0 speaks, every rank takes part in the means.

    A model that has `tokens_per_sample` or `flops_per_sample` (of a forward and backward pass) gets
    tokens per second and, where the device's peak is known, its share of that (MFU).
    """

    def __init__(
        self, settings: TrainingSettings, group: Group, model: nn.Module, resumed: Resumed
    ) -> None:
        self._settings, self._group = settings, group
        self._pace = Pace(resumed.step)
        self._tokens = getattr(model, "tokens_per_sample", None)
        self._flops = getattr(model, "flops_per_sample", None)
        self._peak = peak_flops(group.device, settings)
        self._metrics: dict[str, float] = {}
        self._events: dict[str, Any] = {}
        if settings.tensorboard and group.rank == 0:
            self._unless_it_fails(lambda: self._open_events(resumed))

    def metrics(self) -> dict[str, float]:
        """What was last logged about the loss, for the manifests of snapshots. Rank 0's alone."""
        return self._metrics

    def waits(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; takes note of how long training waits for each."""
        return self._pace.waits(batches)

    def after_step(self, step: int, loss: torch.Tensor, norm: torch.Tensor, rate: float) -> None:
        """Log every `log_every` steps, and the last one.

        Raises TrainingError on all ranks when the loss or the gradient is no number any more.
        """
        settings = self._settings
        if step % settings.log_every and step != settings.total_steps:
            return
        mean_loss, gradient_norm = mean_over_ranks(loss, self._group.world_size), float(norm)
        if self._group.rank == 0:
            values = {
                "loss": mean_loss,
                "learning_rate": rate,
                "gradient_norm": gradient_norm,
                **self._speed(step),
            }
            say(step_line(step, **values))
            self._metrics = {"loss": mean_loss, "loss_step": step}
            self._note("train", step, values)
        if not (math.isfinite(mean_loss) and math.isfinite(gradient_norm)):
            raise TrainingError(
                f"the loss is {mean_loss} and the gradient norm {gradient_norm} at step {step}; "
                f"start again under another run_name, with a lower learning_rate or a longer "
                f"warm-up. The snapshots of this run are from before"
            )

    def evaluated(self, step: int, loss: float) -> None:
        """Take note of the loss on the validation data; the time that took is nobody's step."""
        self._pace.restart(step)
        self._note("validation", step, {"loss": loss})

    def close(self) -> None:
        """Let what was noted reach the disk."""
        for events in self._events.values():
            self._unless_it_fails(events.close)

    def _speed(self, step: int) -> dict[str, float]:
        seconds, waited = self._pace.since_last(step)
        samples = self._settings.global_batch_size / seconds
        found = {"samples_per_second": samples, "step_seconds": seconds}
        found["data_wait_seconds"] = waited
        if self._tokens:
            found["tokens_per_second"] = samples * self._tokens
        if self._flops and self._peak:
            found["mfu"] = samples * self._flops / (self._peak * self._group.world_size)
        return found

    def _open_events(self, resumed: Resumed) -> None:
        directory = Path(self._settings.checkpoint_dir) / FOLDER
        self._events["train"] = _event_writer(directory / "train", resumed.step)
        self._events["validation"] = _event_writer(directory / "validation", resumed.evaluated)

    def _note(self, part: str, step: int, values: dict[str, float]) -> None:
        def write() -> None:
            for name, value in values.items():
                self._events[part].add_scalar(name, value, step)

        if part in self._events:
            self._unless_it_fails(write)

    def _unless_it_fails(self, work: Callable[[], object]) -> None:
        """A curve is not worth a run: a disk that refuses ends the curves alone, and is told."""
        try:
            work()
        except Exception as error:
            say(f"tensorboard_failed reason={sentence(error)}; no more is written in this attempt")
            self._events = {}


def _event_writer(directory: Path, done: int) -> Any:
    """Appends to what earlier attempts wrote; of theirs, only steps up to `done` count.

    Steps that are taken again are then shown once: TensorBoard drops what came before the purge.
    """
    from torch.utils.tensorboard import SummaryWriter

    # One second, because what an interruption catches in memory is a gap in the curve.
    return SummaryWriter(directory, purge_step=done + 1, flush_secs=1)
