"""What the rehearsal concludes: equality of bits, what the interruptions cost, what is said."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from launch.rehearsal.attempt import COMPLETED, Attempt
from launch.rehearsal.container import Means
from launch.rehearsal.equality import digest_of
from launch.rehearsal.interruptions import HOST, KILL, KINDS, RECLAIM
from launch.rehearsal.report import Outcome, facts, table, write
from launch.rehearsal.screen import Screen


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


def concluded(attempts, uninterrupted=None, **more):
    digests = {"interrupted": "aa", "uninterrupted": "aa"}
    alone = uninterrupted or attempts[-1]
    return Outcome(attempts, alone, digests, Means(True, ("unshare",)), **more)


def printed(*things):
    console = Console(width=80, file=io.StringIO(), highlight=False)
    for thing in things:
        console.print(thing)
    return console.file.getvalue()


def test_steps_lost_and_goodput_come_from_the_log(outcome):
    assert outcome.steps_lost == 2
    assert outcome.goodput == pytest.approx(5 / 20)


def test_restart_and_replay_are_told_apart(outcome):
    assert outcome.restart_seconds == pytest.approx(5.0)  # the step that ended at 16 took a second
    assert outcome.replay_seconds == pytest.approx(2.0)  # steps 3 and 4; step 5 is new


def test_a_line_that_speaks_for_ten_steps_counts_ten():
    one = attempt(1, 0.0, 40.0, COMPLETED, None, [(10, step(10)), (20, step(20))])
    assert concluded([one]).goodput == pytest.approx(0.5)


@pytest.fixture
def every_five():
    """log_every is 5: lines at 5 and 10, a snapshot of 12, then 15 and 20 in the next attempt."""
    first = [(10, step(5)), (15, step(10)), (19, "snapshot step=12 stall_ms=1")]
    second = [(29, "resumed step=10 snapshot=x attempt=2"), (40, step(15, 2)), (45, step(20))]
    return concluded(
        [attempt(1, 0.0, 20.0, KILL, None, first), attempt(2, 20.0, 50.0, COMPLETED, None, second)]
    )


def test_with_a_line_every_five_steps_all_steps_still_count(every_five):
    first, second = every_five.as_json()["attempts"]
    assert (first["first_step"], first["last_step"]) == (1, 12)
    assert (second["first_step"], second["last_step"]) == (11, 20)
    assert every_five.steps_lost == 2
    assert every_five.replay_seconds == pytest.approx(2 * 2.0)
    assert every_five.restart_seconds == pytest.approx(40 - 5 * 2.0 - 20)
    assert every_five.goodput == pytest.approx((10 * 1.0 + 5 * 2.0 + 5 * 1.0) / 50)


def test_a_step_that_only_a_snapshot_tells_of_counts_as_the_mean_step_or_as_the_time_there_was():
    """Two steps after the last line: held by the final model, though no line gave their seconds."""
    second = [(39, "resumed step=12 snapshot=x attempt=2"), (45, step(15)), (50, step(20))]

    def goodput(snapshot_at):
        first = [(5, step(5)), (10, step(10)), (snapshot_at, "snapshot step=12 stall_ms=1")]
        return concluded(
            [
                attempt(1, 0.0, 20.0, KILL, None, first),
                attempt(2, 20.0, 60.0, COMPLETED, None, second),
            ]
        ).goodput

    assert goodput(snapshot_at=19) == pytest.approx(20 / 60)
    assert goodput(snapshot_at=11) == pytest.approx(19 / 60)


def test_an_attempt_that_ended_before_its_first_step_is_all_restart():
    attempts = [
        attempt(1, 0, 10, KILL, None, [(9, step(1)), (10, step(2)), (10, "snapshot step=2 s")]),
        attempt(2, 10, 17, HOST, None, [(16, "resumed step=2 snapshot=x attempt=2")]),
        attempt(3, 17, 30, COMPLETED, None, [(25, "resumed step=2 snapshot=x attempt=3")]),
    ]
    attempts[2].hear(step(3), 27.0)
    outcome = concluded(attempts)
    assert outcome.restart_seconds == pytest.approx(7 + 9)
    assert (outcome.steps_lost, outcome.replay_seconds) == (0, 0)
    assert outcome.goodput == pytest.approx(3 / 30)
    idle = outcome.as_json()["attempts"][1]
    assert (idle["first_step"], idle["last_step"], idle["resumed_from"]) == (None, None, 2)
    assert "none" in printed(table(outcome))


def test_without_a_snapshot_before_the_interruption_every_step_is_replayed():
    lines = [(6, step(1)), (7, step(2)), (8, step(3))]
    again = [(when + 10, line) for when, line in [*lines, (9, step(4))]]
    outcome = concluded(
        [attempt(1, 0, 9, KILL, None, lines), attempt(2, 10, 20, COMPLETED, None, again)]
    )
    assert outcome.steps_lost == 3
    assert outcome.replay_seconds == pytest.approx(3.0)
    assert outcome.goodput == pytest.approx(4 / 19)
    assert outcome.snapshots == {"written": 0, "rejected": 0, "restored": 0}


def test_a_step_that_is_taken_three_times_is_replayed_twice():
    def go(number, start, kind, last):
        lines = [(start + n, step(n)) for n in range(1, last + 1)]
        return attempt(number, start, start + 10, kind, None, lines)

    attempts = [go(1, 0, KILL, 6), go(2, 10, KILL, 2), go(3, 20, COMPLETED, 8)]
    assert concluded(attempts).steps_lost == 2 + 6


def test_spot_saves_what_the_discount_leaves_after_the_interruptions(outcome):
    alone = attempt(1, 0.0, 12.0, COMPLETED, None, [(12, step(5))])
    saved = dataclasses.replace(outcome, uninterrupted=alone, discount=0.7).saved
    assert saved == pytest.approx(1 - 20 * 0.3 / 12)
    assert "50% cheaper" in printed(facts(dataclasses.replace(outcome, uninterrupted=alone)))


def test_a_saving_that_is_none_is_called_by_its_name(outcome):
    alone = attempt(1, 0.0, 4.0, COMPLETED, None, [(4, step(5))])
    outcome = dataclasses.replace(outcome, uninterrupted=alone)
    assert outcome.saved == pytest.approx(-0.5)
    assert outcome.as_json()["spot"] == {"discount": 0.7, "saved": -0.5}
    assert "50% DEARER" in printed(facts(outcome))


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
    assert (report["steps_lost"], report["goodput"]) == (2, 0.25)
    assert (tmp_path / "rehearsal.png").stat().st_size > 10_000
    assert table(outcome).row_count == 3


def test_the_report_tells_how_it_was_rehearsed_and_what_it_cost(outcome):
    outcome.interrupted[1].hear("rejected snapshot=step-0000000004.pt reason=half", 14.0)
    report = dataclasses.replace(
        outcome,
        changes=("training.model_width is 96 instead of 1024",),
        unreached=("55:upload",),
        control_reused=True,
        seed=3,
        sync="stalled",
    ).as_json()
    expected = {
        "interruptions": 1,
        "unreached": ["55:upload"],
        "restart_seconds": 5.0,
        "replay_seconds": 2.0,
        "snapshots": {"written": 1, "rejected": 1, "restored": 1},
        "spot": {"discount": 0.7, "saved": 0.4},
        "changes": ["training.model_width is 96 instead of 1024"],
        "control_reused": True,
        "seed": 3,
        "sync": "stalled",
        "toolkit": True,
        "pid_namespace": True,
        "notes": [],
    }
    assert {key: report[key] for key in expected} == expected


def test_different_digests_are_not_equal(outcome):
    outcome.digests["interrupted"] = "bb"
    assert outcome.equal is False
    assert outcome.as_json()["equal"] is False


def shown(terminal=False):
    """What a Screen prints, while no bar is drawn."""
    file = io.StringIO()
    screen = Screen(60, Console(file=file, width=80, force_terminal=terminal, highlight=False))
    return screen, lambda: file.getvalue()


def test_every_kind_of_interruption_has_one_line_in_words():
    screen, text = shown()
    for number, kind in enumerate(KINDS, 1):
        one = attempt(number, 0, 9, kind, None, [(8, step(17))])
        screen.show(one, "booting")
        screen.show(one, kind)
    lines = text().splitlines()
    assert len(lines) == len(KINDS)
    assert all("after step 17; instances and disks are gone" in line for line in lines)
    assert "attempt 2: SIGKILL without warning" in lines[KINDS.index(KILL)]


def test_what_the_rehearsal_did_and_what_rank_0_said_is_shown():
    screen, text = shown()
    one = attempt(1, 0, 9, HOST, None, [])
    one.cause = "rank 0: host algo-2 vanished"
    failed = "snapshot_failed step=1 reason=[Errno 28] No space left on device"
    for event in ("! instance algo-2 vanished", "step=1 loss=2", failed, HOST):
        screen.show(one, event)
    assert text().splitlines() == [
        "  attempt 1: instance algo-2 vanished",
        f"  attempt 1: {failed}",
        "  attempt 1: the others noticed: rank 0: host algo-2 vanished",
        "  attempt 1: the others stopped before its first step; instances and disks are gone",
    ]


def test_the_conclusion_fits_80_columns_and_names_what_did_not_happen(outcome):
    outcome.digests.update(interrupted="a" * 64, uninterrupted="a" * 64)
    screen, text = shown()
    screen.scaled([])
    assert text() == ""
    screen.scaled(["training.model_width is 96 instead of 1024"])
    screen.control()
    screen.reused()
    screen.conclude(dataclasses.replace(outcome, unreached=("55:upload",)), Path("out/x"))
    assert max(map(len, text().splitlines())) <= 80
    for said in (
        "scaled down: training.model_width is 96 instead of 1024",
        "uninterrupted: kept from an earlier rehearsal",
        "The resumed run ended with the same bits; steps taken twice: 2, goodput 25%.",
        "the interruption 55:upload did not happen",
    ):
        assert said in text()


def test_on_a_terminal_a_long_line_goes_on_below_its_own_beginning():
    screen, text = shown(terminal=True)
    reason = "the manifest promises 1234567 bytes, and the file has 55555, so it is not whole"
    screen.show(attempt(1, 0, 9, KILL, None, []), f"rejected snapshot=step-7.pt reason={reason}")
    first, second = [line.rstrip() for line in text().splitlines() if line.strip()][:2]
    assert first.startswith("  attempt 1: rejected")
    assert second.startswith("             ")
    assert max(len(first), len(second)) <= 80
