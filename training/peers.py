"""When a collective fails: which peer is gone, and what it said before it went.

A rank that has to leave tells the others through the store, because in a collective its end looks
the same as that of a machine that vanished.
"""

import time
from dataclasses import dataclass

import torch.distributed as dist

from training.failure import TrainingError, sentence

SECONDS_FOR_LAST_WORDS = 3.0
_SECONDS_BETWEEN_LOOKS = 0.05


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed, as far as torch lets one see: gloo has no type of its own."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


@dataclass(frozen=True)
class Peers:
    """The ranks by their hosts, and the store that still carries words when collectives fail."""

    rank: int
    hosts: tuple[str, ...]
    store: dist.Store

    def tell(self, error: BaseException) -> None:
        """Let rank 0 know that this rank leaves and why. Costs nothing to say twice."""
        try:
            self.store.set(_key(self.rank), "" if is_lost_peer(error) else sentence(error))
        except RuntimeError:
            return  # the store is on rank 0's host: nobody is there to read it

    def explained(self, error: Exception) -> Exception:
        """`error` itself, or, where a lost peer is behind it, a TrainingError that names it.

        Rank 0 waits a few seconds for the last words of the others; they leave at once, so that
        the ranks that are only connected to them notice as well.
        """
        self.tell(error)
        if not is_lost_peer(error):
            return error
        if self.rank != 0:
            return TrainingError(
                f"host {self.hosts[self.rank]} lost the connection to another rank, which is gone "
                f"({sentence(error)})"
            )
        others = range(1, len(self.hosts))
        deadline = time.monotonic() + SECONDS_FOR_LAST_WORDS
        while (silent := [r for r in others if not self._told(r)]) and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return TrainingError(self._account(silent, error))

    def _account(self, silent: list[int], error: Exception) -> str:
        for rank in range(1, len(self.hosts)):
            if rank not in silent and (words := self._words(rank)):
                return f"rank {rank} on host {self.hosts[rank]} stopped: {words}"
        if silent:
            hosts = ", ".join(dict.fromkeys(self.hosts[rank] for rank in silent))
            return (
                f"host {hosts} vanished (rank {', '.join(map(str, silent))} left without a word); "
                f"start the job again, and it goes on from its newest snapshot"
            )
        return f"the connection between the ranks failed, but all still answer: {sentence(error)}"

    def _told(self, rank: int) -> bool:
        try:
            return bool(self.store.check([_key(rank)]))
        except RuntimeError:
            return False

    def _words(self, rank: int) -> str:
        try:
            return str(self.store.get(_key(rank)).decode())
        except RuntimeError:
            return ""


def _key(rank: int) -> str:
    return f"left-{rank}"
