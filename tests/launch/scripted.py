"""The life of a training job, played: SageMaker, CloudWatch Logs and S3 answer as of a clock."""

import datetime
import io
import itertools
import json
from types import SimpleNamespace

from botocore.exceptions import ClientError

from launch.following.follower import Clients, Time
from training.metrics import resumed_line, snapshot_line, step_line
from training.snapshots.manifest import data_name, manifest_name

BEGIN = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)
NAME = "shakespeare-20260301-120000-000"
PREFIX = "spot-ddp/shakespeare/snapshots/"
MODEL = f"s3://my-bucket/spot-ddp/shakespeare/output/{NAME}/output/model.tar.gz"
TOTAL = 400
ENDS = {"Completed": "Completed", "Failed": "Failed", "Stopped": "Stopped"}
ENDS |= {"MaxWaitTimeExceeded": "Stopped", "MaxRuntimeExceeded": "Stopped"}


def at(seconds):
    """The time so many seconds after the job was created."""
    return BEGIN + datetime.timedelta(seconds=seconds)


def refused(code, operation="DescribeTrainingJob", message="said AWS"):
    """An error as a client raises it."""
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)


def stepped(step, loss=2.5):
    return step_line(
        step,
        loss=loss,
        learning_rate=3e-4,
        gradient_norm=1.0,
        samples_per_second=640.0,
        step_seconds=2.0,
    )


def saved(step):
    return snapshot_line(step, stall_seconds=0.001, write_seconds=0.4, bytes=7)


def resumed(step, attempt):
    return resumed_line(step, data_name(step), attempt)


def described_manifest(step, **changes):
    """A manifest's bytes, for a data file of seven bytes."""
    values = {
        **{"format": 1, "run_name": "shakespeare", "step": step, "samples_seen": step * 64},
        **{"world_size": 2, "saved_at": "2026-03-01T12:00:00+00:00", "bytes": 7},
        **{"digests": {}, "settings": {}, "versions": {}},
    }
    return json.dumps({**values, **changes}).encode()


class Aws:
    """What a test fills: `life`, `say`, `put`, `fail`; `seconds` is the clock."""

    def __init__(self):
        self.seconds = 0
        self.calls = []
        self.slept = []
        self.states = []
        self.events = []
        self.objects = []  # arrives, key, bytes
        self.errors = {}
        self.page, self.keys = 10_000, 1000
        self.request = {
            "TrainingJobName": NAME,
            "TrainingJobArn": f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{NAME}",
            "RoleArn": "arn:aws:iam::123456789012:role/training",
            "HyperParameters": {"run_name": '"shakespeare"', "total_steps": str(TOTAL)},
            "CheckpointConfig": {"S3Uri": f"s3://my-bucket/{PREFIX}"},
            "CreationTime": BEGIN,
            "EnableManagedSpotTraining": True,
        }
        self.at_the_end = {"TrainingTimeInSeconds": 1000, "BillableTimeInSeconds": 320}

    def life(self, *states):
        """The states, each with how many seconds it lasts; the last one stays."""
        begins = 0
        for status, *lasts in states:
            self.states.append((begins, status))
            begins += lasts[0] if lasts else 0
        return self

    def say(self, seconds, text, stream="algo-1-1772366400", late=0):
        """A log line, which CloudWatch shows `late` seconds after it was written."""
        key = f"{len(self.events):056d}"
        name = f"{NAME}/{stream}"
        milliseconds = int(at(seconds).timestamp() * 1000)
        event = {"eventId": key, "logStreamName": name, "timestamp": milliseconds, "message": text}
        self.events.append((seconds + late, event))
        return self

    def put(self, seconds, *steps, manifest=None):
        """Snapshots that are whole in S3 from then on."""
        for step in steps:
            text = manifest if manifest is not None else described_manifest(step)
            self.objects.append((seconds, PREFIX + manifest_name(step), text))
            self.objects.append((seconds, PREFIX + data_name(step), b"7 bytes"))
        return self

    def fail(self, operation, error, *, after=0, times=10**9):
        """Let an operation raise, from `after` seconds on, so many times."""
        self.errors[operation] = [error, after, times]
        return self

    @property
    def clients(self):
        meta = SimpleNamespace(region_name="us-east-1")
        sagemaker = SimpleNamespace(
            describe_training_job=self._describe, search=self._search, meta=meta
        )
        s3 = SimpleNamespace(list_objects_v2=self._list, get_object=self._get)
        return Clients(sagemaker, SimpleNamespace(filter_log_events=self._filter), s3)

    @property
    def time(self):
        return Time(lambda: at(self.seconds), self._sleep)

    def _sleep(self, seconds):
        self.slept.append(seconds)
        self.calls.append("sleep")
        self.seconds += seconds
        assert self.seconds < 40 * 86400, "followed for ever"

    def _called(self, operation):
        self.calls.append(operation)
        error, after, times = self.errors.get(operation, (None, 0, 0))
        if times > 0 and self.seconds >= after:
            self.errors[operation][2] -= 1
            raise error

    def described(self):
        """The answer of DescribeTrainingJob, as of now."""
        begun = [(begins, status) for begins, status in self.states if begins <= self.seconds]
        transitions = [
            {"Status": status, "StartTime": at(begins), "StatusMessage": ""}
            for begins, status in begun
        ]
        for one, following in itertools.pairwise(transitions):
            one["EndTime"] = following["StartTime"]
        begins, last = begun[-1]
        answer = {
            **self.request,
            "TrainingJobStatus": ENDS.get(last, "InProgress"),
            "SecondaryStatus": last,
            "SecondaryStatusTransitions": transitions,
        }
        if last in ENDS:
            answer |= {"TrainingEndTime": at(begins), **self.at_the_end}
        if last == "Completed":
            answer["ModelArtifacts"] = {"S3ModelArtifacts": MODEL}
        return answer

    def _describe(self, *, TrainingJobName):  # noqa: N803
        self._called("describe")
        if TrainingJobName != NAME:
            raise refused("ValidationException", message="Requested resource not found.")
        return self.described()

    def _search(self, **asked):
        self._called("search")
        self.asked = asked
        return {"Results": [{"TrainingJob": self.described()}]}

    def _filter(self, *, logGroupName, logStreamNamePrefix, startTime, nextToken="0"):  # noqa: N803
        self._called("logs")
        assert logGroupName == "/aws/sagemaker/TrainingJobs"
        assert logStreamNamePrefix == f"{NAME}/"
        there = [
            event
            for arrives, event in self.events
            if arrives <= self.seconds and event["timestamp"] >= startTime
        ]
        there.sort(key=lambda event: event["timestamp"])
        begin = int(nextToken)
        end = begin + self.page
        more = {"nextToken": str(end)} if end < len(there) else {}
        return {"events": there[begin:end], **more}

    def _list(self, *, Bucket, Prefix, StartAfter=""):  # noqa: N803
        self._called("list")
        assert Bucket == "my-bucket"
        found = sorted(
            (key, len(body))
            for arrives, key, body in self.objects
            if arrives <= self.seconds and key.startswith(Prefix) and key > StartAfter
        )
        items = [{"Key": key, "Size": size} for key, size in found[: self.keys]]
        return {"Contents": items, "IsTruncated": len(found) > self.keys}

    def _get(self, *, Bucket, Key):  # noqa: N803
        self._called("get")
        return {"Body": io.BytesIO(next(b for _, key, b in self.objects if key == Key))}
