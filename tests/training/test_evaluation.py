"""Evaluating and keeping the best state: training does not notice, and a resumed run agrees."""

import json
import shutil

import pytest
import torch

from tests.states import differing
from training import train as story
from training.data import ByteWindows
from training.failure import TrainingError
from training.group import joined
from training.sampling import held_out
from training.settings import SettingsError, TrainingSettings, validation_problems
from training.snapshots import files
from training.validation import validation_loss

SHARE = {"validation_share": 0.2, "total_steps": 8, "decay_steps": 8, "snapshot_steps": 3}
EVALUATING = {**SHARE, "evaluate_every": 2}


@pytest.fixture
def losses(monkeypatch):
    """Replace what validation finds: the loss of the n-th evaluation is the n-th of this list."""
    found = []
    monkeypatch.setattr("training.evaluation.validation_loss", lambda *_: found.pop(0))
    return found


@pytest.fixture
def checkpoints(tmp_path):
    return tmp_path / "checkpoints"


def kept(checkpoints):
    """The best state on the disk."""
    (step,) = files.candidates(path.name for path in (checkpoints / "best").iterdir())
    files.verify(checkpoints / "best", step)
    return torch.load(checkpoints / "best" / files.data_name(step), weights_only=True)


def test_training_does_not_depend_on_whether_it_was_evaluated(run, tmp_path):
    with_evaluation = run(**EVALUATING, dropout=0.3, checkpoint_dir=str(tmp_path / "evaluated"))
    without = run(**SHARE, dropout=0.3)
    del with_evaluation["validation"]
    without.pop("validation", None)
    assert differing(with_evaluation, without) == []


def test_the_lowest_loss_is_kept_apart_and_of_equals_the_first(run, losses, checkpoints):
    losses += [3.0, 2.0, 2.0, 2.5]
    final = run(**EVALUATING)
    state = kept(checkpoints)
    assert (state["step"], state["validation_loss"]) == (4, 2.0)
    # Pruning does not count it, and it does not prune.
    assert files.candidates(p.name for p in checkpoints.iterdir()) == [8, 6, 3]
    assert differing(state["model"], final["model"]) != []


def test_a_loss_that_is_no_number_is_never_the_best(run, losses, checkpoints):
    losses += [float("nan"), 5.0, float("inf"), float("nan")]
    run(**EVALUATING)
    assert kept(checkpoints)["step"] == 4


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 6, 7])
def test_a_run_in_parts_ends_with_the_same_best_state(run, tmp_path, stop):
    options = {**EVALUATING, "export": "best", "snapshot_steps": 1}
    places = {}
    for name, budgets in {"straight": (8,), "parts": (stop, 8)}.items():
        home = places[name] = tmp_path / name
        for total_steps in budgets:
            where = {"checkpoint_dir": str(home), "model_dir": str(home / "model")}
            run(**{**options, "total_steps": total_steps}, **where)
    assert differing(*(kept(home) for home in places.values())) == []
    exported = [torch.load(home / "model" / "model.pt") for home in places.values()]
    assert differing(*exported) == []
    assert differing(exported[0], kept(places["parts"])["model"]) == []


def test_an_evaluation_that_an_interruption_cut_short_comes_first_after_the_resume(
    run, monkeypatch, tmp_path, capfd
):
    straight = run(**EVALUATING, checkpoint_dir=str(tmp_path / "straight"))

    def cut_short(*arguments):
        raise RuntimeError("gloo: connection closed by peer")

    with monkeypatch.context() as patched:
        patched.setattr("training.evaluation.validation_loss", cut_short)
        with pytest.raises(TrainingError, match="connection between the ranks failed"):
            run(**EVALUATING)
        torch.distributed.destroy_process_group()
    capfd.readouterr()
    resumed = run(**EVALUATING)
    said = capfd.readouterr().out
    assert "resumed step=2 " in said
    assert "validation step=2 " in said.split("\nstep=3 ")[0]
    assert differing(straight, resumed) == []


def test_the_best_state_comes_back_from_the_snapshot(run, losses, checkpoints):
    losses += [1.0, 2.0]
    run(**{**EVALUATING, "total_steps": 4, "snapshot_steps": 1})
    before = kept(checkpoints)
    shutil.rmtree(checkpoints / "best")  # S3 did not have it
    losses += [3.0, 4.0]
    run(**{**EVALUATING, "snapshot_steps": 1})
    assert differing(before, kept(checkpoints)) == []


def test_a_disk_that_refuses_the_best_state_is_told_once_and_is_an_error_at_the_end(
    run, checkpoints, capfd
):
    checkpoints.mkdir()
    (checkpoints / "best").write_text("in the way")
    with pytest.raises(TrainingError, match=r"best state could not be written to .*best"):
        run(**EVALUATING)
    assert capfd.readouterr().out.count("best_failed ") == 1
    assert (checkpoints / files.manifest_name(8)).exists()


@pytest.mark.parametrize(("export", "step"), [("best", 2), ("last", 8)])
def test_the_exported_model_says_which_it_is(run, losses, tmp_path, checkpoints, export, step):
    losses += [1.0, 2.0, 3.0, 4.0]
    final = run(**EVALUATING, export=export)
    described = json.loads((tmp_path / "model" / "exported.json").read_text())
    assert (described["export"], described["step"]) == (export, step)
    assert described.get("validation_loss") == (1.0 if export == "best" else None)
    exported = torch.load(tmp_path / "model" / "model.pt", weights_only=True)
    expected = kept(checkpoints)["model"] if export == "best" else final["model"]
    assert differing(exported, expected) == []


def test_the_parts_are_disjoint_complete_and_a_function_of_the_seed(text_dir):
    def parts(seed):
        settings = TrainingSettings(validation_share=0.25, seed=seed)
        return [set(part.indices) for part in held_out(ByteWindows(text_dir, 64), settings)]

    training, validation = parts(0)
    size = len(ByteWindows(text_dir, 64))
    assert training | validation == set(range(size))
    assert not training & validation
    assert len(validation) == round(size / 4)
    assert parts(0) == [training, validation] != parts(1)


def test_a_share_that_leaves_nothing_is_refused(text_dir):
    settings = TrainingSettings(validation_share=0.0001)
    with pytest.raises(TrainingError, match="leaves 0 for validation and 624 for training"):
        held_out(ByteWindows(text_dir, 64), settings)


def test_a_frozen_part_of_the_model_stays_frozen(make_settings, text_dir):
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    model[0].eval()
    model.forward = lambda inputs, targets: inputs.float().mean()
    with joined(60) as group:
        validation_loss(model, ByteWindows(text_dir, 16), make_settings(), group, lambda: None)
    assert (model.training, model[0].training, model[1].training) == (True, False, True)


def test_workers_do_not_change_what_is_found(run, tmp_path, capfd):
    for workers in (0, 2):
        run(**SHARE, dataloader_workers=workers, checkpoint_dir=str(tmp_path / f"with-{workers}"))
    said = [x for x in capfd.readouterr().out.splitlines() if x.startswith("validation ")]
    assert len(said) == 2
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("values", "channel", "said"),
    [
        ({"export": "best"}, False, "export is best, but there is no validation data"),
        ({"evaluate_every": 5}, False, "evaluate_every is 5, but there is no validation data"),
        ({"validation_share": 0.1}, True, "validation_share is 0.1, but there is a validation"),
    ],
)
def test_validation_that_cannot_be_is_refused_before_the_group_starts(values, channel, said):
    settings = TrainingSettings(**values, validation_dir="/data" if channel else "")
    (problem,) = validation_problems(settings, channel=channel)
    assert problem.startswith(said)
    with pytest.raises(SettingsError, match=said):
        story.check_settings(settings)


def test_enough_validation_data_is_fine():
    both = TrainingSettings(export="best", evaluate_every=5, validation_share=0.1)
    assert validation_problems(both, channel=False) == []
    assert validation_problems(TrainingSettings(export="best"), channel=True) == []
