"""The memory that holds a mapped file's pages while its tensors are copied."""

import ctypes
import mmap
from pathlib import Path

RELEASE_BYTES = 16 * 2**20


class Mapping:
    """A data file as this process has it mapped, to be left before the copies double the memory.

    The pages belong to the file, so the kernel may take them back at any time: a tensor that is
    read again is read from the file again. Where there is no /proc, nothing is released.
    """

    def __init__(self, path: Path) -> None:
        self._ranges = _ranges(path)
        self._copied = 0
        self._advise = ctypes.CDLL(None).madvise if self._ranges else None

    def copied(self, count: int) -> None:
        """Take note that `count` more bytes were copied; now and then, release what was read."""
        self._copied += count
        if self._copied < RELEASE_BYTES or self._advise is None:
            return
        self._copied = 0
        for start, length in self._ranges:
            self._advise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _ranges(path: Path) -> list[tuple[int, int]]:
    """Where `path` is mapped, as (address, bytes)."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    name = f" {path.resolve()}"
    places = [line.split(maxsplit=5) for line in lines if line.endswith(name)]
    spans = [tuple(int(edge, 16) for edge in place[0].split("-")) for place in places]
    return [(start, end - start) for start, end in spans]
