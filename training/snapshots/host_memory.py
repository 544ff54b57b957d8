"""Whether the host has room for the copy of the state that snapshots are written from."""

from pathlib import Path

from training.failure import TrainingError, say
from training.replica import Replica
from training.snapshots.staging import host_bytes

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def check_room(replica: Replica) -> None:
    """Say how much the copy takes. Raises TrainingError if that much is not available.

    Ask once the optimizer has its state: that is the larger part.
    """
    needed, available = host_bytes(replica), available_bytes()
    say(f"snapshot_memory bytes={needed}" + ("" if available is None else f" of={available}"))
    if available is not None and needed > available:
        raise TrainingError(
            f"snapshots are written from a copy of the state that takes {needed / 2**30:.1f} GiB "
            f"of this host's memory, but only {available / 2**30:.1f} GiB are available; take an "
            f"instance with more memory, or lower dataloader_workers"
        )


def available_bytes() -> int | None:
    """What can still be allocated on this host and in this container; None where nothing tells."""
    known = [size for size in (_of_the_host(), _of_the_container()) if size is not None]
    return min(known, default=None)


def _of_the_host() -> int | None:
    try:
        lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None


def _of_the_container() -> int | None:
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        return max(0, limit - used + _cache_bytes())
    except (OSError, ValueError):
        return None  # no limit, which is the word max


def _cache_bytes() -> int:
    """What the container's use counts, but would be given back: the page cache."""
    lines = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    return int(lines.get("inactive_file", 0))
