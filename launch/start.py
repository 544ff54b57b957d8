"""How a job is started: the one way a request is made, dry runs and rehearsals included."""

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launch import container_rules, data, environment, runs, source
from launch.data import Channel
from launch.errors import Refused
from launch.schema import JobConfig

if TYPE_CHECKING:
    from sagemaker import Session

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


def start_job(
    config: JobConfig,
    session: "Session",
    channels: Sequence[Channel],
    snapshots: str,
    say: Callable[[str], None],
) -> Started:
    """Upload data and code and start the job.

    `config` names its bucket and role; `snapshots` is the S3 prefix that the job restores and
    writes; `say` hears what was uploaded. Raises Refused before anything is uploaded if the SDK
    does not accept the job.
    """
    from launch import estimator

    inputs = {channel.name: channel.uri(config, str(config.aws.bucket)) for channel in channels}
    now = datetime.datetime.now(datetime.UTC)
    job_name = f"{config.run_name}-{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03d}"
    with source.staged() as folder:
        job = estimator.build(config, session, folder, snapshots)
        for channel in channels:
            sent = data.upload(channel, inputs[channel.name], session.s3_client, config.aws.kms_key)
            say(data.outcome(channel, sent))
        estimator.start(job, inputs, config.data.input_mode, job_name)
    return Started(job_name, session.boto_region_name, snapshots)


def check_volume(config: JobConfig, channels: Sequence[Channel]) -> None:
    """Raise Refused if the instances' volumes cannot hold the data that is uploaded from here."""
    if config.data.input_mode == "File":
        size = sum(channel.size for channel in channels)
        if problems := list(container_rules.volume(config, size)):
            raise Refused(problems)


def request_of(config: JobConfig) -> dict[str, Any]:
    """The CreateTrainingJob request of `config`, with nothing read from or sent to AWS.

    It restores the run's first snapshot prefix: whether the run has moved on, only S3 knows.
    """
    requests: list[dict[str, Any]] = []
    # Without their files, the channels keep their addresses, and nothing is there to upload.
    channels = data.channels(config)
    check_volume(config, channels)
    channels = [dataclasses.replace(channel, files={}) for channel in channels]
    with environment.replaced(environment.NO_ACCOUNT):
        from launch import estimator  # the SDK reads the AWS configuration when it is imported

        session = estimator.recording_session(str(config.aws.region), requests)
        start_job(config, session, channels, runs.snapshots_uri(config), lambda line: None)
    return requests[0]


def with_stand_ins(config: JobConfig) -> tuple[JobConfig, list[str]]:
    """Fill in what only an account knows; returns the names of what was filled in."""
    missing = {n: v for n, v in STAND_INS.items() if getattr(config.aws, n) is None}
    return with_aws(config, **missing), list(missing)


def with_aws(config: JobConfig, **values: Any) -> JobConfig:
    """The configuration with other values in its section `aws`."""
    return config.model_copy(update={"aws": config.aws.model_copy(update=values)})
