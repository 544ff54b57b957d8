"""One attempt of a job: boot the instances, run them, take them away or wait for their end."""

import os
import queue
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
from launch.rehearsal.container import TOOLKIT_PORT, Means
from launch.rehearsal.instance import Instance, port_is_free
from launch.runs import split
from training.snapshots.manifest import candidates, data_name, manifest_name

RECLAIM, COMPLETED, FAILED = "reclaim", "completed", "failed"
SILENCE_SECONDS = 180.0

_STEP = re.compile(r"^step=(\d+) loss=(\S+) .*\bstep_seconds=(\S+)")
_SNAPSHOT = re.compile(r"^snapshot step=(\d+) ")
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
    rejected: list[str] = field(default_factory=list)
    signalled: float | None = None
    cause: str | None = None

    @property
    def first_step(self) -> int | None:
        """The first optimizer step that this attempt finished."""
        return self.steps[0][1] if self.steps else None

    @property
    def last_step(self) -> int | None:
        """The last optimizer step that this attempt finished."""
        seen = [step for _, step, *_ in self.steps] + [step for _, step in self.snapshots]
        return max(seen, default=None)

    def hear(self, line: str, when: float) -> None:
        """Take in a line of the log."""
        if match := _STEP.match(line):
            self.steps.append((when, int(match[1]), float(match[2]), float(match[3])))
        elif match := _SNAPSHOT.match(line):
            self.snapshots.append((when, int(match[1])))
        elif match := _RESUMED.match(line):
            self.resumed_from = int(match[1])
        elif match := _REJECTED.match(line):
            self.rejected.append(match[1])


@dataclass(frozen=True)
class Job:
    """What all attempts of a rehearsed job share."""

    request: dict[str, Any]
    s3: Any
    means: Means
    environment: dict[str, str]
    directory: Path
    on_event: Callable[[Attempt, str], None]

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


def run(job: Job, number: int, clock: float, *, reclaim_at: int | None, grace: float) -> Attempt:
    """Run attempt `number` to its end, or reclaim all its instances after step `reclaim_at`.

    `clock` is the monotonic time that counts as zero; `grace` the seconds between SIGTERM and
    SIGKILL, which a snapshot that has reached S3 cuts short. Only an attempt that completed leaves
    its disks behind, under the job's directory. Raises Failed if the job fails.
    """
    check_port()
    attempt = Attempt(number, time.monotonic() - clock)
    job.on_event(attempt, "booting")
    lines: queue.Queue[tuple[str, str, float]] = queue.Queue()
    with _instances(job, number, lines) as instances, _log(job, number) as log:

        def take_in(host: str, line: str, when: float) -> None:
            print(f"[{host}] {line}", file=log)
            attempt.hear(line, when - clock)
            job.on_event(attempt, line)

        for heard in _heard(instances, lines):
            take_in(*heard)
            if reclaim_at is not None and (attempt.last_step or 0) >= reclaim_at:
                attempt.signalled = time.monotonic() - clock
                _reclaim(attempt, job, instances, lines, take_in, grace)
                break
        else:
            _judge(attempt, instances)
    attempt.ended = time.monotonic() - clock
    job.on_event(attempt, attempt.kind)
    if attempt.kind == FAILED:
        raise Failed(
            f"attempt {number} failed: {attempt.cause}; its log is in {job.directory / 'logs'}"
        )
    return attempt


def check_port() -> None:
    """Raise Refused if something listens where the toolkit will."""
    if not port_is_free(TOOLKIT_PORT):
        raise Refused(
            f"port {TOOLKIT_PORT} is taken, which the SageMaker toolkit uses for torchrun; "
            f"end the program that listens there (lsof -i :{TOOLKIT_PORT}) and try again"
        )


def _reclaim(
    attempt: Attempt,
    job: Job,
    instances: list[Instance],
    lines: "queue.Queue[tuple[str, str, float]]",
    take_in: Callable[[str, str, float], None],
    grace: float,
) -> None:
    asked_at = attempt.last_step or 0
    for instance in instances:
        instance.terminate()
    job.on_event(attempt, "SIGTERM")
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and job.newest_in_s3() <= asked_at:
        try:
            take_in(*lines.get(timeout=0.05))
        except queue.Empty:
            continue
    if all(instance.exit_code == 0 for instance in instances):
        raise Failed(
            "training finished before its instances could be taken away; "
            "interrupt it earlier, or give it more steps: --set training.total_steps=…"
        )
    for instance in instances:
        instance.vanish()
    attempt.kind = RECLAIM
    while not lines.empty():  # what was printed until the end belongs to this attempt
        take_in(*lines.get())


def _judge(attempt: Attempt, instances: list[Instance]) -> None:
    codes = {instance.host: instance.exit_code for instance in instances}
    if all(code == 0 for code in codes.values()):
        attempt.kind = COMPLETED
        return
    causes = [cause for instance in instances if (cause := instance.failure())]
    attempt.cause = causes[0].splitlines()[0] if causes else f"exit codes {codes}"


@contextmanager
def _instances(
    job: Job, number: int, lines: "queue.Queue[tuple[str, str, float]]"
) -> Iterator[list[Instance]]:
    home = job.directory / f"attempt-{number}"
    instances = [
        Instance(
            host,
            job.hosts,
            home / host,
            job.request,
            job.s3,
            job.means,
            lambda host, line, when: lines.put((host, line, when)),
        )
        for host in job.hosts
    ]
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Instance.boot, instances))
        threads = max(1, (os.cpu_count() or 1) // len(instances))
        for instance in instances:
            instance.start(threads, job.environment)
        yield instances
    finally:
        with ExitStack() as stack:  # each is stopped, even if another cannot be
            for instance in instances:
                stack.callback(instance.stop)
        if not all(instance.exit_code == 0 for instance in instances):
            shutil.rmtree(home, ignore_errors=True)


def _heard(
    instances: list[Instance], lines: "queue.Queue[tuple[str, str, float]]"
) -> Iterator[tuple[str, str, float]]:
    """The lines of all instances until all have exited; raises Failed when they fall silent."""
    last = time.monotonic()
    while True:
        try:
            yield lines.get(timeout=0.1)
            last = time.monotonic()
        except queue.Empty:
            codes = [instance.exit_code for instance in instances]
            if None not in codes or any(codes):
                return
            if time.monotonic() - last > SILENCE_SECONDS:
                raise Failed(
                    f"no instance has said anything for {SILENCE_SECONDS:.0f} s, so the attempt "
                    f"was ended"
                ) from None


@contextmanager
def _log(job: Job, number: int) -> Iterator[TextIO]:
    directory = job.directory / "logs"
    directory.mkdir(exist_ok=True)
    with open(directory / f"attempt-{number}.log", "w") as file:
        yield file
