"""What a person sees while the rehearsal runs."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from launch.rehearsal import report
from launch.rehearsal.attempt import Attempt
from launch.rehearsal.container import Means


class Screen:
    """A progress bar an attempt, and a line for each thing that happens."""

    def __init__(self, total_steps: int) -> None:
        self._console = Console(highlight=False)
        self._total = total_steps
        self._prefix = ""
        self._progress = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=30),
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
        self._say(
            f"[bold]{request['TrainingJobName']}[/]: the request has arrived; running it on "
            f"{count} simulated instance{'s' if count > 1 else ''}"
        )
        for note in means.notes():
            self._say(f"[yellow]note:[/] {note}")

    def control(self) -> None:
        """What follows is the uninterrupted run."""
        self._prefix = "uninterrupted"

    def show(self, attempt: Attempt, event: str) -> None:
        """Take in a line of the log, or something that the rehearsal did."""
        name = self._prefix or f"attempt {attempt.number}"
        key = (self._prefix, attempt.number)
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(f"{name}: starting", total=self._total)
        task = self._tasks[key]
        if event.startswith("step="):
            self._progress.update(
                task, completed=attempt.last_step or 0, description=f"{name}: training"
            )
        elif event.startswith(("resumed ", "snapshot ", "rejected ", "already finished")):
            self._say(f"  {name}: {escape(event)}")
        elif event == "SIGTERM":
            self._say(f"  {name}: [red]SIGTERM after step {attempt.last_step}[/]")
        elif event == attempt.kind:
            self._progress.update(task, description=f"{name}: {_ENDS[event]}")
            self._progress.stop_task(task)
            if event == "reclaim":
                self._say(f"  {name}: [red]SIGKILL; the instances and their disks are gone[/]")

    def conclude(self, outcome: report.Outcome, directory: Path) -> None:
        """The table, the verdict, and where to look."""
        self._progress.stop()
        self._console.print(report.table(outcome))
        for name in ("uninterrupted", "interrupted"):
            self._console.print(f"{name:>13}  {outcome.digests[name]}")
        verdict = "[green]the same bits[/]" if outcome.equal else "[red]different bits[/]"
        self._console.print(
            f"The resumed run ended with {verdict}; steps taken twice: {outcome.steps_lost}, "
            f"goodput {outcome.goodput:.0%}."
        )
        self._console.print(f"Report: {directory}/report.json and rehearsal.png", soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


_ENDS = {"reclaim": "taken away", "completed": "completed", "failed": "failed"}
