"""One job, sent once to the mocked AWS, and run there as often as asked."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from launch import estimator, runs, start
from launch.data import Channel
from launch.rehearsal import attempt, control, disk
from launch.rehearsal.attempt import Attempt, Job
from launch.rehearsal.aws import loopback_aws
from launch.rehearsal.container import Means
from launch.rehearsal.equality import final_digest
from launch.rehearsal.interruptions import Interruption
from launch.schema import JobConfig

Event = Callable[[Attempt, str], None]


@dataclass(frozen=True)
class Result:
    """How a run of the job went: its attempts, and the digest of what it ended with."""

    attempts: list[Attempt]
    digest: str
    unreached: tuple[Interruption, ...] = ()
    """The interruptions that training was faster than"""


@dataclass(frozen=True)
class Trial:
    """The job as it arrived at the mocked AWS, and what its simulated instances are made of."""

    config: JobConfig
    request: dict[str, Any]
    s3: Any
    means: Means
    environment: dict[str, str]
    grace: float
    stalled: bool

    def interrupted(
        self, directory: Path, interruptions: Sequence[Interruption], seed: int, on_event: Event
    ) -> Result:
        """Run the job from nothing, and take its instances away as `interruptions` say.

        Logs stay in `directory`, the snapshots in S3. Raises Failed if an attempt fails by itself.
        """
        self._empty_prefix()
        job = self._job(directory, on_event, seed)
        clock, left, attempts = time.monotonic(), list(interruptions), list[Attempt]()
        while not attempts or attempts[-1].kind != attempt.COMPLETED:
            next_one = left.pop(0) if left else None
            attempts.append(attempt.run(job, len(attempts) + 1, clock, next_one))
            if next_one and attempts[-1].kind == attempt.COMPLETED:
                left.insert(0, next_one)
        return Result(attempts, self._digest(job, attempts[-1]), tuple(left))

    def uninterrupted(self, directory: Path, on_event: Event) -> tuple[Result, bool]:
        """The same job left alone, and whether its account is an earlier rehearsal's."""
        key = control.key_of(self.request, self.s3)
        if kept := control.recall(key):
            return Result([kept[0]], kept[1]), True
        result = self.interrupted(directory, [], 0, on_event)
        control.keep(key, result.attempts[0], result.digest)
        return result, False

    def save_s3(self, directory: Path) -> None:
        """Copy what S3 holds of the run's snapshots into `directory`."""
        bucket, prefix = runs.split(self.request["CheckpointConfig"]["S3Uri"])
        directory.mkdir(parents=True, exist_ok=True)
        for item in boto3.resource("s3").Bucket(bucket).objects.filter(Prefix=prefix):
            self.s3.download_file(bucket, item.key, str(directory / Path(item.key).name))

    def _job(self, directory: Path, on_event: Event, seed: int) -> Job:
        directory.mkdir()
        return Job(
            self.request,
            self.s3,
            self.means,
            self.environment,
            directory,
            on_event,
            grace=self.grace,
            seed=seed,
            stalled=self.stalled,
        )

    def _empty_prefix(self) -> None:
        """A run must not find another run's snapshots."""
        bucket, prefix = runs.split(self.request["CheckpointConfig"]["S3Uri"])
        boto3.resource("s3").Bucket(bucket).objects.filter(Prefix=prefix).delete()

    def _digest(self, job: Job, last: Attempt) -> str:
        """The digest of the last attempt's final state; its disks are not needed afterwards."""
        home = job.directory / f"attempt-{last.number}"
        base = home / job.hosts[0]
        checkpoints = disk.checkpoint_dir(base, job.request)
        digest = final_digest(checkpoints, base / "model", self.config.training.total_steps)
        shutil.rmtree(home)
        return digest


@contextmanager
def opened(
    config: JobConfig,
    channels: Sequence[Channel],
    means: Means,
    out: Path,
    *,
    grace: float,
    stalled: bool,
) -> Iterator[Trial]:
    """Start the mocked AWS and send the job there as `submit.py` does."""
    region = str(config.aws.region)
    with loopback_aws(region) as aws:
        # All instances share it, and fetch large files in parts.
        s3 = boto3.client("s3", config=Config(max_pool_connections=64))
        there = {} if region == "us-east-1" else {"LocationConstraint": region}
        located = {"CreateBucketConfiguration": there} if there else {}
        s3.create_bucket(Bucket=str(config.aws.bucket), **located)
        session, snapshots = estimator.open_session(region), runs.snapshots_uri(config)
        start.start_job(config, session, channels, snapshots, lambda line: None)
        request = aws.requests[-1]
        (out / "request.json").write_text(json.dumps(request, indent=2) + "\n")
        yield Trial(config, request, s3, means, aws.environment(region), grace, stalled)
