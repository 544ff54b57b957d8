"""Measure what snapshots cost, and exit with 1 if that is more than promised.

python -m tests.benchmarks [--sizes 5,20,120]
"""

import argparse
import contextlib
import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from tests.benchmarks.job import SHAPES, prepare
from tests.benchmarks.loops import overhead, throughput
from tests.benchmarks.machine import Others
from tests.benchmarks.measure import compare
from tests.benchmarks.picture import draw
from tests.benchmarks.report import Report
from tests.benchmarks.start import measure_start
from training.group import Group, joined

OUT = Path(__file__).resolve().parents[2] / "out" / "benchmark"
LOOPS_AT = 20  # million parameters
PACE_SECONDS = 30.0


def main() -> int:
    """Measure, print, write; the exit code."""
    sizes = _sizes(sys.argv[1:])
    OUT.mkdir(parents=True, exist_ok=True)
    report, others = Report({}), Others()
    with _quiet(OUT / "training.log") as console, joined(600) as group:
        for millions in sizes:
            with _work() as directory:
                console.print(f"saving and resuming {millions} M parameters …")
                repeats = 4 if millions > 50 else 7
                job = prepare(SHAPES[millions], group, directory)
                report.comparisons[millions] = compare(job, repeats)
            del job
            gc.collect()
        if LOOPS_AT in sizes:
            _measure_loops(report, group, console)
            console.print("starting the sample job …")
            with _work() as directory:
                report.start = measure_start(directory)
        report.others = others.share
        report.show(console)
    report.write(OUT / "benchmark.json")
    draw(report, OUT / "benchmark.png")
    print(f"{OUT}/benchmark.json, {OUT}/benchmark.png")
    return 0 if report.met else 1


def _measure_loops(report: Report, group: Group, console: Console) -> None:
    shape = SHAPES[LOOPS_AT]
    console.print(f"training {LOOPS_AT} M parameters with and without snapshots …")
    with _work() as directory:
        job = prepare(shape, group, directory, snapshot_seconds=PACE_SECONDS, snapshots_kept=9)
        report.throughput = throughput(job, rounds=3)
    console.print(f"training {LOOPS_AT} M parameters in this loop and in a bare one …")
    with _work() as directory:
        jobs = [prepare(shape, group, directory / name) for name in ("ours", "bare")]
        report.overhead = overhead(*jobs, blocks=24)


def _sizes(arguments: list[str]) -> list[int]:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    known = ", ".join(map(str, SHAPES))
    parser.add_argument(
        "--sizes", default="5,20,120", help=f"millions of parameters, out of {known}"
    )
    given = parser.parse_args(arguments).sizes
    try:
        sizes = [int(size) for size in given.split(",")]
        if unknown := [size for size in sizes if size not in SHAPES]:
            raise ValueError(unknown)
    except ValueError:
        parser.error(f"--sizes is {given!r}; give some of {known}, with commas between them")
    return sizes


@contextlib.contextmanager
def _work() -> Iterator[Path]:
    """A folder beside the results, because /tmp may be memory and not a disk."""
    with tempfile.TemporaryDirectory(prefix="work-", dir=OUT) as directory:
        yield Path(directory)


@contextlib.contextmanager
def _quiet(log: Path) -> Iterator[Console]:
    """What training says goes to `log`; yields a console that still reaches the terminal."""
    # DCP warns about its own tensors, and about a world of one.
    warnings.filterwarnings("ignore")
    terminal = os.dup(1)
    with open(log, "wb") as file, os.fdopen(terminal, "w") as screen:
        width = None if os.isatty(terminal) else 140
        console = Console(file=screen, width=width)
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        try:
            yield console
        finally:
            screen.flush()
            os.dup2(terminal, 1)


if __name__ == "__main__":
    sys.exit(main())
