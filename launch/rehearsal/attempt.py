"""One attempt of a job: boot the instances, listen to them, and take them away when it is time."""

import os
import queue
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from launch.errors import Failed, Refused
from launch.rehearsal import vanishing
from launch.rehearsal.container import TOOLKIT_PORT, Means
from launch.rehearsal.instance import Instance, SyncHabits, port_is_free
from launch.rehearsal.interruptions import Interruption
from launch.runs import split
from training.snapshots.manifest import candidates, data_name, manifest_name

COMPLETED, FAILED = "completed", "failed"
SILENCE_SECONDS = 180.0

_STEP = re.compile(r"^step=(\d+) loss=(\S+) .*\bstep_seconds=(\S+)")
_SNAPSHOT = re.compile(r"^snapshot step=(\d+) ")
_DELIVERED = re.compile(r"^delivered step=(\d+) ")
_RESUMED = re.compile(r"^resumed step=(\d+) ")
_REJECTED = re.compile(r"^rejected snapshot=(\S+) ")


@dataclass
class Attempt:
    """What the log of one attempt tells. Times are seconds since the job's first instant."""

    number: int
    started: float
    ended: float = 0.0
    kind: str = FAILED
    resumed_from: int | None = None
    steps: list[tuple[float, int, float, float]] = field(default_factory=list)
    """(time, step, loss, seconds) of each step line"""
    snapshots: list[tuple[float, int]] = field(default_factory=list)
    delivered: list[tuple[float, int]] = field(default_factory=list)
    """(time, step) of each snapshot that rank 0 took to S3 itself"""
    rejected: list[str] = field(default_factory=list)
    signalled: float | None = None
    heard_rank_0: bool = False
    """Whether rank 0 is up: it has resumed, or started fresh"""
    cause: str | None = None

    @property
    def last_step(self) -> int | None:
        """The last optimizer step that this attempt finished."""
        logged = [step for _, step, *_ in self.steps[-1:]]
        return max([*logged, *(step for _, step in self.snapshots[-1:])], default=None)

    def hear(self, line: str, when: float) -> None:
        """Take in a line of the log."""
        self.heard_rank_0 |= line.startswith(("resumed ", "starting fresh"))
        if match := _STEP.match(line):
            self.steps.append((when, int(match[1]), float(match[2]), float(match[3])))
        elif match := _SNAPSHOT.match(line):
            self.snapshots.append((when, int(match[1])))
        elif match := _DELIVERED.match(line):
            self.delivered.append((when, int(match[1])))
        elif match := _RESUMED.match(line):
            self.resumed_from = int(match[1])
        elif match := _REJECTED.match(line):
            self.rejected.append(match[1])


Heard = tuple[str, str, float]  # host, line, monotonic time


@dataclass(frozen=True)
class Job:
    """What all attempts of a rehearsed job share."""

    request: dict[str, Any]
    s3: Any
    means: Means
    environment: dict[str, str]
    directory: Path
    on_event: Callable[[Attempt, str], None]
    grace: float = 5.0
    """Seconds between SIGTERM and SIGKILL; a snapshot that has reached S3 cuts them short."""
    seed: int = 0
    stalled: bool = False
    """Whether SageMaker's sync agent restores, and then never uploads anything."""

    @property
    def hosts(self) -> list[str]:
        """The names of the instances; on Linux each is an address of the loopback."""
        count = self.request["ResourceConfig"]["InstanceCount"]
        named = "127.0.0.{}" if self.means.toolkit else "algo-{}"
        return [named.format(number) for number in range(1, count + 1)]

    def newest_in_s3(self) -> int:
        """The newest step of which both files have reached S3; 0 if there is none."""
        bucket, prefix = split(self.request["CheckpointConfig"]["S3Uri"])
        listed = self.s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
        names = {item["Key"].removeprefix(prefix) for item in listed}
        whole = (s for s in candidates(names) if {data_name(s), manifest_name(s)} <= names)
        return next(whole, 0)


def run(job: Job, number: int, clock: float, interruption: Interruption | None = None) -> Attempt:
    """Run attempt `number` to its end, or until `interruption` takes its instances away.

    `clock` is the monotonic time that counts as zero. An attempt that ends before its interruption
    is `completed`, and only that leaves its disks behind, under the job's directory. Raises Failed
    if the job fails; then the disks are kept as well.
    """
    check_port()
    attempt = Attempt(number, time.monotonic() - clock)
    job.on_event(attempt, "booting")
    lines: queue.Queue[Heard] = queue.Queue()
    with _instances(job, attempt, lines) as instances, _log(job, number) as log:
        course = Course(attempt, job, instances, lines, log, clock)
        if interruption and vanishing.take_away(course, interruption):
            attempt.kind = interruption.kind
            course.hear_the_rest()
        else:
            course.listen(lambda: False)
            _judge(attempt, instances)
    attempt.ended = time.monotonic() - clock
    job.on_event(attempt, attempt.kind)
    if attempt.kind == FAILED:
        raise Failed(
            f"attempt {number} failed: {attempt.cause}; its log is in {job.directory / 'logs'}"
        )
    return attempt


class Course:
    """An attempt under way: its instances, and what they say."""

    def __init__(
        self,
        attempt: Attempt,
        job: Job,
        instances: list[Instance],
        lines: "queue.Queue[Heard]",
        log: TextIO,
        clock: float,
    ) -> None:
        self.attempt, self.job, self.instances = attempt, job, instances
        self.rng = random.Random(f"{job.seed}/{attempt.number}")
        self._lines, self._log, self._clock = lines, log, clock

    def listen(
        self, until: Callable[[], bool], seconds: float = float("inf"), every: float = 0.05
    ) -> bool:
        """Take in lines until `until()`; False if the job ends, or `seconds` pass, before that.

        Raises Failed when all instances fall silent for good.
        """
        last = started = time.monotonic()
        while not until():
            if time.monotonic() - started > seconds:
                return False
            try:
                self._take_in(*self._lines.get(timeout=every))
                last = time.monotonic()
            except queue.Empty:
                if self._has_ended():
                    return until()
                if time.monotonic() - last > SILENCE_SECONDS:
                    raise Failed(
                        f"no instance has said anything for {SILENCE_SECONDS:.0f} s, so the "
                        f"attempt was ended"
                    ) from None
        return True

    def hear_the_rest(self) -> None:
        """Take in what was printed until the end: it belongs to this attempt."""
        while not self._lines.empty():
            self._take_in(*self._lines.get())

    def tell(self, event: str) -> None:
        """Show something that the rehearsal did."""
        self.job.on_event(self.attempt, event)

    def now(self) -> float:
        """Seconds since the job's first instant."""
        return time.monotonic() - self._clock

    def vanish(self) -> None:
        """All instances are gone at once, with their disks."""
        for instance in self.instances:
            instance.kill()
        for instance in self.instances:
            instance.vanish()

    def _has_ended(self) -> bool:
        codes = [instance.exit_code for instance in self.instances if not instance.gone]
        return None not in codes or any(codes)

    def _take_in(self, host: str, line: str, when: float) -> None:
        print(f"[{host}] {line}", file=self._log)
        self.attempt.hear(line, when - self._clock)
        self.job.on_event(self.attempt, line)


def check_port() -> None:
    """Raise Refused if something listens where the toolkit will."""
    if not port_is_free(TOOLKIT_PORT):
        raise Refused(
            f"port {TOOLKIT_PORT} is taken, which the SageMaker toolkit uses for torchrun; "
            f"end the program that listens there (lsof -i :{TOOLKIT_PORT}) and try again"
        )


def _judge(attempt: Attempt, instances: list[Instance]) -> None:
    codes = {instance.host: instance.exit_code for instance in instances}
    if all(code == 0 for code in codes.values()):
        attempt.kind = COMPLETED
        return
    causes = [cause for instance in instances if (cause := instance.failure())]
    attempt.cause = causes[0].splitlines()[0] if causes else f"exit codes {codes}"


@contextmanager
def _instances(job: Job, attempt: Attempt, lines: "queue.Queue[Heard]") -> Iterator[list[Instance]]:
    home = job.directory / f"attempt-{attempt.number}"
    instances = [
        Instance(
            host,
            job.hosts,
            home / host,
            job.request,
            job.s3,
            job.means,
            lambda host, line, when: lines.put((host, line, when)),
            SyncHabits(random.Random(f"{job.seed}/{attempt.number}/{host}"), job.stalled),
        )
        for host in job.hosts
    ]
    judged = False
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Instance.boot, instances))
        threads = max(1, (os.cpu_count() or 1) // len(instances))
        for instance in instances:
            instance.start(threads, job.environment)
        yield instances
        judged = attempt.kind in (COMPLETED, FAILED)
    finally:
        with ExitStack() as stack:  # each is stopped, even if another cannot be
            for instance in instances:
                stack.callback(instance.stop)
        if not judged:
            shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _log(job: Job, number: int) -> Iterator[TextIO]:
    directory = job.directory / "logs"
    directory.mkdir(exist_ok=True)
    with open(directory / f"attempt-{number}.log", "w") as file:
        yield file
