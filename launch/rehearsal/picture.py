"""The picture of a rehearsal: its attempts over time, and the loss, as if nothing had happened.

Everything is named where it stands, so that no legend has to be looked up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.rehearsal.attempt import COMPLETED, FAILED, Attempt
from launch.rehearsal.interruptions import COMMIT, FREEZE, HOST, KILL, RECLAIM, SAVE, UPLOAD

if TYPE_CHECKING:
    from launch.rehearsal.report import Outcome, Step

_ENDS = {
    RECLAIM: "reclaimed, with a warning",
    KILL: "killed without warning",
    HOST: "one instance vanished",
    SAVE: "killed while writing a snapshot",
    COMMIT: "killed between data and manifest",
    UPLOAD: "killed during an upload",
    FREEZE: "froze, then killed",
    FAILED: "failed",
}
_TAILS = {COMPLETED: "ending", RECLAIM: "grace", HOST: "noticing", FREEZE: "frozen"}
_GREY, _BLUE, _ORANGE, _RED, _GREEN = "#d9d9d9", "#5b9bd5", "#f2a541", "#b3261e", "#2e7d32"
_BROWN = "#a86200"
_DARK = ("#1b4f8a", "#8a1b5e", "#2b6b2b", "#8a4b00", "#4b2e83", "#00666b", "#7a1f1f", "#444444")
_WIDTH, _ROW, _LOSS, _HEAD = 11.0, 0.6, 3.2, 1.7  # inches: the figure, a row, the rest
_AXES = 9.7  # inches of an x axis, about
_LARGE, _SMALL = 9.0, 7.5  # points
_BAR = 0.36  # of a row's height


def draw(outcome: "Outcome", path: Path) -> None:
    """Write the picture as a PNG file."""
    from matplotlib.figure import Figure

    rows = (len(outcome.interrupted) + 1) * _ROW
    figure = Figure(figsize=(_WIDTH, _HEAD + rows + _LOSS), layout="constrained")
    times, losses = figure.subplots(2, 1, height_ratios=[rows, _LOSS])
    _draw_title(times, outcome)
    _draw_times(times, outcome)
    _draw_losses(losses, outcome)
    figure.savefig(path, dpi=110)


def _draw_title(axes: Any, outcome: "Outcome") -> None:
    color = _GREEN if outcome.equal else _RED
    axes.set_title(_headline(outcome), loc="left", pad=26, size=14, weight="bold", color=color)
    at = {"xycoords": "axes fraction", "xytext": (0, 9), "textcoords": "offset points"}
    axes.annotate(_subtitle(outcome), (0, 1), **at, size=10.5, color="0.25")


def _headline(outcome: "Outcome") -> str:
    count = len(outcome.interruptions)
    how = {0: "Never interrupted", 1: "Interrupted once"}.get(count, f"Interrupted {count} times")
    bits = "the same bits as" if outcome.equal else "DIFFERENT BITS from"
    return f"{how}: the final model has {bits} the uninterrupted run's"


def _subtitle(outcome: "Outcome") -> str:
    return (
        f"{_many(outcome.steps_lost, 'step')} taken again ({outcome.replay_seconds:.1f} s), "
        f"{outcome.restart_seconds:.1f} s of restarting, goodput {outcome.goodput:.0%}"
    )


# The attempts over time.


@dataclass(frozen=True)
class _Row:
    """An attempt's place in the upper panel, and the moments, in seconds, that divide its bar."""

    y: int
    name: str
    color: str
    attempt: Attempt
    steps: "list[Step]"
    replayed: "list[Step]"
    began: float
    earlier: bool = False
    """Whether it is from an earlier rehearsal"""

    @property
    def replayed_until(self) -> float:
        return self.replayed[-1].ended if self.replayed else self.began

    @property
    def trained_until(self) -> float:
        return self.steps[-1].ended if self.steps else self.began

    @property
    def beginning(self) -> str:
        """What is written where training begins."""
        attempt = self.attempt
        rejected = [f"{_many(len(attempt.rejected), 'snapshot')} rejected"] * bool(attempt.rejected)
        if attempt.resumed_from is not None:
            return ", ".join([f"resumed from step {attempt.resumed_from}", *rejected])
        return ", ".join(["from step 1", *rejected]) if self.steps else ""

    @property
    def again(self) -> str:
        """What is written behind it, if steps were replayed."""
        return f", {_many(len(self.replayed), 'step')} taken again" if self.replayed else ""

    @property
    def ending(self) -> str:
        """What is written where the attempt ends."""
        if self.attempt.kind == COMPLETED:
            earlier = ", in an earlier rehearsal" if self.earlier else ""
            return f"completed after {self.attempt.ended:.0f} s{earlier}"
        words = _ENDS.get(self.attempt.kind, self.attempt.kind)
        last = self.attempt.last_step
        return f"after step {last}: {words}" if last else f"before its first step: {words}"


def _draw_times(axes: Any, outcome: "Outcome") -> None:
    rows = list(_rows(outcome))
    width = _room(rows)
    axes.set(xlim=(0, width), ylim=(len(rows) - 0.4, -0.7))
    for row in rows:
        _draw_bar(axes, row)
        _write_at(axes, row)
        _number_snapshots(axes, row, width)
        tail = _TAILS.get(row.attempt.kind, "")
        _write_inside(axes, row.y, (row.trained_until, row.attempt.ended), tail, width)
    _name_parts(axes, rows, width)
    axes.set_xlabel("seconds since the job began")
    axes.set_yticks([row.y for row in rows], [row.name for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(row.color)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _rows(outcome: "Outcome") -> Iterator[_Row]:
    for y, attempt in enumerate(outcome.interrupted):
        steps, replayed = outcome.steps_of(attempt), outcome.replayed(attempt)
        name, began = f"attempt {attempt.number}", outcome.training_began(attempt)
        yield _Row(y, name, _color(attempt), attempt, steps, replayed, began)
    alone, y = outcome.uninterrupted, len(outcome.interrupted)
    steps, began = outcome.steps_of(alone), outcome.training_began(alone)
    yield _Row(y, "uninterrupted", "0.45", alone, steps, [], began, outcome.control_reused)


def _draw_bar(axes: Any, row: _Row) -> None:
    def bar(start: float, end: float, **style: Any) -> None:
        axes.barh(row.y, end - start, left=start, height=_BAR, **style)

    bar(row.attempt.started, row.attempt.ended, color=_GREY)
    bar(row.began, row.trained_until, color=_BLUE)
    bar(row.began, row.replayed_until, color=_ORANGE, hatch="////", edgecolor="white", lw=0)
    snapshots = [when for when, _ in row.attempt.snapshots]
    axes.plot(snapshots, [row.y + 0.21] * len(snapshots), "^", ms=5, color="black", mew=0)
    if row.attempt.kind != COMPLETED:
        axes.plot(row.attempt.ended, row.y, "X", ms=10, color=_RED, mec="white", clip_on=False)


def _write_at(axes: Any, row: _Row) -> None:
    """How it begins, above the bar; how it ends, behind it."""
    above = {"size": _LARGE, "va": "bottom"}
    text = axes.text(row.began, row.y - _BAR / 2 - 0.03, row.beginning, color="0.2", **above)
    if row.again:
        axes.annotate(row.again, (1, 0), xycoords=text, color=_BROWN, **above)
    color = _GREEN if row.attempt.kind == COMPLETED else _RED
    behind = {"xytext": (9, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(row.ending, (row.attempt.ended, row.y), **behind, size=_LARGE, color=color)


def _number_snapshots(axes: Any, row: _Row, width: float) -> None:
    """The step of each snapshot below its mark, as far as there is room."""
    free_from = 0.0
    for when, step in row.attempt.snapshots:
        half = _inches(f" {step} ", _SMALL) / 2 * width / _AXES
        if when - half >= free_from:
            _write_below(axes, row.y, when, str(step), "center")
            free_from = when + half


def _name_parts(axes: Any, rows: list[_Row], width: float) -> None:
    """What the parts of a bar are, written into the first bar that has the room."""
    starting = [(row.y, (row.attempt.started, row.began)) for row in rows]
    training = [(row.y, (row.replayed_until, row.trained_until)) for row in rows]
    for names, parts in (("instances starting", "starting"), starting), (("training",), training):
        any(_write_inside(axes, y, part, name, width) for name in names for y, part in parts)
    for row in rows:
        if row.attempt.snapshots:
            when, step = row.attempt.snapshots[0]
            half = _inches(f"{step} ", _SMALL) / 2 * width / _AXES
            _write_below(axes, row.y, when - half, "snapshots at step", "right")
            return


def _write_inside(axes: Any, y: int, bounds: tuple[float, float], text: str, width: float) -> bool:
    """Write into a part of a bar; False, and nothing, if it is too short."""
    start, end = bounds
    if _inches(text, _SMALL) > (end - start) / width * _AXES:
        return False
    axes.text((start + end) / 2, y, text, size=_SMALL, ha="center", va="center", color="0.15")
    return True


def _write_below(axes: Any, y: int, when: float, text: str, align: str) -> None:
    axes.text(when, y + 0.28, text, size=_SMALL, ha=align, va="top", color="0.3")


def _room(rows: list[_Row]) -> float:
    """The end of the time axis, in seconds, so that whatever is written beside a bar fits in."""
    texts = [(row.attempt.ended, row.ending) for row in rows]
    texts += [(row.began, row.beginning + row.again) for row in rows]
    return max(when / max(0.2, 1 - _inches(f"{text}   ", _LARGE) / _AXES) for when, text in texts)


# The loss over the optimizer steps.


def _draw_losses(axes: Any, outcome: "Outcome") -> None:
    axes.plot(*_curve(outcome.uninterrupted), lw=10, color="0.86", solid_capstyle="round")
    for attempt in reversed(outcome.interrupted):  # who reached a step first is on top
        axes.plot(*_curve(attempt), lw=1.8, color=_color(attempt), marker=".", ms=4)
    for attempt in outcome.interrupted:
        _draw_replayed(axes, outcome, attempt)
        if attempt.kind != COMPLETED and attempt.steps:
            _, step, loss, _ = attempt.steps[-1]
            axes.plot(step, loss, "X", ms=9, color=_RED, mec="white", zorder=4)
    _name_pieces(axes, outcome)
    _name_curves(axes, outcome)
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.margins(y=0.14)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_replayed(axes: Any, outcome: "Outcome", attempt: Attempt) -> None:
    """Dashes in this attempt's colour, on the line of the one that was here before."""
    again = {step.number for step in outcome.replayed(attempt)}
    points = [(step, loss) for _, step, loss, _ in attempt.steps if step in again]
    if points:
        axes.plot(*zip(*points, strict=True), lw=1.8, ls=(0, (2, 2)), color=_color(attempt))


def _name_pieces(axes: Any, outcome: "Outcome") -> None:
    """Each attempt's name where it went further than those before; its number if room is short."""
    spots = list(_spots(outcome))
    per_inch = _last_step(outcome) * 1.2 / _AXES
    ends = [step for _, step in spots[1:]] + [float("inf")]
    free_from = 0.0
    for (attempt, step), end in zip(spots, ends, strict=True):
        names = f"attempt {attempt.number}", str(attempt.number)
        wide = _inches(f"{names[0]} ", _LARGE) * per_inch
        name = names[0] if step + wide <= end else names[1]
        if step < free_from:
            continue
        free_from = step + _inches(f"{name} ", _LARGE) * per_inch
        height = max(loss for s, loss in _points(outcome) if step <= s <= max(step, free_from))
        beside = {"xytext": (3, 9), "textcoords": "offset points"}
        axes.annotate(name, (step, height), **beside, size=_LARGE, color=_color(attempt))


def _spots(outcome: "Outcome") -> Iterator[tuple[Attempt, int]]:
    """The middle of the steps that an attempt was the first to log."""
    furthest = 0
    for attempt in outcome.interrupted:
        new = [step for _, step, *_ in attempt.steps if step > furthest]
        if new:
            yield attempt, new[len(new) // 2]
            furthest = new[-1]


def _points(outcome: "Outcome") -> Iterator[tuple[int, float]]:
    return ((step, loss) for a in outcome.interrupted for _, step, loss, _ in a.steps)


def _name_curves(axes: Any, outcome: "Outcome") -> None:
    """What the two lines are, in the corner that a falling loss leaves free."""
    end = _last_step(outcome)
    axes.set_xlim(-0.02 * end, end * 1.1)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= end])
    names = [("thick and pale: uninterrupted", "0.5"), ("thin: the attempts", "0.1")]
    if outcome.steps_lost:
        names.append(("dashed: steps taken again", "0.1"))
    for row, (text, color) in enumerate(names):
        corner = {"xycoords": "axes fraction", "ha": "right", "va": "top"}
        axes.annotate(text, (0.98, 0.96 - 0.08 * row), **corner, size=_LARGE, color=color)


def _curve(attempt: Attempt) -> tuple[list[int], list[float]]:
    return [step for _, step, *_ in attempt.steps], [loss for _, _, loss, _ in attempt.steps]


def _last_step(outcome: "Outcome") -> int:
    return max([a.last_step or 1 for a in [*outcome.interrupted, outcome.uninterrupted]])


def _color(attempt: Attempt) -> str:
    return _DARK[(attempt.number - 1) % len(_DARK)]


def _inches(text: str, points: float) -> float:
    """How wide a text is, about."""
    return len(text) * points * 0.6 / 72


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
