"""Rank 0 takes a snapshot to S3 itself, when SageMaker's agent may have no time left to do so.

SageMaker promises no last upload when an instance is taken away. boto3 is in every PyTorch image,
but nothing depends on it: what is missing costs one warning.
"""

import os
import time
from pathlib import Path
from typing import Any

from training.failure import say, sentence
from training.snapshots.manifest import data_name, manifest_name

_CLOCK_SLACK_SECONDS = 2.0  # S3 tells the second in which an object was written, by its own clock


class Delivery:
    """Sends snapshots from `directory` to the S3 prefix `uri`; an empty `uri` sends nothing."""

    def __init__(self, directory: Path | str, uri: str) -> None:
        self._directory = Path(directory)
        self._bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        self._prefix = prefix.rstrip("/") + "/" if prefix else ""
        self._warned = False
        self.arrived: set[int] = set()
        """The steps whose two files are in S3 because of this object."""

    def send(self, step: int, grace_ends: float | None = None) -> None:
        """Upload the data file, then the manifest, each unless it is in S3 already.

        Says how long it took, and how much was left of the grace that ends at the monotonic time
        `grace_ends`. Whatever prevents the upload is one warning, once.
        """
        if not self._bucket or step in self.arrived:
            return
        started = time.monotonic()
        try:
            s3 = _client()
            sent = [name for name in (data_name(step), manifest_name(step)) if self._put(s3, name)]
        except Exception as error:  # boto3 missing, no permission, no network, a full bucket
            if not self._warned:
                self._warned = True
                say(
                    f"snapshot_not_delivered step={step} reason={sentence(error)}; "
                    f"SageMaker's own upload has to be in time"
                )
            return
        self.arrived.add(step)
        now = time.monotonic()
        grace = "" if grace_ends is None else f" grace_left_s={grace_ends - now:.1f}"
        say(f"delivered step={step} upload_s={now - started:.2f} files_sent={len(sent)}{grace}")

    def _put(self, s3: Any, name: str) -> bool:
        """Upload one file; False if the agent was faster. Raises OSError if S3 holds another."""
        path, key = self._directory / name, self._prefix + name
        if self._is_there(s3, path, key):
            return False
        s3.upload_file(str(path), self._bucket, key)
        if not self._is_there(s3, path, key):
            raise OSError(f"s3://{self._bucket}/{key} is not what was sent")
        return True

    def _is_there(self, s3: Any, path: Path, key: str) -> bool:
        """Whether S3 holds as many bytes, written after the file was.

        The age tells this attempt's file from a damaged one of the same step and size.
        """
        listed = s3.list_objects_v2(Bucket=self._bucket, Prefix=key, MaxKeys=1)
        local = path.stat()
        return any(
            item["Key"] == key
            and item["Size"] == local.st_size
            and item["LastModified"].timestamp() >= local.st_mtime - _CLOCK_SLACK_SECONDS
            for item in listed.get("Contents", [])
        )


def _client() -> Any:
    import boto3
    from botocore.config import Config

    patience = Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 3})
    return boto3.client("s3", region_name=os.environ.get("AWS_REGION"), config=patience)
