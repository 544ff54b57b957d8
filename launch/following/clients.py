"""The AWS clients of somebody who follows; they never wait on their own."""

import os
import re

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from launch.errors import Refused, one_line
from launch.following.follower import Clients
from launch.schema import REGION

# Waiting is the follower's own business: it shows that it waits, and Ctrl-C ends it.
_CONFIG = Config(
    retries={"total_max_attempts": 1, "mode": "standard"}, connect_timeout=10, read_timeout=30
)


def clients(region: str | None) -> Clients:
    """Clients for a region, by default that of the environment. Raises Refused if there is none."""
    try:
        session = boto3.Session(region_name=region or os.environ.get("AWS_REGION") or None)
        if not session.region_name:
            raise Refused("no AWS region is set; type --region us-east-1, or set AWS_REGION")
        if not re.fullmatch(REGION, session.region_name):
            raise Refused(
                f"the AWS region is {session.region_name!r}; it must look like us-east-1: "
                f"type --region us-east-1, or set AWS_REGION"
            )
        sagemaker, logs, s3 = (
            session.client(name, config=_CONFIG) for name in ("sagemaker", "logs", "s3")
        )
    except (BotoCoreError, ValueError) as error:
        raise Refused(f"the AWS configuration cannot be used: {one_line(error)}") from error
    return Clients(sagemaker, logs, s3)
