"""One simulated host: an empty disk that is filled as SageMaker fills it, and a container."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from launch.rehearsal import container
from launch.rehearsal.sync import SyncAgent

_OPT_ML = "/opt/ml"


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
    ) -> None:
        self.host, self.base = host, base
        self._hosts, self._request, self._s3 = hosts, request, s3
        self._means, self._on_line = means, on_line
        checkpoints = request["CheckpointConfig"]
        self.checkpoint_dir = base / Path(checkpoints["LocalPath"]).relative_to(_OPT_ML)
        self._agent = SyncAgent(s3, checkpoints["S3Uri"], self.checkpoint_dir)
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    def boot(self) -> None:
        """Fill the disk: configuration, data channels, and the snapshots that S3 holds."""
        config = self.base / "input" / "config"
        for directory in (config, self.base / "model", self.base / "output/data"):
            directory.mkdir(parents=True)
        for name, content in self._config_files().items():
            (config / name).write_text(json.dumps(content))
        for channel in self._request.get("InputDataConfig", []):
            uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
            SyncAgent(self._s3, uri, self.base / "input/data" / channel["ChannelName"]).restore()
        if not self._means.toolkit:
            self._unpack_code()
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
        for process in self._first_processes():
            try:
                process.send_signal(signal.SIGTERM)
            except psutil.NoSuchProcess:
                continue

    def vanish(self) -> None:
        """Everything ends at once, the sync agent included, and the disk is gone."""
        self.stop()
        shutil.rmtree(self.base, ignore_errors=True)

    def stop(self) -> None:
        """SIGKILL to all processes and no more syncing; returns when none is left."""
        self._agent.stop()
        if self._process is None:
            return
        for process in _tree(self._process.pid):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait()
        if self._reader:
            self._reader.join()  # the pipe ends when its last writer is gone

    def failure(self) -> str | None:
        """What the `failure` file says, as SageMaker would report it."""
        try:
            return (self.base / "output" / "failure").read_text()[:1024].strip()
        except OSError:
            return None

    def _first_processes(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        tree = _tree(self._process.pid)
        if self._means.pid_namespace:
            return tree[1:2]  # the wrapper's child is the first process of the namespace
        return [p for p in tree if "torch.distributed.run" in " ".join(_arguments(p))][:1]

    def _config_files(self) -> dict[str, Any]:
        group, instance_type = "homogeneousCluster", self._request["ResourceConfig"]["InstanceType"]
        return {
            "hyperparameters.json": self._request["HyperParameters"],
            "resourceconfig.json": {
                "current_host": self.host,
                "hosts": self._hosts,
                "current_instance_type": instance_type,
                "current_group_name": group,
                "instance_groups": [
                    {
                        "instance_group_name": group,
                        "instance_type": instance_type,
                        "hosts": self._hosts,
                    }
                ],
                "network_interface_name": "lo" if sys.platform == "linux" else "lo0",
            },
            "inputdataconfig.json": {
                channel["ChannelName"]: {
                    "TrainingInputMode": channel.get("InputMode", "File"),
                    "S3DistributionType": "FullyReplicated",
                    "RecordWrapperType": "None",
                }
                for channel in self._request.get("InputDataConfig", [])
            },
            "checkpointconfig.json": {
                "S3Uri": self._request["CheckpointConfig"]["S3Uri"],
                "LocalPath": str(self.checkpoint_dir),
            },
        }

    def _unpack_code(self) -> None:
        address = json.loads(self._request["HyperParameters"]["sagemaker_submit_directory"])
        bucket, _, key = address.removeprefix("s3://").partition("/")
        packed = self.base / "sourcedir.tar.gz"
        self._s3.download_file(bucket, key, str(packed))
        with tarfile.open(packed) as archive:
            archive.extractall(self.base / "code", filter="data")

    def _read(self) -> None:
        assert self._process
        assert self._process.stdout
        for line in self._process.stdout:
            self._on_line(self.host, line.decode(errors="replace").rstrip(), time.monotonic())
        self._process.stdout.close()


def _tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants, parents first; empty if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def port_is_free(port: int) -> bool:
    """Whether nothing listens on `port` of the loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
