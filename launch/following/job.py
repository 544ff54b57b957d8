"""What DescribeTrainingJob says about a job, or Search, as far as it says anything."""

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.errors import Refused
from launch.following.trouble import Withheld, code_of, sorted_out

ENDS = ("Completed", "Failed", "Stopped")
OUT_OF_TIME = {"MaxWaitTimeExceeded": "max_wait", "MaxRuntimeExceeded": "max_run"}
_BREAKS = ("Interrupted", "Restarting")
_BEGINNINGS = ("Starting", "Downloading", "Training")


@dataclass(frozen=True)
class Transition:
    """One state that a job went through; times are None where AWS gave none."""

    status: str
    start: datetime.datetime | None
    end: datetime.datetime | None
    message: str


@dataclass(frozen=True)
class Job:
    """A training job as AWS described it last; what it left out is empty, zero or None."""

    response: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.response.get("TrainingJobName", ""))

    @property
    def status(self) -> str:
        """InProgress, Stopping, Completed, Failed or Stopped."""
        return str(self.response.get("TrainingJobStatus", "unknown"))

    @property
    def secondary_status(self) -> str:
        """The state in detail, such as Downloading."""
        return str(self.response.get("SecondaryStatus") or self.status)

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ENDS

    @property
    def transitions(self) -> list[Transition]:
        """All states so far, in the order in which AWS lists them."""
        return [
            Transition(
                str(one.get("Status", "unknown")),
                _time(one.get("StartTime")),
                _time(one.get("EndTime")),
                str(one.get("StatusMessage") or ""),
            )
            for one in self.response.get("SecondaryStatusTransitions") or []
        ]

    @property
    def interruptions(self) -> int:
        """How often the instances were taken."""
        return sum(one.status == "Interrupted" for one in self.transitions)

    @property
    def attempts(self) -> int:
        """How often instances were started, or are being."""
        count, running = 0, False
        for one in self.transitions:
            if one.status in _BREAKS:
                running = False
            elif one.status in _BEGINNINGS and not running:
                count, running = count + 1, True
        return count

    @property
    def attempt_began(self) -> datetime.datetime | None:
        """When the last interruption was, before which nothing is in memory or on a disk."""
        return _newest(one.start for one in self.transitions if one.status in _BREAKS)

    @property
    def training_since(self) -> datetime.datetime | None:
        """When the newest attempt began to train; None unless it does now."""
        last = self.transitions[-1:]
        trains = self.secondary_status == "Training" and last and last[0].status == "Training"
        return last[0].start if trains else None

    @property
    def created(self) -> datetime.datetime | None:
        """When the job was asked for."""
        return _time(self.response.get("CreationTime"))

    @property
    def over_since(self) -> datetime.datetime | None:
        """When the job ended; None while it goes on."""
        end = self.response.get("TrainingEndTime") or self.response.get("LastModifiedTime")
        return _time(end) if self.ended else None

    @property
    def trained_until(self) -> datetime.datetime | None:
        """When training last ended; None while it goes on, or before it began."""
        return _newest(one.end for one in self.transitions if one.status == "Training")

    @property
    def out_of_time(self) -> str | None:
        """max_wait or max_run where the job stopped because that was over."""
        seen = [self.secondary_status, *(one.status for one in self.transitions)]
        over = [OUT_OF_TIME[status] for status in seen if status in OUT_OF_TIME]
        return over[0] if over and self.ended and self.status != "Failed" else None

    @property
    def seconds_trained(self) -> int | None:
        """Seconds of instances in use, over all attempts."""
        return _whole_number(self.response.get("TrainingTimeInSeconds"))

    @property
    def seconds_billed(self) -> int | None:
        """Seconds to pay for, on each instance."""
        return _whole_number(self.response.get("BillableTimeInSeconds"))

    @property
    def savings(self) -> float | None:
        """1 - billed / trained; None while one of them is unknown, or nothing was trained."""
        if not self.seconds_trained or self.seconds_billed is None:
            return None
        return round(1 - self.seconds_billed / self.seconds_trained, 4)

    @property
    def failure_reason(self) -> str:
        """Why the job failed, in AWS's words."""
        return str(self.response.get("FailureReason") or "")

    @property
    def model(self) -> str | None:
        """Where the model is."""
        return (self.response.get("ModelArtifacts") or {}).get("S3ModelArtifacts") or None

    @property
    def snapshots_uri(self) -> str | None:
        """Where the checkpoint directory is in S3, with its slash; None where it is not synced."""
        uri = str((self.response.get("CheckpointConfig") or {}).get("S3Uri") or "")
        return uri.rstrip("/") + "/" if uri.startswith("s3://") else None

    @property
    def run_name(self) -> str | None:
        """The run that this job is a part of; None for a job that is not of this project."""
        name = self.hyperparameter("run_name")
        return None if name is None else str(name)

    @property
    def total_steps(self) -> int | None:
        """The step at which the run is finished."""
        return _whole_number(self.hyperparameter("total_steps")) or None

    def hyperparameter(self, name: str) -> Any:
        """A hyperparameter's value, which the SDK wrote as JSON; None where there is none."""
        text = (self.response.get("HyperParameters") or {}).get(name)
        try:
            return json.loads(text) if text is not None else None
        except (ValueError, RecursionError):
            return text


def describe(sagemaker: Any, name: str) -> Job:
    """Ask for the job. Raises Refused if there is none or we may not see it, Passing if busy."""
    try:
        with sorted_out():
            return Job(sagemaker.describe_training_job(TrainingJobName=name))
    except Withheld as error:
        if code_of(error.__cause__) in ("ValidationException", "ResourceNotFound"):
            region = sagemaker.meta.region_name
            raise Refused(
                f"there is no training job {name!r} in {region} ({error}); type `python "
                f"launch/follow.py` to list those of this project, or give another --region"
            ) from error
        raise Refused(f"the training job {name!r} cannot be read: {error}") from error


def _time(value: Any) -> datetime.datetime | None:
    if not isinstance(value, datetime.datetime):
        return None
    return value.astimezone(datetime.UTC)


def _newest(times: Any) -> datetime.datetime | None:
    return max((time for time in times if time is not None), default=None)


def _whole_number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None
