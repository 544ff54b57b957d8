"""The last words about a job that has ended, and the exit code that they mean."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launch.errors import DONE, FAILED, STOPPED_SHORT
from launch.following import again
from launch.following.picture import Picture
from launch.following.words import duration, percent, snapshot

LAST_LINES = 15


@dataclass(frozen=True)
class Ending:
    """What is said at the end, a line each, and the exit code."""

    lines: Sequence[str]
    code: int


@dataclass(frozen=True)
class Resumable:
    """What a new start would find in S3; `known` is False where that could not be read."""

    step: int | None
    rejected: Sequence[str] = ()
    known: bool = True


def ending_of(picture: Picture, found: Resumable, *, stalled: bool, strict: bool) -> Ending:
    """How the job ended; with `strict`, a sync that was `stalled` makes it a failure."""
    status = picture.job.status
    if status == "Completed" and not picture.job.out_of_time:
        ending = _completed(picture, found)
    elif status == "Failed":
        ending = Ending(list(_failed(picture, found)), FAILED)
    else:
        ending = Ending(list(_stopped(picture, found)), STOPPED_SHORT)
    if strict and stalled and ending.code == DONE:
        said = "failed by --strict: the sync to S3 was stalled while the job ran"
        return Ending([*ending.lines, said], FAILED)
    return ending


def _completed(picture: Picture, found: Resumable) -> Ending:
    job, total = picture.job, picture.job.total_steps
    lines = [
        f"completed  {job.name}",
        f"model      {job.model or 'AWS names none'}",
        _saved(picture),
    ]
    last = found.step if found.known else picture.logged
    if total is None or job.snapshots_uri is None:
        return Ending(lines, DONE)
    if not found.known and last is None:
        return Ending([*lines, "note       the last snapshot could not be seen"], DONE)
    if (last or 0) >= total:
        return Ending(lines, DONE)
    short = (
        f"but its last whole snapshot is {snapshot(last)}, not step {total}, the last of the run: "
        f"look at the model before you rely on it"
    )
    return Ending([*lines, short, *found.rejected, *_go_on(picture)], FAILED)


def _failed(picture: Picture, found: Resumable) -> Iterator[str]:
    job = picture.job
    yield f"failed     {job.name}"
    yield f"reason     {job.failure_reason or 'AWS names none'}"
    if words := picture.log.last_words(job.attempt_began, LAST_LINES):
        rank = "" if words.rank is None else f", rank {words.rank}"
        yield f"the last lines of the host that failed first, {words.host}{rank}:"
        yield from (f"  {line}" for line in words.lines)
    yield from what_is_left(picture, found)


def _stopped(picture: Picture, found: Resumable) -> Iterator[str]:
    job = picture.job
    over = job.out_of_time
    why = f"because spot.{over} was over" if over else "by hand"
    yield f"stopped    {job.name} was stopped {why}; the run is not finished"
    yield from what_is_left(picture, found)


def what_is_left(picture: Picture, found: Resumable) -> Iterator[str]:
    """What it cost, where a new start resumes, and the command that starts it, a line each."""
    yield _saved(picture)
    total = picture.job.total_steps
    of = f" of {total}" if total else ""
    if not found.known:
        yield "resumes    S3 could not be read; a new start says where it resumes"
    elif found.step is None:
        yield "resumes    nowhere: S3 has no whole snapshot, so a new start begins at step 0"
    else:
        yield f"resumes    a new start goes on at step {found.step}{of}"
    yield from found.rejected
    yield from _go_on(picture)


def _go_on(picture: Picture) -> Iterator[str]:
    command = again.command(picture.job)
    yield f"continue   {command or 'unknown: this job has no run_name'}"


def _saved(picture: Picture) -> str:
    job = picture.job
    trained, billed = duration(job.seconds_trained), duration(job.seconds_billed)
    return f"savings    {percent(job.savings)} (trained {trained}, billed {billed})"
