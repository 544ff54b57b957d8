"""The bytes of a snapshot: digests, atomic write, verification.

A snapshot exists when its manifest exists and the data file's bytes match it. Whatever else lies in
the directory is not a snapshot. Nothing here knows torch.distributed, or that there are other
ranks.
"""

import dataclasses
import datetime
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from training.snapshots import digests
from training.snapshots.digests import Digests
from training.snapshots.manifest import FORMAT as FORMAT
from training.snapshots.manifest import TEMPORARY as TEMPORARY
from training.snapshots.manifest import Manifest as Manifest
from training.snapshots.manifest import NotASnapshot as NotASnapshot
from training.snapshots.manifest import candidates as candidates
from training.snapshots.manifest import data_name as data_name
from training.snapshots.manifest import differences as differences
from training.snapshots.manifest import manifest_name as manifest_name

State = dict[str, Any]


def write(directory: Path, state: State, **described: Any) -> Manifest:
    """Write `state`, then the manifest that makes it a snapshot; both appear whole or not at all.

    `described` are the manifest's fields that this file cannot know: run_name, step, samples_seen,
    world_size, settings, attempt, dataset_samples, optimizer and metrics. Raises OSError when the
    disk refuses, with no debris left.
    """
    step = described["step"]
    _make_room(directory, step, described["run_name"])
    passed = Digests()
    write_atomically(directory / data_name(step), lambda file: serialise(state, file, passed))
    manifest = Manifest(
        format=FORMAT,
        saved_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        bytes=passed.bytes,
        digests=passed.result(),
        versions={"torch": torch.__version__, "python": platform.python_version()},
        **described,
    )
    text = json.dumps(dataclasses.asdict(manifest), indent=1).encode()
    try:
        write_atomically(directory / manifest_name(step), lambda file: file.write(text))
    except OSError:
        delete(directory, step)  # a large file that is no snapshot, on a disk that is full
        raise
    return manifest


def write_atomically(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Let `fill` write a file that appears at `path` whole and durable, or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with open(temporary, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def verify(directory: Path, step: int) -> Manifest:
    """Check the snapshot of `step` byte for byte. Raises NotASnapshot if it is not whole."""
    manifest = Manifest.read(directory / manifest_name(step))
    path = directory / data_name(step)
    try:
        size = path.stat().st_size
        if size != manifest.bytes:
            raise NotASnapshot(f"{size} bytes instead of {manifest.bytes}")
        with open(path, "rb") as file:
            same = digests.matches(file.fileno(), size, manifest.digests)
    except OSError as error:
        raise NotASnapshot(f"data cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise NotASnapshot(f"cannot be verified ({error})") from error
    if not same:
        raise NotASnapshot("the bytes are not those that were written (digests differ)")
    return manifest


def load(directory: Path, step: int) -> State:
    """The state in a data file, on the CPU. Raises NotASnapshot if it cannot be loaded safely.

    The tensors lie in the file itself, mapped into memory: copy them before the file may change.
    """
    path = directory / data_name(step)
    try:
        # weights_only: a pickle that wants to run code is refused, whoever wrote it.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0][:120] if str(error) else ""
        raise NotASnapshot(f"cannot be loaded ({type(error).__name__}: {reason})") from error
    if not isinstance(state, dict) or not {"model", "optimizer", "step"} <= state.keys():
        raise NotASnapshot("holds no model, optimizer and step")
    if state["step"] != step:
        raise NotASnapshot(f"its data is of step {state['step']}")
    return state


def read(directory: Path, step: int) -> tuple[Manifest, State]:
    """The manifest and the state of a snapshot, parsed while other threads verify its bytes.

    Raises NotASnapshot if it is not whole, cannot be loaded safely, or was replaced meanwhile.
    """
    before = _identity(directory / data_name(step))
    with ThreadPoolExecutor(1) as beside:
        loading = beside.submit(load, directory, step)
        manifest = verify(directory, step)
    state = loading.result()
    if _identity(directory / data_name(step)) != before:
        raise NotASnapshot("it changed while it was read")
    return manifest, state


def is_complete_pair(directory: Path, step: int) -> bool:
    """Whether both files of `step` are there, sound or not."""
    return all((directory / name(step)).exists() for name in (data_name, manifest_name))


def looks_whole(directory: Path, step: int, run_name: str) -> bool:
    """Whether `step` is a snapshot of this run as far as can be seen without reading its bytes."""
    try:
        manifest = Manifest.read(directory / manifest_name(step))
        size = (directory / data_name(step)).stat().st_size
    except (NotASnapshot, OSError):
        return False
    return manifest.run_name == run_name and size == manifest.bytes


def owner(directory: Path, step: int) -> str | None:
    """The run that a snapshot belongs to; None if its manifest is missing or cannot be read."""
    try:
        return Manifest.read(directory / manifest_name(step)).run_name
    except NotASnapshot:
        return None


def delete(directory: Path, step: int) -> None:
    """Delete a snapshot, the manifest first: what a crash leaves in between is no snapshot."""
    for path in (directory / manifest_name(step), directory / data_name(step)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def prepare(directory: Path) -> None:
    """Make the directory, prove that it can be written, and sweep up a killed writer's debris.

    Raises OSError if snapshots could not be written there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob(f"step-*{TEMPORARY}"):
        path.unlink(missing_ok=True)
    probe = directory / f"probe{TEMPORARY}"
    write_atomically(probe, lambda file: file.write(b"probe"))
    probe.unlink()


def _identity(path: Path) -> tuple[int, ...] | None:
    """Which file this is, and in which state: what is verified must be what is loaded."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def serialise(state: Mapping[str, Any], file: BinaryIO, passed: Digests | None = None) -> None:
    """torch.save, which adds every byte to `passed`. Raises OSError when the disk refuses."""
    tee = _Tee(file, passed)
    try:
        torch.save(state, cast("IO[bytes]", tee))
    except Exception as error:
        # torch hides a full disk behind a RuntimeError about positions in its archive.
        raise tee.error or error from error


class _Tee:
    """A writable file whose bytes are digested as they pass; torch.save writes front to back."""

    def __init__(self, file: BinaryIO, passed: Digests | None) -> None:
        self._file, self._passed = file, passed
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self._passed:
            self._passed.add(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _make_room(directory: Path, step: int, run_name: str) -> None:
    """Remove the leftovers of `step`, never another run's snapshot."""
    found = owner(directory, step)
    if found not in (run_name, None):
        raise FileExistsError(f"{data_name(step)} belongs to the run {found!r}")
    # An old manifest beside new data would be a snapshot that does not match: it goes first.
    delete(directory, step)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
