"""YAML and `--set` overrides → a validated, frozen JobConfig. Knows no AWS and no SDK."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from launch.errors import Refused
from training.settings import (
    RUN_NAME_PATTERN,
    SettingsError,
    TrainingSettings,
    is_directory,
    nearest,
)

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_CONFIG = ROOT / "config" / "default.yaml"
JOB_NAME_LIMIT = 63  # API_CreateTrainingJob: TrainingJobName
TIMESTAMP_LENGTH = len("-20261130-221530-123")
LONGEST_RUN = 28 * 86400  # API_StoppingCondition: MaxRuntimeInSeconds
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

    region: str | None = Field(default=None, pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")
    role: str | None = Field(default=None, pattern=r"^arn:aws[a-z\-]*:iam::\d{12}:role/.+$")
    bucket: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]$")
    prefix: str = Field(default="spot-ddp", pattern=r"^[\w.\-]+(/[\w.\-]+)*$")
    subnets: tuple[str, ...] = ()
    security_group_ids: tuple[str, ...] = ()
    kms_key: str | None = None
    tags: dict[str, str] = {}


class Compute(_Section):
    """The instances and the container."""

    instance_type: str = Field(default="ml.g5.2xlarge", pattern=r"^ml\.[a-z0-9\-]+\.[a-z0-9]+$")
    instance_count: int = Field(default=2, ge=1)
    volume_gb: int = Field(default=100, ge=1)
    framework_version: str = "2.8.0"
    py_version: str = "py312"
    image_uri: str | None = None


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
        return {f.name: getattr(self.training, f.name) for f in fields if not is_directory(f)}


def load(path: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Read a YAML file, apply `section.key=value` overrides, and validate the whole.

    Raises Refused with all problems at once.
    """
    values = _read(path)
    for override in overrides:
        _apply(values, override)
    return validate(values)


def validate(values: Mapping[str, Any]) -> JobConfig:
    """Check a configuration, given as nested dictionaries. Raises Refused with all problems."""
    values = {key: value for key, value in values.items() if value is not None}
    training, problems = _training(values.pop("training", None), values.get("run_name"))
    try:
        config = JobConfig.model_validate({**values, "training": training})
    except ValidationError as error:
        raise Refused([_sentence(item) for item in error.errors()] + problems) from None
    if problems or (problems := _combination_problems(config)):
        raise Refused(problems)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise Refused(f"the configuration {path} cannot be read: {reason}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise Refused(
            f"{path} is not valid YAML{line}: {getattr(error, 'problem', error)}"
        ) from None
    if not isinstance(values, dict):
        raise Refused(f"{path} holds no settings; see {DEFAULT_CONFIG.relative_to(ROOT)}")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) > 2 or not all(keys):
        raise Refused(
            f"--set {override!r} is not of the form section.key=value, "
            f"such as --set compute.instance_count=4"
        )
    section = values
    if len(keys) == 2:
        section = values[keys[0]] = values.get(keys[0]) or {}
        if not isinstance(section, dict):
            raise Refused(f"--set {override!r}: {keys[0]} is not a section")
    section[keys[-1]] = _value(text)


def _value(text: str) -> Any:
    """Lists, mappings and null as YAML reads them; the schema types everything else."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return value if value is None or isinstance(value, (list, dict)) else text


def _training(values: Any, run_name: Any) -> tuple[TrainingSettings, list[str]]:
    values = {} if values is None else values
    if not isinstance(values, dict):
        return TrainingSettings(), [f"training is {values!r}, but must be a section of settings"]
    problems = []
    directories = {f.name for f in dataclasses.fields(TrainingSettings) if is_directory(f)}
    for name in sorted(values.keys() & (directories | {"run_name"})):
        remedy = "set run_name at the top level" if name == "run_name" else "SageMaker decides it"
        problems.append(f"training.{name} cannot be set here: {remedy}")
    kept = {str(k): v for k, v in values.items() if k not in directories and k != "run_name"}
    if isinstance(run_name, str):
        kept["run_name"] = run_name
    try:
        return TrainingSettings.from_mapping(kept), problems
    except SettingsError as error:
        return TrainingSettings(), problems + [f"training.{p}" for p in error.problems]


def _sentence(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"]) or "the configuration"
    if error["type"] == "extra_forbidden":
        section, _, key = name.rpartition(".")
        parent = JobConfig.model_fields[section].annotation if section else JobConfig
        return f"{name} is not a setting{nearest(key, list(getattr(parent, 'model_fields', {})))}"
    if error["type"] == "missing":
        return f"{name} is missing; set it in the YAML or with --set {name}=…"
    said = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if error["type"] == "string_pattern_mismatch":
        said = f"must look like {_EXAMPLES[name]}"
    elif error["type"] == "invalid_key":
        return f"{name} is not a setting; a setting's name is text"
    elif error["type"] == "model_type":
        said = "must be a section of settings"
    elif error["type"] == "string_type" and isinstance(error["input"], (int, float)):
        said = "must be text; put it in quotes"
    return f"{name} is {error['input']!r}; it {said}"


_EXAMPLES = {
    "aws.region": "us-east-1",
    "aws.role": "arn:aws:iam::123456789012:role/name",
    "aws.bucket": "my-bucket: 3 to 63 small letters, digits, dots and hyphens",
    "aws.prefix": "team/project: no slash at either end, none doubled",
    "compute.instance_type": "ml.g5.2xlarge",
}


def _combination_problems(config: JobConfig) -> list[str]:
    problems = _run_name_problems(config.run_name)
    spot, aws = config.spot, config.aws
    if spot.enabled and spot.max_wait < spot.max_run:
        problems.append(
            f"spot.max_wait is {spot.max_wait} s but spot.max_run is {spot.max_run} s; a spot job "
            f"must be allowed to wait at least as long as it may run: "
            f"set spot.max_wait to {_readable(spot.max_run)} or more"
        )
    if spot.max_run > LONGEST_RUN:
        problems.append(
            f"spot.max_run is {spot.max_run} s; SageMaker stops every job after 28 days: "
            f"set spot.max_run to 28d or less"
        )
    if bool(aws.subnets) != bool(aws.security_group_ids):
        given, missing = ("subnets", "security_group_ids")[:: 1 if aws.subnets else -1]
        problems.append(f"aws.{given} is set but aws.{missing} is not; a VPC needs both")
    return problems


def _run_name_problems(name: str) -> list[str]:
    longest = JOB_NAME_LIMIT - TIMESTAMP_LENGTH
    if not re.fullmatch(RUN_NAME_PATTERN, name):
        return [
            f"run_name is {name!r}; SageMaker allows letters, digits and hyphens, "
            f"beginning and ending with a letter or digit: set run_name to something like my-run-1"
        ]
    if len(name) > longest:
        return [
            f"run_name is {len(name)} characters long; with the time added a job name may have "
            f"{JOB_NAME_LIMIT}: set run_name to {longest} characters or less"
        ]
    return []


def _readable(seconds: int) -> str:
    unit = next(u for u in "dhms" if seconds % _UNITS[u] == 0)
    return f"{seconds // _UNITS[unit]}{unit}"
