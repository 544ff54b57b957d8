"""The command that continues a job: its request, turned back into what a person types."""

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from launch.config import DEFAULT_CONFIG, load
from launch.data import channels
from launch.errors import Refused
from launch.following.job import Job
from launch.runs import split
from launch.schema import JobConfig
from training.settings import TrainingSettings, is_directory

_IMAGE = re.compile(r"/pytorch-training:([0-9.]+)-[cg]pu-(py[0-9]+)")


def command(job: Job) -> str | None:
    """`python launch/submit.py` with the run's name and all that differs from the default.

    Without the bucket, the prefix or a setting, another start might not find the run's snapshots or
    be refused. None for a job that no run_name connects with others.
    """
    if job.run_name is None:
        return None
    wanted = dict(_settings(job))
    usual = _usual()
    chosen = {name: value for name, value in wanted.items() if usual.get(name) != value}
    sets = [("run_name", job.run_name), *chosen.items()]
    parts = [part for name, value in sets for part in ("--set", f"{name}={_text(value)}")]
    return shlex.join(["python", "launch/submit.py", *parts])


def _settings(job: Job) -> Iterator[tuple[str, Any]]:
    """What the request says, under the names of the configuration."""
    request = job.response
    arn = str(request.get("TrainingJobArn") or "").split(":")
    if len(arn) > 3:
        yield "aws.region", arn[3]
    for name, path in _PLACES.items():
        if (value := _at(request, path)) not in (None, "", []):
            yield name, value
    yield from _home(job)
    yield from _image(request)
    if not request.get("EnableManagedSpotTraining"):
        yield "spot.enabled", False
    for channel in request.get("InputDataConfig") or []:
        if uri := _at(channel, "DataSource.S3DataSource.S3Uri"):
            yield f"data.{channel.get('ChannelName')}", uri
    yield from _training(job)


_PLACES = {
    "aws.role": "RoleArn",
    "aws.kms_key": "OutputDataConfig.KmsKeyId",
    "aws.volume_kms_key": "ResourceConfig.VolumeKmsKeyId",
    "aws.subnets": "VpcConfig.Subnets",
    "aws.security_group_ids": "VpcConfig.SecurityGroupIds",
    "compute.instance_type": "ResourceConfig.InstanceType",
    "compute.instance_count": "ResourceConfig.InstanceCount",
    "compute.volume_gb": "ResourceConfig.VolumeSizeInGB",
    "spot.max_run": "StoppingCondition.MaxRuntimeInSeconds",
    "spot.max_wait": "StoppingCondition.MaxWaitTimeInSeconds",
}


def _at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _home(job: Job) -> Iterator[tuple[str, str]]:
    bucket, key = split(job.snapshots_uri or "s3:///")
    home = re.fullmatch(rf"(.+)/{re.escape(str(job.run_name))}/snapshots(-[0-9]+)?/", key)
    if home:
        yield "aws.bucket", bucket
        yield "aws.prefix", home[1]


def _image(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    image = str(_at(request, "AlgorithmSpecification.TrainingImage") or "")
    if known := _IMAGE.search(image):
        yield "compute.framework_version", known[1]
        yield "compute.py_version", known[2]
    elif image:
        yield "compute.image_uri", image


def _training(job: Job) -> Iterator[tuple[str, Any]]:
    max_run = _at(job.response, "StoppingCondition.MaxRuntimeInSeconds")
    for field in dataclasses.fields(TrainingSettings):
        value = job.hyperparameter(field.name)
        if value is None or is_directory(field) or field.name == "run_name":
            continue
        if field.name == "deadline_seconds" and value == max_run:
            continue  # the launcher fills it in
        yield f"training.{field.name}", value


def _usual() -> dict[str, Any]:
    """What submit.py takes from the default configuration, by the same names."""
    try:
        config = load(DEFAULT_CONFIG)
        data = {f"data.{one.name}": _uri(one, config) for one in channels(config)}
    except Refused:
        return {}  # it was made one's own, and is being edited: say everything
    values = {
        f"{section}.{name}": list(value) if isinstance(value, tuple) else value
        for section in ("aws", "compute", "spot")
        for name, value in getattr(config, section)
    }
    training = {f"training.{k}": v for k, v in config.hyperparameters().items()}
    return {**values, **training, **data}


def _uri(channel: Any, config: JobConfig) -> str | None:
    """Where the default data lies, where that is known: not in an unnamed bucket."""
    return channel.uri(config, config.aws.bucket) if config.aws.bucket else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
