"""Asks AWS about one job, again and again, until it has ended."""

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from launch.errors import Refused
from launch.following import picture as pictures
from launch.following.ending import Resumable
from launch.following.job import Job, describe
from launch.following.logs import LogReader
from launch.following.picture import Picture
from launch.following.state import LogState
from launch.following.storage import Storage, resumable
from launch.following.trouble import TRIES, Passing, Withheld, backoff, patiently

CATCH_UP_SECONDS = 0.3  # between two pages of a log that is being read up to now
# The last lines and files arrive after the end: a job is looked at so often again, or so long.
LOOKS_AFTER_END, SETTLED_AFTER = 3, datetime.timedelta(minutes=2)


@dataclass(frozen=True)
class Clients:
    """The AWS clients that a follower asks."""

    sagemaker: Any
    logs: Any
    s3: Any


@dataclass(frozen=True)
class Time:
    """The clock and how to wait; tests bring their own."""

    now: Callable[[], datetime.datetime]
    sleep: Callable[[float], None]


class Follower:
    """What is known about one job; `stalled` remembers a late sync, `over` that it has ended."""

    def __init__(self, clients: Clients, name: str, stall_minutes: float, time: Time) -> None:
        self._clients, self._name, self._time = clients, name, time
        self._minutes = stall_minutes
        self._log = LogState()
        self._reader = LogReader(clients.logs, name)
        self._storage: Storage | None = None
        self._job: Job | None = None
        self._failures, self._busy = 0, False
        self._due = time.now()  # for a look at more than the rest of the log
        self._looks_after_end = 0
        self._missing: dict[str, str] = {}
        self._s3_known = False
        self.stalled = self.over = False

    def pictures(self, refresh: float) -> Iterator[Picture]:
        """A picture after every look, `refresh` seconds apart; the last one is of the end.

        Raises Refused if there is no such job, or the credentials do not count any more.
        """
        while True:
            picture = self._look(refresh)
            if picture:
                self.over = self._settled(picture)
                yield picture
                if self.over:
                    return
            self._time.sleep(self._pause(refresh))

    def resumable(self) -> Resumable:
        """What a new start would find in S3. Raises Refused for lost credentials."""
        if self._job is None or self._storage is None:
            return Resumable(None, known=False)
        s3, uri, run_name = self._clients.s3, self._storage.uri, self._job.run_name
        try:
            found = patiently(lambda: resumable(s3, uri, run_name), self._time.sleep)
        except (Withheld, Passing):
            return Resumable(None, known=False)
        return Resumable(*found)

    def _look(self, refresh: float) -> Picture | None:
        """One refresh: three calls at most. None until the job was described for the first time."""
        only_log = self._reader.behind and not self._busy and self._time.now() < self._due
        self._busy = False
        if self._job and only_log:
            self._read_log(self._job)
        else:
            self._ask_everything(refresh)
        self._failures = self._failures + 1 if self._busy else 0
        return self._picture(self._job) if self._job else None

    def _ask_everything(self, refresh: float) -> None:
        self._due = self._time.now() + datetime.timedelta(seconds=refresh)
        self._missing = {}
        try:
            self._job = describe(self._clients.sagemaker, self._name)
        except Passing as error:
            if self._job is None and self._failures + 1 == TRIES:
                raise Refused(f"AWS cannot be reached: {error}") from error
            self._wait_for("status", error)
            return
        self._looks_after_end += self._job.ended
        self._read_log(self._job)
        self._list_snapshots(self._job)

    def _read_log(self, job: Job) -> None:
        self._missing.pop("log", None)
        try:
            for event in self._reader.read(job, self._time.now()):
                self._log.absorb(event)
        except Withheld as error:
            self._missing["log"] = f"the log cannot be read: {error}"
        except Passing as error:
            self._wait_for("log", error)

    def _list_snapshots(self, job: Job) -> None:
        if job.snapshots_uri is None:
            self._missing["S3"] = "this job has no checkpoint location in S3"
            return
        if self._storage is None:
            self._storage = Storage(self._clients.s3, job.snapshots_uri)
        try:
            self._storage.look()
            self._s3_known = True
        except Withheld as error:
            self._s3_known = False
            self._missing["S3"] = f"{job.snapshots_uri} cannot be listed: {error}"
        except Passing as error:
            self._wait_for("S3", error)

    def _wait_for(self, what: str, error: Passing) -> None:
        self._busy = True
        seconds = backoff(self._failures + 1)
        self._missing[what] = f"{what}: {error}; asking again in {seconds:.0f} s"

    def _picture(self, job: Job) -> Picture:
        now = self._time.now()
        in_s3 = self._storage.newest if self._storage else None
        return Picture(
            job=job,
            log=self._log,
            in_s3=in_s3,
            missing=list(self._missing.values()),
            warnings=list(self._warnings(job, in_s3, now)),
            now=now,
            s3_known=self._s3_known,
            log_known="log" not in self._missing,
        )

    def _warnings(self, job: Job, in_s3: int | None, now: datetime.datetime) -> Iterator[str]:
        """What is wrong with the job, as far as what could be read allows to judge it."""
        patience = datetime.timedelta(minutes=self._minutes)
        if self._reader.behind or "log" in self._missing or "status" in self._missing:
            return
        late = pictures.overdue(job, self._log, in_s3, now, patience)
        if late and "S3" not in self._missing:
            self.stalled = True
            yield pictures.stalled_line(late, self._minutes)
        if silence := pictures.silence_line(job, self._log, now, patience):
            yield silence

    def _settled(self, picture: Picture) -> bool:
        """Whether the job has ended, and nothing more will arrive that tells how."""
        if not picture.job.ended or self._busy or self._reader.behind:
            return False
        over = picture.job.over_since
        return self._looks_after_end >= LOOKS_AFTER_END or (
            over is not None and picture.now - over > SETTLED_AFTER
        )

    def _pause(self, refresh: float) -> float:
        if self._busy:
            return backoff(self._failures)
        return min(refresh, CATCH_UP_SECONDS) if self._reader.behind else refresh
