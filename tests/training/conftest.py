"""One rank of training, in this process: fast enough to run hundreds of times."""

import gc
import signal

import pytest
import torch

from training.group import joined
from training.settings import TrainingSettings
from training.snapshots.snapshotter import Snapshotter
from training.train import train

TINY = {
    "total_steps": 6,
    "global_batch_size": 8,
    "model_width": 16,
    "model_depth": 1,
    "model_heads": 2,
    "sequence_length": 16,
    "decay_steps": 6,
    "snapshot_steps": 2,
    "snapshot_seconds": 0.0,
}


@pytest.fixture
def make_settings(tmp_path, text_dir):
    """TrainingSettings of a tiny run in `tmp_path`, with overrides."""

    def make(**overrides):
        return TrainingSettings(
            **{
                **TINY,
                "train_dir": str(text_dir),
                "checkpoint_dir": str(tmp_path / "checkpoints"),
                "model_dir": str(tmp_path / "model"),
                **overrides,
            }
        )

    return make


@pytest.fixture
def run(hasty_run, monkeypatch):
    """Run one attempt as `hasty_run` does, on a disk that is always done before the next step."""
    take = Snapshotter.take

    def patiently(self, step):
        take(self, step)
        self._keeper._collect(wait=True)

    monkeypatch.setattr(Snapshotter, "take", patiently)
    return hasty_run


@pytest.fixture
def hasty_run(make_settings):
    """Run one attempt with overrides; returns the final state as the last snapshot holds it."""
    before, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    torch.set_num_threads(1)

    def attempt(**overrides):
        settings = make_settings(**overrides)
        with joined(60) as group:
            train(settings, group)
        gc.collect()  # else a forked data worker would take apart this attempt's process group
        path = f"{settings.checkpoint_dir}/step-{settings.total_steps:010d}.pt"
        return torch.load(path, weights_only=True)

    yield attempt
    if torch.distributed.is_initialized():  # the attempt ended in an error
        torch.distributed.destroy_process_group()
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, before)
