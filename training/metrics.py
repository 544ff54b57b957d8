"""Log lines, and the regular expressions that read them: one place for both.

SageMaker applies the expressions to every line of the log and plots what they find.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

NUMBER = r"([-+]?(?:[0-9.]+(?:e[-+]?[0-9]+)?|nan|inf))"

_FORMATS = {
    "loss": ".4f",
    "learning_rate": ".1e",
    "gradient_norm": ".3f",
    "samples_per_second": ".1f",
    "step_seconds": ".4g",
    "data_wait_seconds": ".4g",
    "tokens_per_second": ".0f",
    "mfu": ".4f",
}


def step_line(step: int, **values: float) -> str:
    """What rank 0 says about an optimizer step; `values` are some of the known ones."""
    return f"step={step} " + " ".join(f"{k}={v:{_FORMATS[k]}}" for k, v in values.items())


def resumed_line(step: int, snapshot: str, attempt: int) -> str:
    """What rank 0 says when every rank holds the state of a snapshot."""
    return f"resumed step={step} snapshot={snapshot} attempt={attempt}"


def snapshot_line(step: int, *, stall_seconds: float, write_seconds: float, bytes: int) -> str:
    """What rank 0 says about a snapshot that is whole on its disk."""
    return (
        f"snapshot step={step} stall_ms={stall_seconds * 1000:.1f} "
        f"write_s={write_seconds:.2f} bytes={bytes}"
    )


def validation_line(step: int, loss: float) -> str:
    """What rank 0 says about the loss on the validation data."""
    return f"validation step={step} validation_loss={loss:.4f}"


METRIC_DEFINITIONS = [
    {"Name": "train:step", "Regex": rf"^step={NUMBER}"},
    {"Name": "train:loss", "Regex": rf"\bloss={NUMBER}"},
    {"Name": "train:learning_rate", "Regex": rf"\blearning_rate={NUMBER}"},
    {"Name": "train:gradient_norm", "Regex": rf"\bgradient_norm={NUMBER}"},
    {"Name": "train:samples_per_second", "Regex": rf"\bsamples_per_second={NUMBER}"},
    {"Name": "train:step_seconds", "Regex": rf"\bstep_seconds={NUMBER}"},
    {"Name": "train:data_wait_seconds", "Regex": rf"\bdata_wait_seconds={NUMBER}"},
    {"Name": "train:tokens_per_second", "Regex": rf"\btokens_per_second={NUMBER}"},
    {"Name": "train:mfu", "Regex": rf"\bmfu={NUMBER}"},
    {"Name": "snapshot:step", "Regex": rf"^snapshot step={NUMBER}"},
    {"Name": "snapshot:stall_ms", "Regex": rf"\bstall_ms={NUMBER}"},
    {"Name": "snapshot:write_s", "Regex": rf"\bwrite_s={NUMBER}"},
    {"Name": "validation:loss", "Regex": rf"\bvalidation_loss={NUMBER}"},
]


class Pace:
    """Measures the steps between two log lines."""

    def __init__(self, step: int) -> None:
        self.restart(step)

    def restart(self, step: int) -> None:
        """Count from `step` and from now on: what happened before belongs to no step."""
        self._step, self._time, self._waited = step, time.perf_counter(), 0.0

    def waits(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; takes note of how long each took to come."""
        iterator = iter(batches)
        while True:
            started = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._waited += time.perf_counter() - started
            yield batch

    def since_last(self, step: int) -> tuple[float, float]:
        """(seconds, seconds of waiting for data) per step since the last call or the start."""
        now = time.perf_counter()
        steps = max(1, step - self._step)
        seconds = max(1e-9, now - self._time) / steps
        waited = self._waited / steps
        self.restart(step)
        return seconds, waited
