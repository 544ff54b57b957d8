"""What may be deleted: nothing that S3 could still need, and nothing that somebody else wrote."""

import os

from tests.training.test_snapshot_files import write
from training.snapshots import files
from training.snapshots.manifest import UPLOADED, UPLOADING, data_name, manifest_name
from training.snapshots.retention import arrived_in_s3, prune


def mark(directory, step, marker, names=(data_name, manifest_name)):
    for name in names:
        (directory / (name(step) + marker)).touch()


def kept(directory):
    return files.candidates(os.listdir(directory))


def test_pruning_keeps_the_newest_whole_ones_and_removes_older_junk(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    (tmp_path / "step-0000000002.pt").write_bytes(b"torn")
    assert prune(tmp_path, "run", whole=[1, 3, 4], kept=2) == [2, 1]
    assert files.candidates(os.listdir(tmp_path)) == [4, 3]


def test_damaged_ones_do_not_push_out_the_good_one(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    # 2 and 3 were rejected at resume, 1 was resumed, 4 is the first one written since.
    assert prune(tmp_path, "run", whole=[1, 4], kept=2) == [3, 2]
    assert prune(tmp_path, "run", whole=[], kept=2) == []
    assert files.candidates(os.listdir(tmp_path)) == [4, 1]


def test_pruning_leaves_other_runs_alone(tmp_path):
    write(tmp_path, 1, run_name="other")
    for step in (2, 3, 4):
        write(tmp_path, step)
    prune(tmp_path, "run", whole=[2, 3, 4], kept=2)
    assert files.candidates(os.listdir(tmp_path)) == [4, 3, 1]


def test_the_manifest_is_deleted_before_its_data(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        write(tmp_path, step)
    gone = []
    unlink = type(tmp_path).unlink
    monkeypatch.setattr(
        type(tmp_path), "unlink", lambda path, **kw: (gone.append(path.name), unlink(path, **kw))
    )
    prune(tmp_path, "run", whole=[1, 2, 3], kept=2)
    assert gone == ["step-0000000001.json", "step-0000000001.pt"]


def test_the_newest_that_has_arrived_stays_until_a_newer_one_has(tmp_path):
    whole = [1, 2, 3, 4, 5]
    for step in whole:
        write(tmp_path, step)
    mark(tmp_path, 1, UPLOADED)
    assert prune(tmp_path, "run", whole, kept=2) == [3, 2]
    assert kept(tmp_path) == [5, 4, 1]
    mark(tmp_path, 4, UPLOADED)
    assert prune(tmp_path, "run", [1, 4, 5], kept=2) == [1]


def test_what_this_process_knows_to_be_in_s3_counts_as_arrived(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    assert prune(tmp_path, "run", [1, 2, 3, 4], kept=2, arrived={1}) == [2]
    assert kept(tmp_path) == [4, 3, 1]


def test_what_is_on_its_way_stays_until_something_newer_has_arrived(tmp_path):
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    mark(tmp_path, 2, UPLOADING, names=[data_name])
    mark(tmp_path, 3, UPLOADED, names=[data_name])  # its manifest is still to come
    assert prune(tmp_path, "run", [1, 2, 3, 4, 5], kept=2) == [1]
    mark(tmp_path, 4, UPLOADED)
    assert prune(tmp_path, "run", [2, 3, 4, 5], kept=2) == [3, 2]


def test_an_upload_that_begins_while_others_are_deleted_spares_its_snapshot(tmp_path, monkeypatch):
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    delete = files.delete

    def slowly(directory, step):
        delete(directory, step)
        mark(directory, 1, UPLOADING, names=[data_name])

    monkeypatch.setattr(files, "delete", slowly)
    assert prune(tmp_path, "run", [1, 2, 3, 4, 5], kept=2) == [3, 2]
    assert kept(tmp_path) == [5, 4, 1]


def test_what_is_newer_than_the_newest_whole_one_is_not_judged(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    assert prune(tmp_path, "run", whole=[1, 2], kept=1) == [1]
    assert kept(tmp_path) == [3, 2]


def test_a_marker_that_is_older_than_its_file_says_nothing(tmp_path):
    write(tmp_path, 1)
    mark(tmp_path, 1, UPLOADED)
    assert arrived_in_s3(tmp_path, [1, 2]) == {1}
    later = (tmp_path / data_name(1)).stat().st_mtime + 1
    os.utime(tmp_path / data_name(1), (later, later))
    assert arrived_in_s3(tmp_path, [1, 2]) == set()


def test_a_stalled_agent_does_not_fill_the_disk(tmp_path):
    whole = []
    for step in range(1, 30):
        write(tmp_path, step)
        whole.append(step)
        if step == 2:
            mark(tmp_path, 1, UPLOADED)
            mark(tmp_path, 2, UPLOADING)
        gone = prune(tmp_path, "run", whole, kept=3)
        whole = [step for step in whole if step not in gone]
    assert kept(tmp_path) == [29, 28, 27, 2, 1]
