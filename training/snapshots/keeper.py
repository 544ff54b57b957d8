"""Rank 0's part of keeping snapshots: when to begin one, what became of it, and the last words.

Between two steps it only takes references; the copy and the disk are other threads'.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from training.failure import TrainingError, say, sentence
from training.group import Group
from training.interruption import Interruption
from training.replica import Replica
from training.settings import TrainingSettings
from training.snapshots.cadence import Cadence
from training.snapshots.delivery import Delivery
from training.snapshots.host_memory import check_room
from training.snapshots.provenance import provenance
from training.snapshots.resume import Resumed
from training.snapshots.staging import Staging
from training.snapshots.writer import Unsound, Writer

Also = Callable[[], Mapping[str, Any]]  # what a snapshot or its manifest holds beside the rest


@dataclass(frozen=True)
class Boundary:
    """A moment between two optimizer steps: the parameters are those after `step`."""

    step: int
    gradient_norm: torch.Tensor


class Keeper:
    """One rank keeps snapshots, and none of this takes a collective."""

    def __init__(
        self,
        settings: TrainingSettings,
        group: Group,
        replica: Replica,
        resumed: Resumed,
        dataset_samples: int,
        interruption: Interruption,
        also: Also,
        metrics: Also,
    ) -> None:
        self._settings, self._group, self._replica = settings, group, replica
        self._attempt, self._dataset_samples = resumed.attempt, dataset_samples
        self._interruption, self._also, self._metrics = interruption, also, metrics
        self._delivery = Delivery(settings.checkpoint_dir, settings.checkpoint_s3_uri)
        self._seconds_before_job = resumed.seconds_before_job
        self._cadence = Cadence(
            settings, resumed.step, resumed.seconds_trained, resumed.seconds_before_job
        )
        self._staging = Staging(replica)
        self._writer = Writer(settings, self._staging, self._delivery, self._describe)
        self._whole = list(resumed.whole)
        self._restored = frozenset(resumed.whole)
        # The best model so far, and for a moment the one that replaces it.
        self._models_to_come = (2 if resumed.best is None else 1) if settings.validates else 0
        self._begun = self._urgent = self._told_length = False
        self._skipped = 0
        self._last_failure: str | None = None
        self._boundary: Boundary | None = None
        self._buffers = _persistent_buffers(replica)
        self._buffers_then = {name: value.clone() for name, value in self._buffers.items()}
        replica.optimizer.register_step_pre_hook(self._leave_boundary)
        self._say_what_comes(resumed.step)

    def reached(self, boundary: Boundary) -> None:
        """Take note of a boundary, so that its state can be written from now on."""
        if not self._begun:  # now the optimizer has its state
            self._begun = True
            check_room(self._replica, models=self._models_to_come)
        self._cadence.step_done(writing=self._writer.busy)
        self._boundary = boundary
        for name, value in self._buffers.items():  # the next forward pass may change them
            self._buffers_then[name].copy_(value)
        self._say_if_too_short(boundary.step)

    def take(self, step: int, *, urgent: bool) -> None:
        """Begin a snapshot of the boundary of `step` if one is due; waits for no disk."""
        self._collect()
        self._urgent |= urgent or self._cadence.deadline_is_near()
        if self._urgent or self._cadence.due(step):
            self._begin()
        self._cadence.step_begins()

    def look(self, *, urgent: bool) -> None:
        """Begin a snapshot that is due, or that a signal or the deadline asks for."""
        self._urgent |= urgent or self._cadence.deadline_is_near()
        self._collect()
        if self._urgent or self._is_due_before_the_end():
            self._begin()

    def salvage(self) -> None:
        """Write the last boundary's state and take it to S3, and wait for both."""
        if self._boundary is None:
            return
        try:
            for name, value in self._buffers.items():  # a forward pass has begun since
                value.copy_(self._buffers_then[name])
            self._collect(wait=True)
            self._urgent = True
            self._begin()
            self._collect(wait=True)
        except Exception as error:  # the failure that brought us here is the one to report
            say(f"snapshot_failed reason={sentence(error)}")

    def finish(self, step: int) -> None:
        """Wait for the writer, let it write `step`, and take that to S3.

        When a job ends, SageMaker uploads the model but promises no last look at snapshots.
        """
        self._collect(wait=True)
        self._urgent = True
        self._begin()
        self._collect(wait=True)
        if step not in self._whole:
            raise TrainingError(
                f"the last snapshot, of step {step}, could not be written to "
                f"{self._settings.checkpoint_dir}: {self._last_failure}; make room or give a "
                f"writable --checkpoint-dir and start again"
            )
        if self._skipped:
            say(f"snapshots_skipped count={self._skipped} reason=the one before was being written")

    def close(self) -> None:
        """Let the writer end what it has begun; no thread and no copy of the state remain."""
        self._writer.close()
        self._staging.close()

    def _is_due_before_the_end(self) -> bool:
        """Not so for the last step: `finish` writes it, with what its evaluation has found."""
        step = self._boundary.step if self._boundary else self._settings.total_steps
        return step < self._settings.total_steps and self._cadence.due(step)

    def _begin(self) -> None:
        """Stage the last boundary's state, unless it is written already."""
        boundary = self._boundary
        if boundary is None:
            return
        step = boundary.step
        if self._writer.busy:  # an urgent one has its turn as soon as the writer is free
            if not self._urgent:
                self._skipped += 1
                self._cadence.taken(step)
            return
        urgent, self._urgent = self._urgent, False
        self._cadence.taken(step)
        if step not in self._whole:
            self._stage(boundary, deliver=urgent)
        elif urgent:
            self._writer.start_delivery(step, self._interruption.grace_ends)

    def _stage(self, boundary: Boundary, *, deliver: bool) -> None:
        started = time.perf_counter()
        self._staging.begin(boundary.step)
        self._writer.start(
            boundary.step,
            boundary.gradient_norm,
            time.perf_counter() - started,
            tuple(self._whole),
            self._restored,
            self._interruption.grace_ends,
            also=self._also(),
            deliver=deliver,
        )

    def _collect(self, *, wait: bool = False) -> None:
        """Take note of what the writer has done; each cause of failure is told once."""
        try:
            written = self._writer.collect(wait=wait)
        except Unsound as error:
            say(f"snapshot_refused step={self._writer.step} reason={error}")
            return
        except Exception as error:
            cause = str(error) if isinstance(error, OSError) else sentence(error)
            if cause != self._last_failure:
                say(f"snapshot_failed step={self._writer.step} reason={cause}")
            self._last_failure = cause
            return
        if written is None:
            return
        self._last_failure = None
        self._whole = [s for s in [*self._whole, written.step] if s not in written.deleted]
        pace = self._cadence.written(
            written.begin_seconds, written.waited_seconds, written.write_seconds
        )
        if pace:
            say(f"snapshot_pace seconds={pace.seconds:.0f} reason={pace.reason}")

    def _describe(self, step: int) -> dict[str, Any]:
        return {
            **provenance(self._settings, step, self._group.world_size),
            "attempt": self._attempt,
            "dataset_samples": self._dataset_samples,
            "optimizer": type(self._replica.optimizer).__name__,
            "seconds_trained": round(self._cadence.seconds_trained, 3),
            "seconds_before_job": self._seconds_before_job,
            "metrics": dict(self._metrics()),
        }

    def _leave_boundary(self, *_: object) -> None:
        self._boundary = None  # an optimizer step is half done until the next is reached

    def _say_what_comes(self, first_step: int) -> None:
        every, left = self._settings.snapshot_steps, self._settings.total_steps - first_step
        if every >= left > 0:
            say(
                f"snapshot_pace steps={every} reason=set by snapshot_steps; the {left} steps that "
                f"are left end before, so only the last one will be written"
            )
        elif not every and left > 0:
            pace = self._cadence.pace
            say(f"snapshot_pace seconds={pace.seconds:.0f} reason={pace.reason}")

    def _say_if_too_short(self, step: int) -> None:
        """Once, as soon as the pace of the steps is known: will the run end before a snapshot?"""
        left = self._settings.total_steps - step
        if self._told_length or (seconds := self._cadence.seconds_for(left)) is None:
            return
        self._told_length = True
        if self._settings.snapshot_steps == 0 and seconds < self._cadence.pace.seconds:
            pace = self._cadence.pace.seconds
            say(
                f"snapshot_pace seconds={pace:.0f} reason=the run will end in about "
                f"{seconds:.0f} s, before that; only the last one will be written"
            )


def _persistent_buffers(replica: Replica) -> dict[str, torch.Tensor]:
    """The model's buffers that a snapshot holds, by their names in the model."""
    model = replica.plain_model
    saved = model.state_dict().keys()
    return {name: value for name, value in model.named_buffers() if name in saved}
