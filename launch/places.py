"""Where a run's snapshots lie: an S3 prefix or a folder here, with one interface for both."""

import contextlib
import datetime
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from launch.errors import Failed, Refused, one_line
from launch.runs import split

Progress = Callable[[int], None]  # hears how many more bytes have arrived
_PART_BYTES = 2**20


@dataclass(frozen=True)
class Entry:
    """A file or an object: its size in bytes, and when it was written."""

    size: int
    written: datetime.datetime


class Gone(Exception):
    """A file that was listed is not there any more."""


class Place(ABC):
    """Files under one address; a name may hold slashes, but never leads out of it."""

    address: str

    @abstractmethod
    def entries(self) -> dict[str, Entry]:
        """Everything under the address, by name. Raises Refused if it cannot be listed."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a small file. Raises Gone or Failed."""

    @abstractmethod
    def parts(self, name: str, begin: int, entry: Entry) -> Iterator[bytes]:
        """The bytes of a file from `begin` on, as it was listed. Raises Gone or Failed."""

    def copy(self, name: str, target: Path, entry: Entry, progress: Progress) -> None:
        """Append to `target` what it lacks of `name`. Raises Gone, Failed or OSError."""
        with open(target, "ab") as file:
            for part in self.parts(name, file.tell(), entry):
                file.write(part)
                progress(len(part))

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file; one that is not there is fine. Raises Failed."""


class Folder(Place):
    """A checkpoint directory on this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.address = directory, str(directory)

    def entries(self) -> dict[str, Entry]:
        found = {}
        try:
            for path in sorted(self.directory.rglob("*")):
                if path.is_file():
                    status = path.stat()
                    written = datetime.datetime.fromtimestamp(status.st_mtime, datetime.UTC)
                    name = path.relative_to(self.directory).as_posix()
                    found[name] = Entry(status.st_size, written)
        except OSError as error:
            raise Refused(f"{self.address} cannot be read ({error.strerror})") from error
        return found

    def read(self, name: str) -> bytes:
        try:
            return (self.directory / name).read_bytes()
        except FileNotFoundError as error:
            raise Gone(name) from error
        except OSError as error:
            raise Failed(f"{self.directory / name} cannot be read ({error.strerror})") from error

    def parts(self, name: str, begin: int, entry: Entry) -> Iterator[bytes]:
        try:
            with open(self.directory / name, "rb") as source:
                source.seek(begin)
                while part := source.read(_PART_BYTES):
                    yield part
        except FileNotFoundError as error:
            raise Gone(name) from error
        except OSError as error:
            raise Failed(f"{self.directory / name} cannot be read ({error.strerror})") from error

    def delete(self, name: str) -> None:
        try:
            (self.directory / name).unlink(missing_ok=True)
        except OSError as error:
            reason = error.strerror
            raise Failed(f"{self.directory / name} cannot be deleted ({reason})") from error


class Prefix(Place):
    """An S3 prefix; `s3` is a boto3 client."""

    def __init__(self, s3: Any, uri: str) -> None:
        self._s3, self.address = s3, uri.rstrip("/") + "/"
        self._bucket, self._prefix = split(self.address)

    def entries(self) -> dict[str, Entry]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        try:
            return {
                name: Entry(item["Size"], item["LastModified"])
                for page in pages
                for item in page.get("Contents", [])
                if _stays_inside(name := item["Key"].removeprefix(self._prefix))
            }
        except (BotoCoreError, ClientError) as error:
            raise Refused(
                f"{self.address} cannot be listed ({one_line(error)}); use credentials that may "
                f"list and read this bucket, and check its name"
            ) from error

    def read(self, name: str) -> bytes:
        with self._asked(name):
            body = self._s3.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"]
            return bytes(body.read())
        raise AssertionError  # _asked raises or the block returns

    def parts(self, name: str, begin: int, entry: Entry) -> Iterator[bytes]:
        if begin >= entry.size:
            return
        with self._asked(name):
            answer = self._s3.get_object(
                Bucket=self._bucket,
                Key=self._prefix + name,
                Range=f"bytes={begin}-",
                IfUnmodifiedSince=entry.written,
            )
            yield from answer["Body"].iter_chunks(_PART_BYTES)

    def delete(self, name: str) -> None:
        with self._asked(name):
            self._s3.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    @contextlib.contextmanager
    def _asked(self, name: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "404", "PreconditionFailed", "412"):
                raise Gone(name) from error
            raise Failed(f"{self.address}{name}: {one_line(error)}") from error
        except (BotoCoreError, Boto3Error) as error:
            raise Failed(f"{self.address}{name}: {one_line(error)}") from error


def _stays_inside(name: str) -> bool:
    """Whether a key is a relative path without a way out; S3 allows any text as a key."""
    return (
        bool(name)
        and not name.endswith("/")
        and os.path.normpath(name) == name
        and (not name.startswith(("/", "..")))
    )
