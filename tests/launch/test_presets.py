"""Every preset gives a request that the API's own model accepts, patterns included.

Botocore checks types and lengths before it sends a request, but leaves patterns, enumerations and
upper limits to the service.
"""

import json
import pydoc_data.topics
import re

import botocore.session
import pytest
import yaml

from launch import config, limits, submit

CONFIGS = sorted((config.ROOT / "config").glob("*.yaml"))
PRESETS = [path for path in CONFIGS if path.stem not in ("default", "rehearsal")]
TYPES = {"string": str, "boolean": bool, "integer": int, "long": int, "float": (int, float)}
CLASSES = {r"\p{L}\p{Z}\p{N}_": r"\w ", r"\p{Alnum}": "a-zA-Z0-9"}  # what `re` calls otherwise


def violations(value, shape, place="request"):
    """Where `value` breaks what `shape`, of botocore's model, says; one line each."""
    kind = {"structure": dict, "map": dict, "list": list}.get(shape.type_name) or TYPES.get(
        shape.type_name
    )
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [f"{place} is no {shape.type_name}"]
    found = [f"{place} {text}" for text in _limits_broken(value, shape)]
    if shape.type_name == "structure":
        found += [
            f"{place}.{name} is missing" for name in shape.required_members if name not in value
        ]
        found += [
            f"{place}.{name} is not in the API" for name in value if name not in shape.members
        ]
        parts = [(n, v, shape.members[n]) for n, v in value.items() if n in shape.members]
    elif shape.type_name == "map":
        found += [line for key in value for line in violations(key, shape.key, f"{place} key")]
        parts = [(key, item, shape.value) for key, item in value.items()]
    elif shape.type_name == "list":
        parts = [(str(n), item, shape.member) for n, item in enumerate(value)]
    else:
        parts = []
    return found + [line for n, v, s in parts for line in violations(v, s, f"{place}.{n}")]


def _limits_broken(value, shape):
    rules, size = shape.metadata, len(value) if hasattr(value, "__len__") else value
    if "min" in rules and size < rules["min"]:
        yield f"is {size}, less than {rules['min']}"
    if "max" in rules and size > rules["max"]:
        yield f"is {size}, more than {rules['max']}"
    if getattr(shape, "enum", None) and value not in shape.enum:
        yield f"is {value!r}, which is not in the list"
    if "pattern" in rules and not re.fullmatch(_for_python(rules["pattern"]), value, re.DOTALL):
        yield f"is {value!r}, which does not match {rules['pattern']}"


def _for_python(pattern):
    for theirs, ours in CLASSES.items():
        pattern = pattern.replace(theirs, ours)
    return pattern


@pytest.fixture(scope="module")
def shape():
    """The input of CreateTrainingJob, as botocore's model of the API describes it."""
    model = botocore.session.get_session().get_service_model("sagemaker")
    return model.operation_model("CreateTrainingJob").input_shape


@pytest.fixture
def dry_run(capsys):
    """The request that submit.py prints for a configuration."""

    def request(path, *overrides):
        arguments = [part for override in overrides for part in ("--set", override)]
        code = submit.main(["--config", str(path), "--dry-run", *arguments])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)

    return request


def by_name(path):
    return path.stem


@pytest.mark.parametrize("path", CONFIGS, ids=by_name)
def test_the_api_accepts_every_shipped_configuration(path, shape, dry_run):
    request = dry_run(path)
    assert violations(request, shape) == []
    assert re.fullmatch(
        r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com/[\w-]+:[\w.-]+",
        request["AlgorithmSpecification"]["TrainingImage"],
    )


def test_the_api_accepts_everything_that_can_be_set_at_once(shape, dry_run):
    request = dry_run(
        config.DEFAULT_CONFIG,
        "run_name=" + "x" * 43,
        "aws.bucket=" + "b" * 63,
        "aws.prefix=" + "p" * 780,
        "aws.subnets=[subnet-1]",
        "aws.security_group_ids=[sg-1]",
        "aws.kms_key=alias/key",
        "aws.volume_kms_key=key",
        "aws.network_isolation=true",
        "aws.encrypt_inter_container_traffic=true",
        'aws.tags={"cost centre": "é+1 @ x/y:z", empty: ""}',
        "compute.instance_type=ml.p3.16xlarge",
        "compute.warm_pool=1h",
        "compute.environment={NCCL_DEBUG: INFO}",
        "spot.enabled=false",
        "data.validation=sample",
        "data.channels={extra.text-1_a: sample}",
    )
    assert violations(request, shape) == []
    assert {"VpcConfig", "Tags", "Environment", "EnableNetworkIsolation"} <= request.keys()


BROKEN = {
    "request.RoleArn is missing": lambda r: r.pop("RoleArn"),
    "request.Extra is not in the API": lambda r: r.update(Extra=1),
    "request.TrainingJobName is 'a_b', which does not match": lambda r: r.update(
        TrainingJobName="a_b"
    ),
    "request.TrainingJobName is 64, more than 63": lambda r: r.update(TrainingJobName="a" * 64),
    "request.ResourceConfig.InstanceCount is no integer": lambda r: r["ResourceConfig"].update(
        InstanceCount=True
    ),
    "request.ResourceConfig.InstanceType is 'ml.x', which is not": lambda r: r[
        "ResourceConfig"
    ].update(InstanceType="ml.x"),
    "request.StoppingCondition.MaxRuntimeInSeconds is 0, less than 1": lambda r: r[
        "StoppingCondition"
    ].update(MaxRuntimeInSeconds=0),
    "request.Environment key is 'a-b', which does not match": lambda r: r["Environment"].update(
        {"a-b": "1"}
    ),
    "request.InputDataConfig is 0, less than 1": lambda r: r.update(InputDataConfig=[]),
    "request.InputDataConfig.0.ChannelName is 'a b', which": lambda r: r["InputDataConfig"][
        0
    ].update(ChannelName="a b"),
    "request.Tags.0.Value is '50%', which does not match": lambda r: r.update(
        Tags=[{"Key": "cost", "Value": "50%"}]
    ),
}


@pytest.mark.parametrize(("said", "damage"), BROKEN.items(), ids=BROKEN.keys())
def test_a_request_that_the_api_refuses_is_seen(said, damage, shape, dry_run):
    request = dry_run(config.DEFAULT_CONFIG)
    damage(request)
    assert [line for line in violations(request, shape) if line.startswith(said)]


@pytest.mark.parametrize("path", PRESETS, ids=by_name)
def test_a_preset_is_a_few_lines_on_top_of_the_default(path):
    values = yaml.safe_load(path.read_text())
    assert values.pop("base") == "default.yaml"
    assert len(path.read_text().splitlines()) <= 30
    assert config.load(path) != config.load(config.DEFAULT_CONFIG)


@pytest.mark.parametrize("path", PRESETS, ids=by_name)
def test_a_preset_that_keeps_the_run_name_can_resume_the_run(path):
    default, preset = config.load(config.DEFAULT_CONFIG), config.load(path)
    same_settings = preset.training.fingerprint() == default.training.fingerprint()
    assert (preset.run_name == default.run_name) == same_settings


@pytest.mark.parametrize("path", CONFIGS, ids=by_name)
def test_the_sample_holds_at_least_one_global_batch(path):
    training = config.load(path).training
    text = "".join(pydoc_data.topics.topics.values()).encode()
    assert len(text) // training.sequence_length > training.global_batch_size


def test_the_presets_are_what_their_names_say():
    job = {path.stem: config.load(path) for path in PRESETS}

    def hosts_and_ranks(name):
        compute = job[name].compute
        return compute.instance_count, limits.ranks_per_host(compute.instance_type)

    assert hosts_and_ranks("one-gpu") == (1, 1)
    assert hosts_and_ranks("one-node") == (1, 8)
    assert hosts_and_ranks("multi-node") == (4, 8)
    assert hosts_and_ranks("cpu-smoke") == (1, 1)
    assert not limits.has_gpus(job["cpu-smoke"].compute.instance_type)
    assert [name for name in job if not job[name].spot.enabled] == ["on-demand"]
