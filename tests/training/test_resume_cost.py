"""What a resume leaves behind: nothing that is mapped to a file, and no second copy."""

import json
import os
import subprocess
import sys

import pytest
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
        resident = memory("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
        assert resume(settings, group, replica, 100).step == 1
        mapped = "step-0000000001.pt" in open("/proc/self/maps").read()
        print(size, memory("RssAnon") - before, memory("VmHWM") - resident, mapped)
"""


def start(what, directory):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, what, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_after_a_resume_nothing_is_mapped_and_no_second_copy_is_left(tmp_path):
    start("write", tmp_path)
    *_, size, grown, peak, mapped = start("resume", tmp_path)
    assert mapped == "False"
    # The optimizer's state is new memory, two thirds of the snapshot; the parameters were there.
    assert int(grown) < 1.25 * int(size)
    # Pages of the file count while they are mapped: they are let go as they are copied.
    assert int(peak) < 1.25 * int(size)


@pytest.fixture
def reads(monkeypatch):
    """(place, bytes) of every read; each gets at most 1000 bytes, as a network disk may answer."""
    seen, preadv = [], os.preadv

    def short(descriptor, buffers, place):
        seen.append((place, len(buffers[0])))
        return preadv(descriptor, [buffers[0][:1000]], place)

    monkeypatch.setattr(os, "preadv", short)
    return seen


def test_verification_needs_a_piece_of_memory_for_each_thread_and_survives_short_reads(
    tmp_path, monkeypatch, reads
):
    monkeypatch.setattr(digests, "CHUNK_BYTES", 8192)
    monkeypatch.setattr(digests, "PIECE_BYTES", 2048)
    write(tmp_path, 1)
    files.verify(tmp_path, 1)
    assert max(count for _, count in reads) == 2048
    state = files.load(tmp_path, 1)
    assert torch.equal(state["model"]["weight"], torch.ones(64, 64))


def test_a_manifest_with_tiny_chunks_makes_no_endless_work(tmp_path, reads):
    write(tmp_path, 1)
    path = tmp_path / files.manifest_name(1)
    manifest = json.loads(path.read_text())
    manifest["digests"]["chunk_bytes"] = 1
    path.write_text(json.dumps(manifest))
    with pytest.raises(files.NotASnapshot, match="digests differ"):
        files.verify(tmp_path, 1)
    assert reads == []


@pytest.mark.parametrize("algorithm", [[], {}, None, 1, "md9"])
def test_an_algorithm_that_is_none_is_no_snapshot(tmp_path, algorithm):
    write(tmp_path, 1)
    path = tmp_path / files.manifest_name(1)
    manifest = json.loads(path.read_text())
    manifest["digests"]["algorithm"] = algorithm
    path.write_text(json.dumps(manifest))
    with pytest.raises(files.NotASnapshot, match="cannot be verified"):
        files.verify(tmp_path, 1)


@pytest.mark.parametrize("place", [0, 4000, 4096, 9000, -1])
def test_a_flipped_byte_is_found_in_the_first_a_middle_and_the_last_chunk(
    tmp_path, monkeypatch, place
):
    monkeypatch.setattr(digests, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(digests, "PIECE_BYTES", 1024)
    write(tmp_path, 1)
    path = tmp_path / files.data_name(1)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(files.NotASnapshot, match="digests differ"):
        files.read(tmp_path, 1)


def test_what_is_replaced_between_verification_and_loading_is_refused(tmp_path, monkeypatch):
    write(tmp_path, 1)
    path = tmp_path / files.data_name(1)
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    verify = files.verify

    def replaced(directory, step):
        manifest = verify(directory, step)
        other.replace(path)
        return manifest

    monkeypatch.setattr(files, "verify", replaced)
    with pytest.raises(files.NotASnapshot, match="changed while it was read"):
        files.read(tmp_path, 1)
