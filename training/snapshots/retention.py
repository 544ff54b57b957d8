"""Which snapshots may be deleted. Deletions travel to S3, so something newer has to be there first.

SageMaker's agent says by marker files beside a file that its upload has begun, or is done. Where
there are no markers, only what this process knows by itself counts as arrived.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from training.snapshots import files
from training.snapshots.manifest import (
    UPLOADED,
    UPLOADING,
    candidates,
    data_name,
    manifest_name,
)


def prune(
    directory: Path,
    run_name: str,
    whole: Sequence[int],
    kept: int,
    arrived: Collection[int] = (),
) -> list[int]:
    """Delete this run's snapshots that nobody can need any more. Returns their steps.

    `whole` are the steps known to be whole; only they count, so damaged files never push out good
    ones. `arrived` are those that this process knows to be in S3. Kept are the newest `kept`, the
    newest that has arrived, and what is newer than that and on its way. So what is known to have
    arrived stays until something newer has, and the directory does not grow when the agent stalls:
    then no further upload begins.

    What nobody has begun to upload is deleted, and no rule that bounds the directory can prevent an
    agent from beginning in that very instant: S3 may then hold it for a moment, and lose it again.
    """
    newest_first = sorted(whole, reverse=True)
    if not newest_first:
        return []
    there = set(arrived) | arrived_in_s3(directory, newest_first)
    safe = next((step for step in newest_first if step in there), -1)
    keep = {*newest_first[:kept], safe}
    found = candidates(os.listdir(directory))
    doomed = [step for step in found if step < newest_first[0] and step not in keep]
    gone = []
    for step in doomed:
        if files.owner(directory, step) not in (run_name, None):
            continue
        # The last look before it goes: deleting the others took time, its upload may have begun.
        if step > safe and step in newest_first and _is_on_its_way(directory, step):
            continue
        files.delete(directory, step)
        gone.append(step)
    return gone


def arrived_in_s3(directory: Path, steps: Iterable[int]) -> set[int]:
    """The steps whose two files the agent has marked as uploaded since they were written."""
    return {step for step in steps if all(_is_uploaded(path) for path in _pair(directory, step))}


def _is_uploaded(path: Path) -> bool:
    try:
        marked = path.with_name(path.name + UPLOADED).stat().st_mtime_ns
        return marked >= path.stat().st_mtime_ns
    except FileNotFoundError:
        return False


def _is_on_its_way(directory: Path, step: int) -> bool:
    return any(
        path.with_name(path.name + marker).exists()
        for path in _pair(directory, step)
        for marker in (UPLOADING, UPLOADED)
    )


def _pair(directory: Path, step: int) -> tuple[Path, Path]:
    return directory / data_name(step), directory / manifest_name(step)
