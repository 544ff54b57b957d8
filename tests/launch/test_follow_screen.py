"""The live view, drawn as text."""

import dataclasses
from io import StringIO

import pytest
from rich.console import Console

from launch.following import screen
from launch.following.ending import Ending
from launch.following.job import Job
from launch.following.logs import Event
from launch.following.picture import Picture
from launch.following.state import LogState
from tests.launch.scripted import NAME, Aws, at, resumed, saved, stepped


def drawn(picture, width=100):
    console = Console(file=StringIO(), width=width)
    console.print(screen.view(picture))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.fixture
def picture():
    """The second attempt, 200 s into its training; one snapshot is logged and not yet in S3."""
    aws = Aws().life(
        *[("Starting", 60), ("Downloading", 30), ("Training", 210), ("Interrupted", 100)],
        *[("Starting", 60), ("Downloading", 30), ("Training", 5000)],
    )
    aws.seconds, log = 690, LogState()
    lines = [
        *[(90, "starting fresh: no snapshot in /opt/ml/checkpoints"), (290, stepped(100, 3.25))],
        *[(291, saved(100)), (490, resumed(100, 2)), (590, stepped(150)), (591, saved(150))],
        *[(640, stepped(175)), (688, stepped(198, 1.9876)), (689, saved(198))],
    ]
    for seconds, text in lines:
        stream = f"{NAME}/algo-1-177236640{1 if seconds < 400 else 2}"
        log.absorb(Event(stream, at(seconds), text))
    described = {**aws.described(), "TrainingTimeInSeconds": 500, "BillableTimeInSeconds": 160}
    return Picture(Job(described), log, 150, (), (), at(690))


VIEW = """
╭─ shakespeare-20260301-120000-000 ────────────────────────────────────────────────────────────────╮
│ run        shakespeare                                                                           │
│ status     InProgress · Training   attempt 2, interrupted 1×                                     │
│ UTC        2026-03-01 12:00:00 Starting → 12:01:00 Downloading → 12:01:30 Training → 12:05:00    │
│            Interrupted → 12:06:40 Starting → 12:07:40 Downloading → 12:08:10 Training            │
│ step       198 / 400  ━━━━━━━━━━━━━━━━━━━╸                      50%  6 min 44 s left             │
│ loss       1.9876   640.0 samples/s                                                              │
│ snapshots  step 198 logged, step 150 in S3: 48 steps at risk (48 to repeat if interrupted now)   │
│ time       trained 8 min 20 s, billed 2 min 40 s, savings 68%                                    │
│ ╭─ log ────────────────────────────────────────────────────────────────────────────────────────╮ │
│ │ 12:04:50 algo-1 step=100 loss=3.2500 learning_rate=3.0e-04 gradient_norm=1.000 samples_per_… │ │
│ │ 12:04:51 algo-1 snapshot step=100 stall_ms=1.0 write_s=0.40 bytes=7                          │ │
│ │ 12:08:10 algo-1 resumed step=100 snapshot=step-0000000100.pt attempt=2                       │ │
│ │ 12:09:50 algo-1 step=150 loss=2.5000 learning_rate=3.0e-04 gradient_norm=1.000 samples_per_… │ │
│ │ 12:09:51 algo-1 snapshot step=150 stall_ms=1.0 write_s=0.40 bytes=7                          │ │
│ │ 12:10:40 algo-1 step=175 loss=2.5000 learning_rate=3.0e-04 gradient_norm=1.000 samples_per_… │ │
│ │ 12:11:28 algo-1 step=198 loss=1.9876 learning_rate=3.0e-04 gradient_norm=1.000 samples_per_… │ │
│ │ 12:11:29 algo-1 snapshot step=198 stall_ms=1.0 write_s=0.40 bytes=7                          │ │
│ ╰──────────────────────────────────────────────────────────────────────────────────────────────╯ │
╰──────────────────────────────────────────────────────────────────────────────────────────────────╯
"""


def test_the_view_shows_all_of_it(picture):
    assert "\n".join(drawn(picture)) == VIEW.strip("\n")


def test_warnings_and_what_could_not_be_read_are_in_the_view(picture):
    picture = dataclasses.replace(
        picture,
        log=LogState(),
        in_s3=None,
        warnings=["no sign of life since 12:00:00"],
        missing=["the log cannot be read: no permission"],
    )
    lines = [line.strip("│ ") for line in drawn(picture)]
    assert lines[5:11] == [
        f"step       – / 400  {' ' * 40}  0%",
        "loss       –   – samples/s",
        "snapshots  none logged, none in S3: 0 steps at risk",
        "time       trained 8 min 20 s, billed 2 min 40 s, savings 68%",
        "! no sign of life since 12:00:00",
        "the log cannot be read: no permission",
    ]


def test_what_s3_has_is_not_known_where_it_cannot_be_listed(picture):
    picture = dataclasses.replace(picture, in_s3=None, s3_known=False)
    lines = [line.strip("│ ") for line in drawn(picture)]
    assert "snapshots  step 198 logged, S3 not known" in lines
    values = picture.as_json()
    assert (values["steps_at_risk"], values["steps_to_repeat"]) == (None, None)


def test_square_brackets_and_narrow_terminals_do_no_harm(picture):
    line = "[red]KeyError[/red] [/] [link=x]"
    picture.log.absorb(Event(f"{NAME}/algo-1-1772366402", at(690), line))
    assert any(f"12:11:30 algo-1 {line}" in one for one in drawn(picture))
    assert all(len(one) <= 30 for one in drawn(picture, width=30))


def test_only_the_newest_of_very_many_states_are_shown(picture):
    aws = Aws().life(*[("Starting", 1), ("Interrupted", 1)] * 100)
    aws.seconds = 1000
    text = " ".join(drawn(dataclasses.replace(picture, job=Job(aws.described()))))
    assert "… 160 earlier → " in text
    assert text.count("Interrupted") - text.count("· Interrupted") == 20


def test_the_end_stays_below_the_last_view(picture):
    console = Console(file=StringIO(), width=100, force_terminal=True)
    with screen.LiveScreen(console) as live:
        live.show(picture)
        live.end(picture, Ending(["stopped    by [hand]", "continue   " + "x" * 150], 3))
    text = console.file.getvalue()
    assert text.endswith(f"stopped    by [hand]\ncontinue   {'x' * 150}\n")


def test_a_job_of_several_days_shows_the_days(picture):
    aws = Aws().life(("Starting", 13 * 3600), ("Training", 60), ("Interrupted",))
    aws.seconds = 50_000
    text = " ".join(" ".join(drawn(dataclasses.replace(picture, job=Job(aws.described())))).split())
    assert "2026-03-01 12:00:00 Starting → 2026-03-02 01:00:00 Training → 01:01:00 Interr" in text
