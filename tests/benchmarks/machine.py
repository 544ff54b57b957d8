"""What the measurements ran on, and how much of it others took meanwhile."""

import os
import platform

import torch


def described() -> str:
    """The machine's shape, in words."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, torch {torch.__version__}"
    )


class Others:
    """Watches, from its creation on, what this machine does beside this process."""

    def __init__(self) -> None:
        self._began = _seconds()

    @property
    def share(self) -> float:
        """The part of all processors' time that others have had; theirs may be a hypervisor."""
        taken, whole = (now - then for now, then in zip(_seconds(), self._began, strict=True))
        return max(0.0, taken / whole) if whole else 0.0


def _seconds() -> tuple[float, float]:
    """(processor seconds that others have had, all there were), since the system started."""
    with open("/proc/stat") as file:
        ticks = [int(value) for value in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]  # idle, and waiting for a disk
    hertz = os.sysconf("SC_CLK_TCK")
    own = os.times()
    return (sum(ticks) - idle) / hertz - sum(own[:4]), sum(ticks) / hertz  # with its children
