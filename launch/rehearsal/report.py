"""What the rehearsal found: report.json, the picture, and the table in the terminal."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from launch.rehearsal.attempt import Attempt
from launch.rehearsal.container import Means


@dataclass(frozen=True)
class Outcome:
    """The interrupted job, the uninterrupted one, and the digests of what they ended with."""

    interrupted: list[Attempt]
    uninterrupted: Attempt
    digests: dict[str, str]
    means: Means

    @property
    def equal(self) -> bool:
        """Whether both ended with the same bits."""
        return self.digests["interrupted"] == self.digests["uninterrupted"]

    @property
    def steps_lost(self) -> int:
        """Steps that were finished, and then had to be taken again."""
        pairs = itertools.pairwise(self.interrupted)
        return sum(max(0, (a.last_step or 0) - (b.resumed_from or 0)) for a, b in pairs)

    @property
    def goodput(self) -> float:
        """The share of the job's time that went into steps which the final model holds."""
        kept: dict[int, float] = {}
        for attempt in self.interrupted:
            before = attempt.resumed_from or 0
            for _, logged, _, seconds in attempt.steps:  # a line speaks for all since the last
                kept.update(dict.fromkeys(range(before + 1, logged + 1), seconds))
                before = logged
        return sum(kept.values()) / sum(a.ended - a.started for a in self.interrupted)

    def as_json(self) -> dict[str, Any]:
        """The content of report.json."""
        return {
            "equal": self.equal,
            "digests": self.digests,
            "attempts": [_describe(attempt) for attempt in self.interrupted],
            "uninterrupted": _describe(self.uninterrupted),
            "steps_lost": self.steps_lost,
            "goodput": round(self.goodput, 4),
            "toolkit": self.means.toolkit,
            "pid_namespace": bool(self.means.pid_namespace),
            "notes": self.means.notes(),
        }


def write(outcome: Outcome, directory: Path) -> None:
    """Write report.json and rehearsal.png."""
    (directory / "report.json").write_text(json.dumps(outcome.as_json(), indent=2) + "\n")
    _draw(outcome, directory / "rehearsal.png")


def table(outcome: Outcome) -> Table:
    """One row an attempt, for the terminal."""
    table = Table("attempt", "resumed from", "steps", "snapshots", "seconds", "end")
    rows = [(str(a.number), a) for a in outcome.interrupted] + [
        ("uninterrupted", outcome.uninterrupted)
    ]
    for name, a in rows:
        table.add_row(
            name,
            "-" if a.resumed_from is None else f"step {a.resumed_from}",
            f"{a.first_step} – {a.last_step}",
            str(len(a.snapshots)),
            f"{a.ended - a.started:.1f}",
            a.kind,
        )
    return table


def _describe(attempt: Attempt) -> dict[str, Any]:
    return {
        "kind": attempt.kind,
        "resumed_from": attempt.resumed_from,
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "seconds": round(attempt.ended - attempt.started, 2),
        "snapshots": [step for _, step in attempt.snapshots],
        "rejected": attempt.rejected,
    }


def _draw(outcome: Outcome, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    steps, losses = figure.subplots(2, 1, height_ratios=[3, 2])
    resumed = {a.number: b.resumed_from or 0 for a, b in _pairs(outcome.interrupted)}
    for attempt in outcome.interrupted:
        times = [time for time, *_ in attempt.steps]
        numbers = [step for _, step, *_ in attempt.steps]
        steps.axvspan(attempt.started, times[0] if times else attempt.ended, color="0.92", lw=0)
        steps.plot(times, numbers, lw=2, color="C0", label=_once(steps, "training"))
        lost = [(t, s) for t, s, *_ in attempt.steps if s > resumed.get(attempt.number, s)]
        if lost:
            steps.plot(*zip(*lost, strict=True), lw=5, color="C3", label=_once(steps, "lost"))
        if attempt.snapshots:
            steps.plot(
                *zip(*attempt.snapshots, strict=True),
                "o",
                color="C2",
                label=_once(steps, "snapshot"),
            )
        if attempt.signalled is not None:
            steps.axvline(attempt.ended, color="C3", ls="--")
            steps.annotate(
                " instances taken away", (attempt.ended, 0), color="C3", va="bottom", fontsize=9
            )
    steps.set(ylabel="optimizer step", xlabel="seconds (grey: instances starting)", ylim=(0, None))
    steps.legend(loc="upper left")
    steps.set_title(_headline(outcome), fontsize=11)
    _losses(losses, outcome)
    figure.savefig(path, dpi=110)


def _losses(axes: Any, outcome: Outcome) -> None:
    whole = outcome.uninterrupted.steps
    axes.plot([s for _, s, *_ in whole], [x for _, _, x, _ in whole], lw=5, color="0.8")
    for attempt in outcome.interrupted:
        axes.plot(
            [s for _, s, *_ in attempt.steps], [x for _, _, x, _ in attempt.steps], color="C0"
        )
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.legend(["never interrupted", "interrupted"], loc="upper right")


def _headline(outcome: Outcome) -> str:
    verdict = "the same bits" if outcome.equal else "DIFFERENT BITS"
    return (
        f"interruptions: {len(outcome.interrupted) - 1}, steps lost: {outcome.steps_lost}; "
        f"the final model and optimizer have {verdict} as without"
    )


def _pairs(attempts: list[Attempt]) -> list[tuple[Attempt, Attempt]]:
    return list(itertools.pairwise(attempts))


def _once(axes: Any, label: str) -> str:
    used = axes.get_legend_handles_labels()[1]
    return f"_{label}" if label in used else label
