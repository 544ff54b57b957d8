"""What the rehearsal found, computed from the logs: report.json, and the tables in the terminal."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from launch.rehearsal.attempt import Attempt
from launch.rehearsal.container import Means


@dataclass(frozen=True)
class Step:
    """An optimizer step as the log tells it, in seconds since the job's first instant."""

    number: int
    ended: float
    seconds: float

    @property
    def began(self) -> float:
        """When it began."""
        return self.ended - self.seconds


@dataclass(frozen=True)
class Outcome:
    """The interrupted job, the uninterrupted one, and the digests of what they ended with."""

    interrupted: list[Attempt]
    uninterrupted: Attempt
    digests: dict[str, str]
    means: Means
    discount: float = 0.7
    """The share by which spot is cheaper than on demand"""
    changes: tuple[str, ...] = ()
    """What was scaled down to fit this machine, in sentences"""
    unreached: tuple[str, ...] = ()
    """Interruptions, such as `55:upload`, that training finished before"""
    control_reused: bool = False
    """Whether the uninterrupted run's account and digest are an earlier rehearsal's"""
    seed: int = 0
    sync: str = "unreliable"
    """How the simulated upload of snapshots behaved: `unreliable` or `stalled`"""

    @property
    def equal(self) -> bool:
        """Whether both ended with the same bits."""
        return self.digests["interrupted"] == self.digests["uninterrupted"]

    @property
    def interruptions(self) -> list[str]:
        """The kind of each interruption, in order."""
        return [attempt.kind for attempt in self.interrupted[:-1]]

    @property
    def steps_lost(self) -> int:
        """Steps that were finished, and then had to be taken again; each time counts."""
        return sum(len(self.replayed(attempt)) for attempt in self.interrupted)

    @property
    def replay_seconds(self) -> float:
        """Seconds spent on steps that an earlier attempt had finished."""
        return sum(step.seconds for a in self.interrupted for step in self.replayed(a))

    @property
    def restart_seconds(self) -> float:
        """Seconds from the start of each attempt after the first until its first step began.

        An attempt that finished no step counts in full.
        """
        return sum(self.training_began(a) - a.started for a in self.interrupted[1:])

    @property
    def goodput(self) -> float:
        """The share of the job's time, from 0 to 1, that went into steps the final model holds."""
        kept = {step.number: step.seconds for a in self.interrupted for step in self.steps_of(a)}
        return sum(kept.values()) / self._seconds

    @property
    def saved(self) -> float:
        """The share of its cost that spot would have saved; negative if it would have cost more.

        It compares this run at `discount` with the uninterrupted one at the on-demand price. An
        instance is paid for from its start to its end; waiting for capacity costs nothing.
        """
        alone = _seconds(self.uninterrupted)
        return 1 - self._seconds * (1 - self.discount) / alone

    @property
    def snapshots(self) -> dict[str, int]:
        """How often a snapshot was written, rejected at a resume, and restored."""
        return {
            "written": sum(len(a.snapshots) for a in self.interrupted),
            "rejected": sum(len(a.rejected) for a in self.interrupted),
            "restored": sum(a.resumed_from is not None for a in self.interrupted),
        }

    def steps_of(self, attempt: Attempt) -> list[Step]:
        """The steps that an attempt finished, as far as its log tells.

        A line speaks for all steps since the last one, and gives their mean. A step after the last
        line shows in a snapshot only: it counts as the job's mean step, or less if there was less
        time.
        """
        steps = _logged(attempt)
        before = steps[-1].number if steps else attempt.resumed_from or 0
        since = steps[-1].ended if steps else attempt.started
        for when, number in attempt.snapshots[-1:]:
            if number > before:
                seconds = min(self._mean_step, (when - since) / (number - before))
                steps += _evenly(before, number, when, seconds)
        return steps

    def replayed(self, attempt: Attempt) -> list[Step]:
        """The steps of an attempt that an earlier one had finished."""
        earlier = [a.last_step or 0 for a in self.interrupted if a.number < attempt.number]
        return [s for s in self.steps_of(attempt) if s.number <= max(earlier, default=0)]

    def training_began(self, attempt: Attempt) -> float:
        """When an attempt's first step began, in seconds since the job's first instant.

        It is the end of an attempt that finished none.
        """
        steps = self.steps_of(attempt)
        return max(attempt.started, steps[0].began) if steps else attempt.ended

    def as_json(self) -> dict[str, Any]:
        """The content of report.json."""
        return {
            "equal": self.equal,
            "digests": self.digests,
            "attempts": [self._describe(attempt) for attempt in self.interrupted],
            "uninterrupted": self._describe(self.uninterrupted),
            "control_reused": self.control_reused,
            "interruptions": len(self.interruptions),
            "unreached": list(self.unreached),
            "steps_lost": self.steps_lost,
            "replay_seconds": round(self.replay_seconds, 2),
            "restart_seconds": round(self.restart_seconds, 2),
            "snapshots": self.snapshots,
            "goodput": round(self.goodput, 4),
            "spot": {"discount": self.discount, "saved": round(self.saved, 4)},
            "changes": list(self.changes),
            "seed": self.seed,
            "sync": self.sync,
            "toolkit": self.means.toolkit,
            "pid_namespace": bool(self.means.pid_namespace),
            "notes": self.means.notes(),
        }

    def _describe(self, attempt: Attempt) -> dict[str, Any]:
        steps = self.steps_of(attempt)
        return {
            "kind": attempt.kind,
            "resumed_from": attempt.resumed_from,
            "first_step": steps[0].number if steps else None,
            "last_step": steps[-1].number if steps else None,
            "seconds": round(_seconds(attempt), 2),
            "snapshots": [step for _, step in attempt.snapshots],
            "rejected": attempt.rejected,
        }

    @property
    def _seconds(self) -> float:
        return sum(_seconds(attempt) for attempt in self.interrupted)

    @property
    def _mean_step(self) -> float:
        """Seconds of the interrupted job's mean step; infinite if no line tells."""
        seconds = [step.seconds for a in self.interrupted for step in _logged(a)]
        return sum(seconds) / len(seconds) if seconds else float("inf")


def write(outcome: Outcome, directory: Path) -> None:
    """Write report.json and rehearsal.png."""
    from launch.rehearsal.picture import draw

    (directory / "report.json").write_text(json.dumps(outcome.as_json(), indent=2) + "\n")
    draw(outcome, directory / "rehearsal.png")


def table(outcome: Outcome) -> Table:
    """One row an attempt, for the terminal."""
    table = Table("attempt", "resumed from", "steps", "snapshots", "seconds", "end")
    rows = [(str(a.number), a) for a in outcome.interrupted]
    for name, attempt in [*rows, ("uninterrupted", outcome.uninterrupted)]:
        resumed, steps = attempt.resumed_from, outcome.steps_of(attempt)
        table.add_row(
            name,
            "-" if resumed is None else f"step {resumed}",
            f"{steps[0].number} – {steps[-1].number}" if steps else "none",
            str(len(attempt.snapshots)),
            f"{_seconds(attempt):.1f}",
            attempt.kind,
        )
    return table


def facts(outcome: Outcome) -> Table:
    """What the interruptions cost, in one line each, for the terminal."""
    grid = Table.grid(padding=(0, 2))
    for name, text in _facts(outcome):
        grid.add_row(name, text)
    return grid


def _facts(outcome: Outcome) -> list[tuple[str, str]]:
    counts = outcome.snapshots
    return [
        ("interruptions", _counted(outcome.interruptions)),
        ("restarting", f"{outcome.restart_seconds:.1f} s until each new attempt took a step"),
        ("replaying", f"{_many(outcome.steps_lost, 'step')}, {outcome.replay_seconds:.1f} s"),
        ("snapshots", ", ".join(f"{count} {what}" for what, count in counts.items())),
        ("goodput", f"{outcome.goodput:.0%} of the time went into steps the final model holds"),
        ("spot", _price(outcome)),
    ]


def _counted(kinds: list[str]) -> str:
    if not kinds:
        return "none"
    each = (f"{count} {kind}" if count > 1 else kind for kind, count in Counter(kinds).items())
    return f"{len(kinds)}: {', '.join(each)}"


def _price(outcome: Outcome) -> str:
    """What this run costs on spot against the uninterrupted one on demand."""
    percent = round(outcome.saved * 100)
    if percent == 0:
        change = "as dear as"
    else:
        change = f"{abs(percent)}% {'cheaper' if percent > 0 else 'DEARER'} than"
    return f"{change} uninterrupted on demand, if spot is {outcome.discount:.0%} off"


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _logged(attempt: Attempt) -> list[Step]:
    """The steps that the lines of an attempt's log speak for."""
    steps, before = list[Step](), attempt.resumed_from or 0
    for when, number, _, seconds in attempt.steps:
        steps += _evenly(before, number, when, seconds)
        before = number
    return steps


def _evenly(before: int, last: int, ended: float, seconds: float) -> list[Step]:
    """Steps `before + 1 … last`, of `seconds` each, of which the last ended at `ended`."""
    numbers = range(before + 1, last + 1)
    return [Step(number, ended - (last - number) * seconds, seconds) for number in numbers]


def _seconds(attempt: Attempt) -> float:
    return attempt.ended - attempt.started
