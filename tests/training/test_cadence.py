"""How often a snapshot is taken: as told, or as often as it may cost."""

import math

import pytest

from training.settings import SettingsError, TrainingSettings
from training.snapshots import cadence
from training.snapshots.cadence import Cadence, pace_for


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(cadence.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cadence, "seconds_since_start", lambda: 0.0)
    return now


def settings(**values):
    return TrainingSettings(**values)


def test_steps_or_seconds_count_whichever_comes_first(clock):
    both = Cadence(settings(snapshot_steps=10, snapshot_seconds=60.0), first_step=5)
    assert not both.due(14)
    assert both.due(15)
    both.taken(15)
    clock[0] += 59.0
    assert not both.due(16)
    clock[0] += 1.0
    assert both.due(16)


def test_with_steps_alone_time_does_not_count(clock):
    by_steps = Cadence(settings(snapshot_steps=10), first_step=0)
    clock[0] += 1e9
    assert not by_steps.due(9)
    assert by_steps.due(10)


@pytest.mark.parametrize(
    ("cost", "values", "seconds", "reason"),
    [
        (None, {}, 30.0, "not known yet"),
        (0.5, {}, 50.0, "one costs 0.500 s of training and may cost 1.0%"),
        (0.5, {"snapshot_overhead": 0.1}, 5.0, "may cost 10.0%"),
        (0.001, {}, 1.0, "one costs 0.001 s"),
        (60.0, {}, 600.0, "but never further apart than this"),
        # Young: √(2 · 0.5 · 14400) = 120
        (0.5, {"mean_seconds_between_interruptions": 14400}, 120.0, "an instance lasts 14400 s"),
        (0.5, {"mean_seconds_between_interruptions": 100}, 50.0, "may cost 1.0%"),
        (0.5, {"mean_seconds_between_interruptions": 1e9}, 600.0, "never further apart"),
        (0.5, {"snapshot_seconds": 7.0}, 7.0, "set by snapshot_seconds"),
        (0.5, {"snapshot_steps": 7}, math.inf, "set by snapshot_steps"),
        (0.5, {"snapshot_steps": 7, "snapshot_seconds": 0.0}, math.inf, "snapshot_seconds"),
    ],
)
def test_the_pace_and_its_reason(cost, values, seconds, reason):
    pace = pace_for(cost, settings(**values))
    assert pace.seconds == pytest.approx(seconds)
    assert reason in pace.reason


def test_stall_and_slow_down_are_what_a_snapshot_costs(clock):
    auto = Cadence(settings(), first_step=0)
    assert auto.written(9.0, 9.0, 9.0) is None  # the first also allocated the buffers
    for _ in range(20):
        auto.step_begins()
        clock[0] += 1.5
        auto.step_done(writing=False)
    assert auto.due(20)
    auto.taken(20)
    for _ in range(3):  # three steps take 1.6 s instead of 1.5 while the snapshot is written
        auto.step_begins()
        clock[0] += 1.6
        auto.step_done(writing=True)
    # What a step waited for the copy is part of what it took longer, if that is known.
    pace = auto.written(begin_seconds=0.1, waited_seconds=0.2, write_seconds=2.0)
    assert pace.seconds == pytest.approx((0.1 + 0.3) / 0.01)
    auto.taken(24)
    clock[0] += 39.0
    assert not auto.due(60)
    clock[0] += 1.1
    assert auto.due(60)


def test_where_no_step_was_undisturbed_the_wait_for_the_copy_is_the_cost(clock):
    auto = Cadence(settings(), first_step=0)
    auto.written(9.0, 9.0, 9.0)
    auto.step_begins()
    clock[0] += 1.0
    auto.step_done(writing=True)
    assert auto.written(0.1, 0.4, 2.0).seconds == pytest.approx(0.5 / 0.01)


def test_a_pace_that_hardly_changes_is_not_told_again(clock):
    auto = Cadence(settings(), first_step=0)
    auto.written(9.0, 0.0, 1.0)
    assert auto.written(0.4, 0.0, 1.0).seconds == pytest.approx(40.0)
    auto.taken(1)
    assert auto.written(0.41, 0.0, 1.0) is None
    auto.taken(2)
    assert auto.written(4.0, 0.0, 1.0).seconds == pytest.approx(100 * (0.405 + 4.0) / 2)


def test_before_the_deadline_there_is_time_for_a_last_snapshot(clock):
    ending = Cadence(settings(deadline_seconds=1000.0), first_step=0, seconds_before=800.0)
    ending.written(0.0, 0.0, write_seconds=20.0)
    margin = 2 * 20.0 + cadence.DEADLINE_MARGIN_SECONDS
    clock[0] += 200 - margin - 0.1
    assert not ending.deadline_is_near()
    clock[0] += 0.2
    assert ending.deadline_is_near()
    assert not ending.deadline_is_near()
    assert ending.seconds_trained == pytest.approx(1000.1 - margin)


def test_the_time_before_the_first_step_counts_for_the_deadline(clock, monkeypatch):
    monkeypatch.setattr(cadence, "seconds_since_start", lambda: 300.0)
    ending = Cadence(settings(deadline_seconds=1000.0), first_step=0)
    clock[0] += 700 - cadence.DEADLINE_MARGIN_SECONDS - 0.1
    assert not ending.deadline_is_near()
    clock[0] += 0.2
    assert ending.deadline_is_near()


def test_what_other_jobs_have_trained_does_not_count_for_the_deadline(clock):
    ending = Cadence(settings(deadline_seconds=1000.0), 0, 1500.0, seconds_before_job=1100.0)
    clock[0] += 600 - cadence.DEADLINE_MARGIN_SECONDS - 0.1
    assert not ending.deadline_is_near()
    clock[0] += 0.2
    assert ending.deadline_is_near()


def test_auto_is_a_word_a_number_is_a_number_and_nothing_else_is():
    read = TrainingSettings.from_arguments
    assert read(["--snapshot-seconds", "auto"]).snapshot_seconds is None
    assert read(["--snapshot-seconds", "12.5"]).snapshot_seconds == 12.5
    with pytest.raises(SettingsError, match="'often', but must be a number or auto"):
        read(["--snapshot-seconds", "often"])
    with pytest.raises(SettingsError, match="snapshot_seconds is -1"):
        read(["--snapshot-seconds", "-1"])
