"""What a job would do with its snapshot prefix: start fresh, resume, or be refused.

Listings and manifests are all that is read; no data file is downloaded, and nothing is deleted.
"""

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from botocore.exceptions import ClientError

from launch.runs import home_uri, readable, split
from launch.schema import JobConfig
from training.snapshots import manifest
from training.snapshots.manifest import Manifest, NotASnapshot, data_name, manifest_name

if TYPE_CHECKING:
    from rich.table import Table

FROM_SCRATCH = "python launch/submit.py --from-scratch"
SHOWN = 5  # names in a sentence, before the rest is only counted


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a job with this configuration would do at `uri`.

    `text` is one line for a person. A job that resumes has a `step` and, where the manifest tells
    it, the time `saved_at`. A refused one has `problems`, each a sentence, and the settings that
    are `differing`.
    """

    kind: Literal["fresh", "resumes", "refused"]
    uri: str
    text: str
    step: int = 0
    saved_at: datetime.datetime | None = None
    problems: tuple[str, ...] = ()
    differing: tuple[manifest.Difference, ...] = ()


def judge(s3: Any, uri: str, config: JobConfig) -> Verdict:
    """What a job with `config` would do with what lies at `uri`; mirrors training's own rules.

    A snapshot is whole, as far as can be seen, when its manifest can be read and names this run,
    and the data file has the manifest's size. Manifests are read newest first, down to the first
    whole one. Raises Refused if the prefix cannot be listed or a manifest cannot be fetched.
    """
    with readable(uri):
        found = _search(s3, uri, config)
        if found.newest is None:
            return _none_whole(uri, config, found)
        exported = found.newest.step < config.training.total_steps or _has_model(s3, config)
    return _whole(uri, config, found, found.newest, exported=exported)


def table(verdict: Verdict) -> "Table":
    """The settings that differ, for a person: the snapshot's value and the one of now."""
    from rich.table import Table
    from rich.text import Text

    shown = Table("setting", "in the snapshot", "now")
    for one in verdict.differing:
        row = (f"training.{one.name}", one.in_snapshot, one.now)
        shown.add_row(*(Text(str(cell)) for cell in row))
    return shown


@dataclass(frozen=True)
class _Found:
    """What a search saw, down to the newest whole snapshot of the run.

    The others are descriptions by step: another run's, this run's that were whole once, and halves
    of an unfinished delivery.
    """

    newest: Manifest | None
    foreign: dict[int, str]
    damaged: dict[int, str]
    half: dict[int, str]


def _search(s3: Any, uri: str, config: JobConfig) -> _Found:
    sizes = _sizes(s3, uri)
    found = _Found(None, {}, {}, {})
    for step in manifest.candidates(sizes):
        described = None
        try:
            described = _manifest(s3, uri, step, sizes)
            if described.run_name != config.run_name:
                found.foreign[step] = f"{data_name(step)} (of the run {described.run_name!r})"
                continue
            _check_size(described, sizes)
        except NotASnapshot as error:
            kind = found.damaged if _existed_whole(step, described, sizes) else found.half
            kind[step] = f"{data_name(step)} ({error})"
        else:
            return _Found(described, found.foreign, found.damaged, found.half)
    return found


def _sizes(s3: Any, uri: str) -> dict[str, int]:
    """Bytes by name of all objects directly under `uri`; one request for a thousand of them."""
    bucket, prefix = split(uri)
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket=bucket, Prefix=prefix, Delimiter="/"
    )
    return {
        item["Key"].removeprefix(prefix): item["Size"]
        for page in pages
        for item in page.get("Contents", [])
    }


def _manifest(s3: Any, uri: str, step: int, sizes: Mapping[str, int]) -> Manifest:
    name = manifest_name(step)
    if name not in sizes:
        raise NotASnapshot("no manifest")
    bucket, prefix = split(uri)
    try:
        text = s3.get_object(Bucket=bucket, Key=prefix + name)["Body"].read()
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchKey":
            raise
        raise NotASnapshot("the manifest was deleted meanwhile") from error
    return manifest.parse(name, text)


def _check_size(described: Manifest, sizes: Mapping[str, int]) -> None:
    size = sizes.get(data_name(described.step))
    if size is None:
        raise NotASnapshot("no data file")
    if size != described.bytes:
        raise NotASnapshot(f"{size} bytes instead of {described.bytes}")


def _existed_whole(step: int, described: Manifest | None, sizes: Mapping[str, int]) -> bool:
    """Whether this step may have been whole once, so that a fresh start would throw away work.

    Half a pair in a run's first attempt is a delivery that was cut short; a later attempt resumed
    from something.
    """
    if {data_name(step), manifest_name(step)} <= sizes.keys():
        return True
    return described is not None and described.attempt > 1


def _none_whole(uri: str, config: JobConfig, found: _Found) -> Verdict:
    if not found.foreign and not found.damaged:
        ignored = f"; only what was delivered in part: {_some(found.half)}" if found.half else ""
        return Verdict(kind="fresh", uri=uri, text=f"starts fresh{ignored}")
    return _refused(uri, [_cannot_go_on(uri, config, found.foreign, found.damaged | found.half)])


def _has_model(s3: Any, config: JobConfig) -> bool:
    """Whether any job of the run has delivered its model."""
    bucket, prefix = split(f"{home_uri(config)}output/")
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    keys = (item["Key"] for page in pages for item in page.get("Contents", []))
    return any(key.endswith("/output/model.tar.gz") for key in keys)


def _whole(
    uri: str, config: JobConfig, found: _Found, newest: Manifest, *, exported: bool
) -> Verdict:
    problems = []
    ours = config.training.fingerprint()
    if differing := manifest.differing(ours, newest.settings):
        problems.append(_other_settings(config, newest))
    finished = newest.step >= config.training.total_steps
    if finished and exported:
        problems.append(_finished(config, newest))
    if config.training.total_steps in found.foreign:
        problems.append(_cannot_go_on(uri, config, found.foreign, {}))
    if problems:
        return _refused(uri, problems, differing)
    saved_at = _time(newest.saved_at)
    saved = f" (saved {_ago(saved_at)})" if saved_at else ""
    passed = found.foreign | found.damaged | found.half
    note = f"; passes over {_some(passed)}" if passed else ""
    note += "; takes no step, and writes the model that no job has delivered" if finished else ""
    return Verdict(
        kind="resumes",
        uri=uri,
        text=f"resumes at step {newest.step}{saved}{note}",
        step=newest.step,
        saved_at=saved_at,
    )


def _refused(
    uri: str, problems: list[str], differing: Iterable[manifest.Difference] = ()
) -> Verdict:
    return Verdict(
        kind="refused",
        uri=uri,
        text=f"is refused: {problems[0]}",
        problems=tuple(problems),
        differing=tuple(differing),
    )


def _other_settings(config: JobConfig, newest: Manifest) -> str:
    differing = manifest.differences(config.training.fingerprint(), newest.settings)
    return (
        f"{data_name(newest.step)} of the run {config.run_name!r} was written with other settings "
        f"({'; '.join(differing)}); set them back, or {_ways_out()}"
    )


def _finished(config: JobConfig, newest: Manifest) -> str:
    total = config.training.total_steps
    return (
        f"training.total_steps is {total} and the run {config.run_name!r} has reached step "
        f"{newest.step}: it is finished; to go on, type --set training.total_steps="
        f"{2 * newest.step} or any number above {newest.step}, or {_ways_out()}"
    )


def _cannot_go_on(
    uri: str, config: JobConfig, foreign: Mapping[int, str], damaged: Mapping[int, str]
) -> str:
    parts = []
    if foreign:
        parts.append(f"snapshots of other runs are there: {_some(foreign)}")
    if damaged:
        parts.append(f"none of this run's snapshots is whole: {_some(damaged)}")
    return (
        f"{uri} holds snapshots that the run {config.run_name!r} cannot go on with: "
        f"{'; '.join(parts)}; {_ways_out()}"
    )


def _ways_out() -> str:
    return (
        f"give the run another name with --set run_name=…, or type `{FROM_SCRATCH}`, "
        f"which begins again at the next prefix and deletes nothing"
    )


def _some(described: Mapping[int, str]) -> str:
    """The newest few descriptions, and how many more there are."""
    newest = [described[step] for step in sorted(described, reverse=True)]
    more = f" and {len(newest) - SHOWN} more" if len(newest) > SHOWN else ""
    return ", ".join(newest[:SHOWN]) + more


def _time(text: str) -> datetime.datetime | None:
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


def _ago(time: datetime.datetime) -> str:
    seconds = max(0, int((datetime.datetime.now(datetime.UTC) - time).total_seconds()))
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"
