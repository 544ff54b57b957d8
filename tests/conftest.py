"""What every test gets: no network, no account, and nobody's configuration."""

import os
import socket
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOOPBACK = {"127.0.0.1", "127.0.0.2", "localhost", "::1"}

# `torchrun` and `train` are found beside the interpreter, whether or not its environment is active.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(autouse=True)
def _no_account(monkeypatch, tmp_path_factory):
    """Fake credentials, no configuration files, and no variable of a real SageMaker container."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "SM_", "TORCHELASTIC_")) or name in {"RANK", "WORLD_SIZE"}:
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Any connection that leaves the loopback fails the test that tried."""
    connect = socket.socket.connect

    def guarded(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in LOOPBACK:
            raise AssertionError(f"a test tried to reach {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture
def text_dir(tmp_path):
    """A training channel: 40 kB of real text."""
    import pydoc_data.topics

    directory = tmp_path / "text"
    directory.mkdir()
    text = "".join(pydoc_data.topics.topics.values()).encode()
    (directory / "topics.txt").write_bytes(text[:40_000])
    return directory
