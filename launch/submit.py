"""Start a job: `python launch/submit.py` builds the request of config/default.yaml and sends it."""

import argparse
import datetime
import json
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

    from launch.config import JobConfig

PLACEHOLDER_REGION = "us-east-1"
PLACEHOLDER_ROLE = "arn:aws:iam::000000000000:role/set-aws.role"
PLACEHOLDER_BUCKET = "set-aws.bucket"


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


def start_job(config: "JobConfig", session: "Session", bucket: str) -> Started:
    """Upload data and code and start the job. The one way a request is made, rehearsals included.

    Raises Refused before anything is uploaded if the data or the job cannot be right.
    """
    from launch import data, estimator, source

    channels = data.channels(config, bucket)
    job_name = f"{config.run_name}-{_timestamp()}"
    with source.staged() as folder:
        job = estimator.build(config, session, folder, bucket)
        for channel in channels:
            data.upload(channel, session.boto_session.client("s3"))
        estimator.start(job, channels, config.data.input_mode, job_name)
    return Started(job_name, session.boto_region_name, estimator.snapshot_uri(config, bucket))


def request_of(config: "JobConfig") -> dict[str, Any]:
    """The CreateTrainingJob request of `config`, with nothing read from or sent to AWS."""
    from launch import data, estimator, source

    requests: list[dict[str, Any]] = []
    bucket = config.aws.bucket or PLACEHOLDER_BUCKET
    channels = data.channels(config, bucket)
    session = estimator.recording_session(config.aws.region or PLACEHOLDER_REGION, requests)
    with source.staged() as folder:
        job = estimator.build(_with_role(config), session, folder, bucket)
        estimator.start(job, channels, config.data.input_mode, f"{config.run_name}-{_timestamp()}")
    return requests[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="submit.py", description="Start a spot training job that survives interruptions."
    )
    parser.add_argument("--config", type=Path, help="a YAML file; default: config/default.yaml")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override one value of the configuration; can be repeated",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the exact request as JSON and touch nothing; needs no account",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    config = _load(options)
    if options.dry_run:
        for name in ("region", "role", "bucket"):
            if getattr(config.aws, name) is None:
                print(f"note: aws.{name} is not set; the request shows a stand-in", file=sys.stderr)
        print(json.dumps(request_of(config), indent=2))
        return DONE
    started = _start_on_aws(config)
    print(_summary(started, options))
    return DONE


def _load(options: argparse.Namespace) -> "JobConfig":
    try:
        from launch.config import DEFAULT_CONFIG, load
    except ModuleNotFoundError as error:
        raise Refused(
            f"the module {error.name} is missing; type `make setup` and use .venv/bin/python, "
            f"or install requirements.txt"
        ) from None
    return load(options.config or DEFAULT_CONFIG, options.overrides)


def _start_on_aws(config: "JobConfig") -> Started:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    boto = boto3.Session()
    region = config.aws.region or boto.region_name
    problems = []
    if region is None:
        problems.append("aws.region is not set, nor is AWS_REGION: --set aws.region=us-east-1")
    if config.aws.role is None:
        problems.append(
            "aws.role is not set; give the execution role's ARN: "
            "--set aws.role=arn:aws:iam::123456789012:role/name (the README shows its policy)"
        )
    if boto.get_credentials() is None:
        problems.append("no AWS credentials were found; type `aws configure` or set AWS_PROFILE")
    if problems:
        raise Refused(problems)
    from launch import data, estimator

    data.channels(config, "checked-before-any-call")
    try:
        session = estimator.open_session(str(region))
        bucket = config.aws.bucket or session.default_bucket()
    except (BotoCoreError, ClientError) as error:
        raise Refused(f"AWS does not let us in: {error}") from error
    try:
        return start_job(config, session, bucket)
    except (BotoCoreError, ClientError) as error:
        raise Failed(f"AWS did not start the job: {error}") from error


def _with_role(config: "JobConfig") -> "JobConfig":
    if config.aws.role:
        return config
    return config.model_copy(
        update={"aws": config.aws.model_copy(update={"role": PLACEHOLDER_ROLE})}
    )


def _timestamp() -> str:
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03d}"


def _summary(started: Started, options: argparse.Namespace) -> str:
    again = ["python launch/submit.py"]
    again += ["--config", str(options.config)] if options.config else []
    again += [f"--set {override}" for override in options.overrides]
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
            f"continue   {' '.join(again)}    (once it has stopped: the same run_name resumes)",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
