"""The job at one moment, from all that is known: what is shown, judged and told to scripts."""

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.following.job import Job
from launch.following.state import LogState
from training.snapshots.manifest import data_name

LINES_SHOWN = 8
NAMED = 3  # snapshots in a warning, before the rest is only counted


@dataclass(frozen=True)
class Picture:
    """One moment of a job.

    `in_s3` is the newest step that S3 has whole, None where it has none, or where S3 could never be
    listed: then `s3_known` is False. `missing` says, a line each, what could not be read.
    """

    job: Job
    log: LogState
    in_s3: int | None
    missing: Sequence[str]
    warnings: Sequence[str]
    now: datetime.datetime
    s3_known: bool = True
    log_known: bool = True

    @property
    def logged(self) -> int | None:
        """The newest snapshot that is on the disk of the running attempt."""
        steps = self.log.snapshots_since(self.job.attempt_began)
        return max(steps, default=None)

    @property
    def at_risk(self) -> int | None:
        """The steps between the newest snapshot that is logged and the newest in S3, if known."""
        return max(0, (self.logged or 0) - (self.in_s3 or 0)) if self.s3_known else None

    @property
    def to_repeat(self) -> int | None:
        """The steps that an interruption now would repeat; None while log or S3 is not known."""
        if self.log.step is None or not self.s3_known:
            return None
        return max(0, self.log.step - (self.in_s3 or 0))

    @property
    def seconds_left(self) -> float | None:
        """Seconds of training until the last step, without interruptions."""
        step, total, pace = self.log.step, self.job.total_steps, self.log.seconds_per_step
        if step is None or total is None or pace is None or self.job.ended:
            return None
        return max(0, total - step) * pace

    def as_json(self) -> dict[str, Any]:
        """For scripts: the same keys every time, null where a thing is not known."""
        job, reading = self.job, self.log.reading
        return {
            "time": self.now.isoformat(timespec="seconds"),
            "job": job.name,
            "run_name": job.run_name,
            "status": job.status,
            "secondary_status": job.secondary_status,
            "transitions": [
                {
                    "status": one.status,
                    "start": one.start and one.start.isoformat(),
                    "end": one.end and one.end.isoformat(),
                    "message": one.message,
                }
                for one in job.transitions
            ],
            "attempts": job.attempts,
            "interruptions": job.interruptions,
            "step": self.log.step,
            "total_steps": job.total_steps,
            "seconds_left": _finite(self.seconds_left),
            "loss": _finite(reading.loss if reading else None),
            "samples_per_second": _finite(reading.samples_per_second if reading else None),
            "snapshot_logged": self.logged,
            "snapshot_in_s3": self.in_s3,
            "steps_at_risk": self.at_risk,
            "steps_to_repeat": self.to_repeat,
            "seconds_trained": job.seconds_trained,
            "seconds_billed": job.seconds_billed,
            "savings": job.savings,
            "last_log_line": self.log.last_time and self.log.last_time.isoformat(),
            "missing": list(self.missing),
            "warnings": list(self.warnings),
        }


def overdue(
    job: Job,
    log: LogState,
    in_s3: int | None,
    now: datetime.datetime,
    patience: datetime.timedelta,
) -> list[int]:
    """The snapshots that this attempt logged longer than `patience` ago, which S3 does not have.

    What an interruption took with it is lost, not late; and after the job's end nothing is sent.
    """
    end = job.over_since or now
    logged = log.snapshots_since(job.attempt_began)
    return [s for s, time in logged.items() if s > (in_s3 or 0) and end - time > patience]


def stalled_line(steps: Sequence[int], minutes: float) -> str:
    """The warning that names snapshots which do not reach S3."""
    named = ", ".join(data_name(step) for step in steps[-NAMED:])
    more = f" and {len(steps) - NAMED} older" if len(steps) > NAMED else ""
    return (
        f"the sync is stalled: {named}{more} did not reach S3 within {minutes:g} min of being "
        f"written; an interruption now would lose them"
    )


def silence_line(
    job: Job, log: LogState, now: datetime.datetime, patience: datetime.timedelta
) -> str | None:
    """The warning about a job that trains but says nothing for longer than `patience`."""
    began = job.training_since
    if began is None or job.ended:
        return None
    last = max(began, log.last_time or began)
    if now - last <= patience:
        return None
    return f"no sign of life since {last:%Y-%m-%d %H:%M:%S} UTC, though the job is Training"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
