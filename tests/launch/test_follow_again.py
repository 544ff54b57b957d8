"""The command that continues a job leads to the request that started it."""

import json
import shlex

import pytest

from launch import start
from launch.config import ROOT, load
from launch.following import again
from launch.following.job import Job
from launch.submit import _parser as submit_parser

BASE = [
    "run_name=mine",
    "aws.region=us-east-1",
    "aws.bucket=my-bucket",
    "aws.role=arn:aws:iam::123456789012:role/training",
]
PRESETS = sorted(path.name for path in (ROOT / "config").glob("*.yaml"))
SECURE = [
    "aws.network_isolation=true",
    "aws.encrypt_inter_container_traffic=true",
    "aws.subnets=[subnet-0a1b2c3d]",
    "aws.security_group_ids=[sg-0a1b2c3d]",
    "aws.volume_kms_key=alias/mine",
    "compute.instance_type=ml.p3.8xlarge",
    'compute.environment={"NCCL_DEBUG": "INFO"}',
    "data.train=s3://my-data/text/",
    "data.validation=s3://my-data/validation/",
    'data.channels={"words": "s3://my-data/words/"}',
    "data.input_mode=File",
    "spot.deliver_sigterm=false",
    "training.learning_rate=0.002",
]
NEWER = ["compute.image_uri=pytorch:2.13-cu133-amzn2023-sagemaker"]
FOREIGN = ["compute.image_uri=123456789012.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.8.0"]


def continued(config):
    """The request of a job of `config`, and that of the job that its command would start."""
    first = start.request_of(config)
    arn = "arn:aws:sagemaker:us-east-1:123456789012:training-job/mine-1"
    command = shlex.split(again.command(Job({**first, "TrainingJobArn": arn})))
    assert command[:2] == ["python", "launch/submit.py"]
    options = submit_parser().parse_args(command[2:])
    second = start.request_of(load(ROOT / "config" / "default.yaml", options.overrides))
    for request in (first, second):
        del request["TrainingJobName"]
        for name in ("sagemaker_submit_directory", "sagemaker_job_name"):
            request["HyperParameters"].pop(name, None)
        for channel in request["InputDataConfig"]:
            if channel["ChannelName"] == "code":
                del channel["DataSource"]
    return first, second, command


@pytest.mark.parametrize("preset", PRESETS)
def test_for_every_preset_it_is_the_same_job(preset):
    first, second, _ = continued(load(ROOT / "config" / preset, BASE))
    assert second == first


@pytest.mark.parametrize("changes", [SECURE, NEWER, FOREIGN], ids=["secure", "newer", "foreign"])
def test_nothing_that_was_asked_for_is_lost(changes):
    first, second, _ = continued(load(ROOT / "config" / "default.yaml", [*BASE, *changes]))
    assert second == first


def test_what_the_default_has_and_the_job_did_not_is_unset(monkeypatch, tmp_path):
    mine = tmp_path / "default.yaml"
    mine.write_text((ROOT / "config" / "default.yaml").read_text())
    config = load(mine, [*BASE, "data.train=s3://my-data/text/"])
    described = {**start.request_of(config), "TrainingJobArn": "arn:aws:sagemaker:us-east-1:1:x/y"}
    own = ["spot.enabled=false", "spot.max_wait=48h", "aws.kms_key=alias/mine", *SECURE[2:4]]
    default = load(mine, [*BASE, *own, *NEWER])
    monkeypatch.setattr(again, "load", lambda path: default)
    command = shlex.split(again.command(Job(described)))
    for expected in (
        "spot.enabled=true",
        "aws.kms_key=null",
        "aws.subnets=[]",
        "compute.image_uri=null",
    ):
        assert expected in command
    assert not any("learning_rate" in part for part in command)


def test_local_data_is_not_read_again_to_say_it(monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    config = load(ROOT / "config" / "default.yaml", BASE)
    data = config.data.model_copy(update={"train": str(tmp_path)})
    monkeypatch.setattr(again, "load", lambda path: config.model_copy(update={"data": data}))
    monkeypatch.setattr(again, "channels", lambda config: pytest.fail("a folder was read"))
    source = {"DataSource": {"S3DataSource": {"S3Uri": "s3://b/data/1/"}}, "ChannelName": "train"}
    hyperparameters = {"run_name": json.dumps("mine")}
    job = Job({"HyperParameters": hyperparameters, "InputDataConfig": [source]})
    assert "data.train=s3://b/data/1/" in shlex.split(again.command(job))
