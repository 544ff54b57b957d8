"""The data channels: the sample text, a local folder, or an S3 prefix that is passed through.

What is uploaded goes under an address made of its content, so a second submit uploads nothing.
"""

import hashlib
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.config import JobConfig
from launch.errors import Refused

SAMPLE = "sample"


@dataclass(frozen=True)
class Channel:
    """A data channel: its S3 prefix and, unless it was there before us, what belongs under it."""

    name: str
    uri: str
    files: dict[str, bytes | Path]


def channels(config: JobConfig, bucket: str) -> list[Channel]:
    """The job's channels; reads local folders but uploads nothing.

    Raises Refused for folders that do not exist or hold no file.
    """
    wanted = {"train": config.data.train, "validation": config.data.validation}
    return [
        _channel(name, source, f"s3://{bucket}/{config.aws.prefix}/data")
        for name, source in wanted.items()
        if source is not None
    ]


def upload(channel: Channel, s3: Any) -> int:
    """Upload what S3 does not hold yet; returns the number of files sent."""
    if not channel.files:
        return 0
    bucket, _, prefix = channel.uri.removeprefix("s3://").partition("/")
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    there = {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", [])}
    sent = 0
    for name, content in channel.files.items():
        key = prefix + name
        if there.get(key) == _size(content):
            continue
        if isinstance(content, Path):
            s3.upload_file(str(content), bucket, key)
        else:
            s3.put_object(Bucket=bucket, Key=key, Body=content)
        sent += 1
    return sent


def _channel(name: str, source: str, base: str) -> Channel:
    if source.startswith("s3://"):
        return Channel(name, source.rstrip("/") + "/", {})
    files = _sample() if source == SAMPLE else _folder(name, Path(source).expanduser())
    return Channel(name, f"{base}/{_address(files)}/", files)


def _sample() -> dict[str, bytes | Path]:
    text = "\n\n".join(pydoc_data.topics.topics.values())
    return {"python-topics.txt": text.encode()}


def _folder(name: str, folder: Path) -> dict[str, bytes | Path]:
    if not folder.is_dir():
        raise Refused(
            f"data.{name} is {str(folder)!r}, which is no folder here; "
            f"set it to sample, to an S3 prefix (s3://bucket/prefix/), or to a local folder"
        )
    paths = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    files: dict[str, bytes | Path] = {
        name: path
        for name, path in paths.items()
        if "/." not in f"/{name}"  # hidden ones stay
    }
    if not any(_size(content) for content in files.values()):
        raise Refused(f"data.{name} is {str(folder)!r}, which holds no data; add files to it")
    return files


def _address(files: dict[str, bytes | Path]) -> str:
    digest = hashlib.sha256()
    for name, content in files.items():
        if isinstance(content, Path):
            with open(content, "rb") as file:
                of_file = hashlib.file_digest(file, "sha256").hexdigest()
        else:
            of_file = hashlib.sha256(content).hexdigest()
        digest.update(f"{name}\0{_size(content)}\0{of_file}\n".encode())
    return digest.hexdigest()[:16]


def _size(content: bytes | Path) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)
