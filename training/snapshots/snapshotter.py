"""Rank 0's facade: captures the state between two steps, writes it when due, prunes the old ones.

On every other rank it does nothing, and on none does it take a collective: a snapshot can be
written when the peers are already gone.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)

from training.failure import TrainingError, say
from training.group import Group
from training.metrics import snapshot_line
from training.replica import Replica
from training.settings import TrainingSettings
from training.snapshots import files
from training.snapshots.cadence import Cadence
from training.snapshots.resume import Resumed


class Snapshotter:
    """Call `after_step` between optimizer steps, and `close` after the last one."""

    def __init__(
        self,
        settings: TrainingSettings,
        group: Group,
        replica: Replica,
        resumed: Resumed,
        dataset_samples: int,
    ) -> None:
        self._settings, self._group, self._replica = settings, group, replica
        self._attempt, self._dataset_samples = resumed.attempt, dataset_samples
        self._directory = Path(settings.checkpoint_dir)
        self._cadence = Cadence(settings.snapshot_steps, settings.snapshot_seconds, resumed.step)
        self._whole = list(resumed.whole)

    def after_step(self, step: int, gradient_norm: torch.Tensor, *, urgent: bool = False) -> None:
        """Write a snapshot of `step` if one is due, or if it is `urgent`.

        A disk that refuses costs this snapshot and no other; training goes on, and the next due
        time tries again. A step whose gradient is not finite is never written over a good one.
        """
        if self._group.rank != 0 or not (urgent or self._cadence.due(step)):
            return
        if step in self._whole:
            return
        self._cadence.saved(step)
        if not torch.isfinite(gradient_norm):
            say(f"snapshot_refused step={step} reason=gradient norm is {float(gradient_norm)}")
            return
        try:
            self._write(step)
        except OSError as error:
            say(f"snapshot_failed step={step} reason={error}")

    def close(self, step: int) -> None:
        """Write the last snapshot, of `step`. Raises TrainingError if it cannot be written."""
        if self._group.rank != 0 or step in self._whole:
            return
        try:
            self._write(step)
        except OSError as error:
            raise TrainingError(
                f"the last snapshot, of step {step}, could not be written to {self._directory}: "
                f"{error}; make room or give a writable --checkpoint-dir and start again"
            ) from error

    def _write(self, step: int) -> None:
        started = time.monotonic()
        state = capture(self._replica, step)
        manifest = files.write(
            self._directory,
            state,
            run_name=self._settings.run_name,
            step=step,
            samples_seen=step * self._settings.global_batch_size,
            world_size=self._group.world_size,
            settings=self._settings.fingerprint(),
            attempt=self._attempt,
            dataset_samples=self._dataset_samples,
            optimizer=type(self._replica.optimizer).__name__,
        )
        self._whole.append(step)
        self._whole = self._whole[-self._settings.snapshots_kept :]
        files.prune(
            self._directory, self._settings.run_name, self._whole, self._settings.snapshots_kept
        )
        seconds = time.monotonic() - started
        say(snapshot_line(step, stall_seconds=seconds, write_seconds=seconds, bytes=manifest.bytes))


def capture(replica: Replica, step: int) -> dict[str, Any]:
    """The state that cannot be derived, after `step` steps and before the gradients are cleared.

    Names are the plain model's: no `module.` of DDP's, no `_orig_mod.` of torch.compile's. Tensors
    on a GPU are copied to the host; on a CPU they are the live ones.
    """
    # With gradients in place an optimizer that keeps no state is left alone; without them torch
    # would take a step to create some.
    state: dict[str, Any] = {
        "model": get_model_state_dict(replica.model),
        "optimizer": get_optimizer_state_dict(replica.model, replica.optimizer),
        "step": step,
    }
    if replica.scaler.is_enabled():
        state["scaler"] = replica.scaler.state_dict()
    return {name: on_host(value) for name, value in state.items()}


def on_host(value: Any) -> Any:
    """A nested state with all tensors on the host, detached, and tuples as lists."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [on_host(item) for item in value]
    return value
