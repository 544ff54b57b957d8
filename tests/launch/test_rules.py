"""Every rule that needs no AWS: what it refuses, what it lets pass, and that both cost nothing."""

import contextlib
import io
import json
import re
import subprocess
import sys
import time
from importlib.resources import files

import botocore.endpoint
import botocore.session
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launch import config, container_rules, limits, rules, submit
from launch.errors import Refused
from training.settings import TrainingSettings

ON_DEMAND = "spot.enabled=false"
CPU = "compute.instance_type=ml.c5.xlarge"
IMAGE = "compute.image_uri=pytorch-training:2.8.0-cpu-py312"
ROLE = "aws.role=arn:aws:iam::123456789012:role"
BOTH = ("aws.subnets=[subnet-1]", "aws.security_group_ids=[sg-1]")


def setting(name, value):
    """An override whose value is a list or a mapping."""
    return f"{name}={json.dumps(value)}"


def numbered(count, key="k", value="v"):
    return {f"{key}{number}": value for number in range(count)}


def channels(**sources):
    return setting("data.channels", sources)


def environment(**variables):
    return setting("compute.environment", variables)


def tags(values):
    return setting("aws.tags", values)


# (what is refused, the same with a value that is right, how the sentence begins)
TABLE = [
    ("run_name=my_run", "run_name=my-run", "run_name is 'my_run'; SageMaker allows letters"),
    ("run_name=-run", "run_name=run", "run_name is '-run'; SageMaker allows"),
    ("run_name=run-", "run_name=run-1", "run_name is 'run-'; SageMaker allows"),
    ("run_name=a b", "run_name=a--b", "run_name is 'a b'; SageMaker allows"),
    ("run_name=läuft", "run_name=laeuft", "run_name is 'läuft'; SageMaker allows"),
    (f"run_name={'x' * 44}", f"run_name={'x' * 43}", "run_name is 44 characters long"),
    ("run_name=null", "run_name=nullify", "run_name is missing"),
    ("spot.max_wait=1h", "spot.max_wait=1d", "spot.max_wait is 3600 s but spot.max_run is 86400"),
    (
        ("spot.max_run=29d", "spot.max_wait=30d"),
        ("spot.max_run=28d", "spot.max_wait=30d"),
        "spot.max_run is 2505600 s; SageMaker stops every job after 28 days",
    ),
    (
        ("spot.max_run=29d", ON_DEMAND),
        ("spot.max_run=28d", ON_DEMAND),
        "spot.max_run is 2505600 s; SageMaker stops every job after 28 days",
    ),
    ("spot.max_wait=31d", "spot.max_wait=30d", "spot.max_wait is 2678400 s; a job lives for 30"),
    ("spot.max_run=soon", "spot.max_run=90m", "spot.max_run is 'soon'; it must be a duration"),
    ("spot.max_run=0", "spot.max_run=60", "spot.max_run is '0'; it must be greater than 0"),
    (
        "compute.warm_pool=30m",
        ("compute.warm_pool=30m", ON_DEMAND),
        "compute.warm_pool is 1800 s and spot.enabled is true; spot instances cannot be kept",
    ),
    (
        ("compute.warm_pool=2h", ON_DEMAND),
        ("compute.warm_pool=1h", ON_DEMAND),
        "compute.warm_pool is 7200 s; SageMaker keeps instances for an hour at most",
    ),
    (
        setting("data.channels", {"a b": "sample"}),
        setting("data.channels", {"a.b-c_1": "sample"}),
        "data.channels has the name 'a b'; a channel's name is made of 1 to 64",
    ),
    (
        channels(**{"c" * 65: "sample"}),
        channels(**{"c" * 64: "sample"}),
        "data.channels has the name 'ccc",
    ),
    (channels(train="sample"), channels(extra="sample"), "data.channels.train reaches the"),
    (channels(validation="sample"), "data.validation=sample", "data.channels.validation reaches"),
    (channels(Train="sample"), channels(Trains="sample"), "data.channels.Train reaches the"),
    (
        channels(extra="sample", EXTRA="sample"),
        channels(extra="sample", EXTRA2="sample"),
        "data.channels.EXTRA reaches the container as SM_CHANNEL_EXTRA, which data.channels.extra",
    ),
    (channels(code="sample"), channels(codes="sample"), "data.channels.code is a name that the"),
    (channels(sm_drivers="sample"), channels(sm="sample"), "data.channels.sm_drivers is a name"),
    (channels(extra=" "), channels(extra="sample"), "data.channels.extra is empty; set it to"),
    (setting("data", {"train": ""}), setting("data", {"train": "sample"}), "data.train is empty"),
    (
        f"data.train=s3://bucket/{'p' * 1020}",
        f"data.train=s3://bucket/{'p' * 1000}",
        "data.train is 1032 characters long; SageMaker allows an address of 1024",
    ),
    (
        setting("data.channels", numbered(20, value="sample")),
        setting("data.channels", numbered(19, value="sample")),
        "data has 21 channels; SageMaker allows 20: remove 1 of data.channels",
    ),
    (
        (setting("data.channels", numbered(19, value="sample")), "aws.network_isolation=true"),
        (setting("data.channels", numbered(18, value="sample")), "aws.network_isolation=true"),
        "data has 21 channels, the code's own included; SageMaker allows 20",
    ),
    (
        (CPU, IMAGE, "training.precision=fp16"),
        (CPU, IMAGE, "training.precision=bf16"),
        "training.precision is fp16, but ml.c5.xlarge has no GPU: set training.precision to bf16",
    ),
    (
        "training.export=best",
        ("training.export=best", "training.validation_share=0.1"),
        "training.export is best, but there is no validation data",
    ),
    (
        "training.evaluate_every=5",
        ("training.evaluate_every=5", "data.validation=sample"),
        "training.evaluate_every is 5, but there is no validation data",
    ),
    (
        ("training.validation_share=0.1", "data.validation=sample"),
        "training.validation_share=0.1",
        "training.validation_share is 0.1, but there is a validation channel too",
    ),
    ("data.input_mode=Pipe", "data.input_mode=File", "data.input_mode is 'Pipe'; it must be"),
    ("aws.subnets=[subnet-1]", BOTH, "aws.subnets is set but aws.security_group_ids is not"),
    ("aws.security_group_ids=[sg-1]", BOTH, "aws.security_group_ids is set but aws.subnets is not"),
    (
        (setting("aws.subnets", [f"subnet-{n}" for n in range(17)]), BOTH[1]),
        (setting("aws.subnets", [f"subnet-{n}" for n in range(16)]), BOTH[1]),
        "aws.subnets has 17 entries; SageMaker allows 16",
    ),
    (
        (BOTH[0], setting("aws.security_group_ids", [f"sg-{n}" for n in range(6)])),
        (BOTH[0], setting("aws.security_group_ids", [f"sg-{n}" for n in range(5)])),
        "aws.security_group_ids has 6 entries; SageMaker allows 5",
    ),
    (
        ("aws.subnets=[vpc-1]", BOTH[1]),
        BOTH,
        "aws.subnets has 'vpc-1'; an entry looks like subnet-0a1b2c3d4e5f67890",
    ),
    (
        (BOTH[0], "aws.security_group_ids=[default]"),
        BOTH,
        "aws.security_group_ids has 'default'; an entry looks like sg-",
    ),
    (
        (BOTH[0], setting("aws.security_group_ids", ["sg-1", "sg-1"])),
        (BOTH[0], setting("aws.security_group_ids", ["sg-1", "sg-2"])),
        "aws.security_group_ids names one entry twice",
    ),
    ("aws.bucket=My_Bucket", "aws.bucket=my-bucket", "aws.bucket is 'My_Bucket'; it must look"),
    ("aws.bucket=s3://data", "aws.bucket=data", "aws.bucket is 's3://data'; it must look like"),
    (
        "aws.bucket=my..bucket",
        "aws.bucket=my.bucket",
        "aws.bucket is 'my..bucket'; a bucket's name",
    ),
    ("aws.bucket=10.0.0.1", "aws.bucket=10.0.0.1a", "aws.bucket is '10.0.0.1'; a bucket's name"),
    (
        "aws.prefix=team/",
        "aws.prefix=team",
        "aws.prefix is 'team/'; it must look like team/project",
    ),
    ("aws.prefix=a//b", "aws.prefix=a/b", "aws.prefix is 'a//b'; it must look like team/project"),
    ("aws.prefix=é", "aws.prefix=e", "aws.prefix is 'é'; it must look like team/project"),
    ("aws.prefix=a/../b", "aws.prefix=a/..b", "aws.prefix is 'a/../b'; S3 takes . and .. for"),
    (
        ("aws.bucket=bucket", f"aws.prefix={'p' * 856}"),
        ("aws.bucket=bucket", f"aws.prefix={'p' * 850}"),
        "aws.prefix is 856 characters long; the addresses made from it may have 1024: set",
    ),
    ("aws.region=us-east", "aws.region=us-east-1", "aws.region is 'us-east'; it must look like"),
    (f"{ROLE.removesuffix(':role')}:user/me", f"{ROLE}/me", "aws.role is 'arn:aws:iam::123456789"),
    (f"{ROLE}/my role", f"{ROLE}/team/my-role", "aws.role is 'arn:aws:iam::123456789012:role/my"),
    (f"{ROLE}/{'r' * 2048}", f"{ROLE}/{'r' * 64}", "aws.role is 2079 characters long; an ARN has"),
    (
        "aws.kms_key=my key",
        "aws.kms_key=alias/my-key",
        "aws.kms_key is 'my key'; give the key's ID",
    ),
    (f"aws.kms_key={'k' * 2049}", "aws.kms_key=k", "aws.kms_key is 'kkk"),
    (
        ("aws.volume_kms_key=ke*", "compute.instance_type=ml.p3.2xlarge"),
        ("aws.volume_kms_key=key", "compute.instance_type=ml.p3.2xlarge"),
        "aws.volume_kms_key is 'ke*'; give the key's ID",
    ),
    *[
        (
            ("aws.volume_kms_key=key", f"compute.instance_type={kind}", *extra),
            ("aws.volume_kms_key=key", "compute.instance_type=ml.p3.2xlarge"),
            f"aws.volume_kms_key is set but compute.instance_type is {kind}, whose own disks",
        )
        for kind, *extra in [
            ("ml.g4dn.xlarge",),
            ("ml.g5.48xlarge",),
            ("ml.p4d.24xlarge",),
            ("ml.p6-b200.48xlarge",),
            ("ml.r5d.large", IMAGE),
        ]
    ],
    (
        "compute.instance_type=g5.2xlarge",
        "compute.instance_type=ml.g5.2xlarge",
        "compute.instance_type is 'g5.2xlarge'; it must look like ml.g5.2xlarge",
    ),
    (CPU, (CPU, IMAGE), "compute.instance_type is ml.c5.xlarge, which holds no NVIDIA GPU"),
    (
        "compute.instance_type=ml.trn1.2xlarge",
        ("compute.instance_type=ml.trn1.2xlarge", IMAGE),
        "compute.instance_type is ml.trn1.2xlarge, which holds no NVIDIA GPU",
    ),
    ("compute.instance_count=0", "compute.instance_count=1", "compute.instance_count is '0'; it"),
    ("compute.image_uri=a b", IMAGE, "compute.image_uri is 'a b'; an image is named without"),
    (f"compute.image_uri={'i' * 256}", IMAGE, "compute.image_uri is 'iii"),
    (
        "compute.framework_version=2.9.0",
        "compute.framework_version=2.8.0",
        "compute.framework_version is '2.9.0', which the SageMaker SDK cannot run torchrun in: set "
        "it to 2.8.0 and compute.py_version to py312, or name a container with compute.image_uri",
    ),
    (
        "compute.framework_version=2.5",
        ("compute.framework_version=2.5.1", "compute.py_version=py311"),
        "compute.framework_version is '2.5', which the SageMaker SDK cannot run torchrun in: set "
        "it to 2.5.1 and compute.py_version to py311",
    ),
    (
        "compute.framework_version=2.4.1",
        ("compute.framework_version=2.4.1", IMAGE),
        "compute.framework_version is '2.4.1', which the SageMaker SDK cannot run torchrun in: set "
        "it to 2.5.1",
    ),
    (
        "compute.framework_version=2.3.0",
        ("compute.framework_version=2.6.0", "compute.py_version=py312"),
        "compute.framework_version is '2.3.0', too old for training/: set it to 2.5.1",
    ),
    (
        "compute.framework_version=latest",
        "compute.framework_version=2.7.1",
        "compute.framework_version is 'latest', which the SageMaker SDK cannot run torchrun in: "
        "set it to 2.8.0",
    ),
    (
        "compute.py_version=py311",
        "compute.py_version=py312",
        "compute.py_version is 'py311', but the container of compute.framework_version 2.8.0 has "
        "py312: set compute.py_version to py312, or name a container with compute.image_uri",
    ),
    (
        (CPU, IMAGE, "compute.volume_gb=1"),
        (CPU, IMAGE, "compute.volume_gb=3"),
        "compute.volume_gb is 1, but 5 snapshots of 0.3 GiB, the final model and its archive need "
        "3 GiB before any data: set compute.volume_gb to 3 or more",
    ),
    (
        (CPU, IMAGE, "training.model_width=4096", "training.model_depth=48"),
        ("training.model_width=4096", "training.model_depth=48"),  # its disks are its own
        "compute.volume_gb is 100, but 5 snapshots of 108.1 GiB, the final model and its archive",
    ),
    (
        (CPU, IMAGE, "compute.volume_gb=16385"),
        (CPU, IMAGE, "compute.volume_gb=16384"),
        "compute.volume_gb is 16385; a volume has at most 16384",
    ),
    ("compute.volume_gb=0", "compute.volume_gb=1", "compute.volume_gb is '0'; it must be greater"),
    (
        ("compute.instance_count=3", "compute.instance_type=ml.g5.48xlarge"),
        ("compute.instance_count=4", "compute.instance_type=ml.g5.48xlarge"),
        "training.global_batch_size is 64, which the 24 ranks of 3 × ml.g5.48xlarge cannot share "
        "evenly: set training.global_batch_size to 48 or 72",
    ),
    (
        ("compute.instance_count=65",),
        ("compute.instance_count=64",),
        "training.global_batch_size is 64, which the 65 ranks of 65 × ml.g5.2xlarge cannot share "
        "evenly: set training.global_batch_size to 65",
    ),
    (
        (CPU, IMAGE, "compute.instance_count=5"),
        (CPU, IMAGE, "compute.instance_count=4"),
        "training.global_batch_size is 64, which the 5 ranks of 5 × ml.c5.xlarge cannot share",
    ),
    (
        ("training.micro_batch_size=16", "compute.instance_count=8"),
        ("training.micro_batch_size=8", "compute.instance_count=8"),
        "training.micro_batch_size is 16, which does not divide the 8 samples of a rank "
        "(training.global_batch_size 64 on 8 × ml.g5.2xlarge): set training.micro_batch_size to 8",
    ),
    (
        setting("compute.environment", numbered(100)),
        setting("compute.environment", numbered(98)),
        "compute.environment has 100 variables; SageMaker allows 100 with the launcher's own",
    ),
    (
        setting("compute.environment", {"MY-NAME": "1"}),
        setting("compute.environment", {"MY_NAME": "1"}),
        "compute.environment has the name 'MY-NAME'; a variable's name is made of",
    ),
    (
        environment(**{"N" * 513: "1"}),
        environment(**{"N" * 512: "1"}),
        "compute.environment has the name 'NNN",
    ),
    (
        environment(MY_NAME="v" * 513),
        environment(MY_NAME="v" * 512),
        "compute.environment.MY_NAME is 513 characters long; SageMaker allows 512",
    ),
    *[
        (
            environment(**{name: "1"}),
            environment(NCCL_DEBUG="INFO"),
            f"compute.environment sets {name},",
        )
        for name in ("SM_HOSTS", "WORLD_SIZE", "AWS_SECRET_ACCESS_KEY", "TORCHELASTIC_RUN_ID")
    ],
    (
        environment(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1"),
        environment(TORCH_LOGS="+dynamo"),
        "compute.environment sets TORCH_ELASTIC_SHUTDOWN_TIMEOUT, which the launcher sets",
    ),
    (tags(numbered(50)), tags(numbered(49)), "aws.tags has 50 tags; AWS allows 50, and one is"),
    (tags({"project": "v"}), tags({"Project": "v"}), "aws.tags has the key 'project', which is"),
    (tags({"k" * 129: "v"}), tags({"k" * 128: "v"}), "aws.tags has the key 'kkk"),
    (tags({"": "v"}), tags({"k": ""}), "aws.tags has the key ''; a key has 1 to 128 characters"),
    (tags({"k": "v" * 257}), tags({"k": "v" * 256}), "aws.tags.k is 257 characters long"),
    (tags({"AWS:k": "v"}), tags({"aws-k": "v"}), "aws.tags has the key 'AWS:k'; AWS keeps aws:"),
    (
        tags({"cost": "50%"}),
        tags({"cost é": "a-b_c.d:e/f=g+h@i 1"}),
        "aws.tags has 'cost': '50%'; AWS does not allow '%' there",
    ),
    ("training.total_steps=0", "training.total_steps=200", "training.total_steps is 0; it must be"),
    ("training.precision=fp8", "training.precision=fp16", "training.precision is 'fp8'; it can be"),
    ("training.stepz=1", "training.seed=1", "training.stepz is not a training setting"),
    ("spots.enabled=true", "spot.enabled=true", "spots is not a setting; did you mean spot?"),
]


def listed(overrides):
    return [overrides] if isinstance(overrides, str) else list(overrides)


@pytest.fixture
def refused(monkeypatch, capsys):
    """Run submit.py here, where a call to AWS fails the test; returns the problems it told."""

    def call(*_, **__):
        raise AssertionError("AWS was called")

    monkeypatch.setattr(botocore.endpoint.Endpoint, "make_request", call)

    def run(overrides, *options):
        arguments = [part for override in overrides for part in ("--set", override)]
        code = submit.main([*options, *arguments])
        printed = capsys.readouterr()
        assert (code, printed.out) == (2, "")
        lines = printed.err.splitlines()
        assert all(line.startswith("error: ") for line in lines)
        return [line.removeprefix("error: ") for line in lines]

    return run


@pytest.mark.parametrize(("bad", "good", "said"), TABLE, ids=[row[2][:50] for row in TABLE])
def test_what_cannot_run_is_refused_in_one_sentence_and_its_neighbour_is_not(
    refused, bad, good, said
):
    for options in ([], ["--dry-run"]):
        (problem,) = refused(listed(bad), *options)
        assert problem.startswith(said)
    assert rules.problems(config.load(config.DEFAULT_CONFIG, listed(good))) == []


def test_the_table_is_as_long_as_was_promised():
    assert len({str(bad) for bad, _, _ in TABLE}) >= 60


def test_all_rules_speak_at_once(refused):
    found = refused(
        ["run_name=a_b", "spot.max_wait=1h", "aws.bucket=a..b", "compute.py_version=py3"]
    )
    assert [problem.split()[0] for problem in found] == [
        "run_name",
        "spot.max_wait",
        "aws.bucket",
        "compute.py_version",
    ]


def told(**values):
    return list(container_rules.hyperparameter_problems(values))


@pytest.mark.parametrize(
    "value", ["a b", "it's", '"a"', "$HOME", "*.py", "x;echo", "[1]", "~", "a\nb", "a&b", "é", "\\"]
)
def test_text_that_a_shell_would_change_is_refused(value):
    (problem,) = told(note=value)
    assert problem.startswith("training.note is ")
    assert "which the container's shell would split or expand" in problem


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}])
def test_lists_and_mappings_are_refused(value):
    assert "shell would split or expand" in told(note=value)[0]


@pytest.mark.parametrize("value", [None, ""])
def test_a_flag_without_a_value_is_refused(value):
    assert told(note=value) == [
        "training.note is empty, so that its flag would take the next one for its value; "
        "give it a value"
    ]


def test_text_that_looks_like_a_flag_is_refused():
    assert told(note="-x")[0].startswith("training.note is '-x', which would be taken for a flag")


@pytest.mark.parametrize("value", ["a/b:c@d", "a,b", "x=1", "-1", "-.5", "90%", -1e-8, True, 3])
def test_what_one_word_of_a_command_can_hold_is_allowed(value):
    assert told(note=value) == []


def test_a_hyperparameter_is_at_most_256_characters_long_with_its_quotes():
    assert told(note="x" * 254) == []
    assert told(note="x" * 255)[0].startswith("training.note is 255 characters long; 256 are")
    assert told(**{"n" * 256: 1}) == []
    assert "is a name of 257 characters; 256 are allowed" in told(**{"n" * 257: 1})[0]


@pytest.mark.parametrize("name", ["n", "my-name", "1st", "sagemaker_program", "a b"])
def test_a_name_that_is_no_flag_of_the_script_is_refused(name):
    assert told(**{name: 1})[0].startswith(f"training.{name} cannot be a flag of train.py")


@pytest.mark.parametrize("name", ["log", "max", "node", "role", "rdzv_id", "start", "local_ranks"])
def test_a_name_that_torchrun_would_take_for_its_own_is_refused(name):
    (problem,) = told(**{name: 1})
    assert problem.startswith(f"training.{name} would be taken by torchrun for its own --")


def test_the_settings_of_this_repository_are_all_allowed():
    assert told(**dict.fromkeys(TrainingSettings.__dataclass_fields__, 1)) == []


def test_more_than_a_hundred_hyperparameters_are_refused(monkeypatch):
    job = config.load(config.DEFAULT_CONFIG)
    many = {"run_name": job.run_name, **numbered(92, key="setting")}
    monkeypatch.setattr(type(job), "hyperparameters", lambda self: dict(many))
    assert rules.problems(job) == [
        "training has 93 settings; SageMaker allows 100 hyperparameters, and the SDK adds 8: "
        "keep 92 fields of TrainingSettings"
    ]
    del many["setting0"]
    assert rules.problems(job) == []


@pytest.fixture
def required(tmp_path):
    """What is said about a requirements.txt of these lines, for the default job."""

    def judge(text, *overrides):
        (tmp_path / "training").mkdir()
        (tmp_path / "training" / "requirements.txt").write_bytes(text)
        return rules.problems(config.load(config.DEFAULT_CONFIG, overrides), tmp_path / "training")

    return judge


@pytest.mark.parametrize(
    "line",
    ["torch", "Torch==2.9.0", "torchvision>=0.2", "numpy<2", "nvidia_nccl_cu12==2.0", "numpy[x]"],
)
def test_requirements_that_replace_what_the_container_brings_are_refused(required, line):
    (problem,) = required(f"einops==0.8.1\n{line}\n".encode())
    assert problem.startswith(f"training/requirements.txt has '{line}', which would replace the")


@pytest.mark.parametrize(
    "line", ["einops", "einops>=0.8", "einops==0.*", "./x", "git+https://example.org/x@main"]
)
def test_requirements_that_are_not_pinned_are_refused(required, line):
    (problem,) = required(line.encode())
    assert problem.startswith(f"training/requirements.txt has '{line}'; a restart could install")


@pytest.mark.parametrize("line", ["-r more.txt", "-e .", "--constraint more.txt"])
def test_requirements_that_lead_to_other_files_are_refused(required, line):
    (problem,) = required(line.encode())
    assert problem.startswith(f"training/requirements.txt has '{line}'; of all such files only")


@pytest.mark.parametrize(
    "text",
    [
        "--extra-index-url https://example.org/simple\nmine==1.0",
        "einops==0.8.1 \\\n    --hash=sha256:abc \\\n    --hash=sha256:def",
        "nvidia-ml-py==12.0",
        "nvidia-dali-cuda120==1.50",
        "x @ git+https://example.org/x@0123456789abcdef",
        "git+https://example.org/x@0123456789abcdef",
    ],
)
def test_requirements_as_tools_write_them_are_allowed(required, text):
    assert required(text.encode()) == []


def test_requirements_that_are_pinned_are_allowed(required):
    assert (
        required(
            b"# what the data needs\n\neinops==0.8.1  # a comment\ndatasets[s3] == 3.0.0; "
            b"python_version >= '3.11'\nmine @ https://example.org/mine-1.0-py3-none-any.whl\n"
            b"torchmetrics===1.4.0\n"
        )
        == []
    )


def test_requirements_cannot_be_installed_without_a_network(required):
    (problem,) = required(b"einops==0.8.1\n", "aws.network_isolation=true")
    assert problem.startswith("training/requirements.txt asks for packages but aws.network_isol")


def test_requirements_that_are_no_text_are_refused(required):
    assert required(b"\xff\xfe") == ["training/requirements.txt cannot be read: not text"]


def test_all_rules_take_less_than_50_ms(tmp_path):
    overrides = [
        setting("compute.environment", numbered(98, value="v" * 512)),
        setting("data.channels", numbered(19, value="sample")),
        tags(numbered(49, value="v" * 256)),
    ]
    job = config.load(config.DEFAULT_CONFIG, overrides)
    (tmp_path / "requirements.txt").write_text("einops==0.8.1\n" * 100)

    def once():
        start = time.process_time()
        assert rules.problems(job, tmp_path) == []
        return time.process_time() - start

    assert min(once() for _ in range(5)) < 0.05


def test_the_rules_need_neither_torch_nor_the_sdk():
    code = "import sys, launch.config; print(*{'torch', 'sagemaker', 'boto3'} & sys.modules.keys())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ""


def refusals(name):
    """What is said about a run's name; nothing if a job of that name is valid."""
    try:
        config.validate({"run_name": name})
    except Refused as refusal:
        return refusal.problems
    return []


@settings(max_examples=400, deadline=None)
@given(name=st.text(st.characters()) | st.text("ab1-_", max_size=50))
def test_any_text_is_a_run_name_or_is_refused_in_sentences(name):
    found = refusals(name)
    allowed = re.fullmatch("[a-zA-Z0-9](-*[a-zA-Z0-9])*", name) and len(name) <= 43
    assert bool(found) != bool(allowed)
    assert all(problem.startswith("run_name") and problem.isprintable() for problem in found)


@settings(max_examples=4, deadline=None)
@example(name="x" * 43)
@given(name=st.from_regex(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", fullmatch=True))
def test_a_run_name_that_is_allowed_gives_a_valid_job_name(name):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = submit.main(["--dry-run", "--set", f"run_name={name}"])
    if code == 2:  # too long, or YAML's word for nothing
        assert len(name) > 43 or name.lower() == "null"
    else:
        job_name = json.loads(out.getvalue())["TrainingJobName"]
        assert job_name.startswith(f"{name}-")
        assert len(job_name) <= 63


@pytest.fixture(scope="module")
def api():
    """Botocore's model of SageMaker's API."""
    return botocore.session.get_session().get_service_model("sagemaker")


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ("TrainingJobName", limits.JOB_NAME_LENGTH),
        ("S3Uri", limits.ADDRESS_LENGTH),
        ("RoleArn", limits.ROLE_LENGTH[1]),
        ("AlgorithmImage", limits.IMAGE_LENGTH),
        ("KmsKeyId", limits.KMS_KEY_LENGTH),
        ("Subnets", limits.SUBNETS),
        ("VpcSecurityGroupIds", limits.SECURITY_GROUPS),
        ("SubnetId", limits.NETWORK_ID_LENGTH),
        ("SecurityGroupId", limits.NETWORK_ID_LENGTH),
        ("InputDataConfig", limits.CHANNELS),
        ("HyperParameters", limits.HYPERPARAMETERS),
        ("HyperParameterKey", limits.HYPERPARAMETER_LENGTH),
        ("TrainingEnvironmentMap", limits.ENVIRONMENT),
        ("TrainingEnvironmentKey", limits.ENVIRONMENT_LENGTH),
        ("TrainingEnvironmentValue", limits.ENVIRONMENT_LENGTH),
        ("TagList", limits.TAGS),
        ("TagKey", limits.TAG_KEY_LENGTH),
        ("TagValue", limits.TAG_VALUE_LENGTH),
    ],
)
def test_the_limits_are_the_apis_own(api, shape, most):
    assert api.shape_for(shape).metadata["max"] == most


def test_the_instance_types_are_ones_that_sagemaker_and_the_sdk_know(api):
    from sagemaker import fw_utils

    known = api.shape_for("TrainingInstanceType").enum
    ours = {
        f"ml.{family}.{size}"
        for family, sizes in limits.GPUS.items()
        for names in sizes.values()
        for size in names.split()
    }
    assert ours <= set(known)
    assert [t for t in known if limits.has_gpus(t) != fw_utils._is_gpu_instance(t)] == []
    without_gpu = [t for t in known if not limits.has_gpus(t) and ".trn" not in t]
    assert {limits.ranks_per_host(t) for t in without_gpu} == {1}
    assert limits.ranks_per_host("ml.p9.48xlarge") is None


def test_the_containers_are_those_that_the_sdk_finds_and_lets_torchrun_run_in():
    from sagemaker import fw_utils

    listed = json.loads((files("sagemaker") / "image_uri_config" / "pytorch.json").read_text())
    found = listed["training"]["versions"]
    assert {
        version: python
        for version in fw_utils.TORCH_DISTRIBUTED_GPU_SUPPORTED_FRAMEWORK_VERSIONS
        if version in found
        for python in found[version]["py_versions"]
    } == limits.CONTAINERS


def test_the_options_of_torchrun_are_all_known():
    from torch.distributed.run import get_args_parser

    options = {text for action in get_args_parser()._actions for text in action.option_strings}
    long = {text[2:].replace("_", "-") for text in options if text.startswith("--")}
    assert long == set(limits.TORCHRUN_OPTIONS)


def test_the_parameters_are_counted_as_the_model_has_them():
    from training.model import build_model

    job = TrainingSettings(model_width=48, model_depth=3, model_heads=4, sequence_length=40)
    model = build_model(job)
    assert limits.parameter_count(48, 3, 40) == sum(p.numel() for p in model.parameters())


def test_the_sdk_adds_no_more_hyperparameters_than_are_left_to_it(capsys):
    assert submit.main(["--dry-run"]) == 0
    sent = json.loads(capsys.readouterr().out)["HyperParameters"]
    added = [name for name in sent if name not in TrainingSettings.__dataclass_fields__]
    assert all(name.startswith("sagemaker_") for name in added)
    assert len(added) <= limits.SDK_HYPERPARAMETERS
