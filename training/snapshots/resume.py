"""Rank 0 picks the snapshot to resume from; all ranks receive the choice and then the state.

Only rank 0's host needs the files. Nobody decides by what it sees on its own disk.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.failure import TrainingError, say, sentence
from training.group import Group
from training.metrics import resumed_line
from training.replica import Replica
from training.settings import TrainingSettings
from training.snapshots import files
from training.snapshots.apply import apply
from training.snapshots.mapping import Mapping
from training.snapshots.names import plain
from training.snapshots.provenance import job_name
from training.snapshots.tensors import copied_to_host, mapped


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where training starts: after `step` optimizer steps; `snapshot` is None for a fresh start.

    `whole` are the steps of this run's snapshots in the directory, the resumed one included, and
    `seconds_trained` is how long the attempts took that led to it, `seconds_before_job` of them in
    earlier jobs. `evaluated` is the last step that was evaluated, 0 if none was; only rank 0 has
    the best state so far.
    """

    step: int = 0
    attempt: int = 1
    snapshot: str | None = None
    whole: tuple[int, ...] = ()
    seconds_trained: float = 0.0
    seconds_before_job: float = 0.0
    evaluated: int = 0
    best: dict[str, Any] | None = None


def resume(
    settings: TrainingSettings,
    group: Group,
    replica: Replica,
    dataset_samples: int,
) -> Resumed:
    """Load the newest whole snapshot into the model, the optimizer and the scaler of every rank.

    Raises TrainingError on all ranks, with the same words, when rank 0 refuses: the directory
    cannot be written, its snapshots are another run's, have other settings or other data, or none
    is whole.
    """
    resumed, state, problem = Resumed(), None, None
    if group.rank == 0:
        try:
            if found := _choose(settings, group.world_size):
                _check_fits(found, replica, dataset_samples)
                resumed, state = found.resumed, found.state
        except Exception as error:
            problem = sentence(error)
    group.wait_for_rank_0("the choice of a snapshot")
    choice: tuple[Resumed, str | None] = group.from_rank_0((resumed, problem))
    resumed, problem = choice
    if problem:
        raise TrainingError(problem)
    if resumed.snapshot:
        path = Path(settings.checkpoint_dir) / resumed.snapshot
        apply(group, replica, state or {}, Mapping(path) if group.rank == 0 else None)
        if group.rank == 0:
            say(resumed_line(resumed.step, resumed.snapshot, resumed.attempt))
    best = (state or {}).get("validation", {}).get("best")
    return dataclasses.replace(resumed, best=mapped(best, copied_to_host))


@dataclass(frozen=True)
class _Found:
    """A whole snapshot of this run; its tensors lie in the file."""

    manifest: files.Manifest
    state: files.State
    resumed: Resumed


def _choose(settings: TrainingSettings, world_size: int) -> _Found | None:
    """The newest snapshot of this run that is whole; None if the run starts fresh."""
    directory = _own_directory(settings)
    steps = files.candidates(path.name for path in directory.iterdir())
    foreign: dict[int, str] = {}
    damaged: dict[int, str] = {}
    half: dict[int, str] = {}
    for step in steps:
        name = files.data_name(step)
        try:
            manifest, state = _open(directory, step, settings)
        except _Foreign as error:
            foreign[step] = f"{name} ({error})"
            say(f"rejected snapshot={name} reason={error}")
        except files.NotASnapshot as error:
            kind = damaged if _existed_whole(directory, step) else half
            kind[step] = f"{name} ({error})"
            say(f"rejected snapshot={name} reason={error}")
        else:
            if settings.total_steps in foreign:
                raise TrainingError(_refusal(settings, foreign, {}))
            older = sorted(s for s in steps if s < step)
            whole = [s for s in older if files.looks_whole(directory, s, settings.run_name)]
            resumed = Resumed(
                step=step,
                attempt=manifest.attempt + 1,
                snapshot=name,
                whole=(*whole, step),
                seconds_trained=manifest.seconds_trained,
                seconds_before_job=_seconds_before_job(manifest),
                evaluated=state.get("validation", {}).get("step", 0),
            )
            _say_what_rounds_differently(manifest, world_size)
            return _Found(manifest, state, resumed)
    if foreign or damaged:
        raise TrainingError(_refusal(settings, foreign, {**damaged, **half}))
    ignored = f"; only what was delivered in part: {', '.join(half.values())}" if half else ""
    say(f"starting fresh: no snapshot in {directory}{ignored}")
    return None


def _seconds_before_job(manifest: files.Manifest) -> float:
    same = manifest.job_name == job_name()
    return manifest.seconds_before_job if same else manifest.seconds_trained


def _say_what_rounds_differently(manifest: files.Manifest, world_size: int) -> None:
    if (before := manifest.world_size) != world_size:
        say(
            f"the snapshot was written by {before} ranks, and there are {world_size} now: every "
            f"sample is still seen once an epoch, at the same learning rate; dropout and rounding "
            f"differ"
        )
    if (torch_then := manifest.versions.get("torch")) != torch.__version__:
        say(
            f"the snapshot was written with torch {torch_then}, and this is {torch.__version__}: "
            f"its operations may round differently"
        )


class _Foreign(Exception):
    """A whole snapshot that belongs to another run."""


def _open(
    directory: Path, step: int, settings: TrainingSettings
) -> tuple[files.Manifest, files.State]:
    manifest = files.Manifest.read(directory / files.manifest_name(step))
    if manifest.run_name != settings.run_name:
        raise _Foreign(f"run_name: {manifest.run_name} in the snapshot, {settings.run_name} now")
    manifest, state = files.read(directory, step)
    if differing := files.differences(settings.fingerprint(), manifest.settings):
        raise TrainingError(
            f"{files.data_name(step)} of the run {settings.run_name!r} was written with other "
            f"settings ({'; '.join(differing)}); set them back, or give the run another run_name"
        )
    return manifest, state


def _existed_whole(directory: Path, step: int) -> bool:
    """Whether rejecting `step` may throw away work, so that a fresh start would be wrong.

    Half a pair in a run's first attempt is a delivery that was cut short before any snapshot was
    whole. In a later attempt there has been one: that attempt resumed from it.
    """
    if files.is_complete_pair(directory, step):
        return True
    try:
        return files.Manifest.read(directory / files.manifest_name(step)).attempt > 1
    except files.NotASnapshot:
        return False


def _own_directory(settings: TrainingSettings) -> Path:
    directory = Path(settings.checkpoint_dir)
    try:
        files.prepare(directory)
    except OSError as error:
        raise TrainingError(
            f"checkpoint_dir {str(directory)!r} cannot be written ({error.strerror}); "
            f"give a directory that can, with --checkpoint-dir"
        ) from error
    return directory


def _refusal(settings: TrainingSettings, foreign: dict[int, str], damaged: dict[int, str]) -> str:
    parts = []
    if foreign:
        parts.append("snapshots of other runs are here: " + ", ".join(foreign.values()))
    if damaged:
        parts.append("none of this run's snapshots is whole: " + ", ".join(damaged.values()))
    return (
        f"{settings.checkpoint_dir} holds snapshots that the run {settings.run_name!r} cannot "
        f"go on with: {'; '.join(parts)}. "
        f"Give the run another run_name and its own directory, or empty this one"
    )


def _check_fits(found: _Found, replica: Replica, dataset_samples: int) -> None:
    """Refuse the state of another model, optimizer or data set, before any rank waits for it."""
    manifest, state, name = found.manifest, found.state, found.resumed.snapshot
    remedy = "or give the run another run_name"
    model = replica.plain_model
    expected = {plain(key): _shape(value) for key, value in model.state_dict().items()}
    saved = {key: _shape(value) for key, value in state["model"].items()}
    if wrong := _differing_keys(expected, saved):
        first = wrong[0]
        raise TrainingError(
            f"{name} does not fit the model: {len(wrong)} tensors differ, the first is {first} "
            f"({saved.get(first, 'absent')} in the snapshot, {expected.get(first, 'absent')} in "
            f"the model); restore the model's code, {remedy}"
        )
    trained = {plain(key) for key, value in model.named_parameters() if value.requires_grad}
    optimized = set(state["optimizer"]["state"])
    if optimized and (wrong := sorted(trained ^ optimized)):
        raise TrainingError(
            f"{name} has optimizer state for other parameters than the model trains, the first is "
            f"{wrong[0]}; restore the model's code, {remedy}"
        )
    optimizer = type(replica.optimizer).__name__
    if manifest.optimizer not in ("", optimizer):
        raise TrainingError(
            f"{name} holds the state of {manifest.optimizer}, but the optimizer is "
            f"{optimizer} now; restore it, {remedy}"
        )
    if optimized and _groups_of(replica) != _groups_in(state):
        raise TrainingError(
            f"{name} has the optimizer's parameters in other groups; restore the code that makes "
            f"the optimizer, {remedy}"
        )
    if manifest.dataset_samples not in (0, dataset_samples):
        raise TrainingError(
            f"{name} was trained on {manifest.dataset_samples} samples, but the training data "
            f"holds {dataset_samples} now, which changes the order of all; restore the data, "
            f"{remedy}"
        )


def _groups_of(replica: Replica) -> set[frozenset[str]]:
    names = {p: plain(name) for name, p in replica.plain_model.named_parameters()}
    groups = replica.optimizer.param_groups
    return {frozenset(names[p] for p in group["params"]) for group in groups}


def _groups_in(state: files.State) -> set[frozenset[str]]:
    return {frozenset(group["params"]) for group in state["optimizer"]["param_groups"]}


def _shape(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _differing_keys(one: dict[str, object], other: dict[str, object]) -> list[str]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
