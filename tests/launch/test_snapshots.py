"""Looking into a run's snapshots: the same code for S3 and a folder, and nothing half-written."""

import errno
import json
import time

import boto3
import pytest
import torch

from launch import account, archive, places, snapshots
from launch.errors import Failed
from training.settings import TrainingSettings
from training.snapshots import files
from training.snapshots.provenance import provenance

BUCKET, PREFIX = "my-bucket", "spot-ddp/shakespeare/snapshots/"
URI = f"s3://{BUCKET}/{PREFIX}"


def write(directory, step, run_name="shakespeare", value=1.0, folder="", **settings):
    """A snapshot of `step`, with its loss in the manifest."""
    made = TrainingSettings(run_name=run_name, **settings)
    state = {
        "model": {"weight": torch.full((64, 64), value)},
        "optimizer": {"state": {}, "param_groups": []},
        "step": step,
    }
    place = directory / folder
    place.mkdir(parents=True, exist_ok=True)
    metrics = {"loss": 2.5, "loss_step": step}
    files.write(place, state, **provenance(made, step, world_size=2), metrics=metrics)


@pytest.fixture
def folder(tmp_path):
    """Two whole snapshots, and every kind of thing that is none."""
    directory = tmp_path / "checkpoints"
    write(directory, 10)
    write(directory, 20)
    write(directory, 30, run_name="another")
    (directory / files.data_name(40)).write_bytes(b"half")
    write(directory, 50)
    (directory / files.data_name(50)).write_bytes(b"torn")
    (directory / files.data_name(60)).write_bytes(b"x")
    (directory / files.manifest_name(60)).write_text("<Error>not JSON</Error>")
    write(directory, 15, folder="best")
    (directory / "tensorboard").mkdir()
    (directory / "tensorboard" / "events").write_bytes(b"x")
    return directory


@pytest.fixture
def s3(aws, folder):
    """The same in the mocked S3, with a key that climbs out."""
    client = boto3.client("s3")
    for path in folder.rglob("*"):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            client.put_object(Bucket=BUCKET, Key=PREFIX + name, Body=path.read_bytes())
    client.put_object(Bucket=BUCKET, Key=f"{PREFIX}../../step-0000000099.json", Body=b"{}")
    return client


@pytest.fixture
def target(tmp_path):
    """Where snapshots are fetched to."""
    return tmp_path / "here"


@pytest.fixture(params=["folder", "address", "run name"])
def run(request, folder, s3):
    """The run, named in each of the three ways; with what has to be typed besides."""
    account = ["--set", "aws.region=us-east-1", "--set", f"aws.bucket={BUCKET}"]
    return {
        "folder": [str(folder)],
        "address": [URI],
        "run name": ["shakespeare", *account],
    }[request.param]


STATES = {
    60: "unreadable",
    50: "incomplete",
    40: "incomplete",
    30: "foreign",
    20: "whole",
    10: "whole",
}


def test_a_listing_tells_what_counts_and_what_does_not(run, capsys):
    assert snapshots.main(["list", *run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["step"]: row["state"] for row in found["snapshots"]} == STATES
    (whole,) = (row for row in found["snapshots"] if row["step"] == 20)
    assert (whole["world_size"], whole["loss"]) == (2, 2.5)
    assert (found["best"]["step"], found["best"]["state"]) == (15, "whole")
    assert snapshots.main(["list", *run]) == 0
    said = capsys.readouterr().out
    for expected in ("best: 15", "foreign: of the run 'another'", "incomplete: no manifest", "4"):
        assert expected in said


@pytest.mark.parametrize(("which", "step"), [("latest", 20), ("10", 10), ("best", 15)])
def test_a_fetched_snapshot_is_the_one_that_was_written(run, which, step, tmp_path, capsys, folder):
    target = tmp_path / "here"
    assert snapshots.main(["fetch", run[0], which, str(target), *run[1:]]) == 0
    assert files.verify(target, step).step == step
    assert sorted(path.name for path in target.iterdir()) == [
        files.manifest_name(step),
        files.data_name(step),
    ]
    assert str(target / files.data_name(step)) in capsys.readouterr().out


def test_verify_finds_a_flipped_byte(run, folder, s3, capsys):
    assert snapshots.main(["verify", *run]) == 0
    assert "step 20 is whole" in capsys.readouterr().out
    path = folder / files.data_name(20)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    s3.put_object(Bucket=BUCKET, Key=PREFIX + path.name, Body=bytes(data))
    assert snapshots.main(["verify", run[0], "20", *run[1:]]) == 1
    assert "is damaged: its digests differ" in capsys.readouterr().err


def test_pruning_keeps_the_newest_whole_ones_and_others_runs(run, folder, s3, capsys):
    assert snapshots.main(["prune", *run, "--keep", "1"]) == 2
    assert "delete 1 snapshots" in capsys.readouterr().err
    assert snapshots.main(["prune", *run, "--keep", "1", "--yes"]) == 0
    assert snapshots.main(["list", *run, "--json"]) == 0
    said = capsys.readouterr().out
    found = json.loads(said[said.index("{") :])
    assert [row["step"] for row in found["snapshots"]] == [60, 50, 40, 30, 20]
    assert found["best"]["step"] == 15


def test_pruning_deletes_the_manifest_first_and_never_the_newest_whole_one(folder):
    deleted = []

    class Recording(places.Folder):
        def delete(self, name):
            deleted.append(name)

    place = Recording(folder)
    listing = archive.look(place, "shakespeare", limit=None)
    assert [row.step for row in archive.superfluous(listing, 1)] == [10]
    archive.prune(place, listing, archive.superfluous(listing, 1), lambda count: None)
    assert deleted == [files.manifest_name(10), files.data_name(10)]
    assert archive.superfluous(listing, 5) == []


def test_pruning_counts_on_a_snapshot_only_after_every_byte_was_right(folder, capsys):
    def flip(step):
        data = bytearray((folder / files.data_name(step)).read_bytes())
        data[-1] ^= 1
        (folder / files.data_name(step)).write_bytes(data)

    write(folder, 5)
    flip(20)  # the newest, of the right size
    assert snapshots.main(["prune", str(folder), "--keep", "1", "--yes"]) == 2
    said = capsys.readouterr().err
    assert "step-0000000020.pt is damaged" in said
    assert "no other snapshot" in said
    assert (folder / files.data_name(10)).exists()
    assert snapshots.main(["prune", str(folder), "--keep", "2", "--yes"]) == 0
    assert "warning: " in capsys.readouterr().err
    assert (folder / files.data_name(10)).exists()
    assert not (folder / files.data_name(5)).exists()


def test_a_person_is_asked_before_anything_is_deleted(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: (_ for _ in ()).throw(EOFError))
    assert snapshots.main(["prune", str(folder), "--keep", "1"]) == 1
    for answer, code in (("", 1), ("n", 1), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert snapshots.main(["prune", str(folder), "--keep", "1"]) == code
    assert not (folder / files.data_name(10)).exists()


def test_a_difference_is_named_with_its_size(tmp_path, capsys):
    write(tmp_path / "a", 10)
    write(tmp_path / "b", 10, value=1.5, learning_rate=0.1)
    assert snapshots.main(["diff", f"{tmp_path}/a", f"{tmp_path}/a@10"]) == 0
    assert "no difference" in capsys.readouterr().out
    assert snapshots.main(["diff", f"{tmp_path}/a@10", f"{tmp_path}/b@latest"]) == 0
    said = capsys.readouterr().out
    assert "model.weight" in said
    assert "0.5" in said
    assert "settings.learning_rate" in said
    assert said.endswith("1 settings and 1 tensors or values differ\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list", "s3://my-bucket"], "s3://my-bucket is no S3 prefix; write s3://bucket/prefix/"),
        (["list", "s3://nobodys-bucket/a/"], "s3://nobodys-bucket/a/ cannot be listed"),
        (["list", "/nowhere/at/all"], "/nowhere/at/all is no folder here; give a run name"),
        (["list", "no_run"], "'no_run' is no run name, S3 address or folder"),
        (["fetch", URI, "11", "x"], f"{URI} has no snapshot of step 11; the newest are: 60, 50"),
        (["fetch", URI, "soon", "x"], "'soon' is no step; give a number, latest or best"),
        (["prune", URI, "--keep", "0"], "--keep is 0; at least 1 snapshot stays"),
        (["verify", "s3://my-bucket/empty/"], "s3://my-bucket/empty/ holds no whole snapshot"),
        (["fetch", "s3://my-bucket/empty/", "best", "x"], "s3://my-bucket/empty/ holds no best"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(s3, arguments, said, capsys):
    assert snapshots.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("step", ["40", "50", "60"])
def test_what_is_not_whole_is_not_fetched(s3, step, tmp_path, capsys):
    assert snapshots.main(["fetch", URI, step, str(tmp_path / "here")]) == 1
    assert f"step {step} in {URI} is " in capsys.readouterr().err
    assert not (tmp_path / "here").exists()


def test_a_key_that_climbs_out_of_the_prefix_is_not_seen(s3):
    names = places.Prefix(s3, URI).entries()
    assert not any(".." in name for name in names)
    assert files.manifest_name(20) in names


def interrupted_after(monkeypatch, count, error):
    """Let the stream of bytes end with `error` after `count` parts of 1000 bytes."""
    monkeypatch.setattr(places, "_PART_BYTES", 1000)
    whole = places.Prefix.parts

    def failing(self, name, begin, entry):
        for number, part in enumerate(whole(self, name, begin, entry)):
            if number == count:
                raise error
            yield part

    monkeypatch.setattr(places.Prefix, "parts", failing)


def test_a_fetch_that_was_cut_off_goes_on_where_it_stopped(s3, target, monkeypatch):
    place, counted = places.Prefix(s3, URI), []
    listing = archive.look(place)
    row = archive.find(listing, place, "latest")
    with monkeypatch.context() as patched:
        interrupted_after(patched, 5, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            archive.fetch(place, row, "latest", target, counted.append)
    (part,) = target.iterdir()
    assert part.name.endswith(".part")
    assert part.stat().st_size == sum(counted) == 5000
    archive.fetch(place, row, "latest", target, counted.append)
    assert sum(counted) == row.manifest.bytes
    files.verify(target, 20)


def test_a_full_disk_is_one_sentence_and_leaves_no_final_name(s3, target, monkeypatch):
    place = places.Prefix(s3, URI)
    row = archive.find(archive.look(place), place, "latest")
    interrupted_after(monkeypatch, 2, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(Failed, match=r"could not be written .*No space left.*goes on where it"):
        archive.fetch(place, row, "latest", target, lambda count: None)
    assert [path.suffix for path in target.iterdir()] == [".part"]


def test_what_is_there_with_other_bytes_is_not_replaced(folder, target, capsys):
    write(folder, 20, value=2.0, folder="best")
    assert snapshots.main(["fetch", str(folder), "20", str(target)]) == 0
    before = (target / files.data_name(20)).read_bytes()
    assert snapshots.main(["fetch", str(folder), "best", str(target)]) == 1
    assert "is there already with other bytes; name another folder" in capsys.readouterr().err
    assert (target / files.data_name(20)).read_bytes() == before
    assert snapshots.main(["fetch", str(folder), "20", str(target)]) == 0  # it is all there


@pytest.mark.parametrize("name", [files.data_name, files.manifest_name])
def test_a_snapshot_that_is_deleted_while_it_is_fetched_is_one_sentence(s3, target, name):
    place = places.Prefix(s3, URI)
    row = archive.find(archive.look(place), place, "latest")
    s3.delete_object(Bucket=BUCKET, Key=PREFIX + name(20))
    with pytest.raises(Failed, match="deleted"):
        archive.fetch(place, row, "latest", target, lambda count: None)
    assert not list(target.glob("step-*.pt"))


def test_a_run_with_5000_objects_is_listed_in_pages_and_in_time(aws, folder):
    from moto.s3.models import s3_backends

    moto = next(one for backends in s3_backends.values() for one in backends.values())
    manifest = (folder / files.manifest_name(20)).read_text()
    for step in range(1, 2501):
        text = manifest.replace('"step": 20', f'"step": {step}')
        data = b"x" * (folder / files.data_name(20)).stat().st_size
        moto.put_object(BUCKET, f"big/{files.manifest_name(step)}", text.encode())
        moto.put_object(BUCKET, f"big/{files.data_name(step)}", data)
    client, calls = account.opened("us-east-1").client("s3"), []
    client.meta.events.register("before-send.s3", lambda event_name, **_: calls.append(event_name))
    # Of this thread: moto, which answers in another one, and other tests share the processors.
    started = time.thread_time()
    listing = archive.look(places.Prefix(client, f"s3://{BUCKET}/big/"))
    assert time.thread_time() - started < 1
    assert calls.count("before-send.s3.ListObjectsV2") <= 6
    assert len(calls) <= 6 + archive.LOOKED_INTO
    assert len(listing.rows) == 2500
    assert listing.whole[0].step == 2500
    assert listing.rows[-1].state == "not looked into"
