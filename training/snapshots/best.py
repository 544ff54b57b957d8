"""The state with the lowest validation loss, kept in `best/` beside the snapshots.

It is no snapshot: nothing resumes from it, and pruning does not know it. It holds the model, the
step and the loss, under the names and with the manifest that a snapshot has.
"""

import math
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import nn

from training.failure import TrainingError, say, sentence
from training.settings import TrainingSettings
from training.snapshots import files
from training.snapshots.manifest import BEST_FOLDER
from training.snapshots.names import plain
from training.snapshots.provenance import provenance
from training.snapshots.resume import Resumed
from training.snapshots.tensors import copied_to_host, mapped


class Best:
    """Rank 0's copy of the best state in host memory; a thread of its own writes it."""

    def __init__(self, settings: TrainingSettings, world_size: int, resumed: Resumed) -> None:
        self._settings, self._world_size, self._attempt = settings, world_size, resumed.attempt
        self._directory = Path(settings.checkpoint_dir) / BEST_FOLDER
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="best state")
        self._work: Future[None] | None = None
        self._told = ""
        self._on_disk: dict[str, Any] | None = None
        self.state: dict[str, Any] | None = resumed.best
        """{"model", "step", "validation_loss"}; None before the first evaluation"""
        if self.state:
            self._write_behind()  # what S3 has in the folder may be older, or newer and replayed

    def consider(self, step: int, loss: float, model: nn.Module) -> None:
        """Keep the state of `step` if its loss is lower than any before; of equals, the first."""
        if not math.isfinite(loss) or (self.state and loss >= self.state["validation_loss"]):
            return
        named = {plain(name): value for name, value in model.state_dict().items()}
        self.state = {
            "model": mapped(named, copied_to_host),
            "step": step,
            "validation_loss": loss,
        }
        self._write_behind()

    def finish(self) -> None:
        """Wait for the writer. Raises TrainingError if the best state could not be written."""
        if self._work is None:
            return
        try:
            self._work.result()
        except Exception:
            self._write_behind()  # the disk may have room by now
        try:
            self._work.result()
        except Exception as error:
            raise TrainingError(
                f"the best state could not be written to {self._directory} ({sentence(error)}); "
                f"make room or give a writable --checkpoint-dir and start again"
            ) from error

    def close(self) -> None:
        """Let the writer end what it has begun."""
        self._thread.shutdown()

    def _write_behind(self) -> None:
        self._work = self._thread.submit(self._write)

    def _write(self) -> None:
        """Write the newest best state, then delete the older ones: S3 has it in a snapshot too."""
        state = self.state
        if state is None or state is self._on_disk:
            return
        try:
            files.prepare(self._directory)
            files.write(self._directory, state, **self._described(state))
        except Exception as error:
            if (reason := sentence(error)) != self._told:
                say(f"best_failed step={state['step']} reason={reason}")
            self._told = reason
            raise
        for step in files.candidates(os.listdir(self._directory)):
            ours = files.owner(self._directory, step) in (self._settings.run_name, None)
            if step != state["step"] and ours:
                files.delete(self._directory, step)
        self._on_disk = state

    def _described(self, state: dict[str, Any]) -> dict[str, Any]:
        return {
            **provenance(self._settings, state["step"], self._world_size),
            "attempt": self._attempt,
            "metrics": {"validation_loss": state["validation_loss"]},
        }
