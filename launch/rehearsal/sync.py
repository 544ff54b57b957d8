"""SageMaker's checkpoint agent: what is in the directory goes to S3, and so do its deletions."""

import threading
from pathlib import Path
from typing import Any

from launch.runs import split
from training.snapshots.manifest import TEMPORARY

_SECONDS_BETWEEN_PASSES = 0.1


class SyncAgent:
    """Mirrors one instance's checkpoint directory into an S3 prefix, in a thread of its own.

    As on SageMaker, every host has an agent, all write to the same prefix, files are restored only
    when the instance starts, and a local deletion is repeated in S3.
    """

    def __init__(self, s3: Any, uri: str, directory: Path) -> None:
        self._s3, self._directory = s3, directory
        self._bucket, self._prefix = split(uri)
        self._known: dict[str, tuple[int, int]] = {}
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

    def _run(self) -> None:
        try:
            while not self._stop.wait(_SECONDS_BETWEEN_PASSES):
                self.one_pass()
        except Exception as error:
            self._error = error

    def one_pass(self) -> None:
        """Bring S3 up to date once: first the deletions, then the files that are new or changed."""
        now = self._look()
        for name in self._known.keys() - now.keys():
            self._s3.delete_object(Bucket=self._bucket, Key=self._prefix + name)
            del self._known[name]
        for name in sorted(now.keys()):
            if self._stop.is_set():
                return
            if self._known.get(name) != now[name]:
                self._upload(name)
                self._known[name] = now[name]

    def _upload(self, name: str) -> None:
        try:
            body = (self._directory / name).read_bytes()
        except FileNotFoundError:
            return  # pruned since the listing; the next pass deletes it
        self._s3.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=body)

    def _look(self) -> dict[str, tuple[int, int]]:
        found = {}
        for path in self._directory.rglob("*"):
            name = str(path.relative_to(self._directory))
            if TEMPORARY in name:
                continue
            try:
                if path.is_file():
                    stat = path.stat()
                    found[name] = (stat.st_size, stat.st_mtime_ns)
            except FileNotFoundError:
                continue
        return found
