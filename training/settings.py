"""Every knob of the training job: one dataclass, one line of help each.

The launcher checks its YAML against this same class, so this file imports nothing but the standard
library: `launch/submit.py --dry-run` must not wait for torch.
"""

import argparse
import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

RUN_NAME_PATTERN = r"[a-zA-Z0-9](-*[a-zA-Z0-9])*"
DEFAULT_CHECKPOINT_DIR = "/opt/ml/checkpoints"
AUTO = "auto"
CHECKPOINT_S3_URI = "CHECKPOINT_S3_URI"  # the variable in which the launcher repeats it


class SettingsError(ValueError):
    """One or more settings cannot work; `problems` holds a sentence for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


def knob(
    default: Any,
    help: str,
    *,
    fixed: bool = False,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    auto: bool = False,
) -> Any:
    """A field with its help, its range, and whether it is `fixed` for the life of a run.

    With `auto` it is a number or None, which people write as the word auto.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "fixed": fixed,
            "minimum": minimum,
            "above": above,
            "below": below,
            "choices": choices,
            "auto": auto,
        },
    )


def directory(find: Any, help: str) -> Any:
    """A field that names a place: SageMaker says where it is, so no job configuration does."""
    return field(default_factory=find, metadata={"help": help, "fixed": False, "directory": True})


def sagemaker_checkpoint_dir() -> str | None:
    """The directory that SageMaker syncs to S3, as this container was told; None outside of one.

    Source: CheckpointConfig.LocalPath, which the platform writes to checkpointconfig.json.
    """
    config_dir = Path(os.environ.get("SM_INPUT_CONFIG_DIR", "/opt/ml/input/config"))
    try:
        config = json.loads((config_dir / "checkpointconfig.json").read_text())
    except (OSError, ValueError):
        return None
    path = config.get("LocalPath") if isinstance(config, dict) else None
    return path if isinstance(path, str) and path else None


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The whole configuration of one training run.

    A setting marked `fixed` decides the bits of the result: a snapshot that was written under
    another value is refused. The others may change whenever the run is started again;
    `micro_batch_size` and `compile` then change how its numbers are rounded.
    """

    run_name: str = knob("local", "names the run: the same name resumes, another starts fresh")
    seed: int = knob(0, "the source of all randomness and of the data order", fixed=True, minimum=0)
    total_steps: int = knob(1000, "optimizer steps of the whole run; may grow later", minimum=1)
    global_batch_size: int = knob(
        32, "samples that one optimizer step sees, on all ranks together", fixed=True, minimum=1
    )
    micro_batch_size: int = knob(
        0, "samples that a device takes at once; 0: a rank's whole share", minimum=0
    )
    learning_rate: float = knob(3e-4, "peak of the schedule", fixed=True, above=0)
    learning_rate_floor: float = knob(
        0.1, "where the cosine ends, as a fraction of the peak", fixed=True, minimum=0, below=1.001
    )
    warmup_steps: int = knob(0, "steps of linear warm-up to the peak", fixed=True, minimum=0)
    decay_steps: int = knob(
        0, "step at which the cosine reaches its floor; 0: total_steps", fixed=True, minimum=0
    )
    weight_decay: float = knob(0.1, "AdamW's, on matrices only", fixed=True, minimum=0)
    beta1: float = knob(0.9, "AdamW's first-moment decay", fixed=True, minimum=0, below=1)
    beta2: float = knob(0.95, "AdamW's second-moment decay", fixed=True, minimum=0, below=1)
    gradient_clip: float = knob(
        1.0, "largest norm of the gradient; 0: not clipped", fixed=True, minimum=0
    )
    deterministic: bool = knob(
        True, "on a GPU: only algorithms that give the same bits every time", fixed=True
    )
    precision: str = knob(
        "fp32", "arithmetic of forward and backward", fixed=True, choices=("fp32", "bf16", "fp16")
    )
    tf32: bool = knob(False, "on a GPU: multiply fp32 matrices in TF32", fixed=True)
    compile: bool = knob(False, "compile the model with torch.compile")

    validation_share: float = knob(
        0, "share of the training data held out for validation", fixed=True, minimum=0, below=1
    )
    evaluate_every: int = knob(0, "steps between evaluations; 0: only after the last", minimum=0)
    export: str = knob(
        "last",
        "the state that becomes model.pt: after the last step, or with the lowest validation loss",
        choices=("last", "best"),
    )

    model_width: int = knob(128, "features of a token", fixed=True, minimum=1)
    model_depth: int = knob(4, "transformer blocks", fixed=True, minimum=1)
    model_heads: int = knob(4, "attention heads; divides the width", fixed=True, minimum=1)
    sequence_length: int = knob(128, "bytes that the model sees at once", fixed=True, minimum=1)
    dropout: float = knob(0.1, "share of activations dropped", fixed=True, minimum=0, below=1)

    snapshot_seconds: float | None = knob(
        None,
        "seconds between snapshots; 0: not by time; auto: as often as snapshot_overhead allows",
        minimum=0,
        auto=True,
    )
    snapshot_steps: int = knob(0, "steps between snapshots; 0: not by steps", minimum=0)
    snapshot_overhead: float = knob(
        0.01,
        "share of the time that snapshots may cost, where their pace is auto",
        above=0,
        below=1,
    )
    mean_seconds_between_interruptions: float = knob(
        0, "how long an instance lasts on average, for the auto pace; 0: unknown", minimum=0
    )
    deadline_seconds: float = knob(
        0, "training time after which the job is stopped, over all attempts; 0: never", minimum=0
    )
    snapshots_kept: int = knob(3, "newest whole snapshots that are never pruned", minimum=2)

    dataloader_workers: int = knob(0, "processes that read data, on each rank", minimum=0)
    log_every: int = knob(1, "steps between log lines", minimum=1)
    tensorboard: bool = knob(False, "write TensorBoard's event files into checkpoint_dir")
    collective_timeout: int = knob(
        600, "seconds after which a silent peer counts as gone", minimum=1
    )

    checkpoint_dir: str = directory(
        lambda: sagemaker_checkpoint_dir() or DEFAULT_CHECKPOINT_DIR, "where snapshots are written"
    )
    checkpoint_s3_uri: str = directory(
        lambda: os.environ.get(CHECKPOINT_S3_URI, ""), "where S3 has checkpoint_dir; empty: unknown"
    )
    train_dir: str = directory(lambda: os.environ.get("SM_CHANNEL_TRAIN", ""), "training data")
    validation_dir: str = directory(
        lambda: os.environ.get("SM_CHANNEL_VALIDATION", ""), "validation data; empty: none"
    )
    model_dir: str = directory(
        lambda: os.environ.get("SM_MODEL_DIR", "/opt/ml/model"), "where the final model is written"
    )

    def __post_init__(self) -> None:
        problems = [
            problem
            for one in dataclasses.fields(self)
            for problem in _range_problems(one, getattr(self, one.name))
        ]
        if problems or (problems := _combination_problems(self)):
            raise SettingsError(problems)

    @property
    def validates(self) -> bool:
        """Whether there is data that is not trained on."""
        return bool(self.validation_dir) or self.validation_share > 0

    def fingerprint(self) -> dict[str, Any]:
        """The settings that a snapshot must have been written under to be resumed."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if is_fixed(f)}

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> "TrainingSettings":
        """Parse command-line flags, spelled with hyphens or underscores.

        Raises SettingsError, with every problem that can be seen at once.
        """
        parser = _Parser(
            prog="train.py", allow_abbrev=False, description=(cls.__doc__ or "").splitlines()[0]
        )
        for one in dataclasses.fields(cls):
            names = dict.fromkeys([flag(one.name), "--" + one.name])
            parser.add_argument(*names, dest=one.name, help=one.metadata["help"])
        values, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise SettingsError(
                [
                    _unknown_flag(text)
                    for before, text in zip(["", *unknown], unknown, strict=False)
                    if text.startswith("--") or not before.startswith("--")  # else: its value
                ]
            )
        return cls.from_mapping({k: v for k, v in vars(values).items() if v is not None})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "TrainingSettings":
        """Build settings from names and values, which may be text.

        Raises SettingsError for unknown names, values of a wrong type and values out of range.
        """
        known = {one.name: one for one in dataclasses.fields(cls)}
        problems, converted = [], {}
        for name, value in values.items():
            if name not in known:
                problems.append(f"{name} is not a training setting{nearest(name, known)}")
                continue
            try:
                converted[name] = _convert(known[name], value)
            except (TypeError, ValueError, KeyError):
                problems.append(f"{name} is {value!r}, but must be {_described(known[name])}")
        try:
            settings = cls(**converted)
        except SettingsError as error:
            raise SettingsError(problems + error.problems) from None
        if problems:
            raise SettingsError(problems)
        return settings


_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def is_fixed(one: "dataclasses.Field[Any]") -> bool:
    """Whether this field may not change while a run goes on."""
    return bool(one.metadata["fixed"])


def is_directory(one: "dataclasses.Field[Any]") -> bool:
    """Whether this field names a directory, which SageMaker decides."""
    return bool(one.metadata.get("directory"))


def nearest(name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """`; did you mean …?` for a misspelled name, or the names there are."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {match[0]}?" if match else f"; there are {', '.join(known)}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError([message])


def _unknown_flag(text: str) -> str:
    if not text.startswith("--"):
        return f"{text!r} stands alone; every setting is written as --name value"
    known = [flag(f.name) for f in dataclasses.fields(TrainingSettings)]
    return f"{text} is not a setting{nearest(text.replace('_', '-'), known)}"


def _type(one: "dataclasses.Field[Any]") -> type:
    if _may_be_auto(one):
        return float
    assert isinstance(one.type, type)
    return one.type


def _described(one: "dataclasses.Field[Any]") -> str:
    return _KINDS[_type(one)] + (" or auto" if _may_be_auto(one) else "")


def _may_be_auto(one: "dataclasses.Field[Any]") -> bool:
    return bool(one.metadata.get("auto"))


def _convert(one: "dataclasses.Field[Any]", value: Any) -> Any:
    if _may_be_auto(one) and value in (AUTO, None):
        return None
    kind = _type(one)
    if kind is bool:
        return {"true": True, "false": False}[str(value).lower()]
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(value)
    if kind is int and isinstance(value, float):
        if not value.is_integer():
            raise ValueError(value)
        return int(value)
    if kind is str and not isinstance(value, str):
        raise TypeError(value)
    return kind(value)


def _range_problems(one: "dataclasses.Field[Any]", value: Any) -> list[str]:
    rules, name = one.metadata, one.name
    if rules.get("choices") and value not in rules["choices"]:
        return [f"{name} is {value!r}; it can be {', '.join(rules['choices'])}"]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return []
    if not math.isfinite(value):
        return [f"{name} is {value}; it must be a finite number"]
    if rules.get("minimum") is not None and value < rules["minimum"]:
        return [f"{name} is {value}; it must be {rules['minimum']} or more"]
    if rules.get("above") is not None and value <= rules["above"]:
        return [f"{name} is {value}; it must be greater than {rules['above']}"]
    if rules.get("below") is not None and value >= rules["below"]:
        return [f"{name} is {value}; it must be less than {rules['below']}"]
    return []


def _combination_problems(settings: TrainingSettings) -> list[str]:
    problems = []
    if settings.model_width % settings.model_heads:
        problems.append(
            f"model_heads is {settings.model_heads}, which does not divide "
            f"model_width {settings.model_width}"
        )
    if settings.warmup_steps > settings.total_steps:
        problems.append(
            f"warmup_steps is {settings.warmup_steps}, but the run ends at "
            f"total_steps {settings.total_steps}; set warmup_steps to that or less"
        )
    if settings.decay_steps and settings.decay_steps < settings.warmup_steps:
        problems.append(
            f"decay_steps is {settings.decay_steps}, before warmup_steps "
            f"{settings.warmup_steps} are over; set it to that or more, or to 0"
        )
    if not settings.snapshot_steps and settings.snapshot_seconds == 0:
        problems.append(
            "snapshot_steps and snapshot_seconds are both 0, so an interruption would lose the "
            "whole run; set one of them"
        )
    if settings.micro_batch_size and settings.global_batch_size % settings.micro_batch_size:
        problems.append(
            f"micro_batch_size is {settings.micro_batch_size}, which does not divide "
            f"global_batch_size {settings.global_batch_size}; "
            f"{_divisor_below(settings.global_batch_size, settings.micro_batch_size)} does"
        )
    return problems


def validation_problems(settings: TrainingSettings, *, channel: bool) -> list[str]:
    """What cannot work with the validation data there is: a `channel` of its own, or a share."""
    held_out = settings.validation_share > 0
    if channel and held_out:
        return [
            f"validation_share is {settings.validation_share:g}, but there is a validation channel "
            f"too; set validation_share to 0, or leave the channel out"
        ]
    if channel or held_out:
        return []
    wanting = []
    if settings.export == "best":
        wanting.append(f"export is {settings.export}")
    if settings.evaluate_every:
        wanting.append(f"evaluate_every is {settings.evaluate_every}")
    return [
        f"{wish}, but there is no validation data; give the job a validation channel, or hold out "
        f"a part of the training data with validation_share, such as 0.05"
        for wish in wanting
    ]


def _divisor_below(number: int, limit: int) -> int:
    return next(d for d in range(min(limit, number), 0, -1) if number % d == 0)
