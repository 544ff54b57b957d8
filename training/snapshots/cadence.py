"""When the next snapshot is due: after so many steps or seconds, or as often as it may cost."""

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass

from training.failure import seconds_since_start
from training.settings import TrainingSettings

LONGEST_SECONDS = 600.0  # between two snapshots, whatever they cost
FIRST_SECONDS = 30.0  # until the first one, whose cost is not known yet
SHORTEST_SECONDS = 1.0
DEADLINE_MARGIN_SECONDS = 15.0  # for what a measured write does not foresee
_STEPS_REMEMBERED, _STEPS_TO_TELL = 50, 5
_WORTH_TELLING = 1.25  # change of the pace by this factor


@dataclass(frozen=True)
class Pace:
    """Seconds from one snapshot to the next, and why."""

    seconds: float
    reason: str


def pace_for(cost: float | None, settings: TrainingSettings) -> Pace:
    """How far apart snapshots should be that cost `cost` seconds of training each.

    None: not known yet. With a mean time between interruptions it is Young's optimum
    √(2 · cost · MTBF) (Young 1974, Daly 2006) where that is longer than the allowed overhead asks.
    """
    if settings.snapshot_seconds is not None:
        return Pace(settings.snapshot_seconds or math.inf, "set by snapshot_seconds")
    if settings.snapshot_steps:
        return Pace(math.inf, "set by snapshot_steps")
    if cost is None:
        return Pace(FIRST_SECONDS, "the cost of a snapshot is not known yet")
    share = settings.snapshot_overhead
    seconds, reason = cost / share, f"one costs {cost:.3f} s of training and may cost {share:.1%}"
    optimum = math.sqrt(2 * cost * settings.mean_seconds_between_interruptions)
    if optimum > seconds:
        seconds = optimum
        reason = (
            f"one costs {cost:.3f} s of training and an instance lasts "
            f"{settings.mean_seconds_between_interruptions:.0f} s"
        )
    if seconds > LONGEST_SECONDS:
        return Pace(LONGEST_SECONDS, f"{reason}, but never further apart than this")
    return Pace(max(SHORTEST_SECONDS, seconds), reason)


class Cadence:
    """Counts from the last snapshot, or from the start of the attempt; learns what one costs.

    `seconds_before` is how long earlier attempts have trained. The deadline does not count those
    of them, `seconds_before_job`, that were other jobs' attempts. This attempt's time is that of
    its process: compiling and reading a snapshot take minutes of the job's time, too.

    On a GPU a step lasts, here, as long as the host takes to prepare it, and the wait for a copy
    begins before the device has come to it. So the cost is not underestimated; it is overestimated
    by as many steps as the host is ahead.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        first_step: int,
        seconds_before: float = 0.0,
        seconds_before_job: float = 0.0,
    ) -> None:
        self._settings = settings
        self._before, self._began = seconds_before + seconds_since_start(), time.monotonic()
        self._before_job = seconds_before_job
        self._undisturbed = deque[float](maxlen=_STEPS_REMEMBERED)
        self._step_began: float | None = None
        self._slow_down = 0.0
        self._write_seconds = 0.0
        self._cost: float | None = None
        self._is_first = True
        self._deadline_met = False
        self.pace = pace_for(None, settings)
        self.taken(first_step)

    @property
    def seconds_trained(self) -> float:
        """Over all attempts, as far as this one knows."""
        return self._before + time.monotonic() - self._began

    def step_done(self, *, writing: bool) -> None:
        """Take note of a step's duration; `writing`: a snapshot was on its way meanwhile."""
        if self._step_began is None:
            return
        seconds = time.monotonic() - self._step_began
        if not writing:
            self._undisturbed.append(seconds)
        elif self._undisturbed:
            self._slow_down += max(0.0, seconds - statistics.median(self._undisturbed))

    def step_begins(self) -> None:
        """Count the next step from now on: what is done between two steps belongs to neither."""
        self._step_began = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether a snapshot of `step` is due now."""
        every = self._settings.snapshot_steps
        by_steps = every and step - self._last_step >= every
        return bool(by_steps) or time.monotonic() - self._last_time >= self.pace.seconds

    def seconds_for(self, steps: int) -> float | None:
        """How long `steps` undisturbed steps take, once enough have been seen to tell."""
        if len(self._undisturbed) < _STEPS_TO_TELL:
            return None
        return steps * statistics.median(self._undisturbed)

    def deadline_is_near(self) -> bool:
        """True once, when it is time for a last snapshot before the job is stopped."""
        deadline = self._settings.deadline_seconds
        needed = 2 * self._write_seconds + DEADLINE_MARGIN_SECONDS
        in_this_job = self.seconds_trained - self._before_job
        if not deadline or self._deadline_met or in_this_job + needed < deadline:
            return False
        self._deadline_met = True
        return True

    def taken(self, step: int) -> None:
        """Count from `step` and from now on, whether or not that snapshot can be written."""
        self._last_step, self._last_time, self._slow_down = step, time.monotonic(), 0.0

    def written(
        self, begin_seconds: float, waited_seconds: float, write_seconds: float
    ) -> Pace | None:
        """Learn from a snapshot that has been written; the new pace, if it is worth telling.

        Training was held up for `begin_seconds` between two steps and for `waited_seconds` in one.
        """
        self._write_seconds = max(self._write_seconds, write_seconds)
        if self._is_first:  # which also allocated the memory that the others use again
            self._is_first = False
            return None
        cost = begin_seconds + max(waited_seconds, self._slow_down)
        # Smoothed: one step that was slow for another reason must not decide the pace.
        self._cost = cost if self._cost is None else (self._cost + cost) / 2
        before, self.pace = self.pace, pace_for(self._cost, self._settings)
        longer, shorter = (f(before.seconds, self.pace.seconds) for f in (max, min))
        return self.pace if longer > _WORTH_TELLING * shorter else None
