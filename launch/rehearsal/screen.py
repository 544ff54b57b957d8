"""What a person sees while the rehearsal runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from launch.rehearsal import report
from launch.rehearsal.attempt import COMPLETED, FAILED, Attempt
from launch.rehearsal.container import Means
from launch.rehearsal.interruptions import COMMIT, FREEZE, HOST, KILL, RECLAIM, SAVE, UPLOAD

_HOW = {
    RECLAIM: "SIGKILL",
    KILL: "SIGKILL without warning",
    HOST: "the others stopped",
    SAVE: "SIGKILL amid writing a data file",
    COMMIT: "SIGKILL before the manifest",
    UPLOAD: "SIGKILL while half a data file was on its way to S3",
    FREEZE: "SIGKILL",
}
_SHOWN = (
    "resumed ",
    "starting fresh",
    "already finished",
    "rejected ",
    "snapshot ",
    "delivered ",
    "snapshot_failed ",
    "snapshot_refused ",
    "snapshot_not_delivered ",
    "best_failed ",
)


class Screen:
    """A progress bar an attempt, and a line for each thing that happens."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._total = total_steps
        self._prefix = ""
        self._progress = Progress(  # 80 columns hold it, up to a million steps
            TextColumn("{task.description:<28}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._tasks: dict[tuple[str, int], Any] = {}

    def __enter__(self) -> "Screen":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

    def began(self, request: dict[str, Any], means: Means) -> None:
        """The request has arrived at the mocked AWS."""
        count = request["ResourceConfig"]["InstanceCount"]
        name = escape(request["TrainingJobName"])
        self._say(
            f"[bold]{name}[/]:",
            f"the request has arrived; running it on {count} simulated "
            f"instance{'s' if count > 1 else ''}",
        )
        for note in means.notes():
            self._note(note)

    def scaled(self, changes: Sequence[str]) -> None:
        """What was scaled down so that this machine can run the job; nothing if empty."""
        for change in changes:
            self._say("scaled down:", escape(change))

    def control(self) -> None:
        """What follows is the uninterrupted run."""
        self._prefix = "uninterrupted"

    def reused(self) -> None:
        """The uninterrupted run is not run again."""
        self._say(
            "  uninterrupted:",
            "kept from an earlier rehearsal: same code, settings and data",
        )

    def show(self, attempt: Attempt, event: str) -> None:
        """Take in a line of the log, or something that the rehearsal did.

        What it did starts with `! `, or is `booting`, `SIGTERM` or, at its end, the attempt's kind.
        """
        name = self._prefix or f"attempt {attempt.number}"
        task = self._task(name, attempt.number)
        if event.startswith("step="):
            self._progress.update(
                task, completed=attempt.last_step or 0, description=f"{name}: training"
            )
        elif event.startswith(_SHOWN):
            if event.startswith("resumed "):
                self._progress.update(task, completed=attempt.resumed_from or 0)
            self._say(f"  {name}:", escape(event))
        elif event.startswith("! "):
            self._say(f"  {name}:", _red(event.removeprefix("! ")))
        elif event == "SIGTERM":
            self._say(f"  {name}:", _red(f"SIGTERM {_after(attempt)}"))
        elif event == attempt.kind:
            self._ended(attempt, name)

    def conclude(self, outcome: report.Outcome, directory: Path) -> None:
        """The tables, the verdict, and where to look."""
        self._progress.stop()
        self._console.print(report.table(outcome))
        self._console.print(report.facts(outcome))
        self._console.print()
        for name in ("uninterrupted", "interrupted"):
            self._console.print(f"{name:>13}  {outcome.digests[name]}", soft_wrap=True)
        self._console.print(_verdict(outcome), soft_wrap=True)
        for one in outcome.unreached:
            self._note(f"the interruption {one} did not happen: training finished first")
        self._console.print(
            f"Report: {escape(str(directory))}/report.json and rehearsal.png", soft_wrap=True
        )

    def _task(self, name: str, number: int) -> Any:
        key = (self._prefix, number)
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(f"{name}: starting", total=self._total)
        return self._tasks[key]

    def _ended(self, attempt: Attempt, name: str) -> None:
        task = self._task(name, attempt.number)
        taken = attempt.kind not in (COMPLETED, FAILED)
        self._progress.update(task, description=f"{name}: {'gone' if taken else attempt.kind}")
        self._progress.stop_task(task)
        if taken:
            how = f"{_HOW.get(attempt.kind, attempt.kind)} {_after(attempt)}"
            if attempt.kind == HOST and attempt.cause:
                self._say(f"  {name}:", f"the others noticed: {escape(attempt.cause)}")
            self._say(f"  {name}:", _red(f"{how}; instances and disks are gone"))

    def _note(self, text: str) -> None:
        self._say("[yellow]note:[/]", escape(text))

    def _say(self, label: str, text: str) -> None:
        """One line; on a terminal a long one goes on below its own beginning, not its label's."""
        if not self._console.is_terminal:  # a log: a line stays a line
            self._console.print(f"{label} {text}", soft_wrap=True)
            return
        line = Table.grid(padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(overflow="fold")
        line.add_row(label, text)
        self._console.print(line)


def _red(text: str) -> str:
    return f"[red]{escape(text)}[/]"


def _after(attempt: Attempt) -> str:
    return f"after step {attempt.last_step}" if attempt.last_step else "before its first step"


def _verdict(outcome: report.Outcome) -> str:
    which = "The resumed run" if outcome.interruptions else "Nothing was interrupted; the run"
    bits = "[green]the same bits[/]" if outcome.equal else "[red]different bits[/]"
    return (
        f"{which} ended with {bits}; steps taken twice: {outcome.steps_lost}, "
        f"goodput {outcome.goodput:.0%}."
    )
