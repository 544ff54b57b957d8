"""A snapshot is whole or it is no snapshot; what is damaged is never chosen and never an error."""

import errno
import hashlib
import io
import json
import os
import threading

import pytest
import torch

from training.snapshots import digests, files


def write(directory, step, run_name="run", value=None):
    state = {
        "model": {"weight": torch.full((64, 64), float(value if value is not None else step))},
        "optimizer": {"state": {}, "param_groups": []},
        "step": step,
    }
    return files.write(
        directory,
        state,
        run_name=run_name,
        step=step,
        samples_seen=step * 8,
        world_size=2,
        settings={"seed": 0},
        attempt=1,
    )


def test_what_was_written_verifies_and_loads(tmp_path):
    write(tmp_path, 7)
    manifest = files.verify(tmp_path, 7)
    assert (manifest.step, manifest.samples_seen, manifest.world_size) == (7, 56, 2)
    assert manifest.bytes == (tmp_path / "step-0000000007.pt").stat().st_size
    assert torch.equal(files.load(tmp_path, 7)["model"]["weight"], torch.full((64, 64), 7.0))


def test_the_names_are_the_contract(tmp_path):
    write(tmp_path, 120)
    assert sorted(os.listdir(tmp_path)) == ["step-0000000120.json", "step-0000000120.pt"]
    promised = {"format", "run_name", "step", "samples_seen", "world_size", "saved_at"}
    promised |= {"bytes", "digests", "settings", "versions"}
    assert promised <= json.loads((tmp_path / "step-0000000120.json").read_text()).keys()


def test_steps_are_compared_as_numbers_and_stray_names_ignored():
    names = [
        "step-0000000900.pt",
        "step-0000001000.pt",
        "step-0000000009.json",
        "step-10.pt",
        "step-0000000077.pt.bak",
        "step-0000000078.pt.12.sagemaker-ignore",
        "step-0000000079.pt.sagemaker-uploading",
        "step-0000000080.pt.sagemaker-uploaded",
        "latest",
        "xstep-0000000081.pt",
    ]
    assert files.candidates(names) == [1000, 900, 9]


def test_an_unknown_manifest_key_is_ignored(tmp_path):
    write(tmp_path, 3)
    path = tmp_path / "step-0000000003.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "from_the_future": 1}))
    assert files.verify(tmp_path, 3).step == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", 4), ("step", "3"), ("bytes", None), ("format", 2), ("digests", []), ("step", True)],
)
def test_a_manifest_that_does_not_hold_together_is_none(tmp_path, key, value):
    write(tmp_path, 3)
    path = tmp_path / "step-0000000003.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(files.NotASnapshot):
        files.verify(tmp_path, 3)


def test_every_single_flipped_bit_of_a_chunk_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "CHUNK_BYTES", 1024)
    write(tmp_path, 3)
    path = tmp_path / "step-0000000003.pt"
    sound = path.read_bytes()
    for place in range(0, len(sound), 997):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with pytest.raises(files.NotASnapshot, match="digests differ"):
            files.verify(tmp_path, 3)
    path.write_bytes(sound)
    files.verify(tmp_path, 3)


def test_chunks_of_exactly_the_chunk_size_leave_no_empty_digest(tmp_path, monkeypatch):
    write(tmp_path, 3)
    size = (tmp_path / "step-0000000003.pt").stat().st_size
    monkeypatch.setattr(digests, "CHUNK_BYTES", size)
    assert len(write(tmp_path, 3).digests["chunks"]) == 1
    files.verify(tmp_path, 3)


@pytest.mark.parametrize("allowed", [0, 100, 5_000, 16_500])
def test_a_disk_that_fills_up_anywhere_is_an_oserror_that_says_so(tmp_path, monkeypatch, allowed):
    write(tmp_path, 1)
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(files, "open", limited_open(allowed), raising=False)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == before


def limited_open(allowed):
    """`open`, for a disk with room for so many bytes."""

    class Limited(io.FileIO):
        def write(self, data):
            if self.tell() + len(data) > allowed:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    return lambda path, mode="r": Limited(path, mode) if "w" in mode else open(path, mode)


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_disk_that_refuses_leaves_the_older_snapshot_and_no_debris(tmp_path, monkeypatch, fails):
    write(tmp_path, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fails, refuse)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_failure_between_data_and_manifest_leaves_no_debris(tmp_path, monkeypatch):
    write(tmp_path, 1)
    replace = os.replace

    def only_data(source, target):
        if str(target).endswith(".json"):
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", only_data)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-0000000001.json", "step-0000000001.pt"]


def test_leftovers_of_the_same_step_are_replaced(tmp_path):
    (tmp_path / "step-0000000002.pt").mkdir()
    (tmp_path / "step-0000000002.json").write_text("half")
    write(tmp_path, 2)
    assert files.verify(tmp_path, 2).step == 2


def test_another_runs_snapshot_is_never_overwritten(tmp_path):
    write(tmp_path, 2, run_name="other")
    with pytest.raises(FileExistsError, match="'other'"):
        write(tmp_path, 2)
    assert files.verify(tmp_path, 2).run_name == "other"


def test_looking_whole_is_a_matter_of_owner_and_size(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2, run_name="other")
    write(tmp_path, 3)
    (tmp_path / "step-0000000003.pt").write_bytes(b"torn")
    assert [s for s in (1, 2, 3, 4) if files.looks_whole(tmp_path, s, "run")] == [1]


def test_a_reader_never_finds_part_of_a_file_under_a_final_name(tmp_path):
    stop, torn = threading.Event(), []

    def read():
        while not stop.is_set():
            for step in files.candidates(os.listdir(tmp_path)):
                if (tmp_path / files.manifest_name(step)).exists():
                    try:
                        files.verify(tmp_path, step)
                    except files.NotASnapshot as error:
                        torn.append((step, str(error)))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 120):
        write(tmp_path, step)
    stop.set()
    reader.join()
    assert torn == []


def test_only_a_killed_writers_debris_is_swept_up(tmp_path):
    write(tmp_path, 1)
    (tmp_path / "step-0000000002.pt.99.sagemaker-ignore").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("a person's")
    files.prepare(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [
        "notes.txt",
        "step-0000000001.json",
        "step-0000000001.pt",
    ]


def test_digests_of_an_earlier_kind_still_verify_and_of_an_unknown_kind_do_not(tmp_path):
    write(tmp_path, 3)
    path = tmp_path / files.manifest_name(3)
    data = (tmp_path / files.data_name(3)).read_bytes()
    manifest = json.loads(path.read_text())
    chunks = [hashlib.sha256(data[n : n + 1000]).hexdigest() for n in range(0, len(data), 1000)]
    manifest["digests"] = {"algorithm": "sha256", "chunk_bytes": 1000, "chunks": chunks}
    path.write_text(json.dumps(manifest))
    assert files.verify(tmp_path, 3).step == 3
    for other in (
        {"algorithm": "md9"},
        {"algorithm": []},
        {"chunk_bytes": 0},
        {"chunk_bytes": None},
    ):
        path.write_text(json.dumps({**manifest, "digests": {**manifest["digests"], **other}}))
        with pytest.raises(files.NotASnapshot, match="cannot be verified"):
            files.verify(tmp_path, 3)
