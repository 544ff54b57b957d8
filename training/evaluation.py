"""When the model is evaluated, and which state was the best.

Evaluating changes nothing about training: the next step seeds all randomness anew.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from training.failure import say
from training.group import Group
from training.heartbeat import alive
from training.metrics import validation_line
from training.settings import TrainingSettings
from training.snapshots.best import Best
from training.snapshots.resume import Resumed
from training.validation import validation_loss

Look = Callable[[], None]


class Evaluation:
    """Call `after_step` between optimizer steps, and `finish` after the last one.

    Without a data set it does nothing. What it has found so far is part of every snapshot, so that
    a resumed run ends with the same best state: see `state`.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        group: Group,
        model: nn.Module,
        dataset: Dataset[Any] | None,
        resumed: Resumed,
        record: Callable[[int, float], None],
    ) -> None:
        self._settings, self._group, self._model = settings, group, model
        self._dataset, self._record = dataset, record
        self._evaluated = resumed.evaluated
        self.best = Best(settings, group.world_size, resumed) if group.rank == 0 else None
        """Rank 0's; None on the others"""

    def after_step(self, step: int, look: Look) -> None:
        """Evaluate if `evaluate_every` says so. `look` answers a stop signal in the meantime."""
        every = self._settings.evaluate_every
        if every and step and step % every == 0:
            self._evaluate(step, look)

    def finish(self, step: int, look: Look) -> None:
        """Evaluate the last state, and wait until the best one is on the disk.

        Raises TrainingError if it cannot be written.
        """
        self._evaluate(step, look)
        if self.best:
            self.best.finish()

    def state(self) -> dict[str, Any]:
        """What a snapshot holds of all this: nothing before the first evaluation. Rank 0's alone.

        The best model is in every snapshot, because files reach S3 in any order: a file of its own
        could be missing there when the snapshot that builds on it is restored.
        """
        if not self.best or not self._evaluated:
            return {}
        return {"validation": {"step": self._evaluated, "best": self.best.state}}

    def _evaluate(self, step: int, look: Look) -> None:
        if self._dataset is None or self._evaluated == step:
            return
        with alive("evaluating"):
            loss = validation_loss(self._model, self._dataset, self._settings, self._group, look)
        self._evaluated = step
        self._record(step, loss)
        if self.best:
            say(validation_line(step, loss))
            self.best.consider(step, loss, self._model)

    def close(self) -> None:
        """Let the writer of the best state end what it has begun."""
        if self.best:
            self.best.close()
