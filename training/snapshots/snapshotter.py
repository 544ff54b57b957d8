"""Rank 0's facade: captures the state between two steps, writes it when due, prunes the old ones.

On every other rank it does nothing, and on none does it take a collective: a snapshot can be
written when the peers are already gone.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)

from training.failure import TrainingError, say
from training.group import Group
from training.interruption import Interruption
from training.metrics import snapshot_line
from training.replica import Replica
from training.settings import TrainingSettings
from training.snapshots import files, retention
from training.snapshots.cadence import Cadence
from training.snapshots.delivery import Delivery
from training.snapshots.resume import Resumed, plain


@dataclass(frozen=True)
class _Boundary:
    """A moment between two optimizer steps: the parameters are those after `step`."""

    step: int
    gradient_norm: torch.Tensor


class Snapshotter:
    """Call `after_step` between optimizer steps, and `close` after the last one."""

    def __init__(
        self,
        settings: TrainingSettings,
        group: Group,
        replica: Replica,
        resumed: Resumed,
        dataset_samples: int,
        interruption: Interruption,
    ) -> None:
        self._settings, self._group, self._replica = settings, group, replica
        self._attempt, self._dataset_samples = resumed.attempt, dataset_samples
        self._interruption = interruption
        self._directory = Path(settings.checkpoint_dir)
        self._delivery = Delivery(self._directory, settings.checkpoint_s3_uri)
        self._cadence = Cadence(settings.snapshot_steps, settings.snapshot_seconds, resumed.step)
        self._whole = list(resumed.whole)
        self._restored = frozenset(resumed.whole)
        self._boundary: _Boundary | None = None
        self._buffers = _persistent_buffers(replica) if group.rank == 0 else {}
        self._buffers_then = {name: value.clone() for name, value in self._buffers.items()}
        replica.optimizer.register_step_pre_hook(self._leave_boundary)

    def after_step(self, step: int, gradient_norm: torch.Tensor) -> None:
        """Write a snapshot of `step` if one is due, or if the instance is about to be taken away.

        A disk that refuses costs this snapshot and no other; training goes on, and the next due
        time tries again. A step whose gradient is not finite is never written over a good one.
        """
        if self._group.rank == 0:
            self._arrive_at(_Boundary(step, gradient_norm))
            if self._cadence.due(step):
                self._try_to_write()
        self.look()

    def look(self) -> None:
        """Answer a stop signal; call it wherever training stays long between two steps.

        The snapshot is written, and sent to S3 in the background: SageMaker promises no last
        upload. Training goes on.
        """
        if self._interruption.noticed():
            self._try_to_write()
            if self._whole:
                self._delivery.start(self._whole[-1], self._interruption.grace_ends)

    @contextmanager
    def salvaging(self) -> Iterator[None]:
        """When the block fails, as it does when a peer vanishes, write the last complete state.

        It is still in memory, it takes no collective, and this process leaves afterwards. What the
        job itself gave up on (TrainingError) is not worth keeping.
        """
        try:
            yield
        except TrainingError:
            raise
        except Exception as error:
            self._group.peers.tell(error)
            if self._group.rank == 0 and self._boundary:
                self._try_to_write()
                if self._whole:
                    self._delivery.finish(timeout=30)
                    self._delivery.send(self._whole[-1])
            raise

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

    def _arrive_at(self, boundary: _Boundary) -> None:
        self._boundary = boundary
        for name, value in self._buffers.items():  # the next forward pass may change them
            self._buffers_then[name].copy_(value)

    def _leave_boundary(self, *_: object) -> None:
        self._boundary = None  # an optimizer step is half done until after_step says otherwise

    def _try_to_write(self) -> None:
        """Write the state of the last boundary, unless it is written already or not sound."""
        boundary = self._boundary
        if boundary is None or boundary.step in self._whole:
            return
        step, norm = boundary.step, boundary.gradient_norm
        self._cadence.saved(step)
        if not torch.isfinite(norm):
            say(f"snapshot_refused step={step} reason=gradient norm is {float(norm)}")
            return
        try:
            self._write(step)
        except OSError as error:
            say(f"snapshot_failed step={step} reason={error}")

    def _write(self, step: int) -> None:
        started = time.monotonic()
        state = capture(self._replica, step)
        state["model"].update({name: on_host(kept) for name, kept in self._buffers_then.items()})
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
        self._prune()
        seconds = time.monotonic() - started
        say(snapshot_line(step, stall_seconds=seconds, write_seconds=seconds, bytes=manifest.bytes))

    def _prune(self) -> None:
        s = self._settings
        arrived = self._restored | self._delivery.arrived
        gone = retention.prune(self._directory, s.run_name, self._whole, s.snapshots_kept, arrived)
        self._whole = [step for step in self._whole if step not in gone]


def _persistent_buffers(replica: Replica) -> dict[str, torch.Tensor]:
    """The model's buffers that a snapshot holds, by their plain names."""
    model = replica.plain_model
    saved = model.state_dict().keys()
    return {plain(name): value for name, value in model.named_buffers() if name in saved}


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
