"""A sign of life in a phase that says nothing for long, so that it can be told from a hung one."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from training.failure import say, seconds_of_silence

SECONDS_BETWEEN_BEATS = 60.0

_phases = [("starting", time.monotonic())]  # the ones that are going on, with their beginnings


@contextmanager
def alive(phase: str) -> Iterator[None]:
    """Name what is going on, for the heartbeat."""
    _phases.append((phase, time.monotonic()))
    try:
        yield
    finally:
        _phases.pop()


@contextmanager
def heartbeat(every: float = SECONDS_BETWEEN_BEATS) -> Iterator[None]:
    """On rank 0, say `alive phase=… seconds=…` after each `every` seconds without another line."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    done = threading.Event()

    def beat() -> None:
        while not done.wait(max(0.001, every - seconds_of_silence())):
            if seconds_of_silence() >= every:
                phase, since = _phases[-1]
                say(f"alive phase={phase} seconds={time.monotonic() - since:.0f}")

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
