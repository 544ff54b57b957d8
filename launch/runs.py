"""Where the snapshots of a run live in S3, and which of its prefixes is the current one."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from launch.errors import Refused, one_line
from launch.schema import JobConfig, encryption
from training.snapshots import manifest

# Keeps a new prefix in existence until its first snapshot. SageMaker restores it into the container
# with everything else; by its name neither the sync agent nor training takes it for anything.
MARKER = f".from-scratch{manifest.TEMPORARY}"


def current_uri(s3: Any, config: JobConfig, *, from_scratch: bool) -> str:
    """Where the run's snapshots live: `snapshots/`, or the `snapshots-N/` of the highest number.

    With `from_scratch` it is the next number, unless the current prefix holds nothing yet. Nothing
    is written: see `claim`. Raises Refused if the bucket cannot be listed.
    """
    with readable(home_uri(config)):
        number = max(_numbers(s3, config), default=1)
        if from_scratch and _holds_anything(s3, snapshots_uri(config, number)):
            number += 1
    return snapshots_uri(config, number)


@contextmanager
def claimed(s3: Any, uri: str, kms_key: str | None = None) -> Iterator[None]:
    """Make `uri` exist, so that it is the run's current prefix, and stays it if the block succeeds.

    A start from scratch that fails must not leave the run at an empty prefix: the next start would
    begin at step 0 without a word. Raises ClientError or BotoCoreError if the marker cannot be
    written.
    """
    bucket, prefix = split(uri)
    marker = {"Bucket": bucket, "Key": prefix + MARKER}
    before = s3.list_objects_v2(Bucket=bucket, Prefix=prefix + MARKER).get("KeyCount", 0)
    s3.put_object(**marker, Body=b"", **encryption(kms_key))
    try:
        yield
    except Exception:
        if not before:
            with suppress(BotoCoreError, ClientError):
                s3.delete_object(**marker)
        raise


def split(uri: str) -> tuple[str, str]:
    """The bucket and the key prefix of an `s3://` address."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return bucket, prefix


@contextmanager
def readable(uri: str) -> Iterator[None]:
    """Turn AWS's refusals into one of ours. Raises Refused if `uri` cannot be listed or read."""
    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise Refused(
            f"{uri} cannot be read ({one_line(error)}); name a bucket with --set aws.bucket=… that "
            f"your credentials may list and read"
        ) from error


def home_uri(config: JobConfig) -> str:
    """Where everything of a run lives in S3; ends with a slash."""
    return f"s3://{config.aws.bucket}/{_home(config)}"


def _home(config: JobConfig) -> str:
    return f"{config.aws.prefix}/{config.run_name}/"


def snapshots_uri(config: JobConfig, number: int = 1) -> str:
    """The run's snapshot prefix of that number; its slash keeps run-1 from restoring run-10's."""
    name = "snapshots" if number == 1 else f"snapshots-{number}"
    return f"{home_uri(config)}{name}/"


def _numbers(s3: Any, config: JobConfig) -> Iterator[int]:
    home = _home(config)
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket=config.aws.bucket, Prefix=f"{home}snapshots", Delimiter="/"
    )
    for page in pages:
        for folder in page.get("CommonPrefixes", []):
            name = folder["Prefix"].removeprefix(home)
            if match := re.fullmatch(r"snapshots(?:-([2-9]|[1-9][0-9]+))?/", name):
                yield int(match[1] or 1)


def _holds_anything(s3: Any, uri: str) -> bool:
    """Whether more lies there than the marker and the folder object that S3's console makes."""
    bucket, prefix = split(uri)
    page = s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=3)
    keys = {item["Key"] for item in page.get("Contents", [])}
    return bool(keys - {prefix, prefix + MARKER})
