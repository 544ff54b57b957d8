"""What a real loop has, killed and resumed under torchrun: the same bits as never interrupted."""

import os
import re
import signal
import time

import pytest
import torch

from tests.end_to_end.test_torchrun import final
from tests.end_to_end.torchrun import Torchrun
from tests.states import differing
from training.optimization import learning_rate
from training.settings import TrainingSettings

STEPS = 12
COMMON = {"total_steps": STEPS, "snapshot_steps": 2, "decay_steps": STEPS}
LOOPS = {
    "bf16, micro batches, data workers, evaluation": {
        "precision": "bf16",
        "micro_batch_size": 2,
        "dataloader_workers": 2,
        "validation_share": 0.1,
        "evaluate_every": 3,
        "export": "best",
    },
    "compiled": {"compile": "true", "ranks": 1},  # compiling takes long enough
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    import pydoc_data.topics

    directory = tmp_path_factory.mktemp("text")
    topics = "".join(pydoc_data.topics.topics.values()).encode()
    (directory / "topics.txt").write_bytes(topics[:20_000])
    return directory


@pytest.mark.parametrize("settings", LOOPS.values(), ids=LOOPS)
def test_killed_and_resumed_it_ends_with_the_same_bits(text, tmp_path, settings):
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    # Both compile for themselves, but not in a folder that other runs of this machine have filled.
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more are processes that import torch first
    }
    with Torchrun(text, straight, env=env, **COMMON, **settings) as run:
        assert run.finish() == 0, run.log
    with Torchrun(text, parts, env=env, **COMMON, **settings) as run:
        run.until(r"^snapshot step=")
        run.until(r"^step=7 ")
        run.kill()
    with Torchrun(text, parts, env=env, **COMMON, **settings) as run:
        assert run.finish() == 0, run.log
        assert run.find(r"^resumed step=\d+ "), run.log
    assert differing(final(straight, STEPS), final(parts, STEPS)) == []
    exported = [torch.load(home / "model" / "model.pt") for home in (straight, parts)]
    assert differing(*exported) == []
    # Whether compiled or not, on one rank or many, files carry the names of the plain model.
    assert exported[0].keys() == final(straight, STEPS)["model"].keys()
    assert {"token.weight", "blocks.0.attend.weight"} < exported[0].keys()


SEEN = """
import os, sys
from training import sampling, train
from training.failure import exit_code_of

read = sampling.SeededSamples.__getitem__

def noted(self, place):
    with open(sys.argv[0] + f".{os.environ['RANK']}", "a") as file:
        print(*place, file=file)
    return read(self, place)

sampling.SeededSamples.__getitem__ = noted
sys.exit(exit_code_of(train.main))
"""


RATES = {"decay_steps": 6, "warmup_steps": 2}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_another_number_of_ranks_sees_every_sample_once(text, tmp_path, before, after):
    script = tmp_path / "noted.py"
    script.write_text(SEEN)
    options = {**RATES, "sequence_length": 512, "model_width": 8, "snapshot_steps": 3}
    rates = []
    for ranks, total_steps in ((before, 3), (after, 6)):
        options["total_steps"] = total_steps
        with Torchrun(text, tmp_path, ranks=ranks, script=str(script), **options) as run:
            assert run.finish() == 0, run.log
        rates += [x.split()[2] for x in run.lines if re.match(r"step=\d+ ", x)]
    assert run.find(rf"^the snapshot was written by {before} ranks, and there are {after} now: ")
    seen = [x for path in tmp_path.glob("noted.py.*") for x in path.read_text().splitlines()]
    assert len(seen) == 6 * 12  # six steps of the global batch
    size = 20_000 // 512
    epochs = [sum(x.startswith(f"{epoch} ") for x in seen) for epoch in range(3)]
    assert len(set(seen)) == len(seen)
    assert epochs == [size, 72 - size, 0] if 2 * size > 72 else [size, size, 72 - 2 * size]
    expected = [learning_rate(TrainingSettings(**RATES, total_steps=6), step) for step in range(6)]
    assert rates == [f"learning_rate={rate:.1e}" for rate in expected]


def test_a_hung_peer_ends_the_job_within_the_collective_timeout(text, tmp_path):
    options = {"total_steps": 100_000, "snapshot_steps": 90_000, "collective_timeout": 5}
    with Torchrun(text, tmp_path, **options) as run:
        run.until(r"^step=3 ")
        first, second = run.ranks()
        os.kill(second.pid, signal.SIGSTOP)
        started = time.monotonic()
        run.until(r"^rank 0: host \S+ vanished")
        first.wait(20)
        assert time.monotonic() - started < 25
        run.kill()  # torchrun itself gives the one that hangs half a minute
    assert "rank 0: host" in run.failure
    assert run.find(r"^snapshot step=\d+ ")  # the last complete state


BROKEN = """
import itertools, sys, time
from torch.utils.data import get_worker_info
from training import data, train
from training.failure import exit_code_of

read, take_step, count = data.ByteWindows.__getitem__, train.take_step, itertools.count(1)

def stuck(self, index):
    if get_worker_info() and next(count) > 3 * 12:  # after three global batches
        time.sleep(3600)
    return read(self, index)

def failing(*arguments):
    if next(count) == 3:
        raise ValueError("no such token")
    return take_step(*arguments)

data.ByteWindows.__getitem__, train.take_step = stuck, failing
sys.exit(exit_code_of(train.main))
"""


def test_a_failure_is_told_and_the_state_kept_though_the_data_is_stuck(text, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    options = {"total_steps": 9, "snapshot_steps": 9, "dataloader_workers": 1, "ranks": 1}
    with Torchrun(text, tmp_path, script=str(script), **options) as run:
        assert run.finish() != 0, run.log
        assert run.find(r"^snapshot step=2 "), run.log
    assert run.failure == "rank 0: ValueError: no such token\n"


SLOW = """
import sys, time
from training import train
from training.failure import exit_code_of
from training.snapshots import files, keeper

def slowly(work):
    def slow(*arguments):
        time.sleep(6)
        return work(*arguments)
    return slow

files.read = slowly(files.read)
keeper.Keeper.finish = slowly(keeper.Keeper.finish)
train.export = slowly(train.export)
sys.exit(exit_code_of(train.main))
"""


def test_rank_0_may_take_longer_with_its_files_than_a_collective_may_last(text, tmp_path):
    options = {"snapshot_steps": 2, "validation_share": 0.1, "decay_steps": 4}
    with Torchrun(text, tmp_path, total_steps=2, **options) as run:
        assert run.finish() == 0, run.log
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    options |= {"collective_timeout": 5, "script": str(script)}
    with Torchrun(text, tmp_path, total_steps=4, **options) as run:
        assert run.finish() == 0, run.log
        assert run.find(r"^resumed step=2 "), run.log
