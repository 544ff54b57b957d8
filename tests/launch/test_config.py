"""A configuration that cannot work is refused here, with every problem at once."""

import pytest

from launch import config, schema
from launch.errors import Refused
from training.settings import TrainingSettings


def problems(values, *overrides):
    """What is refused about `values` with overrides; an empty list if nothing is."""
    for override in overrides:
        config._apply(values, override)
    try:
        config.validate(values)
    except Refused as error:
        return error.problems
    return []


@pytest.mark.parametrize("name", ["default", "rehearsal"])
def test_the_shipped_configurations_are_valid(name):
    loaded = config.load(config.ROOT / "config" / f"{name}.yaml")
    assert loaded.training.run_name == loaded.run_name


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("24h", 86400), ("2d", 172800), ("3600", 3600), ("45s", 45), (" 1h ", 3600)],
)
def test_durations_read_as_people_write_them(text, seconds):
    assert schema.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "1.5h", "h", "-1h", "1h30m", "soon", "1w"])
def test_other_durations_are_refused(values, text):
    (problem,) = problems(values, f"spot.max_run={text}")
    assert problem.startswith("spot.max_run is")
    assert "90m, 24h, 2d or 3600" in problem


BAD = {
    "aws.regoin=x": "aws.regoin is not a setting; did you mean region?",
    "spots.enabled=true": "spots is not a setting; did you mean spot?",
    "training.learnign_rate=1": "training.learnign_rate is not a training setting; "
    "did you mean learning_rate?",
    "training.total_steps=many": "training.total_steps is 'many', but must be a whole number",
    "training.total_steps=1.5": "training.total_steps is '1.5', but must be a whole number",
    "training.total_steps=0": "training.total_steps is 0; it must be 1 or more",
    "training.dropout=1": "training.dropout is 1.0; it must be less than 1",
    "training.precision=fp8": "training.precision is 'fp8'; it can be fp32, bf16, fp16",
    "training.model_heads=7": "training.model_heads is 7, which does not divide model_width 512",
    "training.snapshots_kept=1": "training.snapshots_kept is 1; it must be 2 or more",
    "training.learning_rate=nan": "training.learning_rate is nan; it must be a finite number",
    "training.run_name=x": "training.run_name cannot be set here: set run_name at the top level",
    "training.train_dir=/x": "training.train_dir cannot be set here: SageMaker decides it",
    "compute.instance_count=two": "compute.instance_count is 'two'; it must be a valid integer",
    "compute.instance_count=0": "compute.instance_count is '0'; it must be greater than or equal",
    "compute.instance_type=g5.2xlarge": "compute.instance_type is 'g5.2xlarge'; "
    "it must look like ml.g5.2xlarge",
    "aws.role=admin": "aws.role is 'admin'; it must look like arn:aws:iam::",
    "aws.bucket=My_Bucket": "aws.bucket is 'My_Bucket'; it must look like my-bucket",
    "aws.region=us east": "aws.region is 'us east'; it must look like us-east-1",
    "aws.prefix=/x/": "aws.prefix is '/x/'; it must look like team/project",
    "aws.subnets=[subnet-1]": "aws.subnets is set but aws.security_group_ids is not",
    "spot.max_wait=1h": "spot.max_wait is 3600 s but spot.max_run is 86400 s; a spot job must be "
    "allowed to wait at least as long as it may run: set spot.max_wait to 1d or more",
    "spot.enabled=perhaps": "spot.enabled is 'perhaps'; it must be a valid boolean",
    "data.input_mode=Pipe": "data.input_mode is 'Pipe'; it must be 'FastFile' or 'File'",
    "run_name=my_run": "run_name is 'my_run'; SageMaker allows letters, digits and hyphens",
    "run_name=-run": "run_name is '-run'; SageMaker allows",
    f"run_name={'x' * 44}": "run_name is 44 characters long",
    "run_name=null": "run_name is missing; set it in the YAML or with --set run_name=…",
    "aws=5": "aws is '5'; it must be a section of settings",
    "training=5": "training is '5', but must be a section of settings",
}


@pytest.mark.parametrize(("override", "said"), BAD.items(), ids=BAD.keys())
def test_what_cannot_work_is_refused_in_one_sentence(values, override, said):
    found = problems(values, override)
    assert [problem for problem in found if problem.startswith(said)], found
    assert len(found) == 1
    assert "\n" not in found[0]


def test_all_problems_are_told_at_once(values):
    found = problems(
        values, "aws.regoin=x", "training.total_steps=0", "training.seeed=1", "compute.volume_gb=-1"
    )
    assert len(found) == 4


def test_max_wait_does_not_matter_without_spot(values):
    assert problems(values, "spot.enabled=false", "spot.max_wait=1h") == []


def test_overrides_are_typed_by_the_schema(values):
    for override in (
        "compute.framework_version=2.10",
        "compute.image_uri=pytorch-training:2.8.0-cpu-py312",
        "compute.instance_count=4",
        "spot.enabled=false",
        "training.learning_rate=3e-4",
        "aws.subnets=[subnet-1, subnet-2]",
        "aws.security_group_ids=[sg-1]",
        "aws.tags={team: vision}",
        "run_name=2024",
    ):
        config._apply(values, override)
    job = config.validate(values)
    assert job.compute.framework_version == "2.10"
    assert (job.compute.instance_count, job.spot.enabled) == (4, False)
    assert job.training.learning_rate == 3e-4
    assert job.aws.subnets == ("subnet-1", "subnet-2")
    assert (job.aws.tags, job.run_name) == ({"team": "vision"}, "2024")


@pytest.mark.parametrize("override", ["x", "=1", "a.b.c=1", ".x=1", "run_name.x=1"])
def test_an_override_of_another_form_is_refused(values, override):
    assert "--set" in problems_of_override(values, override)


def problems_of_override(values, override):
    with pytest.raises(Refused) as caught:
        config._apply(values, override)
    return caught.value.problems[0]


FILES = {
    "": "holds no settings",
    "- a\n- b\n": "holds no settings",
    "a: [": "is not valid YAML at line",
    "run_name: 2024-13-45": "is not valid YAML",
    "\x00": "is not valid YAML",
}


@pytest.mark.parametrize(("content", "said"), FILES.items())
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, said):
    path = tmp_path / "job.yaml"
    path.write_text(content)
    with pytest.raises(Refused, match=said):
        config.load(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"missing\.yaml cannot be read: No such file"):
        config.load(tmp_path / "missing.yaml")


def test_a_number_where_text_belongs_says_so(values):
    values["compute"]["framework_version"] = 2.10
    assert problems(values) == [
        "compute.framework_version is 2.1; it must be text; put it in quotes"
    ]


def test_every_setting_but_the_places_reaches_the_script(values):
    sent = config.validate(values).hyperparameters()
    fields = TrainingSettings.__dataclass_fields__.keys()
    assert fields - sent.keys() == {
        *("checkpoint_dir", "checkpoint_s3_uri", "train_dir", "validation_dir", "model_dir")
    }
    assert None not in sent.values()
