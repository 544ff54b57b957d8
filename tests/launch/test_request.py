"""The CreateTrainingJob request, field by field, as it arrives at the mocked AWS."""

import io
import json
import subprocess
import sys
import tarfile

import boto3
import jsonschema
import pytest
from sagemaker.config.config_schema import SAGEMAKER_PYTHON_SDK_CONFIG_SCHEMA

from launch import config, estimator, start
from launch.errors import Refused
from training.metrics import METRIC_DEFINITIONS
from training.settings import TrainingSettings

PROJECT = {"Key": "project", "Value": "sagemaker-spot-ddp"}


@pytest.mark.parametrize("count", [1, 2])
def test_the_request_on_spot(send, count):
    request = send(f"compute.instance_count={count}")
    name = request["TrainingJobName"]
    hyperparameters = {k: json.loads(v) for k, v in request.pop("HyperParameters").items()}
    assert request == {
        "TrainingJobName": name,
        "RoleArn": "arn:aws:iam::123456789012:role/training",
        "AlgorithmSpecification": {
            "TrainingInputMode": "File",
            "TrainingImage": "763104351884.dkr.ecr.us-east-1.amazonaws.com/"
            "pytorch-training:2.8.0-gpu-py312",
            "ContainerEntrypoint": ["bash", "-c", estimator.DELIVER_SIGTERM],
            "MetricDefinitions": METRIC_DEFINITIONS,
            "EnableSageMakerMetricsTimeSeries": True,
        },
        "ResourceConfig": {
            "InstanceType": "ml.g5.2xlarge",
            "InstanceCount": count,
            "VolumeSizeInGB": 100,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400, "MaxWaitTimeInSeconds": 172800},
        "EnableManagedSpotTraining": True,
        "CheckpointConfig": {
            "S3Uri": "s3://my-bucket/spot-ddp/shakespeare/snapshots/",
            "LocalPath": "/opt/ml/checkpoints",
        },
        "OutputDataConfig": {"S3OutputPath": "s3://my-bucket/spot-ddp/shakespeare/output"},
        "InputDataConfig": [
            {
                "ChannelName": "train",
                "InputMode": "FastFile",
                "DataSource": {
                    "S3DataSource": {
                        "S3DataType": "S3Prefix",
                        "S3DataDistributionType": "FullyReplicated",
                        "S3Uri": request["InputDataConfig"][0]["DataSource"]["S3DataSource"][
                            "S3Uri"
                        ],
                    }
                },
            }
        ],
        "Environment": {
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "110",
            "CHECKPOINT_S3_URI": request["CheckpointConfig"]["S3Uri"],
        },
        "ProfilerConfig": {"DisableProfiler": True},
        "Tags": [PROJECT],
    }
    assert hyperparameters["sagemaker_torch_distributed_enabled"] is True
    assert hyperparameters["sagemaker_program"] == "training/train.py"
    assert hyperparameters["run_name"] == "shakespeare"
    assert hyperparameters["total_steps"] == 5000


def test_the_request_on_demand_has_no_wait_but_keeps_the_snapshots(send):
    request = send("spot.enabled=false")
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 86400}
    assert not request.get("EnableManagedSpotTraining")
    assert request["CheckpointConfig"]["S3Uri"].endswith("/snapshots/")


def test_the_images_own_entry_point_can_be_kept(send):
    assert "ContainerEntrypoint" not in send("spot.deliver_sigterm=false")["AlgorithmSpecification"]


def test_every_string_of_the_entry_point_is_short_enough():
    assert all(len(part) <= 256 for part in estimator._entry_point(True))


def test_network_keys_and_tags_are_in_the_request_when_set(send):
    request = send(
        "aws.subnets=[subnet-1]",
        "aws.security_group_ids=[sg-1]",
        "aws.kms_key=key",
        "aws.volume_kms_key=disk-key",
        "aws.encrypt_inter_container_traffic=true",
        "compute.instance_type=ml.p3.8xlarge",
        "compute.environment={NCCL_DEBUG: INFO}",
        "aws.tags={team: vision}",
    )
    assert request["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert request["OutputDataConfig"]["KmsKeyId"] == "key"
    assert request["ResourceConfig"]["VolumeKmsKeyId"] == "disk-key"
    assert request["EnableInterContainerTrafficEncryption"] is True
    assert request["Environment"]["NCCL_DEBUG"] == "INFO"
    assert request["Tags"] == [{"Key": "team", "Value": "vision"}, PROJECT]


def test_an_image_is_taken_as_it_is(send):
    image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/pytorch:mine"
    request = send(f"compute.image_uri={image}", "compute.instance_type=ml.c5.xlarge")
    assert request["AlgorithmSpecification"]["TrainingImage"] == image


def test_the_dry_run_prints_what_would_arrive(send, values):
    arrived = send()
    dry = start.request_of(config.validate(values))
    assert dry["TrainingJobName"] != arrived["TrainingJobName"]
    renamed = json.dumps(dry).replace(dry["TrainingJobName"], arrived["TrainingJobName"])
    assert json.loads(renamed) == arrived


def test_what_is_shipped_is_the_package_and_nothing_else(send, tmp_path):
    address = json.loads(send()["HyperParameters"]["sagemaker_submit_directory"])
    key = address.removeprefix("s3://my-bucket/")
    packed = boto3.client("s3").get_object(Bucket="my-bucket", Key=key)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path, filter="data")
    assert "training/train.py" in names
    assert "training/snapshots/files.py" in names
    assert not [n for n in names if n.split("/")[0] != "training" or "__pycache__" in n]
    assert not [n for n in names if n.endswith((".pyc", "setup.py", "pyproject.toml"))]
    # It runs from a bare copy, where this repository is not installed.
    code = "import sys; sys.path = [p for p in sys.path if 'main' not in p]; import runpy; "
    code += "sys.argv = ['train.py', '--help']; runpy.run_path(sys.argv[0], run_name='__main__')"
    shown = subprocess.run(
        [sys.executable, "train.py", "--help"],
        cwd=tmp_path / "training",
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "--global-batch-size" in shown.stdout


def test_the_second_submit_uploads_no_data(send, monkeypatch):
    from launch import data

    sent = []
    upload = data.upload
    monkeypatch.setattr(data, "upload", lambda *args: sent.append(upload(*args)) or sent[-1])
    first, second = send(), send()
    assert sent == [1, 0]
    assert first["InputDataConfig"] == second["InputDataConfig"]


def test_nothing_is_uploaded_when_the_sdk_does_not_know_the_container(send):
    for override in ("compute.py_version=py39", "compute.framework_version=2.8"):
        with pytest.raises(Refused, match=r"compute\.image_uri"):
            send(override)
    assert boto3.client("s3").list_objects_v2(Bucket="my-bucket")["KeyCount"] == 0


def test_telemetry_is_off_and_our_defaults_are_ones_that_the_sdk_accepts(send, monkeypatch):
    import sagemaker.telemetry.telemetry_logging as telemetry

    sent = []
    monkeypatch.setattr(telemetry, "_send_telemetry_request", lambda *a, **k: sent.append(a))
    send()
    assert sent == []
    jsonschema.validate(estimator.SDK_DEFAULTS, SAGEMAKER_PYTHON_SDK_CONFIG_SCHEMA)


def test_no_flag_of_the_script_is_one_that_torchrun_would_take_for_its_own():
    from torch.distributed.run import get_args_parser

    flags = [f"--{name}" for name in TrainingSettings.__dataclass_fields__]
    flags += [flag.replace("_", "-") for flag in flags]
    arguments = [part for flag in flags for part in (flag, "1")]
    parsed = get_args_parser().parse_args(["--nnodes", "2", "train.py", *arguments])
    assert parsed.training_script_args == arguments
