"""Log lines, and the regular expressions that read them: one place for both.

SageMaker applies the expressions to every line of the log and plots what they find.
"""

import time

NUMBER = r"([-+]?(?:[0-9.]+(?:e[-+]?[0-9]+)?|nan|inf))"


def step_line(
    step: int,
    *,
    loss: float,
    learning_rate: float,
    gradient_norm: float,
    samples_per_second: float,
    step_seconds: float,
) -> str:
    """What rank 0 says about an optimizer step."""
    return (
        f"step={step} loss={loss:.4f} learning_rate={learning_rate:.1e} "
        f"gradient_norm={gradient_norm:.3f} samples_per_second={samples_per_second:.1f} "
        f"step_seconds={step_seconds:.4f}"
    )


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
    {"Name": "snapshot:step", "Regex": rf"^snapshot step={NUMBER}"},
    {"Name": "snapshot:stall_ms", "Regex": rf"\bstall_ms={NUMBER}"},
    {"Name": "snapshot:write_s", "Regex": rf"\bwrite_s={NUMBER}"},
    {"Name": "validation:loss", "Regex": rf"\bvalidation_loss={NUMBER}"},
]


class Pace:
    """Measures the steps between two log lines."""

    def __init__(self, samples_per_step: int, step: int) -> None:
        self._samples, self._step, self._time = samples_per_step, step, time.perf_counter()

    def since_last(self, step: int) -> tuple[float, float]:
        """(samples per second, seconds per step) since the last call or the start."""
        now = time.perf_counter()
        steps = max(1, step - self._step)
        seconds = max(1e-9, now - self._time) / steps
        self._step, self._time = step, now
        return self._samples / seconds, seconds
