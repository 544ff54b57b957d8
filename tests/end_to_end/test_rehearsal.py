"""The rehearsal: the real request, the real toolkit, instances that vanish, the same bits.

All of them use the toolkit's port: pytest-xdist must run this file in one process (loadfile).
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch

from launch.config import ROOT
from launch.errors import Refused
from launch.rehearsal import container
from tests.end_to_end.torchrun import wait_until

COMMAND = [sys.executable, str(ROOT / "launch" / "rehearse.py")]
SHORT = ["--set", "training.total_steps=24", "--set", "training.warmup_steps=2"]


def rehearse(*arguments, **options):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **options,
    )


def left_behind(out):
    """The living processes of instances that were rehearsed into the folder `out`."""
    return [process for process in psutil.process_iter() if _instance(process).startswith(str(out))]


def _instance(process):
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return process.environ().get("REHEARSED_INSTANCE", "") if alive else ""
    except psutil.Error:
        return ""


MEANS = container.find_means(without_toolkit=False)
needs_toolkit = pytest.mark.skipif(
    not (MEANS.toolkit and MEANS.pid_namespace),
    reason="the SageMaker toolkit and PID namespaces are Linux's",
)


SCRIPTED = {
    "kill": 2,  # before the first snapshot
    "save": 5,
    "commit": 8,
    "upload": 12,
    "host": 16,
    "freeze": 20,
    "reclaim": 23,
}


@needs_toolkit
def test_every_way_to_vanish_ends_with_the_same_bits(tmp_path):
    out = tmp_path / "report"
    script = [part for kind, step in SCRIPTED.items() for part in ("--interrupt", f"{step}:{kind}")]
    frequent = ["--set", "training.total_steps=28", "--set", "training.snapshot_steps=3"]
    # With this seed the instance that vanishes is not rank 0's.
    done = rehearse("--out", out, *SHORT, *frequent, *script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    report = json.loads((out / "report.json").read_text())
    assert report["equal"] is True
    assert report["digests"]["interrupted"] == report["digests"]["uninterrupted"]
    assert (report["toolkit"], report["pid_namespace"]) == (True, True)
    assert (report["notes"], report["unreached"]) == ([], [])
    attempts = report["attempts"]
    assert [one["kind"] for one in attempts] == [*SCRIPTED, "completed"]
    killed, saving, committing, uploading, bereft, frozen, reclaimed, last = attempts
    logs = {
        kind: (out / "interrupted" / "logs" / f"attempt-{number}.log").read_text()
        for number, kind in enumerate(SCRIPTED, start=1)
    }
    assert killed["resumed_from"] is None
    assert saving["resumed_from"] is None
    # The snapshot that was being written is not there: not for the log, and not for the next.
    for cut, successor in ((saving, committing), (committing, uploading)):
        assert (successor["resumed_from"] or 0) <= max(cut["snapshots"], default=0)
    assert bereft["resumed_from"] < 12  # half of an object is no object
    # The survivor wrote the last complete state, took it to S3, and knew who was missing.
    assert "rank 0: host 127.0.0.2 vanished" in logs["host"]
    assert frozen["resumed_from"] == bereft["last_step"] == bereft["snapshots"][-1]
    # The signal came through the request's own entry point: the step that it found was saved.
    assert "Invoking TorchDistributed" in logs["reclaim"]
    assert "SIGTERM noticed" in logs["reclaim"]
    assert last["resumed_from"] == reclaimed["snapshots"][-1]
    assert last["last_step"] == 28
    taken = [
        step
        for one in attempts
        for step in range((one["resumed_from"] or 0) + 1, (one["last_step"] or 0) + 1)
    ]
    assert report["steps_lost"] == len(taken) - len(set(taken))
    assert 0 < report["goodput"] < 1
    assert (out / "rehearsal.png").read_bytes().startswith(b"\x89PNG")
    request = json.loads((out / "request.json").read_text())
    assert request["ResourceConfig"]["InstanceCount"] == 2
    assert left_behind(out) == []


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """scikit-learn's bundled images, as the second user's channel."""
    from sklearn.datasets import load_digits

    bundled = load_digits()
    directory = tmp_path_factory.mktemp("digits")
    images, labels = torch.from_numpy(bundled.images).byte(), torch.from_numpy(bundled.target)
    torch.save({"images": images, "labels": labels}, directory / "digits.pt")
    return directory


@pytest.fixture
def second_project(tmp_path):
    """A clone in which a second user has replaced the two files."""
    clone = tmp_path / "clone"
    for room in ("config", "launch", "training"):
        shutil.copytree(ROOT / room, clone / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("model.py", "data.py"):
        shutil.copy(ROOT / "tests" / "second_model" / name, clone / "training" / name)
    return clone


@needs_toolkit
def test_an_image_classifier_passes_the_same_rehearsal(second_project, digits, tmp_path):
    values = {
        "data.train": digits,
        "training.total_steps": 30,
        "training.warmup_steps": 2,
        "training.snapshot_steps": 4,
        "training.validation_share": 0.2,
        "training.evaluate_every": 5,
        "training.export": "best",
        "training.model_width": 16,
        "training.dropout": 0.2,
        "training.learning_rate": 0.02,
    }
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    out = tmp_path / "report"
    done = subprocess.run(
        [
            *(sys.executable, str(second_project / "launch" / "rehearse.py"), "--out", str(out)),
            *("--interrupt", "7:kill", "--interrupt", "18", *settings),
        ],
        cwd=second_project,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "report.json").read_text())
    assert report["equal"] is True
    assert [one["kind"] for one in report["attempts"]] == ["kill", "reclaim", "completed"]
    log = (out / "interrupted" / "logs" / "attempt-3.log").read_text()
    losses = [float(x) for x in re.findall(r"validation_loss=(\d\.\d+)$", log, re.M)]
    assert losses[-1] < 2.2  # it learns: guessing costs ln 10, which is 2.3
    assert " export=best validation_loss=" in log


def test_without_the_toolkit_and_with_a_sync_that_never_works_it_is_the_same(tmp_path):
    out = tmp_path / "report"
    arguments = ["--without-toolkit", "--sync", "stalled", "--interrupt", 8]
    done = rehearse("--out", out, *SHORT, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "report.json").read_text())
    assert (report["equal"], report["sync"], report["toolkit"]) == (True, "stalled", False)
    assert "torchrun was started directly" in report["notes"][0]
    assert "torchrun was started directly" in done.stdout
    first, second = report["attempts"]
    assert second["resumed_from"] == first["snapshots"][-1] >= 8  # rank 0 took it to S3 itself


@needs_toolkit
def test_the_command_without_the_toolkit_is_the_toolkits_own(tmp_path):
    from sagemaker_training import mapping

    values = {"run_name": "a", "total_steps": 5, "deterministic": True, "learning_rate": 3e-4}
    request = {
        "HyperParameters": {
            **{name: json.dumps(value) for name, value in values.items()},
            "sagemaker_program": '"training/train.py"',
        }
    }
    assert container.script_arguments(request) == mapping.to_cmd_args(values)


def test_a_job_that_fails_is_told_with_its_own_words_and_exit_1(tmp_path):
    out = tmp_path / "report"
    (tmp_path / "little").mkdir()
    (tmp_path / "little" / "text").write_text("x" * 300)
    done = rehearse("--out", out, "--without-toolkit", "--set", f"data.train={tmp_path}/little")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.startswith("error: attempt 1 failed: rank ")
    assert "holds 2 samples, fewer than global_batch_size 16" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopping_or_killing_it_takes_down_all_that_it_started(tmp_path, number):
    out = tmp_path / "report"
    started = subprocess.Popen(
        [*COMMAND, "--out", str(out), "--without-toolkit"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # Whoever runs the tests in the background has Ctrl-C ignored, and its children inherit it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: len(left_behind(out)) > 3)
    os.kill(started.pid, number)
    asked = time.monotonic()
    assert started.wait(60) != 0
    assert time.monotonic() - asked < 20
    wait_until(lambda: not left_behind(out))


BAD = {
    ("--interrupt", "0"): "--interrupt 0 is not inside the run; it has 60 steps",
    ("--interrupt", "5:fire"): "--interrupt 5:fire names no kind; there are reclaim, kill, host,",
    ("--interrupt", "soon"): "--interrupt soon is no step; write STEP or STEP:KIND, such as",
    ("--hosts", "0"): "--hosts is 0; a rehearsal needs at least 1",
    ("--campaign", "0"): "--campaign is 0; give 1 or more",
    ("--grace", "-1"): "--grace is -1.0; SageMaker gives 120 seconds",
    ("--discount", "1"): "--discount is 1.0; give a share",
    ("--interrupt", "60"): "--interrupt 60 is not inside the run; it has 60 steps",
    ("--set", "data.train=s3://bucket/data/"): "data.train is an S3 prefix, which a rehearsal",
    ("--set", "data.train=/nowhere"): "data.train is '/nowhere', which is no folder here",
    ("--config", "nowhere.yaml"): "the configuration nowhere.yaml cannot be read",
}


@pytest.mark.parametrize(("arguments", "said"), BAD.items())
def test_bad_input_is_refused_and_nothing_is_left(tmp_path, arguments, said):
    done = rehearse("--out", tmp_path / "report", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "report").exists()


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "mine").write_text("")
    done = rehearse("--out", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not empty" in done.stderr


def test_without_unshare_the_whole_chain_is_refused_and_the_rest_offered():
    with pytest.raises(Refused, match=r"no PID namespace.*--without-toolkit"):
        container.check_means(container.Means(toolkit=True, pid_namespace=()))
    container.check_means(container.Means(toolkit=False, pid_namespace=()))


def test_a_taken_port_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", container.TOOLKIT_PORT))
        taken.listen()
        done = rehearse("--out", tmp_path / "report")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: port 7777 is taken")
