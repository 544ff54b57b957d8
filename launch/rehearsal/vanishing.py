"""How instances are taken away: one function for each kind of interruption."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from launch.errors import Failed
from launch.rehearsal.interruptions import (
    COMMIT,
    FREEZE,
    HOST,
    KILL,
    RECLAIM,
    SAVE,
    UPLOAD,
    Interruption,
)
from training.snapshots.manifest import TEMPORARY, data_name, manifest_name

if TYPE_CHECKING:
    from launch.rehearsal.attempt import Course

SECONDS_TO_NOTICE = 60.0  # how long survivors may take to find out that a peer is gone
FROZEN_SECONDS = 1.0
_SLICE_SECONDS = 0.0002  # how long a stopped writer runs on before we look again
_WRITING = re.compile(rf"step-(\d{{10}})\.pt\..*{re.escape(TEMPORARY)}")


def take_away(course: "Course", interruption: Interruption) -> bool:
    """Wait for the interruption's moment, then let it happen; False if the job ended before."""
    kind, step = interruption.kind, interruption.step
    if kind in (SAVE, COMMIT, UPLOAD):
        came = _AT_A_SNAPSHOT[kind](course, step)
    else:
        came = course.listen(lambda: (course.attempt.last_step or 0) >= step)
        came = came and _AFTER_A_STEP[kind](course)
    if came:
        course.vanish()
    return came


def _reclaim(course: "Course") -> bool:
    asked_at = course.attempt.last_step or 0
    course.attempt.signalled = course.now()
    for instance in course.instances:
        instance.terminate()
    course.tell("SIGTERM")
    course.listen(lambda: course.job.newest_in_s3() > asked_at, seconds=course.job.grace)
    return any(instance.exit_code != 0 for instance in course.instances)


def _kill(course: "Course") -> bool:
    return True


def _host(course: "Course") -> bool:
    victim = course.rng.choice(course.instances)
    rest = [instance for instance in course.instances if instance is not victim]
    course.tell(f"! instance {victim.host} vanished")
    victim.vanish()
    alone = course.listen(
        lambda: all(instance.exit_code is not None for instance in rest), SECONDS_TO_NOTICE
    )
    if not alone:
        raise Failed(
            f"instance {victim.host} vanished, and the others had not noticed after "
            f"{SECONDS_TO_NOTICE:.0f} s"
        )
    causes = [cause for instance in rest if (cause := instance.failure())]
    course.attempt.cause = causes[0].splitlines()[0] if causes else None
    return True


def _freeze(course: "Course") -> bool:
    victim = course.rng.choice(course.instances)
    course.tell(f"! instance {victim.host} froze")
    victim.freeze()
    course.listen(lambda: False, seconds=FROZEN_SECONDS)
    return any(instance.exit_code != 0 for instance in course.instances)


def _save(course: "Course", step: int) -> bool:
    return _Writer(course, step).listen_until(_Writer.is_in_the_data)


def _commit(course: "Course", step: int) -> bool:
    return _Writer(course, step).listen_until(_Writer.is_before_the_manifest)


def _upload(course: "Course", step: int) -> bool:
    half = course.instances[0].hold_upload_at_half(step)
    return course.listen(half.is_set)


class _Writer:
    """Rank 0 while it writes a snapshot of `step` or later, seen from outside.

    The process is stopped, looked at, and let run on for an instant, until the moment has come; if
    the snapshot slips through, the next one has its turn.
    """

    def __init__(self, course: "Course", step: int) -> None:
        self._course, self._step = course, step
        self._host = course.instances[0]
        self._temporary: Path | None = None
        self._process: psutil.Process | None = None

    def listen_until(self, moment: "Callable[[_Writer], bool]") -> bool:
        """Leave rank 0 stopped at `moment`; False if the job ended before."""
        return self._course.listen(lambda: self._catch(moment), every=0.001)

    def is_in_the_data(self) -> bool:
        """Some bytes of the data file are there, under its temporary name."""
        with contextlib.suppress(FileNotFoundError):
            return self._temporary is not None and self._temporary.stat().st_size > 0
        return False

    def is_before_the_manifest(self) -> bool:
        """The data file has its name, and the manifest has not."""
        return self._has(data_name) and not self._has(manifest_name)

    def _catch(self, moment: "Callable[[_Writer], bool]") -> bool:
        if not self._process:  # looked up ahead of time: writing takes milliseconds
            self._process = self._host.rank_0() if self._course.attempt.heard_rank_0 else None
        self._temporary = self._find()
        if not self._process or not self._temporary:
            return False
        while self._process.is_running():
            os.kill(self._process.pid, signal.SIGSTOP)
            if moment(self):
                return True
            os.kill(self._process.pid, signal.SIGCONT)
            if self._has(manifest_name):
                return False
            time.sleep(_SLICE_SECONDS)
        return False

    def _find(self) -> Path | None:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._host.checkpoints):
                if (match := _WRITING.fullmatch(name)) and int(match[1]) >= self._step:
                    return self._host.checkpoints / name
        return None

    def _has(self, file: Callable[[int], str]) -> bool:
        assert self._temporary
        number = int(self._temporary.name[5:15])
        return (self._host.checkpoints / file(number)).exists()


_AFTER_A_STEP = {RECLAIM: _reclaim, KILL: _kill, HOST: _host, FREEZE: _freeze}
_AT_A_SNAPSHOT = {SAVE: _save, COMMIT: _commit, UPLOAD: _upload}
