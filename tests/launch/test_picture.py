"""The picture of a rehearsal: it can always be drawn, and says in words what happened."""

import dataclasses

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from launch.rehearsal.attempt import COMPLETED, Attempt
from launch.rehearsal.container import Means
from launch.rehearsal.interruptions import FREEZE, KINDS
from launch.rehearsal.picture import draw
from launch.rehearsal.report import Outcome


def attempt(number, kind, resumed_from, last, every=1):
    """Ten seconds an attempt: five to start, then a tenth of a second for each step."""
    started = (number - 1) * 10.0
    made = Attempt(number, started, started + 10, kind, resumed_from or None)
    for step in range(resumed_from + every, last + 1, every):
        when = started + 5 + (step - resumed_from) / 10
        made.hear(f"step={step} loss={5 - step / 30:.2f} norm=1 step_seconds=0.1", when)
    if last > resumed_from:
        made.hear(f"snapshot step={last - 2} stall_ms=1", started + 9)
    return made


def outcome(interruptions, every=1, equal=True):
    kinds = (KINDS * 2)[:interruptions]
    attempts, resumed = [], 0
    for number, kind in enumerate(kinds, 1):
        last = resumed if kind == FREEZE else resumed + 10
        attempts.append(attempt(number, kind, resumed, last, every))
        resumed = max(resumed, last - 5)
    attempts.append(attempt(len(kinds) + 1, COMPLETED, resumed, 60, every))
    digests = {"interrupted": "a", "uninterrupted": "a" if equal else "b"}
    alone = attempt(1, COMPLETED, 0, 60, every)
    return Outcome(attempts, alone, digests, Means(True, ()))


@pytest.fixture
def words(monkeypatch):
    """The texts of the figure that was drawn last."""
    figures = []
    save = Figure.savefig

    def remember(figure, *args, **options):
        figures.append(figure)
        return save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", remember)
    return lambda: [text.get_text() for text in figures[-1].findobj(Text)]


@pytest.mark.parametrize("interruptions", [0, 1, 8])
@pytest.mark.parametrize("every", [1, 5])
def test_it_is_drawn_with_a_row_for_each_attempt(tmp_path, words, interruptions, every):
    draw(outcome(interruptions, every), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    rows = [word for word in words() if word.startswith("attempt ")]
    assert {f"attempt {number}" for number in range(1, interruptions + 2)} <= set(rows)


def test_it_says_where_training_went_on_and_how_each_attempt_ended(tmp_path, words):
    draw(outcome(1), tmp_path / "picture.png")
    said = words()
    assert "Interrupted once: the final model has the same bits as the uninterrupted run's" in said
    assert "after step 10: reclaimed, with a warning" in said
    assert "resumed from step 5" in said
    assert ", 5 steps taken again" in said
    assert "completed after 20 s" in said


def test_an_attempt_without_a_step_and_other_bits_are_said_too(tmp_path, words):
    draw(outcome(7, equal=False), tmp_path / "picture.png")
    assert "before its first step: froze, then killed" in words()
    assert any("DIFFERENT BITS" in word for word in words())


def test_an_uninterrupted_run_of_an_earlier_rehearsal_is_called_so(tmp_path, words):
    draw(dataclasses.replace(outcome(1), control_reused=True), tmp_path / "picture.png")
    assert "completed after 10 s, in an earlier rehearsal" in words()


def overlapping(figure):
    """Pairs of texts of the upper panel that lie on each other."""
    renderer = figure.canvas.get_renderer()
    boxes = [
        (text.get_text(), text.get_window_extent(renderer))
        for text in figure.axes[0].texts
        if text.get_text()
    ]
    return [
        (a, b)
        for i, (a, first) in enumerate(boxes)
        for b, second in boxes[i + 1 :]
        if first.shrunk(0.97, 0.8).overlaps(second.shrunk(0.97, 0.8))
    ]


@pytest.mark.parametrize("interruptions", [1, 4, 10])
def test_no_text_lies_on_another(tmp_path, monkeypatch, interruptions):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw(outcome(interruptions), tmp_path / "picture.png")
    FigureCanvasAgg(figures[0]).draw()
    assert overlapping(figures[0]) == []
