"""Whether the host has room for the copies of the state that are kept while training."""

from pathlib import Path

from torch import Tensor

from training.failure import TrainingError, say
from training.replica import Replica
from training.snapshots.staging import host_bytes

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def check_room(replica: Replica, *, models: int = 0) -> None:
    """Say how much the copies take. Raises TrainingError if that much is not available.

    One is what snapshots are written from; `models` more hold the model alone. Ask once the
    optimizer has its state: that is the larger part.
    """
    needed, available = host_bytes(replica), available_bytes()
    model = replica.plain_model.state_dict().values()
    needed += models * sum(value.nbytes for value in model if isinstance(value, Tensor))
    say(f"snapshot_memory bytes={needed}" + ("" if available is None else f" of={available}"))
    if available is not None and needed > available:
        raise TrainingError(
            f"snapshots are written from copies of the state that take {needed / 2**30:.1f} GiB of "
            f"this host's memory, but only {available / 2**30:.1f} GiB are available; take an "
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
