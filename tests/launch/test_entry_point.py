"""The container's entry point: it runs what the image would, and only the ranks get SIGTERM."""

import os
import signal
import subprocess
import sys

import pytest

from launch.estimator import DELIVER_SIGTERM
from launch.rehearsal.container import find_means
from tests.end_to_end.torchrun import wait_until


@pytest.fixture
def image(tmp_path):
    """A folder of programs that stands for the image's; returns (write a program, environment)."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def write(name, text):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return write, {**os.environ, "PATH": path, "OUT": str(tmp_path)}


def run(environment):
    return subprocess.run(
        ["bash", "-c", DELIVER_SIGTERM], env=environment, timeout=30, capture_output=True, text=True
    )


@pytest.mark.parametrize("code", [0, 1, 7])
def test_where_the_hostname_script_is_missing_it_runs_train_and_keeps_its_code(image, code):
    write, environment = image
    write("train", f"#!/bin/sh\necho trained\nexit {code}\n")
    done = run(environment)
    assert (done.returncode, done.stdout, done.stderr) == (code, "trained\n", "")


def test_where_the_hostname_script_is_there_it_runs_that(image):
    write, environment = image
    write("train", "#!/bin/sh\nexit 9\n")
    write("start_with_right_hostname.sh", '#!/bin/bash\necho "script $1"\nexit 3\n')
    done = run(environment)
    assert (done.returncode, done.stdout) == (3, "script train\n")


@pytest.mark.skipif(not find_means(without_toolkit=False).pid_namespace, reason="no PID namespace")
@pytest.mark.parametrize("entry", [DELIVER_SIGTERM, "bash -m start_with_right_hostname.sh train"])
def test_as_the_first_process_it_forwards_sigterm_to_the_ranks_alone(image, tmp_path, entry):
    write, environment = image
    # The script of the images: `train` in the foreground, without exec and without a trap.
    write("start_with_right_hostname.sh", "#!/bin/bash\ntrain\necho $? > $OUT/left\n")
    write("train", f"#!/bin/bash\n{sys.executable} $OUT/torchrun.py\n")
    (tmp_path / "torchrun.py").write_text(
        "import os, signal, subprocess, sys\n"
        "open('/proc/self/comm', 'w').write('pt_elastic')\n"
        "rank = subprocess.Popen([sys.executable, os.environ['OUT'] + '/rank.py'],\n"
        "                        env={**os.environ, 'LOCAL_RANK': '0'})\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(99))\n"
        "sys.exit(rank.wait())\n"
    )
    (tmp_path / "rank.py").write_text(
        "import os, signal, time\n"
        "def told(*_):\n"
        "    open(os.environ['OUT'] + '/told', 'w').close()\n"
        "    os._exit(5)\n"
        "signal.signal(signal.SIGTERM, told)\n"
        "open(os.environ['OUT'] + '/ready', 'w').close()\n"
        "time.sleep(60)\n"
    )
    namespace = find_means(without_toolkit=False).pid_namespace
    container = subprocess.Popen([*namespace, "bash", "-c", entry], env=environment)
    try:
        wait_until((tmp_path / "ready").exists)
        children = f"/proc/{container.pid}/task/{container.pid}/children"
        with open(children) as file:
            os.kill(int(file.read().split()[0]), signal.SIGTERM)
        if entry is DELIVER_SIGTERM:
            container.wait(20)
            assert (tmp_path / "told").exists()
            assert (tmp_path / "left").read_text() == "5\n"  # torchrun lived on to pass it on
        else:  # the control: the image's own entry point lets nobody know
            with pytest.raises(subprocess.TimeoutExpired):
                container.wait(2)
            assert not (tmp_path / "told").exists()
    finally:
        container.kill()
        container.wait()
