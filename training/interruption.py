"""SIGTERM on any rank → rank 0 knows, without a collective.

The signal is a bonus: it makes the last snapshot fresher and nothing depends on it. Training goes
on until the instance is gone, because an exit during a reclaim could pass for a finished job, and
the end of a container by itself for a failed one.
"""

import os
import signal
import time
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported late: signals are held back before torch is there
    from training.group import Group

GRACE_SECONDS = 120.0  # between SIGTERM and SIGKILL; API_StopTrainingJob
_KEY = "sigterm"
_SECONDS_BETWEEN_LOOKS = 0.5


def hold_back() -> None:
    """Keep SIGTERM waiting until an Interruption listens: by itself it would end this process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


class Interruption:
    """Watches for SIGTERM from its creation on; ask `noticed()` between two optimizer steps."""

    def __init__(self, group: "Group") -> None:
        self._group = group
        self._signalled: float | None = None
        self._answered = False
        self._next_look = 0.0
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    @property
    def grace_ends(self) -> float | None:
        """The monotonic time at which SIGKILL follows the noticed SIGTERM; None before one."""
        return None if self._signalled is None else self._signalled + GRACE_SECONDS

    def noticed(self) -> bool:
        """True once, on rank 0, when any rank has been told to stop. Other ranks pass it on."""
        if self._answered:
            return False
        if self._group.rank == 0:
            self._look_at_peers()
            self._answered = self._signalled is not None
            return self._answered
        if self._signalled is not None:
            self._answered = True
            self._tell_rank_0()
        return False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = self._signalled or time.monotonic()
        try:
            # The toolkit at the other end of the pipe may already be dead: no print, no logging.
            os.write(2, b"SIGTERM noticed: a snapshot follows at the next step boundary\n")
        except OSError:
            return

    def _tell_rank_0(self) -> None:
        try:
            self._group.store.set(_KEY, "1")
        except RuntimeError:
            return  # rank 0's host is gone; so is the one that could have written a snapshot

    def _look_at_peers(self) -> None:
        now = time.monotonic()
        # A look is a network round trip; steps can be shorter than that.
        if self._signalled is not None or now < self._next_look:
            return
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        try:
            if self._group.store.check([_KEY]):
                self._signalled = now
        except RuntimeError:
            return
