"""SageMaker's checkpoint agent: what is in the directory goes to S3, and so do its deletions."""

import contextlib
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.runs import split
from training.snapshots.manifest import TEMPORARY, UPLOADED, UPLOADING

_DATA = re.compile(r"step-(\d{10})\.pt")
_Seen = tuple[int, int]  # size in bytes, time of the last change in ns


class SyncAgent:
    """Mirrors one instance's checkpoint directory into an S3 prefix, in a thread of its own.

    As on SageMaker, every host has an agent, all write to the same prefix, files are restored only
    when the instance starts, a local deletion is repeated in S3, and marker files beside a file say
    that its upload has begun or is done. The order and the delays are unknown there; here they are
    drawn from `rng`. As in S3, nothing of an object shows before all of it has been sent. With
    `stalled` the agent restores, and then does nothing any more.
    """

    def __init__(
        self,
        s3: Any,
        uri: str,
        directory: Path,
        rng: random.Random | None = None,
        stalled: bool = False,
    ) -> None:
        self._s3, self._directory = s3, directory
        self._bucket, self._prefix = split(uri)
        self._rng = rng or random.Random(0)
        self._idle = stalled
        self._known: dict[str, _Seen] = {}
        self._hold_from: int | None = None
        self._held = threading.Event()
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"sync {directory}")

    def restore(self) -> None:
        """Download everything under the prefix, as SageMaker does before the container starts."""
        self._directory.mkdir(parents=True, exist_ok=True)
        pages = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        for item in (item for page in pages for item in page.get("Contents", [])):
            path = self._directory / item["Key"].removeprefix(self._prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._s3.download_file(self._bucket, item["Key"], str(path))
        self._known = self._look()

    def start(self) -> None:
        """Begin to mirror."""
        self._thread.start()

    def stop(self) -> None:
        """Stop at once: SageMaker promises no last upload. The thread is gone afterwards.

        Raises what ended the mirroring earlier, if anything did.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._error:
            error, self._error = self._error, None
            raise error

    def hold_at_half(self, step: int) -> threading.Event:
        """Stop for good when half of a data file of `step` or later is sent; tells when it is."""
        self._hold_from = step
        return self._held

    def one_pass(self) -> None:
        """Bring S3 up to date once, without delays."""
        for _ in self.moves():
            continue

    def moves(self) -> Iterator[None]:
        """Bring S3 up to date with what is there now, in any order; yields after each small move.

        Between two moves anything may happen to the files.
        """
        now = self._look()
        todo = [name for name in now if self._known.get(name) != now[name]]
        todo += [name for name in self._known if name not in now]
        self._rng.shuffle(todo)
        for name in todo:
            if not self._idle:
                yield from self._upload(name) if name in now else self._delete(name)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._delay()):
                for _ in self.moves():
                    if self._stop.wait(self._delay()):
                        return
        except Exception as error:
            self._error = error

    def _delay(self) -> float:
        """Seconds until the next move: a few hundredths, seldom more than half a second."""
        return min(0.7, self._rng.expovariate(20) * self._rng.choice((1, 1, 1, 4)))

    def _upload(self, name: str) -> Iterator[None]:
        path = self._directory / name
        begun, done = path.with_name(path.name + UPLOADING), path.with_name(path.name + UPLOADED)
        try:
            done.unlink(missing_ok=True)
            begun.touch()
            yield
            seen, body = _stat(path), path.read_bytes()
            yield  # half of it is sent
            match = _DATA.fullmatch(name)
            if match and self._hold_from is not None and int(match[1]) >= self._hold_from:
                self._idle = True
                self._held.set()
                return
            self._s3.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=body)
            self._known[name] = seen
            yield
            if _stat(path) == seen:
                done.touch()
        except FileNotFoundError:
            pass  # pruned since the listing; the next pass deletes it in S3
        begun.unlink(missing_ok=True)  # not where it ends midway: who is gone tidies nothing up

    def _delete(self, name: str) -> Iterator[None]:
        path = self._directory / name
        if not path.exists():  # else it came back, and the next pass uploads it
            self._s3.delete_object(Bucket=self._bucket, Key=self._prefix + name)
            self._known.pop(name, None)
            path.with_name(path.name + UPLOADED).unlink(missing_ok=True)
            yield

    def _look(self) -> dict[str, _Seen]:
        found = {}
        for path in sorted(self._directory.rglob("*")):  # a seed means the same on every disk
            name = str(path.relative_to(self._directory))
            if TEMPORARY in name or name.endswith((UPLOADING, UPLOADED)):
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    found[name] = _stat(path)
        return found


def _stat(path: Path) -> _Seen:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
