"""Which samples a rank sees at a step, and the randomness of a step, a rank and a sample.

All of it is a pure function of (settings, step, rank), so a resumed run needs no fast-forward: it
costs the same at step ten and at step ten million.

The samples of all epochs stand in one endless row: epoch e is a permutation of the data set, and
optimizer step n takes the positions n·B … (n+1)·B of that row, where B is the global batch. Every
sample is seen exactly once an epoch, a batch may reach into the next epoch, and the world size only
decides who computes what.
"""

import functools
import hashlib
import queue
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from training.failure import TrainingError
from training.group import Group
from training.settings import TrainingSettings

Place = tuple[int, int]  # (epoch, index in the data set)


def derive_seed(*parts: int | str) -> int:
    """A seed that is a function of `parts` alone: 63 bits, the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make all randomness of optimizer step `step` on `rank` a function of these three numbers."""
    _seed_everything(derive_seed("step", seed, step, rank))


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, size: int) -> torch.Tensor:
    """The order of `size` samples in `epoch`: an int64 tensor of shape (size,)."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(size, generator=generator)


def places_of(first: int, count: int, seed: int, size: int) -> list[Place]:
    """What stands at positions `first` … `first + count` of the endless row of epochs."""
    positions = (divmod(position, size) for position in range(first, first + count))
    return [(epoch, int(epoch_order(seed, epoch, size)[offset])) for epoch, offset in positions]


class MicroBatches(Sampler[list[Place]]):
    """The micro batches of one rank, from optimizer step `first_step` to the end of the run."""

    def __init__(
        self, settings: TrainingSettings, size: int, rank: int, world_size: int, first_step: int
    ) -> None:
        self._settings, self._size = settings, size
        self._rank, self._first_step = rank, first_step
        self._share = settings.global_batch_size // world_size
        self._micro = settings.micro_batch_size or self._share

    @property
    def per_step(self) -> int:
        """How many micro batches make one optimizer step on this rank."""
        return self._share // self._micro

    def __iter__(self) -> Iterator[list[Place]]:
        s = self._settings
        for step in range(self._first_step, s.total_steps):
            first = step * s.global_batch_size + self._rank * self._share
            places = places_of(first, self._share, s.seed, self._size)
            for start in range(0, self._share, self._micro):
                yield places[start : start + self._micro]


class SeededSamples(Dataset[Any]):
    """Any map-style data set, asked by (epoch, index) and seeded from it.

    A sample's augmentation then depends on the epoch and the sample alone: not on the number of
    workers, not on the rank, not on whether the run was resumed.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, place: Place) -> Any:
        epoch, index = place
        _seed_sample(derive_seed("sample", self._seed, epoch, index))
        return self._dataset[index]


def held_out(
    dataset: Dataset[Any], settings: TrainingSettings
) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """`dataset` in two parts: for training and, if there is a `validation_share`, for validation.

    Which sample belongs where depends on the seed alone. Raises TrainingError if a part is empty.
    """
    if not settings.validation_share:
        return dataset, None
    size = len(dataset)  # type: ignore[arg-type]
    count = round(size * settings.validation_share)
    if not 0 < count < size:
        raise TrainingError(
            f"validation_share {settings.validation_share:g} of {size} samples leaves {count} for "
            f"validation and {size - count} for training; add data or set another share"
        )
    generator = torch.Generator().manual_seed(derive_seed("held out", settings.seed))
    order = torch.randperm(size, generator=generator)
    parts = [sorted(part.tolist()) for part in (order[count:], order[:count])]
    return Subset(dataset, parts[0]), Subset(dataset, parts[1])


def check_batch(settings: TrainingSettings, size: int, world_size: int) -> None:
    """Refuse batches that cannot be dealt evenly, or a data set that is smaller than one.

    Raises TrainingError, with the nearest sizes that work.
    """
    batch, micro = settings.global_batch_size, settings.micro_batch_size
    if batch % world_size:
        below, above = batch - batch % world_size, batch + world_size - batch % world_size
        nearest = f"{below} or {above}" if below else f"{above}"
        raise TrainingError(
            f"global_batch_size is {batch}, which {world_size} ranks cannot share evenly; "
            f"{nearest} can be shared"
        )
    share = batch // world_size
    if micro and share % micro:
        fits = next(d for d in range(min(micro, share), 0, -1) if share % d == 0)
        raise TrainingError(
            f"micro_batch_size is {micro}, which does not divide the {share} samples of a rank "
            f"(global_batch_size {batch} on {world_size} ranks); {fits} does"
        )
    if size < batch:
        largest = size - size % world_size
        smaller = (
            f"start again under another run_name with global_batch_size {largest} or less"
            if largest
            else f"train on fewer than {world_size} ranks"
        )
        raise TrainingError(
            f"the training data holds {size} samples, fewer than global_batch_size {batch}; "
            f"add data, or {smaller}"
        )


def steps_of_data(
    dataset: Dataset[Any], settings: TrainingSettings, group: Group, first_step: int
) -> Iterator[list[Any]]:
    """Yield, for each optimizer step from `first_step` on, this rank's micro batches.

    `dataset` is map-style with a length; samples are collated by torch's default rule.
    """
    count = settings.total_steps - first_step
    if count <= 0:
        return
    size = len(dataset)  # type: ignore[arg-type]
    sampler = MicroBatches(settings, size, group.rank, group.world_size, first_step)
    batches = batches_of(
        SeededSamples(dataset, settings.seed), settings, group, batch_sampler=sampler
    )

    def step_of_data() -> list[Any]:
        return [next(batches) for _ in range(sampler.per_step)]

    if settings.dataloader_workers:
        yield from _one_ahead(step_of_data, count)
    else:  # in this thread, whose step seeds what is random only after the samples were read
        for _ in range(count):
            yield step_of_data()


def _one_ahead(make: Callable[[], list[Any]], count: int) -> Iterator[list[Any]]:
    """What `make` returns, `count` times; the next is made in a thread while this one is used.

    Taking a batch from its worker costs a millisecond of unpickling, which training would wait for.
    """
    asked = queue.SimpleQueue[Future[list[Any]] | None]()

    def ask() -> Future[list[Any]]:
        asked.put(one := Future[list[Any]]())
        return one

    def work() -> None:
        while one := asked.get():
            try:
                one.set_result(make())
            except Exception as error:
                one.set_exception(error)

    # Not an executor's thread, for which the interpreter's exit would wait: data may never come.
    threading.Thread(target=work, name="data", daemon=True).start()
    try:
        coming = ask()
        for left in reversed(range(count)):
            made = coming.result()
            if left:
                coming = ask()
            yield made
    finally:
        asked.put(None)


def batches_of(
    dataset: Dataset[Any], settings: TrainingSettings, group: Group, **sampling: Any
) -> Iterator[Any]:
    """The batches that torch's DataLoader makes of `dataset`, in as many processes as are set.

    Call it from the main thread: that is where torch watches over the processes it starts here.
    """
    workers, patience = settings.dataloader_workers, settings.collective_timeout
    loader = DataLoader(
        dataset,
        num_workers=workers,
        worker_init_fn=_start_worker if workers else None,
        timeout=patience if workers else 0,
        pin_memory=group.device.type == "cuda",
        **sampling,
    )
    return _in_time(iter(loader), workers, patience)


def _in_time(batches: Iterator[Any], workers: int, patience: int) -> Iterator[Any]:
    """The same; raises TrainingError when one takes as long as a peer that counts as gone."""
    try:
        yield from batches
    except RuntimeError as error:
        if "timed out" not in str(error):
            raise
        raise TrainingError(
            f"{workers} data workers brought no batch within {patience} s; look for what blocks "
            f"in data.py, or set a longer collective_timeout"
        ) from error


def _start_worker(worker: int) -> None:
    """What a process that reads data does first."""
    # torchrun signals the whole process group: a worker that dies of it takes the rank down with
    # it before the step loop can write the snapshot that the signal was sent for.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    _seed_python(seed)


def _seed_sample(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # samples are made on the CPU
    _seed_python(seed)


def _seed_python(seed: int) -> None:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):  # not a dependency, but a data set may use it
        numpy.random.seed(seed % 2**32)
