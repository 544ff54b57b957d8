"""One simulated host: its disk, its container's processes, and its checkpoint agent."""

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from launch.rehearsal import container, disk
from launch.rehearsal.sync import SyncAgent

_MARK = "REHEARSED_INSTANCE"  # in the environment of every process of an instance


@dataclass(frozen=True)
class SyncHabits:
    """How an instance's sync agent behaves: what its randomness is, and whether it works at all."""

    rng: random.Random
    stalled: bool


class Instance:
    """Boot it, start its container, read its lines, and take it away.

    `on_line(host, line, when)` is called for each line of the container's output.
    """

    def __init__(
        self,
        host: str,
        hosts: list[str],
        base: Path,
        request: dict[str, Any],
        s3: Any,
        means: container.Means,
        on_line: Callable[[str, str, float], None],
        habits: SyncHabits,
    ) -> None:
        self.host, self.base = host, base
        self._hosts, self._request, self._s3 = hosts, request, s3
        self._means, self._on_line = means, on_line
        self.checkpoints = disk.checkpoint_dir(base, request)
        self._agent = SyncAgent(
            s3, request["CheckpointConfig"]["S3Uri"], self.checkpoints, habits.rng, habits.stalled
        )
        self._scratch = Path(tempfile.mkdtemp(prefix="instance-"))  # its path must be short
        self.gone = False
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    def boot(self) -> None:
        """Fill the disk: configuration, data channels, and the snapshots that S3 holds."""
        disk.fill(self.base, self._request, self.host, self._hosts, self._s3)
        if not self._means.toolkit:
            disk.unpack_code(self.base, self._request, self._s3)
        self._agent.restore()

    def start(self, threads: int, environment: dict[str, str]) -> None:
        """Start the container. Call it from the main thread: the container dies with its caller.

        `threads` is how many cores this instance has; `environment` leads its clients to moto.
        """
        self._process = subprocess.Popen(
            container.command(self._means, self._request, self.host, self._hosts),
            env={
                **container.environment(self._means, self._request, self.base, self.host),
                **environment,
                "OMP_NUM_THREADS": str(threads),
                "TMPDIR": str(self._scratch),
                _MARK: str(self.base),
            },
            cwd=self.base if self._means.toolkit else self.base / "code",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the rehearsal, which then takes these down
        )
        self._reader = threading.Thread(target=self._read, name=f"log {self.host}")
        self._reader.start()
        self._agent.start()

    @property
    def exit_code(self) -> int | None:
        """The container's exit code, None while it runs."""
        return self._process.poll() if self._process else None

    def terminate(self) -> None:
        """SIGTERM to the container's first process; nobody else gets it from us."""
        for process in self._first_process():
            _signal(process, signal.SIGTERM)

    def rank_0(self) -> psutil.Process | None:
        """The training process of the first local rank, if it runs."""
        for process in self._tree():
            try:
                # torchrun itself has no LOCAL_RANK; its workers and their data workers do.
                if process.environ().get("LOCAL_RANK") == "0":
                    return process
            except psutil.Error:
                continue
        return None

    def hold_upload_at_half(self, step: int) -> threading.Event:
        """Let the sync agent stop for good in the middle of a data file of `step` or later."""
        return self._agent.hold_at_half(step)

    def freeze(self) -> None:
        """Every process stops dead, but stays; the peers see nothing."""
        for process in self._tree():
            _signal(process, signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL to all processes, without waiting for their end."""
        if self._process and self._process.poll() is None:
            for process in self._processes():
                _signal(process, signal.SIGKILL)

    def vanish(self) -> None:
        """Everything ends at once, the sync agent included, and the disk is gone."""
        self.gone = True
        self.stop()
        shutil.rmtree(self.base, ignore_errors=True)

    def stop(self) -> None:
        """SIGKILL to all processes and no more syncing; returns when none is left.

        Raises what the sync agent failed of, if it did.
        """
        try:
            if self._process and self._reader:
                while processes := self._processes():
                    for process in processes:
                        _signal(process, signal.SIGKILL)
                    psutil.wait_procs(processes, timeout=5)
                self._process.wait()
                self._reader.join()  # the pipe ends when its last writer is gone
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._agent.stop()

    def failure(self) -> str | None:
        """What the `failure` file says, as SageMaker would report it."""
        try:
            return (self.base / "output" / "failure").read_text()[:1024].strip()
        except OSError:
            return None

    def _first_process(self) -> list[psutil.Process]:
        tree = self._tree()
        if not tree or self._process is None:
            return []
        if self._means.pid_namespace:
            return tree[:1]  # the wrapper's child is the first process of the namespace
        torchrun = [process for process in tree if _runs_torchrun(process)]
        return torchrun[:1] or [psutil.Process(self._process.pid)]

    def _tree(self) -> list[psutil.Process]:
        """The container's processes, parents first; empty if it does not run."""
        if self._process is None or self._process.poll() is not None:
            return []
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _processes(self) -> list[psutil.Process]:
        """What is still alive of this instance: the wrapper, whose namespace dies with it, or,
        where there is no namespace, everything that carries the mark."""
        assert self._process
        if self._means.pid_namespace:
            return [psutil.Process(self._process.pid)] if self._process.poll() is None else []
        return [process for process in psutil.process_iter() if self._is_marked(process)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            zombie = process.status() == psutil.STATUS_ZOMBIE
            return not zombie and process.environ().get(_MARK) == str(self.base)
        except psutil.Error:
            return False

    def _read(self) -> None:
        assert self._process
        assert self._process.stdout
        for line in self._process.stdout:
            self._on_line(self.host, line.decode(errors="replace").rstrip(), time.monotonic())
        self._process.stdout.close()


def port_is_free(port: int) -> bool:
    """Whether nothing listens on `port` of the loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _signal(process: psutil.Process, number: int) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return


def _runs_torchrun(process: psutil.Process) -> bool:
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return False
    return any(Path(a).name == "torchrun" or a == "torch.distributed.run" for a in arguments)
