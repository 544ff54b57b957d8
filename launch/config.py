"""YAML and `--set` overrides → a validated, frozen JobConfig. Knows no AWS and no SDK."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from launch import rules
from launch.errors import Refused
from launch.schema import JobConfig
from training.settings import SettingsError, TrainingSettings, is_directory, nearest

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_CONFIG = ROOT / "config" / "default.yaml"


def load(path: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Read a YAML file, apply `section.key=value` overrides, and validate the whole.

    A file with `base: other.yaml` is read on top of that file, which lies beside it. Raises Refused
    with all problems at once.
    """
    values = _with_bases(path)
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
    if problems or (problems := rules.problems(config)):
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


def _with_bases(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path in above:
        raise Refused(f"base in {above[-1]} leads back to {path}; name another file, or none")
    values = _read(path)
    if base := values.pop("base", None):
        below = _with_bases(path.parent / str(base), (*above, path))
        return _on_top_of(below, values)
    return values


def _on_top_of(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged key by key; everything else replaces what the base says."""
    merged = dict(base)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = {**base[key], **value} if both else value
    return merged


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
