"""The command that continues a job: its request, turned back into what a person types."""

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from launch import images, limits
from launch.config import DEFAULT_CONFIG, load
from launch.data import SAMPLE, channels
from launch.errors import Refused
from launch.following.job import Job
from launch.runs import split
from launch.schema import JobConfig
from training.settings import TrainingSettings, is_directory


def command(job: Job) -> str | None:
    """`python launch/submit.py` with the run's name and all that differs from the default.

    Without the bucket, the prefix or a setting, another start might not find the run's snapshots or
    be refused. What AWS does not tell are the tags. None for a job that no run_name connects with
    others.
    """
    if job.run_name is None:
        return None
    wanted = dict(_settings(job))
    usual = _usual()
    # A default that the job did not have is unset, or the next job would be another one.
    chosen = {n: value for n, value in wanted.items() if n not in usual or usual[n] != value}
    sets = [("run_name", job.run_name), *chosen.items()]
    parts = [part for name, value in sets for part in ("--set", f"{name}={_text(value)}")]
    return shlex.join(["python", "launch/submit.py", *parts])


def _settings(job: Job) -> Iterator[tuple[str, Any]]:
    """What the request says, under the names of the configuration."""
    request = job.response
    arn = str(request.get("TrainingJobArn") or "").split(":")
    region = arn[3] if len(arn) > 3 else ""
    if region:
        yield "aws.region", region
    for name, (path, empty) in _PLACES.items():
        if (value := _at(request, path) or empty) is not ...:
            yield name, value
    yield from _home(job)
    yield from _container(request, region)
    yield from _spot(request)
    yield from _data(request)
    yield from _training(job)


# Where the request has a value, and what it means that it has none; every request has those with ….
_PLACES: dict[str, tuple[str, Any]] = {
    "aws.role": ("RoleArn", None),
    "aws.kms_key": ("OutputDataConfig.KmsKeyId", None),
    "aws.volume_kms_key": ("ResourceConfig.VolumeKmsKeyId", None),
    "aws.subnets": ("VpcConfig.Subnets", []),
    "aws.security_group_ids": ("VpcConfig.SecurityGroupIds", []),
    "aws.network_isolation": ("EnableNetworkIsolation", False),
    "aws.encrypt_inter_container_traffic": ("EnableInterContainerTrafficEncryption", False),
    "compute.instance_type": ("ResourceConfig.InstanceType", ...),
    "compute.instance_count": ("ResourceConfig.InstanceCount", ...),
    "compute.volume_gb": ("ResourceConfig.VolumeSizeInGB", ...),
    "compute.warm_pool": ("ResourceConfig.KeepAlivePeriodInSeconds", None),
    "spot.enabled": ("EnableManagedSpotTraining", False),
    "spot.max_run": ("StoppingCondition.MaxRuntimeInSeconds", ...),
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


def _container(request: Mapping[str, Any], region: str) -> Iterator[tuple[str, Any]]:
    """The framework's version where that alone leads to the same image, else its address."""
    variables = _at(request, "Environment") or {}
    ours = limits.LAUNCHER_ENVIRONMENT
    yield "compute.environment", {n: v for n, v in variables.items() if n not in ours}
    image = str(_at(request, "AlgorithmSpecification.TrainingImage") or "")
    tag = re.fullmatch(r".+/(pytorch-training:([0-9.]+)-gpu-(py[0-9]+))", image)
    if tag and limits.CONTAINERS.get(tag[2]) == tag[3] and _address(tag[1], region) == image:
        yield "compute.image_uri", None
        yield "compute.framework_version", tag[2]
        yield "compute.py_version", tag[3]
    elif image:
        yield "compute.image_uri", image


def _address(short: str, region: str) -> str | None:
    try:
        return images.resolve(short, region)
    except Refused:
        return None


def _spot(request: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    max_wait = _at(request, "StoppingCondition.MaxWaitTimeInSeconds")
    if request.get("EnableManagedSpotTraining") and max_wait:
        yield "spot.max_wait", max_wait
    yield "spot.deliver_sigterm", bool(_at(request, "AlgorithmSpecification.ContainerEntrypoint"))


def _data(request: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    sources, modes = {}, set()
    for channel in request.get("InputDataConfig") or []:
        name, uri = str(channel.get("ChannelName")), _at(channel, "DataSource.S3DataSource.S3Uri")
        if uri and name not in limits.RESERVED_CHANNELS:
            sources[name] = uri
            modes.add(channel.get("InputMode"))
    if train := sources.pop("train", None):
        yield "data.train", train
    yield "data.validation", sources.pop("validation", None)
    yield "data.channels", sources
    if len(modes) == 1 and (mode := modes.pop()):
        yield "data.input_mode", mode


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
    except Refused:
        return {}  # it was made one's own, and is being edited: say everything
    values = {
        f"{section}.{name}": list(value) if isinstance(value, tuple) else value
        for section in ("aws", "compute", "spot", "data")
        for name, value in getattr(config, section)
    }
    training = {f"training.{k}": v for k, v in config.hyperparameters().items()}
    train = {"data.train": _sample_uri(config)} if config.data.train == SAMPLE else {}
    return {**values, **training, **train}


def _sample_uri(config: JobConfig) -> str | None:
    """Where the sample text lies, where that is known: not in an unnamed bucket."""
    if not config.aws.bucket:
        return None
    data = config.data.model_copy(update={"validation": None, "channels": {}})
    (sample,) = channels(config.model_copy(update={"data": data}))
    return sample.uri(config, config.aws.bucket)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
