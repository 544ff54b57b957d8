"""Settings come from flags, from SageMaker's command line and from YAML, and mean the same."""

import json

import pytest

from training.settings import SettingsError, TrainingSettings, sagemaker_checkpoint_dir


def test_hyphens_and_underscores_are_the_same():
    hyphens = TrainingSettings.from_arguments(["--total-steps", "7", "--run-name", "a"])
    underscores = TrainingSettings.from_arguments(["--total_steps", "7", "--run_name", "a"])
    assert hyphens == underscores
    assert (hyphens.total_steps, hyphens.run_name) == (7, "a")


@pytest.mark.parametrize(("text", "value"), [("True", True), ("true", True), ("False", False)])
def test_both_spellings_of_truth_are_read(text, value):
    assert TrainingSettings.from_arguments(["--deterministic", text]).deterministic is value


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--totl-steps", "7"], "--totl-steps is not a setting; did you mean --total-steps?"),
        (["--total", "7"], "--total is not a setting"),
        (["--total-steps", "x"], "total_steps is 'x', but must be a whole number"),
        (["--total-steps", ""], "total_steps is '', but must be a whole number"),
        (["--deterministic", "perhaps"], "deterministic is 'perhaps', but must be true or false"),
        (["--total-steps"], "argument --total-steps"),
        (["train.py"], "'train.py' stands alone"),
        (["--learning-rate", "inf"], "learning_rate is inf; it must be a finite number"),
        (["--learning-rate", "0"], "learning_rate is 0.0; it must be greater than 0"),
        (["--precision", "int8"], "precision is 'int8'; it can be fp32, bf16, fp16"),
        (["--warmup-steps", "9", "--total-steps", "5"], "warmup_steps is 9, but the run ends at"),
        (["--decay-steps", "3", "--warmup-steps", "4"], "decay_steps is 3, before warmup_steps 4"),
        (["--model-heads", "3"], "model_heads is 3, which does not divide model_width 128"),
        (["--micro-batch-size", "5"], "micro_batch_size is 5, which does not divide"),
        (["--snapshot-seconds", "0"], "snapshot_steps and snapshot_seconds are both 0"),
    ],
)
def test_what_cannot_work_is_one_sentence(arguments, said):
    with pytest.raises(SettingsError) as caught:
        TrainingSettings.from_arguments(arguments)
    (problem,) = caught.value.problems
    assert problem.startswith(said)


def test_the_nearest_batch_that_divides_is_named():
    with pytest.raises(SettingsError, match="global_batch_size 32; 4 does"):
        TrainingSettings(micro_batch_size=5)


def test_every_setting_has_a_line_of_help():
    for one in TrainingSettings.__dataclass_fields__.values():
        assert 10 < len(one.metadata["help"]) < 90
        assert "\n" not in one.metadata["help"]


def test_the_fingerprint_holds_what_decides_the_bits_and_not_the_budget():
    fingerprint = TrainingSettings().fingerprint()
    assert {"seed", "global_batch_size", "learning_rate", "model_width"} <= fingerprint.keys()
    may_change = {"total_steps", "snapshot_seconds", "log_every", "train_dir", "micro_batch_size"}
    assert not may_change & fingerprint.keys()


def test_the_checkpoint_directory_is_the_one_that_sagemaker_syncs(tmp_path, monkeypatch):
    assert TrainingSettings().checkpoint_dir == "/opt/ml/checkpoints"
    monkeypatch.setenv("SM_INPUT_CONFIG_DIR", str(tmp_path))
    path = tmp_path / "checkpointconfig.json"
    for broken in ("", "[]", '{"LocalPath": 5}', "{}"):
        path.write_text(broken)
        assert sagemaker_checkpoint_dir() is None
    path.write_text(json.dumps({"LocalPath": "/data/snapshots", "S3Uri": "s3://b/p/"}))
    assert TrainingSettings().checkpoint_dir == "/data/snapshots"


def test_the_other_directories_are_sagemakers(monkeypatch):
    monkeypatch.setenv("SM_CHANNEL_TRAIN", "/in/train")
    monkeypatch.setenv("SM_CHANNEL_VALIDATION", "/in/validation")
    monkeypatch.setenv("SM_MODEL_DIR", "/out/model")
    settings = TrainingSettings()
    assert (settings.train_dir, settings.validation_dir) == ("/in/train", "/in/validation")
    assert settings.model_dir == "/out/model"
