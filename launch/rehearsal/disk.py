"""What SageMaker puts on an instance's disk before the container starts."""

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

from launch.rehearsal.sync import SyncAgent
from launch.runs import split

OPT_ML = "/opt/ml"
_GROUP = "homogeneousCluster"


def fill(base: Path, request: dict[str, Any], host: str, hosts: list[str], s3: Any) -> None:
    """Fill the empty directory `base`, which stands for /opt/ml, but for the checkpoints."""
    config = base / "input" / "config"
    for directory in (config, base / "model", base / "output" / "data", base / "bin"):
        directory.mkdir(parents=True)
    for name, content in _config_files(base, request, host, hosts).items():
        (config / name).write_text(json.dumps(content))
    for channel in request.get("InputDataConfig", []):
        uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
        SyncAgent(s3, uri, base / "input" / "data" / channel["ChannelName"]).restore()
    # A simulated instance has no GPU, whatever this machine has: the toolkit counts them with this.
    no_gpu = base / "bin" / "nvidia-smi"
    no_gpu.write_text("#!/bin/sh\nexit 1\n")
    no_gpu.chmod(0o755)


def unpack_code(base: Path, request: dict[str, Any], s3: Any) -> None:
    """Put the shipped code where the toolkit would put it."""
    address = json.loads(request["HyperParameters"]["sagemaker_submit_directory"])
    bucket, key = split(address)
    packed = base / "sourcedir.tar.gz"
    s3.download_file(bucket, key, str(packed))
    with tarfile.open(packed) as archive:
        archive.extractall(base / "code", filter="data")


def checkpoint_dir(base: Path, request: dict[str, Any]) -> Path:
    """Where the request's checkpoint directory lies on this disk."""
    return base / Path(request["CheckpointConfig"]["LocalPath"]).relative_to(OPT_ML)


def _config_files(
    base: Path, request: dict[str, Any], host: str, hosts: list[str]
) -> dict[str, dict[str, Any]]:
    instance_type = request["ResourceConfig"]["InstanceType"]
    group = {"instance_group_name": _GROUP, "instance_type": instance_type, "hosts": hosts}
    channels = request.get("InputDataConfig", [])
    return {
        "hyperparameters.json": request["HyperParameters"],
        "resourceconfig.json": {
            "current_host": host,
            "hosts": hosts,
            "current_instance_type": instance_type,
            "current_group_name": _GROUP,
            "instance_groups": [group],
            "network_interface_name": "lo" if sys.platform == "linux" else "lo0",
        },
        "inputdataconfig.json": {
            channel["ChannelName"]: {
                "TrainingInputMode": channel.get("InputMode", "File"),
                "S3DistributionType": "FullyReplicated",
                "RecordWrapperType": "None",
            }
            for channel in channels
        },
        "checkpointconfig.json": {
            "S3Uri": request["CheckpointConfig"]["S3Uri"],
            "LocalPath": str(checkpoint_dir(base, request)),
        },
    }
