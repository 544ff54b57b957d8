"""Checksums of a data file, one for each chunk, so that all cores can verify it at once.

They are there against storage, not against an adversary: a snapshot is never unpickled into code.
CRC-32 finds every burst of up to 32 wrong bits and all but one in four billion of anything else,
at the speed of memory; a cryptographic digest would take longer than reading the file.
"""

import hashlib
import os
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CHUNK_BYTES = 16 * 2**20
ALGORITHM = "crc32"
MOST_THREADS = 8  # more would only wait for memory
# What a thread reads and digests at a time: little enough for a cache, and enough to be worth the
# wait for Python's lock, which whoever parses the state meanwhile holds for milliseconds.
PIECE_BYTES = 4 * 2**20


class _Crc32:
    """CRC-32 behind hashlib's interface."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_ALGORITHMS: dict[str, Callable[[], Any]] = {
    "crc32": _Crc32,
    "sha256": hashlib.sha256,  # what earlier snapshots have
}


class Digests:
    """The checksums of a stream, as it passes."""

    def __init__(self, algorithm: str = ALGORITHM, chunk_bytes: int = 0) -> None:
        self.bytes = 0
        self._algorithm, self._chunk_bytes = algorithm, chunk_bytes or CHUNK_BYTES
        self._start = _ALGORITHMS[algorithm]
        self._done: list[str] = []
        self._current, self._room = self._start(), self._chunk_bytes

    @classmethod
    def like(cls, expected: dict[str, Any]) -> "Digests":
        """For a stream that should have the `expected` digests. Raises ValueError as `matches`."""
        name, chunk, _ = _understood(expected)
        return cls(name, chunk)

    def add(self, data: Any) -> None:
        """Take in the next bytes, any buffer."""
        view = memoryview(data).cast("B")
        self.bytes += len(view)
        while len(view):
            part, view = view[: self._room], view[self._room :]
            self._current.update(part)
            self._room -= len(part)
            if not self._room:
                self._end_chunk()

    def result(self) -> dict[str, Any]:
        """What the manifest says under `digests`."""
        if self._room < self._chunk_bytes or not self._done:
            self._end_chunk()
        kind = {"algorithm": self._algorithm, "chunk_bytes": self._chunk_bytes}
        return {**kind, "chunks": self._done}

    def _end_chunk(self) -> None:
        self._done.append(self._current.hexdigest())
        self._current, self._room = self._start(), self._chunk_bytes


def matches(descriptor: int, size: int, expected: dict[str, Any]) -> bool:
    """Whether an open file of `size` bytes has the `expected` digests.

    Raises OSError if it cannot be read, and ValueError for digests that this code cannot check.
    """
    name, chunk, chunks = _understood(expected)
    start_digest = _ALGORITHMS[name]
    starts = range(0, max(size, 1), chunk)
    if len(starts) != len(chunks):  # also keeps a wrong chunk_bytes from making endless work
        return False
    own = threading.local()  # one buffer for each thread: new memory takes as long as the read

    def digest(start: int) -> str:
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(bytearray(min(PIECE_BYTES, chunk)))
        place, end, passed = start, min(start + chunk, size), start_digest()
        while place < end:
            read = os.preadv(descriptor, [own.buffer[: end - place]], place)
            if not read:
                break
            passed.update(own.buffer[:read])
            place += read
        return str(passed.hexdigest())

    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(digest, starts)) == chunks


def _understood(expected: dict[str, Any]) -> tuple[str, int, list[Any]]:
    """The algorithm, the bytes of a chunk and the digests. Raises ValueError for unknown ones."""
    name, chunk, chunks = (expected.get(key) for key in ("algorithm", "chunk_bytes", "chunks"))
    known = isinstance(name, str) and name in _ALGORITHMS
    if not known or type(chunk) is not int or chunk < 1 or not isinstance(chunks, list):
        raise ValueError(f"its digests are {name} of {chunk} bytes")
    return str(name), chunk, chunks
