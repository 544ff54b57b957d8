"""Many random interruptions over several runs, one line each, and the same bits after every run."""

import random
import time
from collections.abc import Callable
from pathlib import Path

from launch.errors import Failed
from launch.rehearsal import attempt, interruptions
from launch.rehearsal.attempt import Attempt
from launch.rehearsal.interruptions import Interruption
from launch.rehearsal.trial import Result, Trial

FEWEST, MOST = 4, 8  # interruptions of one run
Say = Callable[[str], None]


def run(
    trial: Trial,
    count: int,
    seed: int,
    out: Path,
    say: Say,
    repeat: Callable[[list[Interruption], int], str],
) -> int:
    """Interrupt the job `count` times in all; returns how many runs that took.

    `repeat(interruptions, seed)` is the command line of one run. The first run that fails, or ends
    with other bits, keeps its logs and what S3 held in `out`, and raises Failed with that command.
    """
    control, reused = trial.uninterrupted(out / "uninterrupted", lambda *_: None)
    say(f"the uninterrupted run{' (kept from earlier)' if reused else ''}: {control.digest[:16]}")
    rng, clock, done, number = random.Random(seed), time.monotonic(), 0, 0
    while done < count:
        number += 1
        many = min(rng.randint(FEWEST, MOST), count - done)
        drawn = interruptions.draw(many, trial.config.training.total_steps, rng)
        run_seed = seed * 1000 + number
        directory = out / f"run-{number}"
        try:
            result = trial.interrupted(directory, drawn, run_seed, _line(say, number))
            _check(result, control, say, number)
        except BaseException as error:
            trial.save_s3(directory / "s3")
            if isinstance(error, Failed):
                raise Failed(f"run {number}: {error}; repeat: {repeat(drawn, run_seed)}") from error
            raise
        done += len(drawn) - len(result.unreached)
        minutes = (time.monotonic() - clock) / 60
        say(f"{done} of {count} interruptions, {done / minutes:.1f} a minute")
    return number


def _check(result: Result, control: Result, say: Say, number: int) -> None:
    for one in result.unreached:
        say(f"run {number}: {one} not reached, training finished first; another is drawn for it")
    if result.digest != control.digest:
        raise Failed(f"ended with other bits, {result.digest} instead of {control.digest}")
    say(f"run {number}: the same bits after {len(result.attempts) - 1} interruptions")


def _line(say: Say, run_number: int) -> Callable[[Attempt, str], None]:
    """What is said of each attempt, when it has ended."""

    def on_event(one: Attempt, event: str) -> None:
        if event != one.kind or event == attempt.FAILED:
            return
        start = "fresh" if one.resumed_from is None else f"from step {one.resumed_from}"
        rejected = f", {len(one.rejected)} rejected" if one.rejected else ""
        say(
            f"run {run_number} attempt {one.number:>2}  {one.kind:<9} {start} to step "
            f"{one.last_step or one.resumed_from or 0}, {len(one.snapshots)} snapshots{rejected}, "
            f"{one.ended - one.started:.1f} s"
        )

    return on_event
