"""Reading the log and the listing: every event once, in any order, in little memory."""

import random
import tracemalloc

import pytest

from launch.following.job import Job
from launch.following.logs import IDS_KEPT, Event, LogReader
from launch.following.state import LINES_KEPT, SNAPSHOTS_KEPT, STREAMS_KEPT, LogState, host_of
from launch.following.storage import Storage, resumable
from launch.following.trouble import Withheld
from tests.launch.scripted import (
    NAME,
    PREFIX,
    Aws,
    at,
    described_manifest,
    refused,
    resumed,
    saved,
    stepped,
)

URI = f"s3://my-bucket/{PREFIX}"


@pytest.fixture
def aws():
    return Aws().life(("Training", 10**6))


def reader_of(aws):
    """A function that reads one page, at the time of the script."""
    reader = LogReader(aws.clients.logs, NAME)
    return reader, lambda: reader.read(Job(aws.described()), at(aws.seconds))


def test_streams_that_arrive_late_and_out_of_order_are_read_once_each(aws):
    draw = random.Random(7)
    for seconds in range(0, 600, 2):
        for host in (1, 2, 3):
            stream = f"algo-{host}-177236640{seconds // 300}"
            aws.say(seconds, f"{host} at {seconds}", stream, late=draw.choice([0, 0, 1, 20, 49]))
    _, read = reader_of(aws)
    seen = []
    for aws.seconds in range(0, 700, 10):
        seen += [event.text for event in read()]
    assert len(seen) == len(set(seen))
    assert set(seen) == {event["message"] for _, event in aws.events}


def test_only_new_events_are_asked_for(aws):
    asked = []
    answer = aws.clients.logs.filter_log_events
    logs = type("Logs", (), {"filter_log_events": lambda _, **k: asked.append(k) or answer(**k)})()
    reader = LogReader(logs, NAME)
    for seconds in range(0, 3600, 10):
        aws.say(seconds, "x")
    for aws.seconds in (0, 1800, 3600):
        reader.read(Job(aws.described()), at(aws.seconds))
    begin = int(at(0).timestamp() * 1000)
    assert [(k["startTime"] - begin) / 1000 for k in asked] == [-60, -60, 1740]


def test_a_long_log_is_read_a_page_a_call(aws):
    aws.page = 100
    for number in range(250):
        aws.say(number, f"line {number}")
    aws.seconds = 300
    reader, read = reader_of(aws)
    pages = []
    for _ in range(3):
        pages.append(len(read()))
        assert reader.behind == (len(pages) < 3)
    assert pages == [100, 100, 50]
    assert read() == []


def test_a_page_that_was_throttled_is_asked_for_again(aws):
    aws.page, aws.seconds = 100, 300
    for number in range(150):
        aws.say(number, f"line {number}")
    _, read = reader_of(aws)
    assert len(read()) == 100
    aws.fail("logs", refused("InvalidParameterException"), times=1)
    with pytest.raises(Withheld):
        read()
    assert sum(len(read()) for _ in range(2)) == 50


def test_a_log_that_is_not_there_yet_is_empty(aws):
    aws.fail("logs", refused("ResourceNotFoundException", "FilterLogEvents"), times=1)
    _, read = reader_of(aws.say(0, "later"))
    assert read() == []
    assert [event.text for event in read()] == ["later"]


def test_what_would_move_a_terminals_cursor_is_left_out(aws):
    _, read = reader_of(aws.say(0, "\x1b[2Jred\r\n").say(1, "x" * 10_000))
    aws.seconds = 1
    red, long = read()
    assert (red.text, len(long.text)) == ("[2Jred", 500)


def event(seconds, text, stream=f"{NAME}/algo-1-1772366400"):
    return Event(stream, at(seconds), text)


def test_a_late_line_does_not_turn_back_the_step():
    log = LogState()
    log.absorb(event(100, stepped(50, 1.5)))
    log.absorb(event(90, stepped(45, 1.6)))
    assert (log.step, log.reading.loss) == (50, 1.5)
    log.absorb(event(300, resumed(40, 2)))
    assert log.step == 40
    log.absorb(event(302, stepped(41, 1.4)))
    assert (log.step, log.seconds_per_step) == (41, 2.0)


def test_snapshots_of_an_earlier_attempt_are_not_this_ones():
    log = LogState()
    for seconds, step in ((10, 100), (20, 200), (120, 150)):
        log.absorb(event(seconds, saved(step)))
    assert log.snapshots_since(at(100)) == {150: at(120)}
    assert max(log.snapshots_since(None)) == 200


@pytest.mark.parametrize(
    ("stream", "host"),
    [("JOB/algo-1-1772366400", "algo-1"), ("JOB/algo-12", "algo-12"), ("", "?"), ("JOB/", "?")],
)
def test_a_stream_is_named_by_its_host(stream, host):
    assert host_of(stream) == host


def test_a_day_of_a_chatty_job_fits_in_memory(aws):
    """Bursts of long lines, from ever new attempts of 24 hosts: far below 200 MB."""
    reader, log = LogReader(aws.clients.logs, NAME), LogState()
    tracemalloc.start()
    for begin in range(0, 86_400, 7_200):
        aws.events, aws.seconds = [], begin + 300
        for number in range(3_000):
            seconds = begin + number / 10
            stream = f"algo-{number % 24}-{1_772_366_400 + begin}"
            text = saved(begin + number) if number % 5 == 0 else stepped(number) + "x" * 400
            aws.say(seconds, text, stream)
            aws.events[-1][1]["eventId"] = f"{seconds:056.3f}"
        for one in reader.read(Job(aws.described()), at(aws.seconds)):
            log.absorb(one)
    aws.events = []
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 20e6
    assert len(log._tails) <= STREAMS_KEPT
    assert len(log.snapshots) <= SNAPSHOTS_KEPT
    assert max(map(len, log._tails.values())) <= LINES_KEPT
    assert len(reader._seen) <= IDS_KEPT


def test_ids_are_bounded_even_when_all_lines_come_in_one_minute(aws, monkeypatch):
    monkeypatch.setattr("launch.following.logs.IDS_KEPT", 100)
    for number in range(1000):
        aws.say(number / 100, "x")
    aws.seconds = 60
    reader, read = reader_of(aws)
    assert len(read()) == 1000
    assert len(reader._seen) == 100


def test_the_newest_whole_snapshot_is_found_behind_a_thousand_names(aws):
    aws.keys = 10
    for step in range(10, 310, 10):
        aws.put(0, step)
    storage = Storage(aws.clients.s3, URI)
    for _ in range(8):
        storage.look()
    assert storage.newest == 300
    aws.calls.clear()
    storage.look()
    assert (storage.newest, aws.calls) == (300, ["list"])


def test_snapshots_that_vanish_are_not_believed_in(aws):
    aws.put(0, 10).put(0, 20)
    storage = Storage(aws.clients.s3, URI)
    storage.look()
    assert storage.newest == 20
    aws.objects = aws.objects[:2]
    storage.look()
    storage.look()
    assert storage.newest == 10


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (b"\x80", "manifest cannot be read (UnicodeDecodeError)"),
        (described_manifest(40), "manifest is of step 40"),
        (described_manifest(30, run_name="other"), "it is of the run 'other'"),
        (described_manifest(30, bytes=8), "7 bytes instead of 8"),
    ],
)
def test_a_start_steps_back_from_what_is_not_whole(aws, manifest, reason):
    aws.put(0, 10, 20).put(0, 30, manifest=manifest)
    found = resumable(aws.clients.s3, URI, "shakespeare")
    assert found == (20, [f"step-0000000030.pt does not count: {reason}"])
