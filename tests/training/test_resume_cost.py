"""What a resume leaves behind: nothing that is mapped to a file, and no second copy."""

import os
import subprocess
import sys

import torch

from tests.training.test_snapshot_files import write
from training.snapshots import digests, files

SCRIPT = """
import sys, torch
from pathlib import Path
from training.group import joined
from training.model import build_model
from training.parallel import distribute
from training.settings import TrainingSettings
from training.snapshots import files
from training.snapshots.resume import resume
from training.snapshots.staging import Staging

def memory(key):
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines[key].split()[0]) * 1024

what, directory = sys.argv[1:]
settings = TrainingSettings(
    checkpoint_dir=directory, model_width=384, model_depth=5, model_heads=4, sequence_length=32
)
with joined(60) as group:
    replica = distribute(build_model(settings), settings, group)
    if what == "write":
        tokens = torch.zeros(1, 32, dtype=torch.int64)
        replica.model(tokens, tokens).backward()
        replica.optimizer.step()
        staging = Staging(replica)
        staging.begin(1)
        files.write(Path(directory), staging.state(), run_name="local", step=1, samples_seen=32,
                    world_size=1, settings=settings.fingerprint(), attempt=1)
        staging.close()
    else:
        before = memory("RssAnon")
        size = files.verify(Path(directory), 1).bytes
        open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
        assert resume(settings, group, replica, 100).step == 1
        mapped = "step-0000000001.pt" in open("/proc/self/maps").read()
        print(size, memory("RssAnon") - before, mapped)
"""


def start(what, directory):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, what, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_after_a_resume_nothing_is_mapped_and_no_second_copy_is_left(tmp_path):
    start("write", tmp_path)
    *_, size, grown, mapped = start("resume", tmp_path)
    assert mapped == "False"
    # The optimizer's state is new memory, two thirds of the snapshot; the parameters were there.
    assert int(grown) < 1.25 * int(size)


def test_verification_takes_one_chunk_of_memory_for_each_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "CHUNK_BYTES", 4096)
    reads = []
    preadv = os.preadv
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, buffers, at: (reads.append(len(buffers[0])), preadv(fd, buffers, at))[1],
    )
    write(tmp_path, 1)
    files.verify(tmp_path, 1)
    assert set(reads) == {4096}
    state = files.load(tmp_path, 1)
    assert torch.equal(state["model"]["weight"], torch.ones(64, 64))
