"""What a save costs and how long a resume takes, by the clock and in memory."""

import ctypes
import gc
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.benchmarks.contenders import CONTENDERS, Contender, Ours, TorchSave
from tests.benchmarks.job import Job
from training.snapshots.resume import resume

PLAIN_STEPS = 4  # before every save
_SAMPLING_SECONDS = 0.003
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Costs:
    """What one contender's saves cost; a list holds a number for every repeat."""

    call: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    plain_steps: list[float] = field(default_factory=list)
    disturbed_steps: list[float] = field(default_factory=list)
    memory_bytes: int = 0

    @property
    def stall(self) -> float:
        """Seconds that training is held up: the call, and the wait before the next update."""
        return statistics.median(c + w for c, w in zip(self.call, self.waited, strict=True))

    @property
    def seconds_to_whole(self) -> float:
        """Seconds from the call until the save is durable."""
        return statistics.median(self.whole)

    @property
    def slow_down(self) -> float | None:
        """How many times longer steps take while a save is in flight, waits apart."""
        if not self.disturbed_steps:
            return None
        # A mean, because a save disturbs the steps beside its phases differently.
        disturbed = (sum(self.disturbed_steps) - sum(self.waited)) / len(self.disturbed_steps)
        return disturbed / statistics.mean(self.plain_steps)

    @property
    def lost(self) -> float:
        """Seconds of training that a save costs in all: the stall and the slow-down."""
        behind = sum(self.disturbed_steps) - len(self.disturbed_steps) * statistics.mean(
            self.plain_steps
        )
        return (sum(self.call) + behind) / len(self.call)


@dataclass
class Comparison:
    """All contenders on one model, in one run."""

    parameters: int
    state_bytes: int
    costs: dict[str, Costs]
    resume_seconds: dict[str, list[float]]
    resume_memory_bytes: dict[str, int]

    @property
    def step_seconds(self) -> float:
        """An undisturbed step."""
        return statistics.median(s for costs in self.costs.values() for s in costs.plain_steps)

    def resume(self, name: str) -> float:
        """Seconds that a resume takes."""
        return statistics.median(self.resume_seconds[name])


def compare(job: Job, repeats: int) -> Comparison:
    """Let the contenders save in turn, `repeats` times each; then resume as often.

    The first save of each, which allocates what it keeps, is only measured in bytes.
    """
    contenders, costs = [], {kind.name: Costs() for kind in CONTENDERS}
    for kind in CONTENDERS:
        with peak_memory() as training:
            _plain_steps(job)
        with peak_memory() as saving:
            contenders.append(kind(job))
            _save(contenders[-1], job, Costs())
        costs[kind.name].memory_bytes = max(0, saving() - training())
    for repeat in range(repeats):
        for place in range(len(contenders)):
            contender = contenders[(repeat + place) % len(contenders)]
            _save(contender, job, costs[contender.name])
    seconds, memory = _resume_in_turn(job, repeats)
    for contender in contenders:
        contender.close()
    return Comparison(job.parameters, job.state_bytes, costs, seconds, memory)


def _save(contender: Contender, job: Job, costs: Costs) -> None:
    """Some steps, a save, and steps for as long as it is in flight."""
    plain = _plain_steps(job)
    started = time.perf_counter()
    contender.save()
    call = time.perf_counter() - started
    disturbed = []
    while contender.in_flight:
        disturbed.append(_timed(job.take_step))
    whole = contender.finish() - started
    costs.plain_steps += plain
    costs.call.append(call)
    costs.waited.append(contender.waited_seconds)
    costs.disturbed_steps += disturbed
    costs.whole.append(whole)


def _plain_steps(job: Job) -> list[float]:
    return [_timed(job.take_step) for _ in range(PLAIN_STEPS)]


def _resume_in_turn(job: Job, repeats: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds and bytes of a resume by this project and by torch.load, from the page cache.

    A resume happens in a process that has just started, which has no freed memory to use again: so
    each first gives back what the one before it left.
    """
    ways = {Ours.name: _resume, TorchSave.name: _load}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory = dict.fromkeys(ways, 0)
    for repeat in range(repeats + 1):
        for name, way in list(ways.items())[:: 1 if repeat % 2 else -1]:
            replica = job.without_optimizer_state()
            trim()
            if repeat:
                seconds[name].append(_timed(lambda way=way, replica=replica: way(job, replica)))
                continue
            before = resident_bytes()
            with peak_memory() as peak:  # and warm up
                way(job, replica)
            memory[name] = peak() - before
    return seconds, memory


def _resume(job: Job, replica: Any) -> None:
    resumed = resume(job.settings, job.group, replica, len(job.dataset))
    assert resumed.snapshot, "nothing was resumed"


def _load(job: Job, replica: Any) -> None:
    state = torch.load(job.directory / "torch.pt", mmap=False)
    replica.plain_model.load_state_dict(state["model"])
    replica.optimizer.load_state_dict(state["optimizer"])


def _timed(what: Any) -> float:
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


@contextmanager
def peak_memory() -> Iterator[Any]:
    """Yields a function: the most bytes that this process held in memory during the block."""
    trim()
    highest = resident_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(_SAMPLING_SECONDS):
            highest = max(highest, resident_bytes())

    watcher = threading.Thread(target=watch, name="peak memory")
    watcher.start()
    try:
        yield lambda: highest
    finally:
        done.set()
        watcher.join()


def trim() -> None:
    """Give back to the system what this process has freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """What this process holds in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE
