"""Two training loops in alternating blocks: with and without snapshots, ours and a bare one."""

import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.benchmarks.job import Job
from training.interruption import Interruption
from training.optimization import learning_rate, take_step
from training.sampling import seed_step, steps_of_data
from training.snapshots.resume import Resumed
from training.snapshots.snapshotter import Snapshotter
from training.watch import Watch

STEPS_PER_BLOCK = 10


@dataclass(frozen=True)
class Throughput:
    """Training with snapshots every so many seconds, and without."""

    steps_per_second_with: float
    steps_per_second_without: float
    snapshots: int

    @property
    def ratio(self) -> float:
        return self.steps_per_second_with / self.steps_per_second_without


@dataclass(frozen=True)
class Overhead:
    """Seconds of a step in training's own loop and in a bare one, block by block."""

    ours: list[float]
    bare: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.bare)


def throughput(job: Job, rounds: int) -> Throughput:
    """Blocks as long as the pace of the snapshots, in the order without, with, with, without …

    So a snapshot is written in each block that has them. `job.settings.snapshot_seconds` is the
    pace; the time that passes in a block without counts for the next one.
    """
    seconds = float(job.settings.snapshot_seconds or 0)
    snapshotter = _snapshotter(job)
    steps, spent = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    directory = Path(job.settings.checkpoint_dir)
    directory.mkdir(parents=True, exist_ok=True)
    with snapshotter as snapshots:
        for number in range(2 * rounds):
            saving = number % 4 in (1, 2)
            # A little less, so that the second snapshot of a block falls into the next.
            began = now = time.perf_counter()
            while now - began < 0.995 * seconds:
                job.take_step()
                if saving:
                    snapshots.reached(job.step, job.norm)
                    snapshots.take(job.step)
                steps[saving] += 1
                now = time.perf_counter()
            spent[saving] += now - began
    taken = sum(1 for _ in directory.glob("step-*.json"))
    if taken < rounds:
        raise RuntimeError(f"{taken} snapshots were written in {rounds} blocks that have them")
    return Throughput(steps[True] / spent[True], steps[False] / spent[False], taken)


def overhead(ours: Job, bare: Job, blocks: int) -> Overhead:
    """The loop of training/train.py beside one that does nothing but train, `blocks` of each."""
    step_ours, step_bare = _our_loop(ours), _bare_loop(bare)
    for _ in range(2):
        step_ours(), step_bare()
    seconds: dict[Callable[[], None], list[float]] = {step_ours: [], step_bare: []}
    for block in range(blocks):
        for loop in (step_ours, step_bare)[:: 1 if block % 2 else -1]:
            started = time.perf_counter()
            for _ in range(STEPS_PER_BLOCK):
                loop()
            seconds[loop].append((time.perf_counter() - started) / STEPS_PER_BLOCK)
    return Overhead(seconds[step_ours], seconds[step_bare])


def _snapshotter(job: Job) -> Snapshotter:
    interruption = Interruption(job.group)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whoever stops a benchmark means it
    resumed, samples = Resumed(step=job.step), len(job.dataset)
    return Snapshotter(job.settings, job.group, job.replica, resumed, samples, interruption)


def _our_loop(job: Job) -> Callable[[], None]:
    """Everything that training/train.py does for a step, with no snapshot due."""
    settings, group, replica, first = job.settings, job.group, job.replica, job.step
    snapshots, watch = (
        _snapshotter(job),
        Watch(settings, group, replica.plain_model, Resumed(step=first)),
    )
    data = watch.waits(steps_of_data(job.dataset, settings, group, first_step=first))

    def take() -> None:
        micro_batches, rate = next(data), learning_rate(settings, job.step)
        seed_step(settings.seed, job.step, group.rank)
        loss, norm = take_step(replica, micro_batches, rate, settings, group.device)
        job.step += 1
        snapshots.reached(job.step, norm)
        watch.after_step(job.step, loss, norm, rate)
        snapshots.take(job.step)

    return take


def _bare_loop(job: Job) -> Callable[[], None]:
    """The same arithmetic on the same data, and nothing else: no log, no schedule, no seeds."""
    model, optimizer = job.replica.model, job.replica.optimizer
    loader = DataLoader(job.dataset, batch_size=job.settings.global_batch_size, shuffle=True)
    batches = iter(loader)

    def take() -> None:
        nonlocal batches
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.settings.gradient_clip)
        optimizer.step()

    return take
