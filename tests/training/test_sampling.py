"""Every sample is seen exactly once an epoch, whoever computes it and however often it resumes."""

import multiprocessing
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter

import pytest
import torch

from training.failure import TrainingError, sentence
from training.group import Group
from training.sampling import (
    MicroBatches,
    SeededSamples,
    _one_ahead,
    batches_of,
    check_batch,
    derive_seed,
    epoch_order,
    places_of,
    steps_of_data,
)
from training.settings import TrainingSettings


def places(rank, world_size, first_step=0, total_steps=30, size=41, **overrides):
    """All places that a rank visits, in order."""
    settings = TrainingSettings(
        total_steps=total_steps, global_batch_size=12, **{"seed": 3, **overrides}
    )
    batches = MicroBatches(settings, size, rank, world_size, first_step)
    return [place for batch in batches for place in batch]


def test_every_sample_is_seen_once_an_epoch():
    seen = Counter(places(0, 1, total_steps=41))  # 41 steps of 12 are 12 epochs of 41
    assert seen == Counter({(epoch, index): 1 for epoch in range(12) for index in range(41)})


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1), (3, 2), (4, 12)])
@pytest.mark.parametrize("stop", [0, 1, 7, 30])
def test_a_change_of_the_world_size_loses_and_repeats_nothing(worlds, stop):
    before, after = worlds
    first = [p for rank in range(before) for p in places(rank, before, total_steps=stop or 1)]
    then = [p for rank in range(after) for p in places(rank, after, first_step=stop)]
    assert Counter((first if stop else []) + then) == Counter(places(0, 1))


def test_resuming_is_an_index():
    whole = places(1, 2)
    assert places(1, 2, first_step=10) == whole[10 * 6 :]
    far = places(0, 1, first_step=10**9, total_steps=10**9 + 1)
    assert len(far) == 12


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [epoch_order(seed, epoch, 100) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert all(sorted(order.tolist()) == list(range(100)) for order in orders)


def test_a_batch_may_reach_into_the_next_epoch():
    assert [epoch for epoch, _ in places_of(38, 6, 0, 41)] == [0, 0, 0, 1, 1, 1]


def test_micro_batches_are_the_same_samples_in_smaller_portions():
    assert places(1, 2) == places(1, 2, micro_batch_size=2)


def test_seeds_are_functions_of_their_parts():
    assert derive_seed("step", 1, 2) == derive_seed("step", 1, 2)
    assert derive_seed("step", 1, 2) != derive_seed("step", 12, "")
    assert 0 <= derive_seed("x") < 2**63


class Augmented(torch.utils.data.Dataset):
    """Samples that are all randomness: torch's, Python's and numpy's."""

    def __len__(self):
        return 41

    def __getitem__(self, index):
        import random

        import numpy

        return (torch.tensor([index, torch.rand(()), random.random(), numpy.random.random()]),)


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_depends_on_epoch_and_sample_alone(workers):
    def seen(world_size, first_step):
        rows = []
        for rank in range(world_size):
            settings = TrainingSettings(
                total_steps=8, global_batch_size=12, dataloader_workers=workers
            )
            group = Group(rank, world_size, torch.device("cpu"), None, None)
            for step in steps_of_data(Augmented(), settings, group, first_step):
                rows += [tuple(row.tolist()) for (batch,) in step for row in batch]
        return Counter(rows)

    whole = seen(1, 4)
    assert whole == seen(2, 4)
    assert len(whole) == 4 * 12
    assert (
        SeededSamples(Augmented(), 0)[(0, 5)][0][1] != SeededSamples(Augmented(), 0)[(1, 5)][0][1]
    )


def test_with_workers_the_next_step_is_fetched_while_this_one_is_used():
    made = []

    def make():
        made.append(len(made))
        if len(made) == 4:
            raise OSError("sample 4 cannot be read")
        return [made[-1]]

    steps = _one_ahead(make, 9)
    assert next(steps) == [0]
    deadline = time.monotonic() + 30
    while len(made) < 2:
        assert time.monotonic() < deadline, "the next step is only made when it is asked for"
        time.sleep(0.001)
    assert [next(steps), next(steps)] == [[1], [2]]
    with pytest.raises(OSError, match="sample 4"):
        next(steps)
    wait_for_the_data_thread_to_end()

    made.clear()
    assert list(_one_ahead(make, 3)) == [[0], [1], [2]]
    assert made == [0, 1, 2], "more was made than is used"


def wait_for_the_data_thread_to_end():
    deadline = time.monotonic() + 30
    while [thread for thread in threading.enumerate() if thread.name.startswith("data")]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_loop_that_fails_does_not_wait_for_data_that_never_comes():
    asked, comes = threading.Event(), threading.Event()

    def make():
        if asked.is_set():
            asked_again.set()
            comes.wait(60)
        asked.set()
        return []

    asked_again = threading.Event()
    steps = _one_ahead(make, 3)
    next(steps)
    assert asked_again.wait(30)
    started = time.monotonic()
    steps.close()
    assert time.monotonic() - started < 30
    comes.set()
    wait_for_the_data_thread_to_end()


class Broken(Augmented):
    """One sample cannot be read."""

    def __init__(self, wrong):
        self.wrong = wrong

    def __getitem__(self, index):
        if index == 7:
            raise self.wrong
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (ValueError("sample 7 is\ntorn"), "ValueError: sample 7 is torn"),
        (KeyError("label"), "KeyError: 'label'"),
        (TrainingError("/data/7 became shorter"), "/data/7 became shorter"),
    ],
)
def test_what_a_data_worker_failed_of_is_one_line(wrong, said):
    settings = TrainingSettings(dataloader_workers=1)
    group = Group(0, 1, torch.device("cpu"), None, None)
    data = batches_of(Broken(wrong), settings, group, batch_size=41)
    with pytest.raises(type(wrong)) as caught:
        next(data)
    assert sentence(caught.value) == said
    traceback.clear_frames(caught.tb)  # they hold the worker
    assert not multiprocessing.active_children()


STUCK = """
import sys, time
import torch
from training.failure import exit_code_of
from training.group import Group
from training.sampling import batches_of
from training.settings import TrainingSettings

class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index if index == 0 else time.sleep(3600)

def main():
    settings = TrainingSettings(dataloader_workers=2, collective_timeout=1)
    group = Group(0, 1, torch.device("cpu"), None, None)
    for batch in batches_of(Stuck(), settings, group, batch_size=1):
        print(batch.tolist())

sys.exit(exit_code_of(main))
"""


def test_data_that_never_comes_ends_the_run_as_a_silent_peer_does():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "[0]\n"), done.stderr
    assert done.stderr == (
        "rank 0: 2 data workers brought no batch within 1 s; look for what blocks in data.py, or "
        "set a longer collective_timeout\n"
    )


def test_a_finished_run_starts_no_workers():
    settings = TrainingSettings(total_steps=8, global_batch_size=12, dataloader_workers=2)
    group = Group(0, 1, torch.device("cpu"), None, None)
    assert list(steps_of_data(Augmented(), settings, group, first_step=8)) == []
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("batch", "micro", "size", "world", "said"),
    [
        (10, 0, 100, 4, "global_batch_size is 10, which 4 ranks cannot share evenly; 8 or 12 can"),
        (2, 0, 100, 4, "global_batch_size is 2, which 4 ranks cannot share evenly; 4 can"),
        (24, 8, 100, 2, r"does not divide the 12 samples of a rank .*; 6 does"),
        (24, 0, 23, 2, "holds 23 samples, fewer than global_batch_size 24; .* 22 or less"),
        (24, 0, 1, 2, "holds 1 samples, .*; add data, or train on fewer than 2 ranks"),
    ],
)
def test_batches_that_cannot_be_dealt_are_refused_with_what_can(batch, micro, size, world, said):
    settings = TrainingSettings(global_batch_size=batch, micro_batch_size=micro)
    with pytest.raises(TrainingError, match=said):
        check_batch(settings, size, world)
