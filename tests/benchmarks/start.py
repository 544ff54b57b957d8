"""How long the sample job takes to its first step, and how long it waits for data."""

import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from launch.config import ROOT, load
from tests.benchmarks.job import text

REPEATS = 3
WORKERS = 2

# Prints when the imports are done, on the same clock as the log lines are stamped with.
_SCRIPT = """
import sys, time
from training import failure, train
say = failure._write

def stamped(descriptor, text):
    say(descriptor, f"{time.monotonic():.4f} {text}")

failure._write = stamped
stamped(1, "imported\\n")
sys.exit(failure.exit_code_of(train.main))
"""


@dataclass(frozen=True)
class Start:
    """Seconds from the imports to the first step's line, and the data wait's share of a step."""

    first_step_seconds: list[float]
    data_wait_share: list[float]


def measure_start(directory: Path) -> Start:
    """Run config/rehearsal.yaml's training on one rank, a few times, with data workers."""
    text(directory / "text")
    runs = [_run(directory) for _ in range(REPEATS)]
    return Start([seconds for seconds, _ in runs], [share for _, share in runs])


def _run(directory: Path) -> tuple[float, float]:
    config = load(ROOT / "config" / "rehearsal.yaml")
    with TemporaryDirectory(dir=directory) as home:
        places = {
            "train_dir": str(directory / "text"),
            "checkpoint_dir": f"{home}/snapshots",
            "model_dir": f"{home}/model",
            "dataloader_workers": WORKERS,
        }
        values = {**config.hyperparameters(), **places}
        flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, *flags],
            cwd=ROOT,
            env={**os.environ, "SM_OUTPUT_DIR": home},
            capture_output=True,
            text=True,
            check=True,
        )
    imported = _times(done.stdout, "imported")[0]
    first = _times(done.stdout, "step=1 ")[0]
    waits = re.findall(r"step_seconds=(\S+) data_wait_seconds=(\S+)", done.stdout)
    # The first step's wait is the start of the workers, which belongs to the other number.
    shares = [float(wait) / float(step) for step, wait in waits[1:]]
    return first - imported, statistics.mean(shares)


def _times(output: str, said: str) -> list[float]:
    return [float(t) for t in re.findall(rf"^(\S+) {re.escape(said)}", output, re.MULTILINE)]
