"""Rank 0 picks the snapshot to resume from; all ranks receive the choice and then the state.

Only rank 0's host needs the files. Nobody decides by what it sees on its own disk.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from training.failure import TrainingError, say, sentence
from training.group import Group
from training.metrics import resumed_line
from training.settings import TrainingSettings
from training.snapshots import files


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where training starts: after `step` optimizer steps; `snapshot` is None for a fresh start."""

    step: int = 0
    attempt: int = 1
    snapshot: str | None = None


def resume(
    settings: TrainingSettings,
    group: Group,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> Resumed:
    """Load the newest whole snapshot into the model, the optimizer and the scaler of every rank.

    Raises TrainingError on all ranks, with the same words, when rank 0 refuses: the directory
    cannot be written, its snapshots are another run's or have other settings, or none is whole.
    """
    resumed, state, problem = Resumed(), None, None
    if group.rank == 0:
        try:
            resumed, state = _choose(settings, model)
        except Exception as error:
            problem = sentence(error)
    choice: tuple[Resumed, str | None] = group.from_rank_0((resumed, problem))
    resumed, problem = choice
    if problem:
        raise TrainingError(problem)
    if resumed.snapshot:
        _receive(group, model, optimizer, scaler, state or {})
        _check_ranks_agree(group, model, optimizer)
        if group.rank == 0:
            say(resumed_line(resumed.step, resumed.snapshot, resumed.attempt))
    return resumed


def _choose(settings: TrainingSettings, model: nn.Module) -> tuple[Resumed, files.State | None]:
    directory = _own_directory(settings)
    steps = files.candidates(path.name for path in directory.iterdir())
    foreign, damaged = [], []
    for step in steps:
        name = files.data_name(step)
        try:
            manifest, state = _open(directory, step, settings, model)
        except _Foreign as error:
            foreign.append(f"{name} ({error})")
            say(f"rejected snapshot={name} reason={error}")
        except files.NotASnapshot as error:
            # Half a pair is a delivery that was cut short: no snapshot has existed there yet.
            if files.is_complete_pair(directory, step):
                damaged.append(f"{name} ({error})")
            say(f"rejected snapshot={name} reason={error}")
        else:
            return Resumed(step=step, attempt=manifest.attempt + 1, snapshot=name), state
    if foreign or damaged:
        raise TrainingError(_refusal(settings, foreign, damaged))
    say(f"starting fresh: no snapshot in {directory}")
    return Resumed(), None


class _Foreign(Exception):
    """A whole snapshot that belongs to another run."""


def _open(
    directory: Path, step: int, settings: TrainingSettings, model: nn.Module
) -> tuple[files.Manifest, files.State]:
    manifest = files.Manifest.read(directory / files.manifest_name(step))
    if manifest.run_name != settings.run_name:
        raise _Foreign(f"run_name: {manifest.run_name} in the snapshot, {settings.run_name} now")
    files.verify(directory, step)
    if differing := files.differences(settings.fingerprint(), manifest.settings):
        raise TrainingError(
            f"{files.data_name(step)} of the run {settings.run_name!r} was written with other "
            f"settings ({'; '.join(differing)}); set them back, or give the run another run_name"
        )
    state = files.load(directory, step)
    _check_fits(state, model, files.data_name(step))
    return manifest, state


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


def _refusal(settings: TrainingSettings, foreign: list[str], damaged: list[str]) -> str:
    parts = []
    if foreign:
        parts.append("snapshots of other runs are here: " + ", ".join(foreign))
    if damaged:
        parts.append("none of this run's snapshots is whole: " + ", ".join(damaged))
    return (
        f"{settings.checkpoint_dir} holds snapshots, but none that the run "
        f"{settings.run_name!r} can resume from: {'; '.join(parts)}. "
        f"Give the run another run_name and its own directory, or empty this one"
    )


def _check_fits(state: files.State, model: nn.Module, name: str) -> None:
    """Refuse a state of another architecture before any rank waits for a broadcast of it."""
    expected = {_plain(key): tuple(value.shape) for key, value in model.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in state["model"].items()}
    if wrong := sorted(
        key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)
    ):
        first = wrong[0]
        raise TrainingError(
            f"{name} does not fit the model: {len(wrong)} tensors differ, the first is {first} "
            f"({found.get(first, 'absent')} in the snapshot, {expected.get(first, 'absent')} in "
            f"the model); restore the model's code, or give the run another run_name"
        )
    trained = {_plain(key) for key, value in model.named_parameters() if value.requires_grad}
    optimized = state["optimizer"]["state"].keys()
    if optimized and (wrong := sorted(trained ^ optimized)):
        raise TrainingError(
            f"{name} has optimizer state for other parameters than the model trains, the first is "
            f"{wrong[0]}; restore the model's code, or give the run another run_name"
        )


def _plain(name: str) -> str:
    return name.removeprefix("module.").replace("_orig_mod.", "")


def _receive(
    group: Group,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    state: files.State,
) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    has_optimizer_state, scaler_state = group.from_rank_0(
        (bool(state.get("optimizer", {}).get("state")), state.get("scaler"))
    )
    # The optimizer first: torch creates its state by taking a step, which may touch the parameters.
    if has_optimizer_state:
        set_optimizer_state_dict(model, optimizer, state.get("optimizer", {}), options=options)
    set_model_state_dict(model, state.get("model", {}), options=options)
    if scaler.is_enabled() and scaler_state:
        scaler.load_state_dict(scaler_state)


def _check_ranks_agree(group: Group, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Prove once that all ranks hold the same bits: DDP never notices optimizers that differ."""
    sums = [_bit_sum(value) for value in model.state_dict().values()]
    for of_parameter in optimizer.state.values():
        sums += [_bit_sum(v) for v in of_parameter.values() if isinstance(v, torch.Tensor)]
    if len(set(group.gather(tuple(sums)))) != 1:
        raise TrainingError(
            "after resuming, the ranks hold different parameters or optimizer states; "
            "this is a defect of the code that loads them, and training would silently diverge"
        )


def _bit_sum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size(), torch.uint8)
    return int(flat.view(whole).sum(dtype=torch.int64))
