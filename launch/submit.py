"""Start a job: `python launch/submit.py` builds the request of config/default.yaml and sends it."""

import argparse
import datetime
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the clone, not its folder launch/

from launch.errors import DONE, Failed, Refused, exit_code_of

if TYPE_CHECKING:  # imported late otherwise: --help must not wait for the SDK
    from sagemaker import Session

    from launch.data import Channel
    from launch.schema import JobConfig

STAND_INS = {
    "region": "us-east-1",
    "role": "arn:aws:iam::000000000000:role/set-aws.role",
    "bucket": "set-aws.bucket",
}


@dataclass(frozen=True)
class Started:
    """A job that SageMaker accepted."""

    job_name: str
    region: str
    snapshots: str

    @property
    def console(self) -> str:
        """The job's page in the AWS console."""
        return (
            f"https://{self.region}.console.aws.amazon.com/sagemaker/home"
            f"?region={self.region}#/jobs/{self.job_name}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and start the job, or print its request."""
    options = _parser().parse_args(arguments)
    return exit_code_of(lambda: _run(options))


def start_job(config: "JobConfig", session: "Session", channels: "Sequence[Channel]") -> Started:
    """Upload data and code and start the job. The one way a request is made, rehearsals included.

    `config` names its bucket and role. Raises Refused before anything is uploaded if the SDK does
    not accept the job.
    """
    from launch import data, estimator, source

    bucket = str(config.aws.bucket)
    inputs = {channel.name: channel.uri(config, bucket) for channel in channels}
    now = datetime.datetime.now(datetime.UTC)
    job_name = f"{config.run_name}-{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03d}"
    with source.staged() as folder:
        job = estimator.build(config, session, folder)
        for channel in channels:
            data.upload(channel, inputs[channel.name], session.boto_session.client("s3"))
        estimator.start(job, inputs, config.data.input_mode, job_name)
    return Started(job_name, session.boto_region_name, estimator.snapshot_uri(config))


def request_of(config: "JobConfig") -> dict[str, Any]:
    """The CreateTrainingJob request of `config`, with nothing read from or sent to AWS."""
    from launch import data, environment

    requests: list[dict[str, Any]] = []
    channels = data.channels(config)
    with environment.replaced(environment.NO_ACCOUNT):
        from launch import estimator  # the SDK reads the AWS configuration when it is imported

        start_job(config, estimator.recording_session(str(config.aws.region), requests), channels)
    return requests[0]


def with_stand_ins(config: "JobConfig") -> "tuple[JobConfig, list[str]]":
    """Fill in what only an account knows; returns the names of what was filled in."""
    missing = {n: v for n, v in STAND_INS.items() if getattr(config.aws, n) is None}
    filled = config.model_copy(update={"aws": config.aws.model_copy(update=missing)})
    return filled, list(missing)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="submit.py", description="Start a spot training job that survives interruptions."
    )
    add_config_options(parser, "config/default.yaml")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the exact request as JSON and touch nothing; needs no account",
    )
    return parser


def add_config_options(parser: argparse.ArgumentParser, default: str) -> None:
    """The options that say which job is meant."""
    parser.add_argument("--config", type=Path, help=f"a YAML file; default: {default}")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override one value of the configuration; can be repeated",
    )


def load_config(options: argparse.Namespace, default: str) -> "JobConfig":
    """The validated configuration that the options name. Raises Refused."""
    try:
        from launch.config import ROOT, load
    except ModuleNotFoundError as error:
        raise Refused(
            f"the module {error.name} is missing; type `make setup` and use .venv/bin/python, "
            f"or install requirements.txt"
        ) from None
    return load(options.config or ROOT / default, options.overrides)


def _run(options: argparse.Namespace) -> int:
    config = load_config(options, "config/default.yaml")
    if options.dry_run:
        config, missing = with_stand_ins(_with_region(config))
        for name in missing:
            print(f"note: aws.{name} is not set; the request shows a stand-in", file=sys.stderr)
        print(json.dumps(request_of(config), indent=2))
    else:
        print(_summary(_start_on_aws(config), options))
    return DONE


def _with_region(config: "JobConfig") -> "JobConfig":
    """The configuration with the region that the environment or the AWS configuration names."""
    import boto3
    from botocore.exceptions import BotoCoreError

    region = config.aws.region or os.environ.get("AWS_REGION")
    try:
        region = region or boto3.Session().region_name
    except BotoCoreError:
        region = None  # a broken configuration is told where an account is needed
    return config.model_copy(update={"aws": config.aws.model_copy(update={"region": region})})


def _start_on_aws(config: "JobConfig") -> Started:
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    config = _with_region(config)
    problems = _missing(config)
    try:
        if boto3.Session().get_credentials() is None:
            problems.append("no AWS credentials were found; type `aws configure`, set AWS_PROFILE")
    except BotoCoreError as error:
        problems.append(f"the AWS configuration cannot be used: {_one_line(error)}")
    from launch import data

    try:
        channels = data.channels(config)
    except Refused as error:
        problems += error.problems
    if problems:
        raise Refused(problems)
    from launch import estimator

    try:
        session = estimator.open_session(str(config.aws.region))
        config = _with_bucket(config, session)
    except (Boto3Error, BotoCoreError, ClientError) as error:
        raise Refused(f"AWS does not let us in: {_one_line(error)}") from error
    try:
        return start_job(config, session, channels)
    except (Boto3Error, BotoCoreError, ClientError) as error:
        raise Failed(f"AWS did not start the job: {_one_line(error)}") from error


def _missing(config: "JobConfig") -> list[str]:
    problems = []
    if config.aws.region is None:
        problems.append("aws.region is not set; type --set aws.region=us-east-1, or set AWS_REGION")
    if config.aws.role is None:
        problems.append(
            "aws.role is not set; give the execution role's ARN: "
            "--set aws.role=arn:aws:iam::123456789012:role/name (the README shows its policy)"
        )
    return problems


def _with_bucket(config: "JobConfig", session: "Session") -> "JobConfig":
    """The configuration with its bucket, which must answer; null means the account's default."""
    from botocore.exceptions import ClientError

    bucket = config.aws.bucket or session.default_bucket()
    try:
        session.boto_session.client("s3").head_bucket(Bucket=bucket)
    except ClientError as error:
        raise Refused(
            f"aws.bucket is {bucket!r}, which does not answer ({_one_line(error)}); create it in "
            f"{config.aws.region}, or name one that your credentials may use"
        ) from error
    return config.model_copy(update={"aws": config.aws.model_copy(update={"bucket": bucket})})


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _summary(started: Started, options: argparse.Namespace) -> str:
    again = ["python", "launch/submit.py"]
    again += ["--config", str(options.config)] if options.config else []
    again += [part for override in options.overrides for part in ("--set", override)]
    region = f"--region {started.region}"
    return "\n".join(
        [
            f"started    {started.job_name}",
            f"console    {started.console}",
            f"snapshots  {started.snapshots}",
            f"follow     aws logs tail /aws/sagemaker/TrainingJobs {region} --follow "
            f"--log-stream-name-prefix {started.job_name}",
            f"stop       aws sagemaker stop-training-job {region} "
            f"--training-job-name {started.job_name}",
            f"continue   {shlex.join(again)}",
            "           once it has stopped: the same run_name resumes from the newest snapshot",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
