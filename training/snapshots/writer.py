"""The thread on which a staged state becomes a snapshot: written, pruned, taken to S3 if asked.

One at a time: while it is busy nothing is queued, because a newer state will be worth more.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.failure import say
from training.metrics import snapshot_line
from training.settings import TrainingSettings
from training.snapshots import files, retention
from training.snapshots.delivery import Delivery
from training.snapshots.staging import Staging

Describe = Callable[[int], dict[str, Any]]


class Unsound(Exception):
    """A state that must not be written over a good one; the text says why."""


@dataclass(frozen=True)
class Written:
    """A snapshot that is whole on disk, what it cost, and which older ones were deleted for it."""

    step: int
    begin_seconds: float
    waited_seconds: float
    write_seconds: float
    deleted: tuple[int, ...]


class Writer:
    """Start it after `staging.begin`; `collect` its result between two steps.

    `describe(step)` gives the manifest's fields that only training knows.
    """

    def __init__(
        self, settings: TrainingSettings, staging: Staging, delivery: Delivery, describe: Describe
    ) -> None:
        self._settings, self._staging, self._delivery = settings, staging, delivery
        self._describe = describe
        self._directory = Path(settings.checkpoint_dir)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot writer")
        self._work: Future[Written | None] | None = None
        self.step = 0
        """The step of the newest snapshot that was begun"""

    @property
    def busy(self) -> bool:
        """Whether a snapshot is under way, or its result has not been collected."""
        return self._work is not None

    def start(
        self,
        step: int,
        gradient_norm: torch.Tensor,
        begin_seconds: float,
        whole: Sequence[int],
        arrived: frozenset[int],
        grace_ends: float | None = None,
        *,
        also: Mapping[str, Any] | None = None,
        deliver: bool = False,
    ) -> None:
        """Write what is staged for `step`, which took `begin_seconds` of training so far.

        `also` is added to the state, and may not change any more. `whole` and `arrived` are for
        pruning; with `deliver` the snapshot is then taken to S3.
        """
        self.step = step
        described = self._describe(step)

        def work() -> Written:
            try:
                _check_sound(gradient_norm)
                state = {**self._staging.state(), **(also or {})}
                written = self._write(state, described, step, begin_seconds, whole, arrived)
            finally:
                self._staging.release()
            if deliver:
                self._delivery.send(step, grace_ends)
            return written

        self._work = self._thread.submit(work)

    def start_delivery(self, step: int, grace_ends: float | None) -> None:
        """Take a snapshot that is whole on disk to S3."""
        self._work = self._thread.submit(self._delivery.send, step, grace_ends)

    def collect(self, *, wait: bool = False) -> Written | None:
        """The result, once there is one. Raises what prevented it: Unsound, OSError and others."""
        if self._work is None or not (wait or self._work.done()):
            return None
        work, self._work = self._work, None
        return work.result()

    def close(self) -> None:
        """Stop the thread, once it is idle."""
        self._thread.shutdown()

    def _write(
        self,
        state: dict[str, Any],
        described: dict[str, Any],
        step: int,
        begin_seconds: float,
        whole: Sequence[int],
        arrived: frozenset[int],
    ) -> Written:
        started = time.monotonic()
        manifest = files.write(self._directory, state, **described)
        deleted = retention.prune(
            self._directory,
            self._settings.run_name,
            [*whole, step],
            self._settings.snapshots_kept,
            arrived | self._delivery.arrived,
        )
        seconds = time.monotonic() - started
        waited = self._staging.waited_seconds
        stall = begin_seconds + waited
        say(snapshot_line(step, stall_seconds=stall, write_seconds=seconds, bytes=manifest.bytes))
        return Written(step, begin_seconds, waited, seconds, tuple(deleted))


def _check_sound(gradient_norm: torch.Tensor) -> None:
    # Here and not in the training loop, which would wait for its device to have the number.
    if not torch.isfinite(gradient_norm):
        raise Unsound(f"gradient norm is {float(gradient_norm)}")
