"""A run's snapshots, wherever they lie: listing, verifying, fetching and pruning them.

Nothing here needs torch, except to fetch: whoever only looks must not wait for it.
"""

import datetime
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launch.errors import Failed, Refused
from launch.places import Entry, Folder, Gone, Place, Progress
from training.snapshots import digests, manifest
from training.snapshots.manifest import (
    BEST_FOLDER,
    Manifest,
    NotASnapshot,
    data_name,
    manifest_name,
)

LOOKED_INTO = 20  # manifests that a listing reads, the newest; of older ones it only sees the names
_READERS = 8
State = Literal["whole", "incomplete", "foreign", "unreadable", "not looked into"]


@dataclass(frozen=True)
class Row:
    """One step in a listing. `manifest` is None where it is missing or was not read."""

    step: int
    state: State
    size: int
    written: datetime.datetime
    note: str = ""
    manifest: Manifest | None = None

    @property
    def loss(self) -> float | None:
        """The last training loss that was logged before this snapshot."""
        found = self.manifest.metrics.get("loss") if self.manifest else None
        return found if isinstance(found, float) else None


@dataclass(frozen=True)
class Listing:
    """What lies at an address, newest step first, and the best state if there is one."""

    rows: list[Row]
    best: Row | None
    entries: dict[str, Entry]

    @property
    def whole(self) -> list[Row]:
        """The snapshots that a run could resume from, newest first."""
        return [row for row in self.rows if row.state == "whole"]


def look(place: Place, run_name: str | None = None, limit: int | None = LOOKED_INTO) -> Listing:
    """List `place`; at most `limit` manifests are read.

    Snapshots of another run than `run_name` are foreign; without it, than the newest readable one.
    Raises Refused if the place cannot be listed.
    """
    entries = place.entries()
    steps = manifest.candidates(entries)
    best_entries = _inside(entries, f"{BEST_FOLDER}/")
    best_steps = manifest.candidates(best_entries)[:1]
    with ThreadPoolExecutor(_READERS) as readers:
        rows = list(readers.map(lambda step: _row(place, "", step, entries), steps[:limit]))
        best = [_row(place, f"{BEST_FOLDER}/", step, best_entries) for step in best_steps]
    run_name = run_name or next((row.manifest.run_name for row in rows if row.manifest), None)
    rows = [_named(row, run_name) for row in rows]
    rows += [_unread(step, entries) for step in steps[len(rows) :]]
    return Listing(rows, best[0] if best else None, entries)


def find(listing: Listing, place: Place, which: str) -> Row:
    """The snapshot that `which` names: a step, `latest` or `best`. Raises Refused if it is none."""
    if which == "best":
        if listing.best is None:
            raise Refused(f"{place.address} holds no best state; give the job validation data")
        return listing.best
    if which == "latest":
        if listing.whole:
            return listing.whole[0]
        raise Refused(f"{place.address} holds no whole snapshot")
    if not which.isdecimal():
        raise Refused(f"{which!r} is no step; give a number, latest or best")
    for row in listing.rows:
        if row.step == int(which):
            return (
                row
                if row.state != "not looked into"
                else _row(place, "", row.step, listing.entries)
            )
    there = ", ".join(str(row.step) for row in listing.rows[:5]) or "none"
    raise Refused(f"{place.address} has no snapshot of step {which}; the newest are: {there}")


_ANOTHER_FOLDER = "name another folder and type the same again: it goes on where it stopped"


def fetch(
    place: Place,
    row: Row,
    which: str,
    target: Path,
    progress: Progress,
    remedy: str = _ANOTHER_FOLDER,
) -> Path:
    """Bring a snapshot into the folder `target`, verified; returns the data file's path.

    Both files appear under their names only when every byte is right. What an interruption left is
    continued, and what is there with other bytes is left alone: the best state and a snapshot may
    be of the same step. Raises Failed; `remedy` is what helps against a full disk.
    """
    _complete(place, row)
    folder = _folder(which)
    name, data = folder + data_name(row.step), target / data_name(row.step)
    text = _read(place, folder + manifest_name(row.step))
    try:
        described = manifest.parse(manifest_name(row.step), text)
    except NotASnapshot as error:
        raise Failed(f"step {row.step} in {place.address} was replaced: {error}") from error
    # The manifest's digest in the name: what was begun is continued only for the same bytes.
    part = target / f"{data.name}.{hashlib.sha256(text).hexdigest()[:12]}.part"
    try:
        target.mkdir(parents=True, exist_ok=True)
        if data.exists() and not _matches(data, described):
            raise Failed(f"{data} is there already with other bytes; name another folder")
        if not data.exists():
            place.copy(name, part, Entry(described.bytes, row.written), progress)
            if not _matches(part, described):
                part.unlink()
                raise _damaged(place, name)
            os.replace(part, data)
        _write(target / manifest_name(row.step), text)
    except Gone as error:
        raise _deleted(place, row.step) from error
    except OSError as error:
        raise Failed(
            f"step {row.step} could not be written to {target} ({error.strerror}); make room or "
            f"{remedy}"
        ) from error
    return data


def verify(place: Place, row: Row, which: str, progress: Progress) -> Manifest:
    """Check every byte of a snapshot as it passes. Raises Failed if it is damaged."""
    described = _complete(place, row)
    name = _folder(which) + data_name(row.step)
    try:
        passed = digests.Digests.like(described.digests)
        for part in place.parts(name, 0, Entry(described.bytes, row.written)):
            passed.add(part)
            progress(len(part))
    except ValueError as error:
        raise Failed(f"step {row.step} cannot be verified ({error})") from error
    except Gone as error:
        raise _deleted(place, row.step) from error
    if passed.bytes != described.bytes or passed.result()["chunks"] != described.digests["chunks"]:
        raise _damaged(place, name)
    return described


def superfluous(listing: Listing, keep: int) -> list[Row]:
    """What pruning to `keep` whole snapshots deletes: older ones, and older debris of this run."""
    whole = listing.whole
    if not whole:
        return []
    kept = {row.step for row in whole[:keep]}
    return [
        row
        for row in listing.rows
        if row.step < whole[0].step and row.step not in kept and row.state in _PRUNED
    ]


_PRUNED: Sequence[State] = ("whole", "incomplete")


def prune(place: Place, listing: Listing, rows: Sequence[Row], progress: Progress) -> list[str]:
    """Delete snapshots, of each the manifest first; returns what is wrong with those that stay.

    One of those is verified before anything goes, the newest that is sound: a size alone proves
    nothing. Raises Refused if none is, Failed if a file cannot be deleted.
    """
    damaged = []
    for kept in (row for row in listing.whole if row not in rows):
        try:
            verify(place, kept, "", progress)
            break
        except Failed as error:
            damaged.append(str(error))
    else:
        raise Refused([*damaged, f"no other snapshot in {place.address} is sound, so all stay"])
    for row in rows:
        place.delete(manifest_name(row.step))
        place.delete(data_name(row.step))
    return damaged


@contextmanager
def local(place: Place, row: Row, which: str, progress: Progress) -> Iterator[Path]:
    """The data file of a snapshot, verified: where it is, or else in a temporary folder."""
    if isinstance(place, Folder):
        verify(place, row, which, progress)
        yield place.directory / _folder(which) / data_name(row.step)
        return
    with tempfile.TemporaryDirectory(prefix="snapshot-") as folder:
        yield fetch(place, row, which, Path(folder), progress, "set TMPDIR to a larger folder")


def _row(place: Place, folder: str, step: int, entries: dict[str, Entry]) -> Row:
    seen = _unread(step, entries)
    if manifest_name(step) not in entries:
        return _with(seen, "incomplete", "no manifest")
    try:
        described = manifest.parse(
            manifest_name(step), place.read(folder + manifest_name(step)).decode()
        )
    except Gone:
        return _with(seen, "incomplete", "the manifest was deleted meanwhile")
    except (Failed, NotASnapshot, UnicodeDecodeError) as error:
        return _with(seen, "unreadable", str(error))
    data = entries.get(data_name(step))
    if data is None:
        return _with(seen, "incomplete", "no data file", described)
    if data.size != described.bytes:
        note = f"{data.size} bytes instead of {described.bytes}"
        return _with(seen, "incomplete", note, described)
    return _with(seen, "whole", "", described)


def _with(row: Row, state: State, note: str, described: Manifest | None = None) -> Row:
    return Row(row.step, state, row.size, row.written, note, described)


def _unread(step: int, entries: dict[str, Entry]) -> Row:
    found = [entries[name] for name in (data_name(step), manifest_name(step)) if name in entries]
    return Row(step, "not looked into", sum(e.size for e in found), found[0].written)


def _named(row: Row, run_name: str | None) -> Row:
    if row.manifest and row.manifest.run_name != run_name:
        return _with(row, "foreign", f"of the run {row.manifest.run_name!r}", row.manifest)
    return row


def _complete(place: Place, row: Row) -> Manifest:
    if row.manifest is None or row.state in ("incomplete", "unreadable"):
        raise Failed(f"step {row.step} in {place.address} is {row.state}: {row.note}")
    return row.manifest


def _read(place: Place, name: str) -> bytes:
    try:
        return place.read(name)
    except Gone as error:
        raise Failed(f"{place.address}{name} was deleted meanwhile; type the same again") from error


def _folder(which: str) -> str:
    return f"{BEST_FOLDER}/" if which == "best" else ""


def _damaged(place: Place, name: str) -> Failed:
    return Failed(f"{place.address}{name} is damaged: its digests differ")


def _deleted(place: Place, step: int) -> Failed:
    return Failed(
        f"step {step} in {place.address} was deleted or replaced while it was fetched; fetch latest"
    )


def _matches(path: Path, described: Manifest) -> bool:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            return size == described.bytes and digests.matches(
                file.fileno(), size, described.digests
            )
        except ValueError as error:
            raise Failed(f"step {described.step} cannot be verified ({error})") from error


def _write(path: Path, text: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(text)
    os.replace(part, path)


def _inside(entries: dict[str, Entry], folder: str) -> dict[str, Entry]:
    return {
        name.removeprefix(folder): entry
        for name, entry in entries.items()
        if name.startswith(folder)
    }


def described(row: Row) -> dict[str, Any]:
    """A row as JSON has it."""
    return {
        "step": row.step,
        "state": row.state,
        "bytes": row.size,
        "written": row.written.isoformat(),
        "world_size": row.manifest.world_size if row.manifest else None,
        "loss": row.loss,
        "note": row.note,
    }
