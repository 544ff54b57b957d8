"""How a followed job is shown: a live view, plain lines, or JSON; each says how it went, too."""

import json
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.following.ending import Ending
from launch.following.picture import LINES_SHOWN, Picture
from launch.following.words import UNKNOWN, clock, duration, moment, number, percent, snapshot

TRANSITIONS_SHOWN = 40
_COLOURS = {"Completed": "green", "Failed": "red", "Stopped": "yellow", "Interrupted": "yellow"}


class Screen(Protocol):
    """Something to show a job on, while a `with` block lasts."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None: ...

    def show(self, picture: Picture) -> None:
        """Show the job as it is now."""

    def end(self, picture: Picture, ending: Ending) -> None:
        """Show the job for the last time, and how it ended."""


class _Lasting:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held open."""


class LiveScreen:
    """The view that stays in its place, on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, at)

    def show(self, picture: Picture) -> None:
        """Draw the view again."""
        self._live.update(view(picture), refresh=True)

    def end(self, picture: Picture, ending: Ending) -> None:
        """Leave the last view where it is, and write the last words below it."""
        self.show(picture)
        self._live.stop()
        for line in ending.lines:
            self._console.print(Text(line), soft_wrap=True)


class PlainScreen(_Lasting):
    """A line for every change, where stdout is no terminal."""

    def __init__(self) -> None:
        self._transitions = 0
        self._said: set[str] = set()
        self._summary = ""

    def show(self, picture: Picture) -> None:
        """Print what was not printed yet."""
        transitions = picture.job.transitions
        for one in transitions[self._transitions :]:
            message = f": {one.message}" if one.message else ""
            print(f"{moment(one.start)} {one.status}{message}", flush=True)
        self._transitions = max(self._transitions, len(transitions))
        notes = {
            *(f"warning: {w}" for w in picture.warnings),
            *(f"note: {m}" for m in picture.missing),
        }
        for note in sorted(notes - self._said):
            print(note, flush=True)
        self._said = notes  # one that went away and comes back is said again
        if (line := summary(picture)) != self._summary:
            print(f"{moment(picture.now)} {line}", flush=True)
            self._summary = line

    def end(self, picture: Picture, ending: Ending) -> None:
        """Print the last changes and the last words."""
        self.show(picture)
        print("\n".join(ending.lines), flush=True)


class JsonScreen(_Lasting):
    """One JSON object a line; the last one holds the exit code and the last words."""

    def show(self, picture: Picture) -> None:
        """Print the object."""
        self._print(picture, None)

    def end(self, picture: Picture, ending: Ending) -> None:
        """Print the last object."""
        self._print(picture, ending)

    def _print(self, picture: Picture, ending: Ending | None) -> None:
        last = {
            "exit_code": ending.code if ending else None,
            "ending": list(ending.lines) if ending else None,
        }
        print(json.dumps({**picture.as_json(), **last}, allow_nan=False), flush=True)


def view(picture: Picture) -> RenderableType:
    """The whole picture for a terminal."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    for name, cell in _rows(picture):
        table.add_row(name, cell)
    notes = [Text(f"! {line}", style="bold yellow") for line in picture.warnings]
    notes += [Text(f"  {line}", style="dim") for line in picture.missing]
    lines = [
        Text(f"{clock(time)} {host} {text}", no_wrap=True, overflow="ellipsis")
        for time, host, text in picture.log.newest_lines(LINES_SHOWN)
    ]
    log = [Panel(Group(*lines), title="log", title_align="left", style="dim")] if lines else []
    return Panel(Group(table, *notes, *log), title=Text(picture.job.name), title_align="left")


def summary(picture: Picture) -> str:
    """The picture on one line."""
    job, reading = picture.job, picture.log.reading
    parts = [
        job.secondary_status,
        f"attempt {job.attempts}",
        f"step {_steps(picture)}",
        f"loss {number(reading.loss if reading else None, '.4f')}",
        f"{number(reading.samples_per_second if reading else None, '.1f')} samples/s",
        f"snapshot {_logged_and_in_s3(picture)}",
        f"savings {percent(job.savings)}",
    ]
    return " · ".join(parts)


def _rows(picture: Picture) -> Iterator[tuple[str, RenderableType]]:
    job, reading = picture.job, picture.log.reading
    yield "run", Text(job.run_name or UNKNOWN)
    yield "status", _status(picture)
    yield "UTC", Text(_transitions(picture))
    yield "step", _progress(picture)
    yield (
        "loss",
        Text(
            f"{number(reading.loss if reading else None, '.4f')}   "
            f"{number(reading.samples_per_second if reading else None, ',.1f')} samples/s"
        ),
    )
    yield "snapshots", Text(_snapshots(picture))
    yield (
        "time",
        Text(
            f"trained {duration(job.seconds_trained)}, billed {duration(job.seconds_billed)}, "
            f"savings {percent(job.savings)}"
        ),
    )


def _status(picture: Picture) -> Text:
    job = picture.job
    style = _COLOURS.get(job.secondary_status, _COLOURS.get(job.status, "cyan"))
    text = Text(job.status, style=f"bold {style}")
    if job.secondary_status != job.status:
        text.append(f" · {job.secondary_status}")
    counted = f"attempt {job.attempts}, interrupted {job.interruptions}×"
    return text.append(f"   {counted}", style="default")


def _transitions(picture: Picture) -> str:
    every = picture.job.transitions
    shown, day = [], None
    for one in every[-TRANSITIONS_SHOWN:]:
        same = one.start is None or one.start.date() == day
        shown.append(f"{clock(one.start) if same else moment(one.start)} {one.status}")
        day = one.start.date() if one.start else day
    earlier = [f"… {len(every) - len(shown)} earlier"] if len(every) > len(shown) else []
    return " → ".join(earlier + shown) or UNKNOWN


def _steps(picture: Picture) -> str:
    step, total = picture.log.step, picture.job.total_steps
    return f"{number(step)} / {number(total)}"


def _progress(picture: Picture) -> RenderableType:
    step, total = picture.log.step, picture.job.total_steps
    left = "" if picture.seconds_left is None else f"{duration(picture.seconds_left)} left"
    if not total:
        return Text(_steps(picture))
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=total, completed=min(step or 0, total), width=40)
    row.add_row(
        Text(_steps(picture)), bar, Text(f"{min(step or 0, total) / total:.0%}"), Text(left)
    )
    return row


def _logged_and_in_s3(picture: Picture) -> str:
    there = f"{snapshot(picture.in_s3)} in S3" if picture.s3_known else "S3 not known"
    return f"{snapshot(picture.logged)} logged, {there}"


def _snapshots(picture: Picture) -> str:
    text = _logged_and_in_s3(picture)
    if picture.job.ended or picture.at_risk is None:
        return text
    text += f": {picture.at_risk} steps at risk"
    if picture.to_repeat is not None:
        text += f" ({picture.to_repeat} to repeat if interrupted now)"
    return text
