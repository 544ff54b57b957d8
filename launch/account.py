"""Into which account and region a command looks: from the configuration, else the environment."""

import datetime
import os
import re
from typing import TYPE_CHECKING, Any

import boto3
import botocore.session
from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError
from botocore.utils import parse_timestamp

from launch.errors import Refused, one_line
from launch.schema import REGION

if TYPE_CHECKING:
    from launch.schema import JobConfig

NO_REGION = "aws.region is not set; type --set aws.region=us-east-1, or set AWS_REGION"


def region_of(chosen: str | None = None) -> str | None:
    """`chosen`, else what the environment or the AWS configuration names, else None.

    Raises Refused if that cannot be a region.
    """
    region = chosen or os.environ.get("AWS_REGION")
    try:
        region = region or boto3.Session().region_name
    except BotoCoreError:
        region = None  # a broken configuration is told where an account is needed
    if region and not re.fullmatch(REGION, region):
        raise Refused(
            f"the AWS region of your environment is {region!r}; it must look like us-east-1: "
            f"set AWS_REGION, or type --set aws.region=us-east-1"
        )
    return region


def credential_problems() -> list[str]:
    """A sentence if there are no credentials, or if they cannot be used."""
    try:
        if boto3.Session().get_credentials() is None:
            return ["no AWS credentials were found; type `aws configure`, or set AWS_PROFILE"]
    except BotoCoreError as error:
        return [f"the AWS configuration cannot be used: {one_line(error)}"]
    return []


def problems(region: str | None) -> list[str]:
    """Why AWS cannot be asked, as far as can be seen from here; a sentence each."""
    return ([] if region else [NO_REGION]) + credential_problems()


def default_bucket(session: Any) -> str:
    """The name of the account's default SageMaker bucket; whether it is there, nobody has looked.

    `session` is boto3's. Raises ClientError or BotoCoreError if AWS does not say who we are.
    """
    account = session.client("sts").get_caller_identity()["Account"]
    return f"sagemaker-{session.region_name}-{account}"


def opened(region: str | None) -> Any:
    """A boto3 session in `region`, or in the environment's. Raises Refused without either."""
    region = region_of(region)
    if found := problems(region):
        raise Refused(found)
    quick = botocore.session.get_session()
    parsers = quick.get_component("response_parser_factory")
    parsers.set_parser_defaults(timestamp_parser=_timestamp)
    return boto3.Session(region_name=region, botocore_session=quick)


def _timestamp(value: Any) -> datetime.datetime:
    # botocore guesses the format of every timestamp anew: half of the time of a long listing.
    if isinstance(value, str) and value.endswith("Z") and value[4:5] == "-":
        return datetime.datetime.fromisoformat(value)
    parsed: datetime.datetime = parse_timestamp(value)
    return parsed


def with_bucket(config: "JobConfig", session: Any) -> "JobConfig":
    """The configuration with its bucket filled in. Raises Refused if AWS does not let us in."""
    from launch.start import with_aws

    try:
        return with_aws(config, bucket=config.aws.bucket or default_bucket(session))
    except (Boto3Error, BotoCoreError, ClientError) as error:
        raise Refused(f"AWS does not let us in: {one_line(error)}") from error
