"""Resume: the newest whole snapshot of this run, bit for bit, or a refusal that says why."""

import io
import os
import shutil
from pathlib import Path

import pytest
import torch

import training.parallel
import training.train
from tests.states import differing
from training.failure import TrainingError
from training.snapshots import files
from training.snapshots.snapshotter import Snapshotter


@pytest.fixture
def checkpoints(tmp_path):
    return tmp_path / "checkpoints"


def largest_tensor_middle(path):
    """An offset in the middle of the biggest stored tensor: its bytes are the longest record."""
    state = torch.load(path, weights_only=True)
    biggest = max(state["model"].values(), key=torch.Tensor.numel)
    place = path.read_bytes().find(biggest.numpy().tobytes())
    assert place > 0
    return place + biggest.nbytes // 2


def cut(keep):
    return lambda path: path.write_bytes(path.read_bytes()[:keep])


def flip(path):
    data, place = bytearray(path.read_bytes()), largest_tensor_middle(path)
    data[place] ^= 0x10
    path.write_bytes(bytes(data))


def zero_hole(path):
    data, place = bytearray(path.read_bytes()), largest_tensor_middle(path)
    data[place : place + 64] = bytes(64)
    path.write_bytes(bytes(data))


def directory(path):
    path.unlink()
    path.mkdir()


def error_page(path):
    path.write_text('<?xml version="1.0"?><Error><Code>SlowDown</Code></Error>')


DAMAGES = {
    "empty": cut(0),
    "one byte": cut(1),
    "half": lambda path: cut(path.stat().st_size // 2)(path),
    "last byte missing": cut(-1),
    "a flipped byte in the largest tensor": flip,
    "zeros in the middle": zero_hole,
    "an XML error page": error_page,
    "a directory of that name": directory,
    "manifest only": Path.unlink,
    "data only": lambda path: path.with_suffix(".json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_newest_sends_resume_to_the_older_one(run, checkpoints, capfd, damage):
    whole = run()
    damage(checkpoints / "step-0000000006.pt")
    capfd.readouterr()
    again = run()
    out = capfd.readouterr().out
    assert out.count("rejected snapshot=step-0000000006.pt") == 1
    assert "resumed step=4 snapshot=step-0000000004.pt attempt=2" in out
    assert differing(whole, again) == []


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_when_none_is_whole_training_refuses_and_names_them_all(run, checkpoints, damage):
    run()
    for step in (2, 4):
        cut(100)(checkpoints / files.data_name(step))
    damage(checkpoints / "step-0000000006.pt")
    kept = sorted(os.listdir(checkpoints))
    with pytest.raises(TrainingError) as caught:
        run()
    for step in (2, 4):
        assert files.data_name(step) in str(caught.value)
    assert "another run_name" in str(caught.value)
    assert sorted(os.listdir(checkpoints)) == kept


@pytest.mark.parametrize("missing", ["step-0000000002.json", "step-0000000002.pt"])
def test_half_a_pair_alone_is_a_first_delivery_cut_short_and_training_starts_fresh(
    run, checkpoints, capfd, missing
):
    whole = run()
    for name in os.listdir(checkpoints):
        if not name.startswith("step-0000000002") or name == missing:
            (checkpoints / name).unlink()
    capfd.readouterr()
    again = run()
    out = capfd.readouterr().out
    assert "rejected snapshot=step-0000000002.pt" in out
    assert "starting fresh" in out
    assert differing(whole, again) == []


def test_a_hostile_pickle_with_a_matching_manifest_executes_nothing(run, checkpoints, tmp_path):
    run()
    manifest = files.Manifest.read(checkpoints / "step-0000000006.json")

    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    hostile = {"model": Hostile(), "optimizer": {}, "step": 8}
    files.write(
        checkpoints,
        hostile,
        run_name=manifest.run_name,
        step=8,
        samples_seen=64,
        world_size=1,
        settings=manifest.settings,
        attempt=1,
    )
    files.verify(checkpoints, 8)
    with pytest.raises(files.NotASnapshot, match="cannot be loaded"):
        files.load(checkpoints, 8)
    run()
    assert not (tmp_path / "executed").exists()


def test_resumed_at_every_step_the_run_ends_with_the_same_bits(run, tmp_path):
    whole = run(total_steps=6, checkpoint_dir=str(tmp_path / "whole"))
    for stop in range(1, 6):
        directory = str(tmp_path / f"stop-{stop}")
        run(total_steps=stop, checkpoint_dir=directory)
        assert differing(whole, run(total_steps=6, checkpoint_dir=directory)) == []


def test_control_without_reseeding_the_bits_differ(run, tmp_path, monkeypatch):
    whole = run(checkpoint_dir=str(tmp_path / "whole"))
    run(total_steps=3, checkpoint_dir=str(tmp_path / "parts"))
    monkeypatch.setattr(training.train, "seed_step", lambda *_: None)
    resumed = run(checkpoint_dir=str(tmp_path / "parts"))
    assert "model" in {name.split(".")[1] for name in differing(whole, resumed)}


def test_other_fixed_settings_are_refused_with_what_differs(run, checkpoints):
    run()
    kept = sorted(os.listdir(checkpoints))
    with pytest.raises(TrainingError) as caught:
        run(learning_rate=0.001, dropout=0.2)
    assert "learning_rate: 0.0003 in the snapshot, 0.001 now" in str(caught.value)
    assert "dropout: 0.1 in the snapshot, 0.2 now" in str(caught.value)
    assert sorted(os.listdir(checkpoints)) == kept


def test_another_runs_snapshots_are_refused(run):
    run(run_name="mine")
    with pytest.raises(TrainingError, match="run_name: mine in the snapshot, yours now"):
        run(run_name="yours")


def test_a_newer_snapshot_of_another_run_is_passed_over_and_survives(run, checkpoints, tmp_path):
    whole = run(run_name="mine")
    run(run_name="other", total_steps=9, checkpoint_dir=str(tmp_path / "other"))
    for name in ("step-0000000009.pt", "step-0000000009.json"):
        shutil.copy(tmp_path / "other" / name, checkpoints / name)
    assert differing(whole, run(run_name="mine")) == []
    assert files.verify(checkpoints, 9).run_name == "other"


def test_modification_times_do_not_matter(run, checkpoints, capfd):
    run()
    for age, step in enumerate((6, 4, 2)):
        for name in (files.data_name(step), files.manifest_name(step)):
            os.utime(checkpoints / name, (1_000_000 + age, 1_000_000 + age))
    capfd.readouterr()
    run()
    assert "resumed step=6" in capfd.readouterr().out


def test_a_finished_run_takes_no_step_and_writes_the_model_again(run, tmp_path, capfd):
    run()
    written = (tmp_path / "model" / "model.pt").read_bytes()
    shutil.rmtree(tmp_path / "model")
    capfd.readouterr()
    run()
    out = capfd.readouterr().out
    assert "already finished: step 6 of 6" in out
    assert "\nstep=" not in out
    assert (tmp_path / "model" / "model.pt").read_bytes() == written


def test_a_run_can_be_extended(run, tmp_path, capfd):
    run(total_steps=6, decay_steps=9)
    capfd.readouterr()
    extended = run(total_steps=9, decay_steps=9)
    assert "resumed step=6" in capfd.readouterr().out
    straight = run(total_steps=9, decay_steps=9, checkpoint_dir=str(tmp_path / "straight"))
    assert differing(extended, straight) == []


def test_a_model_of_another_shape_is_refused_before_anything_is_loaded(run, monkeypatch):
    run()
    build = training.train.build_model

    def wider(settings):
        model = build(settings)
        model.extra = torch.nn.Linear(2, 2)
        return model

    monkeypatch.setattr(training.train, "build_model", wider)
    with pytest.raises(TrainingError, match="does not fit the model: 2 tensors differ"):
        run(total_steps=9)


def test_another_version_of_torch_is_told(run, checkpoints, capfd):
    run()
    manifest = checkpoints / "step-0000000006.json"
    manifest.write_text(manifest.read_text().replace(torch.__version__, "1.13.0"))
    capfd.readouterr()
    run(total_steps=7)
    assert f"written with torch 1.13.0, and this is {torch.__version__}: " in capfd.readouterr().out
    run(total_steps=8)
    assert "written with torch" not in capfd.readouterr().out


def test_a_model_of_another_type_is_refused_before_anything_is_rounded(run, monkeypatch):
    run()
    build = training.train.build_model
    monkeypatch.setattr(training.train, "build_model", lambda settings: build(settings).double())
    with pytest.raises(TrainingError, match=r"\(float32 \(48,\) in .*, float64 \(48,\) in the"):
        run(total_steps=9)


def test_a_snapshot_without_optimizer_state_for_a_weight_is_refused(run, checkpoints):
    state = run()
    manifest = files.Manifest.read(checkpoints / "step-0000000006.json")
    del state["optimizer"]["state"]["token.weight"]
    described = {
        name: getattr(manifest, name)
        for name in ("run_name", "step", "samples_seen", "world_size", "settings", "attempt")
    }
    files.write(checkpoints, state, **described)
    with pytest.raises(TrainingError, match=r"optimizer state for other parameters.*token\.weight"):
        run(total_steps=9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_resumes_with_and_without_state(run, tmp_path, monkeypatch, momentum):
    monkeypatch.setattr(
        training.parallel,
        "build_optimizer",
        lambda model, settings: torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum),
    )
    whole = run(checkpoint_dir=str(tmp_path / "whole"))
    run(total_steps=3, checkpoint_dir=str(tmp_path / "parts"))
    assert differing(whole, run(checkpoint_dir=str(tmp_path / "parts"))) == []


def test_buffers_resume_too(run, tmp_path, monkeypatch):
    build = training.train.build_model

    class WithNorm(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.batch_norm = inner, torch.nn.BatchNorm1d(16)

        def forward(self, inputs, targets):
            noise = self.batch_norm(torch.randn(len(inputs), 16)).mean()
            return self.inner(inputs, targets) + 0 * noise + self.batch_norm.running_mean.sum()

    monkeypatch.setattr(training.train, "build_model", lambda s: WithNorm(build(s)))
    whole = run(checkpoint_dir=str(tmp_path / "whole"))
    run(total_steps=3, checkpoint_dir=str(tmp_path / "parts"))
    assert int(whole["model"]["batch_norm.num_batches_tracked"]) == 6
    assert differing(whole, run(checkpoint_dir=str(tmp_path / "parts"))) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("workers", [0, 2])
def test_precision_accumulation_and_workers_keep_the_bits(run, tmp_path, precision, workers):
    options = {"precision": precision, "micro_batch_size": 2, "dataloader_workers": workers}
    whole = run(**options, checkpoint_dir=str(tmp_path / "whole"))
    run(**options, total_steps=3, checkpoint_dir=str(tmp_path / "parts"))
    assert differing(whole, run(**options, checkpoint_dir=str(tmp_path / "parts"))) == []


def test_snapshots_use_plain_names_and_plain_types(run):
    state = run()
    assert {"model", "optimizer", "step"} == state.keys()
    assert state["step"] == 6
    assert "token.weight" in state["model"]
    assert state["optimizer"]["state"].keys() == state["model"].keys()


def test_the_directory_never_holds_more_than_kept_and_one(run, checkpoints, monkeypatch):
    most = []
    after = Snapshotter.take

    def counted(self, *args, **kwargs):
        after(self, *args, **kwargs)
        most.append(len([n for n in os.listdir(checkpoints) if n.endswith(".pt")]))

    monkeypatch.setattr(Snapshotter, "take", counted)
    run(total_steps=20, decay_steps=20, snapshot_steps=1, snapshots_kept=2)
    assert 2 <= max(most) <= 3


def test_a_full_disk_costs_a_snapshot_and_not_the_run(run, checkpoints, monkeypatch, capfd):
    write = files.write

    def full_at_4(directory, state, **described):
        if described["step"] == 4:
            raise OSError(28, "No space left on device")
        return write(directory, state, **described)

    monkeypatch.setattr(files, "write", full_at_4)
    run()
    assert "snapshot_failed step=4" in capfd.readouterr().out
    assert files.candidates(os.listdir(checkpoints)) == [6, 2]


def test_a_last_snapshot_that_cannot_be_written_fails_the_run(run, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write", full)
    with pytest.raises(TrainingError, match=r"last snapshot, of step 6.*No space left"):
        run()


def test_a_step_that_blew_up_is_not_saved_and_stops_the_run(run, checkpoints, monkeypatch):
    build = training.train.build_model

    def exploding(settings):
        model = build(settings)
        forward, calls = model.forward, []

        def explode(*batch):
            calls.append(1)
            return forward(*batch) * (float("nan") if len(calls) > 4 else 1.0)

        model.forward = explode
        return model

    monkeypatch.setattr(training.train, "build_model", exploding)
    with pytest.raises(TrainingError, match="the loss is nan"):
        run()
    assert files.candidates(os.listdir(checkpoints)) == [2]


def test_swapping_the_optimizer_is_refused(run, monkeypatch):
    run()
    monkeypatch.setattr(
        training.parallel,
        "build_optimizer",
        lambda model, settings: torch.optim.SGD(model.parameters(), lr=1.0),
    )
    with pytest.raises(TrainingError, match="holds the state of AdamW, but the optimizer is SGD"):
        run(total_steps=9)


def test_more_data_than_before_is_refused(run, text_dir):
    run()
    (text_dir / "more.txt").write_text("x" * 1000)
    with pytest.raises(TrainingError, match=r"was trained on 2499 samples.*holds 2562 now"):
        run(total_steps=9)


def test_a_lone_manifest_of_a_later_attempt_is_work_that_was_lost(run, checkpoints):
    run(total_steps=3)
    run(total_steps=6)
    for name in os.listdir(checkpoints):
        if name != "step-0000000006.json":
            (checkpoints / name).unlink()
    with pytest.raises(TrainingError, match="none of this run's snapshots is whole"):
        run()


def test_another_runs_snapshot_in_the_place_of_the_last_one_is_refused_at_the_start(
    run, checkpoints, tmp_path
):
    run(run_name="mine")
    run(run_name="other", total_steps=9, checkpoint_dir=str(tmp_path / "other"))
    for name in ("step-0000000009.pt", "step-0000000009.json"):
        shutil.copy(tmp_path / "other" / name, checkpoints / name)
    with pytest.raises(TrainingError, match="snapshots of other runs are here"):
        run(run_name="mine", total_steps=9)


def test_frequent_interruptions_do_not_let_snapshots_pile_up(run, checkpoints):
    for attempt in range(1, 9):  # one snapshot an attempt: fewer than are kept
        run(total_steps=attempt, decay_steps=9, snapshot_steps=100, snapshots_kept=3)
    assert files.candidates(os.listdir(checkpoints)) == [8, 7, 6]


def test_validation_is_the_same_when_a_finished_run_is_started_again(run, text_dir, capfd):
    run(validation_dir=str(text_dir))
    first = [line for line in capfd.readouterr().out.splitlines() if "validation_loss" in line]
    run(validation_dir=str(text_dir))
    assert first == [x for x in capfd.readouterr().out.splitlines() if "validation_loss" in x]
    assert len(first) == 1


def test_an_empty_validation_channel_is_refused_before_the_first_step(run, tmp_path, checkpoints):
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainingError, match="empty holds 0 bytes"):
        run(validation_dir=str(tmp_path / "empty"))
    assert not checkpoints.exists()


def test_a_model_that_does_not_fit_on_the_disk_is_a_sentence(run, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            if self.tell() > 10_000:
                raise OSError(28, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(training.train, "write_atomically", lambda path, fill: fill(Full()))
    with pytest.raises(TrainingError, match=r"could not be written to .* \(No space left"):
        run()


def test_a_model_directory_that_cannot_be_written_is_refused_before_the_first_step(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"model_dir .* cannot be written"):
        run(model_dir=str(tmp_path / "file"))


def test_a_checkpoint_directory_that_cannot_be_written_is_refused(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"checkpoint_dir .* cannot be written"):
        run(checkpoint_dir=str(tmp_path / "file"))
