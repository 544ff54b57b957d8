"""Rehearse a job here: its own request, on simulated instances that are taken away.

`python launch/rehearse.py` needs no AWS account and reaches no network: a mocked AWS on the
loopback receives what `submit.py` would send, and what arrived there is what runs.
"""

import argparse
import datetime
import json
import logging
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the clone, not its folder launch/

from launch.errors import DONE, FAILED, Refused, exit_code_of
from launch.submit import add_config_options, load_config

if TYPE_CHECKING:  # imported late otherwise: --help must not wait for the SDK
    from launch.data import Channel
    from launch.rehearsal.attempt import Attempt, Job
    from launch.rehearsal.report import Outcome
    from launch.rehearsal.screen import Screen
    from launch.schema import JobConfig

GRACE_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and rehearse."""
    options = _parser().parse_args(arguments)
    return exit_code_of(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rehearse.py",
        description="Run a job here, on simulated instances that are taken away, and prove that "
        "it ends with the same bits as without.",
    )
    add_config_options(parser, "config/rehearsal.yaml")
    parser.add_argument(
        "--interrupt",
        metavar="STEP",
        action="append",
        type=int,
        default=[],
        help="take the instances away after this step; can be repeated; default: in the middle",
    )
    parser.add_argument("--out", type=Path, help="folder for the report; default: out/rehearsal-…")
    parser.add_argument(
        "--without-toolkit",
        action="store_true",
        help="start torchrun directly, as on systems that cannot install the SageMaker toolkit",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logging.disable(logging.INFO)  # moto, botocore and matplotlib talk; the screen is for people
    config = load_config(options, "config/rehearsal.yaml")
    interruptions = _interruptions(options.interrupt, config.training.total_steps)
    from launch import data, start
    from launch.rehearsal import attempt, report
    from launch.rehearsal.screen import Screen

    config, _ = start.with_stand_ins(config)
    channels = data.channels(config)
    _refuse_what_is_in_s3(channels)
    attempt.check_port()
    out = _empty(options.out or Path(f"out/rehearsal-{datetime.datetime.now():%Y%m%d-%H%M%S}"))
    with Screen(config.training.total_steps) as screen:
        outcome = _rehearse(config, channels, interruptions, out, screen, options.without_toolkit)
        report.write(outcome, out)
        screen.conclude(outcome, out)
    return DONE if outcome.equal else FAILED


def _refuse_what_is_in_s3(channels: "Sequence[Channel]") -> None:
    if there := [channel.name for channel in channels if channel.s3_prefix]:
        raise Refused(
            f"data.{name} is an S3 prefix, which a rehearsal cannot reach; "
            f"rehearse with a local folder that holds some of it: --set data.{name}=FOLDER"
            for name in there
        )


def _interruptions(steps: Sequence[int], total_steps: int) -> list[int]:
    if wrong := [step for step in steps if not 1 <= step < total_steps]:
        raise Refused(
            f"--interrupt {step} is not inside the run; it has {total_steps} steps, so give a "
            f"number from 1 to {total_steps - 1}"
            for step in wrong
        )
    return sorted(steps) or [max(1, total_steps * 2 // 5)]


def _empty(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise Refused(f"--out {directory} is not empty; name another folder, or empty it")
    except OSError as error:
        raise Refused(f"--out {directory} cannot be used: {error.strerror}") from error
    return directory.resolve()


def _rehearse(
    config: "JobConfig",
    channels: "Sequence[Channel]",
    interruptions: Sequence[int],
    out: Path,
    screen: "Screen",
    without_toolkit: bool,
) -> "Outcome":
    from launch.rehearsal import attempt, container
    from launch.rehearsal.aws import loopback_aws
    from launch.rehearsal.report import Outcome

    means = container.find_means(without_toolkit=without_toolkit)
    region = str(config.aws.region)
    with loopback_aws(region) as aws:
        request, s3 = _send(config, channels, aws.requests)
        (out / "request.json").write_text(json.dumps(request, indent=2) + "\n")
        screen.began(request, means)

        def job(name: str) -> "Job":
            (out / name).mkdir()
            return attempt.Job(request, s3, means, aws.environment(region), out / name, screen.show)

        interrupted_job, control_job = job("interrupted"), job("uninterrupted")
        interrupted = _run_interrupted(interrupted_job, interruptions)
        _empty_prefix(request["CheckpointConfig"]["S3Uri"])
        screen.control()
        control = attempt.run(
            control_job, 1, time.monotonic(), reclaim_at=None, grace=GRACE_SECONDS
        )
        digests = {
            "uninterrupted": _digest(control_job, control, config),
            "interrupted": _digest(interrupted_job, interrupted[-1], config),
        }
    return Outcome(interrupted, control, digests, means)


def _run_interrupted(job: "Job", interruptions: Sequence[int]) -> "list[Attempt]":
    from launch.rehearsal import attempt

    clock = time.monotonic()
    return [
        attempt.run(job, number, clock, reclaim_at=step, grace=GRACE_SECONDS)
        for number, step in enumerate([*interruptions, None], start=1)
    ]


def _send(
    config: "JobConfig", channels: "Sequence[Channel]", arrived: list[dict[str, Any]]
) -> tuple[dict[str, Any], Any]:
    """Send the job as `submit.py` does; returns the request as it arrived, and an S3 client."""
    import boto3

    from launch import estimator, runs, start

    s3, region = boto3.client("s3"), str(config.aws.region)
    there = {} if region == "us-east-1" else {"LocationConstraint": region}
    located = {"CreateBucketConfiguration": there} if there else {}
    s3.create_bucket(Bucket=str(config.aws.bucket), **located)
    session = estimator.open_session(region)
    start.start_job(config, session, channels, runs.snapshots_uri(config), lambda line: None)
    return arrived[-1], s3


def _empty_prefix(uri: str) -> None:
    """The control must not find the other run's snapshots."""
    import boto3

    from launch.runs import split

    bucket, prefix = split(uri)
    boto3.resource("s3").Bucket(bucket).objects.filter(Prefix=prefix).delete()


def _digest(job: "Job", attempt: "Attempt", config: "JobConfig") -> str:
    """The digest of the attempt's final state; its disks are not needed afterwards."""
    from launch.rehearsal import disk
    from launch.rehearsal.equality import final_digest

    home = job.directory / f"attempt-{attempt.number}"
    base = home / job.hosts[0]
    checkpoints = disk.checkpoint_dir(base, job.request)
    digest = final_digest(checkpoints, base / "model", config.training.total_steps)
    shutil.rmtree(home)
    return digest


if __name__ == "__main__":
    sys.exit(main())
