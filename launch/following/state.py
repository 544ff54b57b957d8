"""What a job's log has told so far, in little memory, whatever the order in which lines arrive."""

import datetime
import math
import re
from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from launch.following.logs import Event
from training.metrics import METRIC_DEFINITIONS, NUMBER

LINES_KEPT = 100  # of each stream
CAUSES_KEPT = 500
LINES_AFTER_CAUSE = 3  # torchrun and the toolkit say the same again, at length
STREAMS_KEPT = 200
SNAPSHOTS_KEPT = 200
PACES_KEPT = 20
_DIGITS = 15  # a step with more is no step

_METRICS = {one["Name"]: re.compile(one["Regex"]) for one in METRIC_DEFINITIONS}
_RESUMED = re.compile(rf"^resumed step={NUMBER}\b")
_FAILED = re.compile(r"^rank (\d{1,6}): ")
# A rank that only suffers from another one's end says so.
_SUFFERED = re.compile(
    r"^rank \d+: (rank \d+ (on host \S+ )?stopped: |host \S.* (lost the connection|vanished)"
    r"|the connection between the ranks failed)"
)
_BLAMED = (
    re.compile(r"^rank \d+: rank (?P<rank>\d{1,6}) (?:on host (?P<host>\S+) )?stopped: "),
    re.compile(r"^rank \d+: host (?P<host>\S+?) vanished \(rank (?P<rank>\d{1,6})"),
)


@dataclass(frozen=True)
class Reading:
    """The newest step that rank 0 reported, with what it said; None is what it did not say."""

    step: int
    time: datetime.datetime
    loss: float | None
    samples_per_second: float | None


@dataclass
class LogState:
    """What is known from the log. `absorb` is how it learns."""

    last_time: datetime.datetime | None = None
    reading: Reading | None = None
    resumed: tuple[datetime.datetime, int] | None = None
    snapshots: dict[int, datetime.datetime] = field(default_factory=dict)
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=PACES_KEPT))
    _tails: dict[str, list[tuple[datetime.datetime, int, str]]] = field(default_factory=dict)
    _causes: deque[tuple[bool, datetime.datetime, int, str, str]] = field(
        default_factory=lambda: deque(maxlen=CAUSES_KEPT)
    )
    _count: int = 0

    def absorb(self, event: Event) -> None:
        """Learn from one line; a late one does not replace what a newer one said."""
        self._count += 1
        self._keep(event)
        self.last_time = max(self.last_time or event.time, event.time)
        if (step := _step(_METRICS["snapshot:step"], event.text)) is not None:
            self._log_snapshot(step, event.time)
        elif (step := _step(_RESUMED, event.text)) is not None:
            self.resumed = max(self.resumed or (event.time, step), (event.time, step))
        elif (step := _step(_METRICS["train:step"], event.text)) is not None:
            self._read(step, event)

    @property
    def step(self) -> int | None:
        """The step that the newest attempt has reached."""
        told = [(self.reading.time, self.reading.step)] if self.reading else []
        told += [self.resumed] if self.resumed else []
        return max(told)[1] if told else None

    @property
    def seconds_per_step(self) -> float | None:
        """The mean over the newest lines that tell it."""
        return sum(self.paces) / len(self.paces) if self.paces else None

    def snapshots_since(self, start: datetime.datetime | None) -> dict[int, datetime.datetime]:
        """The snapshots whose log line is no older than `start`, by step, with its time."""
        return {s: t for s, t in sorted(self.snapshots.items()) if start is None or t >= start}

    def newest_lines(self, count: int) -> list[tuple[datetime.datetime, str, str]]:
        """The newest lines of all streams, oldest first: time, host, text."""
        lines = [(t, n, s, text) for s, tail in self._tails.items() for t, n, text in tail[-count:]]
        return [(time, host_of(stream), text) for time, _, stream, text in sorted(lines)[-count:]]

    def last_words(self, start: datetime.datetime | None, count: int) -> "LastWords | None":
        """The end of the stream that failed first, among those that wrote since `start`.

        The rank that says why it leaves, before the others do; with no such line, the host that
        fell silent first. None if there are no lines.
        """
        tails = {s: t for s, t in self._tails.items() if start is None or t[-1][0] >= start}
        if not tails:
            return None
        causes = [one for one in self._causes if start is None or one[1] >= start]
        if not causes:
            stream = min(tails, key=lambda name: tails[name][-1][:2])
            return LastWords(host_of(stream), None, _texts(tails[stream])[-count:])
        *_, speaker, text = min(causes)
        stream, rank = _whose(speaker, text, list(tails))
        lines = _texts(tails.get(stream, []))
        if stream == speaker:
            lines = _around(lines, text, count)
        return LastWords(host_of(stream), rank, lines[-count:])

    def _keep(self, event: Event) -> None:
        tail = self._tails.setdefault(event.stream, [])
        insort(tail, (event.time, self._count, event.text))
        del tail[:-LINES_KEPT]
        if _FAILED.match(event.text):
            suffered = bool(_SUFFERED.match(event.text))
            self._causes.append((suffered, event.time, self._count, event.stream, event.text))
        if len(self._tails) > STREAMS_KEPT:
            del self._tails[min(self._tails, key=lambda name: self._tails[name][-1][:2])]

    def _log_snapshot(self, step: int, time: datetime.datetime) -> None:
        self.snapshots[step] = max(self.snapshots.get(step, time), time)
        while len(self.snapshots) > SNAPSHOTS_KEPT:
            del self.snapshots[min(self.snapshots, key=lambda one: self.snapshots[one])]

    def _read(self, step: int, event: Event) -> None:
        if self.reading and event.time < self.reading.time:
            return
        if self.reading and event.time == self.reading.time and step < self.reading.step:
            return  # several lines may share a millisecond
        loss = _number(_METRICS["train:loss"], event.text)
        rate = _number(_METRICS["train:samples_per_second"], event.text)
        self.reading = Reading(step, event.time, loss, rate)
        pace = _number(_METRICS["train:step_seconds"], event.text)
        if pace is not None and math.isfinite(pace) and pace >= 0:
            self.paces.append(pace)


@dataclass(frozen=True)
class LastWords:
    """The last lines of a host, and the rank that spoke there, where it is known."""

    host: str
    rank: int | None
    lines: list[str]


def host_of(stream: str) -> str:
    """The host in a stream's name, `JOB/algo-1-1700000000`: without the time of its start."""
    return re.sub(r"-\d{9,}$", "", stream.rpartition("/")[2]) or "?"


def _texts(tail: list[tuple[datetime.datetime, int, str]]) -> list[str]:
    return [text for *_, text in tail]


def _around(lines: list[str], cause: str, count: int) -> list[str]:
    """`count` lines that end shortly after the cause; it is there even if too many came since."""
    if cause not in lines:
        return [cause, *lines[1 - count :]]
    end = lines.index(cause) + 1 + LINES_AFTER_CAUSE
    return lines[max(0, end - count) : end]


def _whose(stream: str, text: str, streams: list[str]) -> tuple[str, int | None]:
    """The stream and the rank that failed; a peer's word for it counts where it kept silent."""
    if blamed := next((m for pattern in _BLAMED if (m := pattern.match(text))), None):
        theirs = [name for name in streams if host_of(name) == blamed["host"]]
        return max(theirs, default=stream), int(blamed["rank"])
    match = _FAILED.match(text)
    return stream, int(match[1]) if match else None


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    try:
        return float(match[1]) if match else None
    except ValueError:
        return None


def _step(pattern: re.Pattern[str], text: str) -> int | None:
    number = _number(pattern, text)
    if number is None or not math.isfinite(number) or not 0 <= number < 10**_DIGITS:
        return None
    return int(number)
