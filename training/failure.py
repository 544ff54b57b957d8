"""A run that stops says why: one sentence on stderr and in SageMaker's `failure` file."""

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from training.settings import SettingsError

_WORKERS_TRACEBACK = "Original Traceback (most recent call last):"
_started = _last_said = time.monotonic()


class TrainingError(RuntimeError):
    """The job cannot go on; its text is one sentence that a person can act on."""


def exit_code_of(main: Callable[[], None]) -> int:
    """Run `main` and turn how it ended into an exit code: 0 done, 2 bad settings, 1 anything else.

    The cause goes into the `failure` file before the process leaves, because the peers only
    notice a failure when it does: the rank that failed first is the one that gets to explain.
    """
    _forget_earlier_attempt()
    try:
        main()
    except Exception as error:
        report(error)
        return 2 if isinstance(error, SettingsError) else 1
    return 0


def report(error: BaseException) -> None:
    """Write the cause of the end to stderr and to the `failure` file; let nothing delay the exit.

    What was not written for people is also shown with its traceback.
    """
    if not isinstance(error, (TrainingError, SettingsError)):
        traceback.print_exception(error)
    line = f"rank {os.environ.get('RANK', '0')}: {sentence(error)}\n"
    _write(2, line)
    # Exclusive: several ranks share the host, and only the first cause is the cause. There is no
    # such directory outside SageMaker: stderr has the line.
    with contextlib.suppress(OSError), open(_failure_file(), "x") as file:
        file.write(line)
    # Data workers ignore SIGTERM, and one that is stuck would hold up the exit. torch answers the
    # death of a worker with an exception in whatever is running, which is this.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()


def sentence(error: BaseException) -> str:
    """An exception as one line: its own words if they are meant for people, else with its kind."""
    text = str(error)
    if _WORKERS_TRACEBACK in text:  # torch raises again what a data worker raised, by its text
        text = re.split(r"^ .*\n", text, flags=re.MULTILINE)[-1]  # what follows the traceback
        return " ".join(text.split()).removeprefix(f"{TrainingError.__module__}.TrainingError: ")
    if isinstance(error, (TrainingError, SettingsError)):
        return text
    return f"{type(error).__name__}: {' '.join(text.split())}"


def _forget_earlier_attempt() -> None:
    """Remove the `failure` file that an earlier attempt left on a disk that was kept.

    A rank of this attempt may have failed already, before we are here: torchrun made the folder of
    TORCHELASTIC_ERROR_FILE just before it started the ranks, so what is older is not theirs.
    """
    with contextlib.suppress(OSError):
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        started = Path(error_file).parent.stat().st_mtime if error_file else time.time() + 1
        if _failure_file().stat().st_mtime < started:
            _failure_file().unlink()


def _failure_file() -> Path:
    return Path(os.environ.get("SM_OUTPUT_DIR", "/opt/ml/output")) / "failure"


def say(line: str) -> None:
    """Print one line in one write, so that log readers never see half of it."""
    global _last_said
    _last_said = time.monotonic()
    _write(1, line + "\n")


def seconds_since_start() -> float:
    """How long this process has been running: this file is what it imports first."""
    return time.monotonic() - _started


def seconds_of_silence() -> float:
    """How long ago this process last said something."""
    return time.monotonic() - _last_said


def _write(descriptor: int, text: str) -> None:
    # The toolkit reads our output through a pipe and can die before us; that must not stop a save.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode(errors="replace"))
