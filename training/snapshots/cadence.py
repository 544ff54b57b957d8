"""When the next snapshot is due: after so many steps or seconds, whichever comes first."""

import time


class Cadence:
    """Counts from the last snapshot, or from the start of the attempt. Zero switches a rule off."""

    def __init__(self, steps: int, seconds: float, first_step: int) -> None:
        self._steps, self._seconds = steps, seconds
        self.saved(first_step)

    def due(self, step: int) -> bool:
        """Whether a snapshot of `step` is due now."""
        by_steps = self._steps and step - self._last_step >= self._steps
        by_time = self._seconds and time.monotonic() - self._last_time >= self._seconds
        return bool(by_steps or by_time)

    def saved(self, step: int) -> None:
        """Count from `step` and from now on, whether or not that snapshot could be written."""
        self._last_step, self._last_time = step, time.monotonic()
