"""SIGTERM on any rank → rank 0 knows, without a collective.

The signal is a bonus: it makes the last snapshot fresher and nothing depends on it. Training goes
on until the instance is gone, because an exit during a reclaim could pass for a finished job.
"""

import os
import signal
import time
from types import FrameType

from training.group import Group

_KEY = "sigterm"
_SECONDS_BETWEEN_LOOKS = 0.5


class Interruption:
    """Watches for SIGTERM from its creation on; ask `noticed()` between two optimizer steps."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._signalled = False
        self._answered = False
        self._next_look = 0.0
        signal.signal(signal.SIGTERM, self._on_signal)

    def noticed(self) -> bool:
        """True once, on rank 0, when any rank has been told to stop. Other ranks pass it on."""
        if self._answered:
            return False
        if self._group.rank == 0:
            self._answered = self._signalled or self._peer_was_signalled()
            return self._answered
        if self._signalled:
            self._answered = True
            self._tell_rank_0()
        return False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = True
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

    def _peer_was_signalled(self) -> bool:
        now = time.monotonic()
        if now < self._next_look:  # a look is a network round trip; steps can be shorter than that
            return False
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        try:
            return bool(self._group.store.check([_KEY]))
        except RuntimeError:
            return False
