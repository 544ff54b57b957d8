"""The data channels: the sample text, a local folder, or an S3 prefix that is passed through.

What is uploaded goes under an address made of its content, so a second submit uploads nothing.
"""

import hashlib
import os
import pydoc_data.topics
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.errors import Refused
from launch.runs import split
from launch.schema import JobConfig, encryption

SAMPLE = "sample"


@dataclass(frozen=True)
class Channel:
    """A data channel: an S3 prefix that is there already, or files named by their content."""

    name: str
    s3_prefix: str | None = None
    address: str = ""
    files: dict[str, bytes | Path] = field(default_factory=dict)

    def uri(self, config: JobConfig, bucket: str) -> str:
        """Where the channel's data lives; always one trailing slash."""
        return self.s3_prefix or f"s3://{bucket}/{config.aws.prefix}/data/{self.address}/"

    @property
    def size(self) -> int:
        """Bytes of the files that this machine knows of."""
        return sum(_size(content) for content in self.files.values())


def channels(config: JobConfig) -> list[Channel]:
    """The job's channels; reads local folders but uploads nothing.

    Raises Refused, for all channels at once, where a folder is missing, unreadable or empty.
    """
    found, problems = [], []
    wanted = {"train": config.data.train, "validation": config.data.validation}
    for name, source in {**wanted, **config.data.channels}.items():
        if source is None:
            continue
        try:
            found.append(_channel(name, source))
        except Refused as error:
            problems += error.problems
        except (OSError, RuntimeError, UnicodeError) as error:
            problems.append(f"data.{name} is {source[:200]!r}, which cannot be read: {error}")
    if problems:
        raise Refused(problems)
    return found


def upload(channel: Channel, uri: str, s3: Any, kms_key: str | None = None) -> int:
    """Upload to `uri` what it does not hold yet; returns the number of files sent.

    Objects are encrypted with `kms_key` where one is given, else as the bucket does by default.
    On a terminal, stderr shows the bytes going out.
    """
    if not channel.files:
        return 0
    bucket, prefix = split(uri)
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    there = {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", [])}
    missing = {
        prefix + name: content
        for name, content in channel.files.items()
        if there.get(prefix + name) != _size(content)
    }
    encrypted = encryption(kms_key)
    with _progress(channel.name, missing.values()) as advance:
        for key, content in missing.items():
            if isinstance(content, Path):
                s3.upload_file(str(content), bucket, key, ExtraArgs=encrypted, Callback=advance)
            else:
                s3.put_object(Bucket=bucket, Key=key, Body=content, **encrypted)
                advance(len(content))
    return len(missing)


def outcome(channel: Channel, sent: int) -> str:
    """What `upload`, which returned `sent`, did for a channel: a line for the person."""
    if not channel.files:
        return f"data.{channel.name} stays where it is, {channel.s3_prefix}"
    count = len(channel.files)
    files = f"{count} file" if count == 1 else f"{count} files"
    if sent == 0:
        return f"data.{channel.name} is already uploaded ({files})"
    return f"data.{channel.name} was uploaded ({sent} of {files})"


@contextmanager
def _progress(name: str, contents: Collection[bytes | Path]) -> Iterator[Callable[[int], None]]:
    """Something to call with each number of bytes sent; it draws a bar if stderr is a terminal."""
    if not contents or not sys.stderr.isatty():
        yield lambda sent: None
        return
    from rich.console import Console  # late: a second submit sends nothing and shows no bar
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        total = sum(_size(content) for content in contents)
        task = progress.add_task(f"data.{name}", total=total)
        yield lambda sent: progress.advance(task, sent)


def _channel(name: str, source: str) -> Channel:
    if "://" in source:
        if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.\-]+(/[^/]+)*/?", source):
            raise Refused(
                f"data.{name} is {source!r}; an S3 prefix is written as s3://bucket/folder/, "
                f"with single slashes"
            )
        return Channel(name, s3_prefix=source.rstrip("/") + "/")
    files = _sample() if source == SAMPLE else _folder(name, Path(source).expanduser())
    return Channel(name, address=_address(files), files=files)


def _sample() -> dict[str, bytes | Path]:
    text = "\n\n".join(pydoc_data.topics.topics.values())
    return {"python-topics.txt": text.encode()}


def _folder(name: str, folder: Path) -> dict[str, bytes | Path]:
    if not folder.is_dir():
        raise Refused(
            f"data.{name} is {str(folder)!r}, which is no folder here; "
            f"set it to sample, to an S3 prefix (s3://bucket/prefix/), or to a local folder"
        )
    files: dict[str, bytes | Path] = {p.relative_to(folder).as_posix(): p for p in _walk(folder)}
    if not any(_size(content) for content in files.values()):
        raise Refused(f"data.{name} is {str(folder)!r}, which holds no data; add files to it")
    return files


def _walk(folder: Path) -> list[Path]:
    """All files that are not hidden, in order; links are followed, and nothing is left out."""

    def fail(error: OSError) -> None:
        raise error

    found, entered = [], set()
    for parent, directories, names in os.walk(folder, onerror=fail, followlinks=True):
        entered.add(os.path.realpath(parent))
        directories[:] = [
            name
            for name in directories
            if not name.startswith(".")
            and os.path.realpath(os.path.join(parent, name)) not in entered
        ]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(found)


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
