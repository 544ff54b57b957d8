"""Rank 0's facade: stages the state between two steps, and has it written while training goes on.

On every other rank it does nothing, and on none does it take a collective: a snapshot can be
written when the peers are already gone.
"""

from typing import Self

import torch

from training.group import Group
from training.interruption import Interruption
from training.replica import Replica
from training.settings import TrainingSettings
from training.snapshots.keeper import Also, Boundary, Keeper
from training.snapshots.resume import Resumed


class Snapshotter:
    """Call `reached`, then `take`, between two optimizer steps, and `finish` after the last one.

    It is a context: when the block fails, as it does when a peer vanishes, the last complete state
    is written. It is still in memory, it takes no collective, and this process leaves afterwards.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        group: Group,
        replica: Replica,
        resumed: Resumed,
        dataset_samples: int,
        interruption: Interruption,
        also: Also = dict,
        metrics: Also = dict,
    ) -> None:
        """What `also` and `metrics` give is added to the state and to the manifest of snapshots."""
        self._interruption = interruption
        self._keeper = (
            Keeper(settings, group, replica, resumed, dataset_samples, interruption, also, metrics)
            if group.rank == 0
            else None
        )
        self._group = group

    def reached(self, step: int, gradient_norm: torch.Tensor) -> None:
        """Say that `step` is done: from now on a signal or a lost peer makes its state be written.

        A step whose gradient is not finite is never written over a good one.
        """
        if self._keeper:
            self._keeper.reached(Boundary(step, gradient_norm))

    def take(self, step: int) -> None:
        """Begin a snapshot of `step` if one is due, or if the instance is about to be taken away.

        A disk that refuses costs this snapshot and no other; training goes on, and the next due
        time tries again.
        """
        noticed = self._interruption.noticed()
        if self._keeper:
            self._keeper.take(step, urgent=noticed)

    def look(self) -> None:
        """Answer a stop signal, or the time: call it where much happens between two steps."""
        noticed = self._interruption.noticed()
        if self._keeper:
            self._keeper.look(urgent=noticed)

    def finish(self, step: int) -> None:
        """Write the last snapshot, of `step`. Raises TrainingError if it cannot be written."""
        if self._keeper:
            self._keeper.finish(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._group.peers.tell(error)
        if self._keeper:
            if isinstance(error, Exception):
                self._keeper.salvage()
            self._keeper.close()
