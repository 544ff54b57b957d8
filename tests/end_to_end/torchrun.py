"""Real torchrun in a process of its own: start it, wait for a line, kill it, read what it said."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil

from launch.config import ROOT

DEADLINE_SECONDS = 90.0
TINY = {
    "global-batch-size": 12,
    "model-width": 16,
    "model-depth": 1,
    "model-heads": 2,
    "sequence-length": 16,
    "dropout": 0.2,
    "snapshot-steps": 3,
}


class Torchrun:
    """`ranks` processes of training/train.py, with settings as keywords (`total_steps=40`)."""

    def __init__(self, text_dir, home, ranks=2, script="training/train.py", env=None, **settings):
        options = {
            **TINY,
            "train-dir": text_dir,
            "checkpoint-dir": home / "checkpoints",
            "model-dir": home / "model",
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        (home / "output").mkdir(parents=True, exist_ok=True)
        self.home, self.lines, self._changed = home, [], threading.Condition()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nproc_per_node", str(ranks), "--master_port", str(free_port())),
                *(script, *flags),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "SM_OUTPUT_DIR": str(home / "output"),
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                **(env or {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def until(self, pattern):
        """Wait for a line that matches; returns the match."""
        with self._changed:
            found = self._changed.wait_for(lambda: self.find(pattern), DEADLINE_SECONDS)
        assert found, f"no line matched {pattern!r} in:\n" + "\n".join(self.lines)
        return found

    def find(self, pattern):
        """The first line that matches, or None."""
        return next((m for line in list(self.lines) if (m := re.search(pattern, line))), None)

    def finish(self):
        """Wait for the end; returns the exit code."""
        code = self.process.wait(DEADLINE_SECONDS)
        self._reader.join(DEADLINE_SECONDS)
        return code

    def ranks(self):
        """The training processes, in the order of their ranks."""
        found = [p for p in psutil.Process(self.process.pid).children() if "train" in _command(p)]
        return sorted(found, key=lambda process: int(process.environ()["RANK"]))

    def kill(self):
        """SIGKILL to everything, as when an instance vanishes."""
        if self.process.poll() is None:
            tree = psutil.Process(self.process.pid).children(recursive=True)
            os.kill(self.process.pid, signal.SIGKILL)
            for process in tree:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(tree, timeout=DEADLINE_SECONDS)
        self.process.wait()
        self._reader.join(DEADLINE_SECONDS)

    @property
    def log(self):
        """All that was said, for the message of a failed assertion."""
        return "\n".join(self.lines)

    @property
    def failure(self):
        """The content of the `failure` file."""
        return (self.home / "output" / "failure").read_text()

    def _read(self):
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        self.process.stdout.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition):
    """Wait for a condition with a deadline; returns its value."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.02)
    return value


def _command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
