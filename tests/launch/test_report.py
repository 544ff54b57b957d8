"""What the rehearsal concludes: equality of bits, steps lost, goodput."""

import json

import pytest
import torch

from launch.rehearsal.attempt import COMPLETED, Attempt
from launch.rehearsal.container import Means
from launch.rehearsal.equality import digest_of
from launch.rehearsal.interruptions import RECLAIM
from launch.rehearsal.report import Outcome, table, write


def state():
    return {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3)}, "step": 4}


def test_equal_states_have_equal_digests_whatever_the_order_of_names():
    shuffled = {"step": 4, "model": dict(reversed(state()["model"].items()))}
    assert digest_of(state()) == digest_of(shuffled)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["model"]["a"].view(torch.int32)[1, 2].bitwise_xor_(1),
        lambda s: s["model"].update(a=s["model"]["a"].reshape(3, 2)),
        lambda s: s["model"].update(a=s["model"]["a"].view(torch.int32)),
        lambda s: s["model"].update(b=torch.tensor(4)),
        lambda s: s["model"].pop("b"),
        lambda s: s.update(step=5),
    ],
)
def test_any_difference_changes_the_digest(change):
    changed = state()
    change(changed)
    assert digest_of(changed) != digest_of(state())


def attempt(number, started, ended, kind, resumed_from, lines):
    made = Attempt(number, started, ended, kind, resumed_from)
    for when, line in lines:
        made.hear(line, when)
    return made


def step(number, seconds=1.0):
    return f"step={number} loss=2.5 learning_rate=1.0e-03 step_seconds={seconds:.4f}"


@pytest.fixture
def outcome():
    first = attempt(
        1,
        0.0,
        10.0,
        RECLAIM,
        None,
        [(6, step(1)), (7, step(2)), (7, "snapshot step=2 stall_ms=1"), (8, step(3)), (9, step(4))],
    )
    second = attempt(2, 10.0, 20.0, COMPLETED, None, [(15, "resumed step=2 snapshot=x attempt=2")])
    for number in (3, 4, 5):
        second.hear(step(number), 13.0 + number)
    digests = {"interrupted": "aa", "uninterrupted": "aa"}
    return Outcome([first, second], second, digests, Means(True, ("unshare",)))


def test_steps_lost_and_goodput_come_from_the_log(outcome):
    assert outcome.steps_lost == 2
    assert outcome.goodput == pytest.approx(5 / 20)


def test_a_line_that_speaks_for_ten_steps_counts_ten():
    one = attempt(1, 0.0, 40.0, COMPLETED, None, [(10, step(10)), (20, step(20))])
    outcome = Outcome([one], one, {"interrupted": "a", "uninterrupted": "a"}, Means(True, ()))
    assert outcome.goodput == pytest.approx(0.5)


def test_the_report_is_the_contract(outcome, tmp_path):
    write(outcome, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["equal"] is True
    assert report["digests"] == {"interrupted": "aa", "uninterrupted": "aa"}
    first, second = report["attempts"]
    assert first == {
        "kind": "reclaim",
        "resumed_from": None,
        "first_step": 1,
        "last_step": 4,
        "seconds": 10.0,
        "snapshots": [2],
        "rejected": [],
    }
    assert (second["resumed_from"], second["first_step"]) == (2, 3)
    assert (tmp_path / "rehearsal.png").stat().st_size > 10_000
    assert table(outcome).row_count == 3


def test_different_digests_are_not_equal(outcome):
    outcome.digests["interrupted"] = "bb"
    assert outcome.equal is False
    assert outcome.as_json()["equal"] is False
