"""The shape of a job's configuration: sections, keys, types and the form of single values."""

import dataclasses
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from training.settings import AUTO, TrainingSettings, is_directory

# In a pattern, \d and \w would allow the digits and letters of every script.
_ROLE = r"^arn:aws[a-z\-]*:iam::[0-9]{12}:role/[a-zA-Z0-9_+=,.@/\-]+$"
_PREFIX = r"^[a-zA-Z0-9_.\-]+(/[a-zA-Z0-9_.\-]+)*$"
REGION = r"^[a-z]{2,4}(-[a-z]+)+-[0-9]$"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(value: Any) -> Any:
    """`90m`, `24h`, `2d`, `45s`, `3600` → seconds; anything else is refused."""
    match = re.fullmatch(r"\s*(\d+)\s*([smhd]?)\s*", str(value))
    if isinstance(value, (bool, float)) or not match:
        raise ValueError("must be a duration such as 90m, 24h, 2d or 3600")
    return int(match[1]) * _UNITS[match[2] or "s"]


Seconds = Annotated[int, BeforeValidator(seconds_of), Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Aws(_Section):
    """The account: where the job runs, as whom, and where its files live."""

    region: str | None = Field(default=None, pattern=REGION)
    role: str | None = Field(default=None, pattern=_ROLE)
    bucket: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]$")
    prefix: str = Field(default="spot-ddp", pattern=_PREFIX)
    subnets: tuple[str, ...] = ()
    security_group_ids: tuple[str, ...] = ()
    kms_key: str | None = None  # encrypts what the job writes to S3
    volume_kms_key: str | None = None  # encrypts the instances' volumes
    encrypt_inter_container_traffic: bool = False
    network_isolation: bool = False
    tags: dict[str, str] = {}


class Compute(_Section):
    """The instances and the container."""

    instance_type: str = Field(default="ml.g5.2xlarge", pattern=r"^ml\.[a-z0-9\-]+\.[a-z0-9]+$")
    instance_count: int = Field(default=2, ge=1)
    volume_gb: int = Field(default=100, ge=1)
    framework_version: str = "2.8.0"
    py_version: str = "py312"
    image_uri: str | None = None
    environment: dict[str, str] = {}
    warm_pool: Seconds | None = None  # how long instances are kept for the next job


class Spot(_Section):
    """How long the job may run and, on spot capacity, wait."""

    enabled: bool = True
    max_run: Seconds = 86400
    max_wait: Seconds = 172800
    deliver_sigterm: bool = True


class Data(_Section):
    """`sample`, an S3 prefix, or a local folder that is uploaded once."""

    train: str = "sample"
    validation: str | None = None
    channels: dict[str, str] = {}  # further channels, by name
    input_mode: Literal["FastFile", "File"] = "FastFile"


class JobConfig(_Section):
    """One job, checked as far as it can be without AWS."""

    run_name: str
    aws: Aws = Aws()
    compute: Compute = Compute()
    spot: Spot = Spot()
    data: Data = Data()
    training: TrainingSettings

    def hyperparameters(self) -> dict[str, Any]:
        """What `train.py` gets on its command line: all settings, but none of the directories."""
        fields = dataclasses.fields(self.training)
        sent = {f.name: getattr(self.training, f.name) for f in fields if not is_directory(f)}
        if not self.training.deadline_seconds:
            sent["deadline_seconds"] = float(self.spot.max_run)
        return {name: AUTO if value is None else value for name, value in sent.items()}


def readable(seconds: int) -> str:
    """A duration as a person would write it: 86400 → 1d."""
    unit = next(u for u in "dhms" if seconds % _UNITS[u] == 0)
    return f"{seconds // _UNITS[unit]}{unit}"


def encryption(kms_key: str | None) -> dict[str, str]:
    """The arguments with which S3 encrypts what we put; by default, as the bucket says."""
    return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}
