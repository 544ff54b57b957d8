"""Reads a job's CloudWatch log a page at a time, every event once, the newest ones soon."""

import datetime
from dataclasses import dataclass
from itertools import islice
from typing import Any

from launch.following.job import Job
from launch.following.trouble import Withheld, code_of, sorted_out

GROUP = "/aws/sagemaker/TrainingJobs"
# Whoever starts to follow late sees this much of the log before its newest end.
LOOK_BACK = datetime.timedelta(hours=6)
# Streams of other hosts arrive late: what is no older than this is asked for again.
OVERLAP_MS = 60_000
# Events by their id in that overlap; enough for a thousand lines a second.
IDS_KEPT = 100_000
LINE_LENGTH = 500  # what is kept of a line; a long one must not fill the memory


@dataclass(frozen=True)
class Event:
    """One line of the log: which stream (host and attempt) wrote it, and when."""

    stream: str
    time: datetime.datetime
    text: str


class LogReader:
    """The log of one job. `behind` says that there is more to read right now."""

    def __init__(self, client: Any, job_name: str) -> None:
        self._client, self._prefix = client, f"{job_name}/"
        self._start: int | None = None
        self._newest = 0
        self._token: str | None = None
        self._seen: dict[str, int] = {}

    @property
    def behind(self) -> bool:
        """Whether the last page was not the last one."""
        return self._token is not None

    def read(self, job: Job, now: datetime.datetime) -> list[Event]:
        """The new events of one page, in the order of their times; costs one call.

        Raises Withheld if the log cannot be read, Passing if it cannot be read now, and Refused.
        """
        if self._start is None:
            self._start = _first_start(job, now)
        page = self._page()
        events = [event for raw in page.get("events") or [] if (event := self._new(raw))]
        self._token = page.get("nextToken") or None
        if self._token is None:
            self._start = max(self._start, min(self._newest, _milliseconds(now)) - OVERLAP_MS)
        self._forget()
        return sorted(events, key=lambda event: event.time)

    def _page(self) -> dict[str, Any]:
        more = {"nextToken": self._token} if self._token else {}
        try:
            with sorted_out():
                page: dict[str, Any] = self._client.filter_log_events(
                    logGroupName=GROUP,
                    logStreamNamePrefix=self._prefix,
                    startTime=self._start,
                    **more,
                )
                return page
        except Withheld as error:
            self._token = None  # it may be the token that is not accepted any more
            if code_of(error.__cause__) == "ResourceNotFoundException":
                return {}  # the account's first job has not written a line yet
            raise

    def _new(self, raw: dict[str, Any]) -> Event | None:
        """The event, unless it was seen before or is none."""
        key, time = raw.get("eventId"), raw.get("timestamp")
        if not isinstance(key, str) or not isinstance(time, int) or key in self._seen:
            return None
        try:
            when = datetime.datetime.fromtimestamp(time / 1000, datetime.UTC)
        except (ValueError, OverflowError, OSError):
            return None
        self._seen[key] = time
        self._newest = max(self._newest, time)
        text = _printable(str(raw.get("message") or "")[:LINE_LENGTH])
        return Event(str(raw.get("logStreamName") or ""), when, text)

    def _forget(self) -> None:
        """Forget the ids of events that no later page can hold, and the oldest of too many."""
        if not self.behind:
            start = self._start or 0
            self._seen = {key: time for key, time in self._seen.items() if time >= start}
        for key in list(islice(self._seen, max(0, len(self._seen) - IDS_KEPT))):
            del self._seen[key]


def _first_start(job: Job, now: datetime.datetime) -> int:
    end = now if job.training_since else job.trained_until or job.over_since or now
    return max(0, _milliseconds(end - LOOK_BACK), _milliseconds(job.created) - OVERLAP_MS)


def _milliseconds(time: datetime.datetime | None) -> int:
    return int(time.timestamp() * 1000) if time else 0


def _printable(text: str) -> str:
    """A line without what would move a terminal's cursor or change its colours."""
    text = text.rstrip().replace("\t", " ")
    return text if text.isprintable() else "".join(filter(str.isprintable, text))
