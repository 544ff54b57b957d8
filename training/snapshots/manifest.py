"""What a snapshot is called and what it says about itself, without its bytes.

The standard library is enough here: whoever reads a run's manifests from S3 need not wait for
torch.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_origin

FORMAT = 1
# SageMaker's sync agent leaves files with this in their name alone; AWS's own containers write
# their temporary files so.
TEMPORARY = ".sagemaker-ignore"
BEST_FOLDER = "best"  # in the checkpoint directory: the state with the lowest validation loss
# The agent puts these beside a file that it is uploading, and one that it has uploaded.
UPLOADING, UPLOADED = ".sagemaker-uploading", ".sagemaker-uploaded"
_NAME = re.compile(r"step-(\d{10})\.(pt|json)")


class NotASnapshot(Exception):
    """This candidate cannot be resumed from; the text says what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a snapshot says about itself, in `step-….json` beside its data file."""

    format: int
    run_name: str
    step: int
    samples_seen: int
    world_size: int
    saved_at: str
    bytes: int
    digests: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, Any]
    attempt: int = 1
    dataset_samples: int = 0
    optimizer: str = ""
    seconds_trained: float = 0.0
    job_name: str = ""
    seconds_before_job: float = 0.0
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read a manifest; unknown keys are ignored. Raises NotASnapshot if it is not one."""
        try:
            text = path.read_text()
        except (OSError, ValueError) as error:
            raise _unreadable(error) from error
        return parse(path.name, text)


def parse(name: str, text: str | bytes) -> Manifest:
    """The manifest in a file called `name`. Raises NotASnapshot if `text` is not one."""
    try:
        values = json.loads(text)
        known = {f.name: get_origin(f.type) or f.type for f in dataclasses.fields(Manifest)}
        manifest = Manifest(**{k: v for k, v in values.items() if k in known})
    except Exception as error:
        raise _unreadable(error) from error
    for field, kind in known.items():
        value = getattr(manifest, field)
        if not isinstance(value, cast("type", kind)) or isinstance(value, bool):
            raise NotASnapshot(f"manifest has {field} = {value!r}")
    if manifest.format != FORMAT:
        raise NotASnapshot(f"format {manifest.format}; this code reads {FORMAT}")
    if name != manifest_name(manifest.step):
        raise NotASnapshot(f"manifest is of step {manifest.step}")
    return manifest


@dataclass(frozen=True)
class Difference:
    """A setting that a snapshot was written under with another value."""

    name: str
    in_snapshot: object
    now: object


def data_name(step: int) -> str:
    """The name of the data file of `step`."""
    return f"step-{step:010d}.pt"


def manifest_name(step: int) -> str:
    """The name of the manifest of `step`."""
    return f"step-{step:010d}.json"


def candidates(names: Iterable[str]) -> list[int]:
    """The steps that have a data file, a manifest or both among `names`, newest first."""
    steps = {int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
    return sorted(steps, reverse=True)


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """The settings that a snapshot was written under (`theirs`) with another value than `ours`."""
    pairs = [
        Difference(name, theirs.get(name, "absent"), ours.get(name, "absent"))
        for name in sorted(ours.keys() | theirs.keys())
    ]
    return [pair for pair in pairs if pair.in_snapshot != pair.now]


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The settings that differ, as `name: theirs there, ours here`."""
    return [
        f"{one.name}: {one.in_snapshot} in the snapshot, {one.now} now"
        for one in differing(ours, theirs)
    ]


def _unreadable(error: Exception) -> NotASnapshot:
    return NotASnapshot(f"manifest cannot be read ({type(error).__name__})")
