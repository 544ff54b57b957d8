"""The rehearsal: the real request, the real toolkit, instances that vanish, the same bits."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from launch.config import ROOT
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


needs_toolkit = pytest.mark.skipif(
    not container.find_means(without_toolkit=False).toolkit,
    reason="the SageMaker toolkit runs on Linux only",
)


@needs_toolkit
def test_a_reclaimed_job_ends_with_the_same_bits(tmp_path):
    out = tmp_path / "report"
    done = rehearse("--out", out, *SHORT, "--interrupt", 13)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    report = json.loads((out / "report.json").read_text())
    assert report["equal"] is True
    assert report["digests"]["interrupted"] == report["digests"]["uninterrupted"]
    assert report["toolkit"] is True
    assert report["pid_namespace"] is True
    assert report["notes"] == []
    first, second = report["attempts"]
    assert (first["kind"], second["kind"]) == ("reclaim", "completed")
    assert first["resumed_from"] is None
    assert (first["first_step"], second["last_step"]) == (1, 24)
    assert first["last_step"] >= 13
    assert second["resumed_from"] >= 10
    assert second["first_step"] == second["resumed_from"] + 1
    assert report["steps_lost"] == first["last_step"] - second["resumed_from"]
    assert 0 < report["goodput"] < 1
    assert report["uninterrupted"]["first_step"] == 1
    assert (out / "rehearsal.png").read_bytes().startswith(b"\x89PNG")
    request = json.loads((out / "request.json").read_text())
    assert request["ResourceConfig"]["InstanceCount"] == 2
    # The signal came through the request's own entry point: the step that it found was saved.
    log = (out / "interrupted" / "logs" / "attempt-1.log").read_text()
    assert "SIGTERM noticed" in log
    assert "Invoking TorchDistributed" in log
    assert left_behind(out) == []
    assert sorted(path.name for path in out.iterdir()) == [
        "interrupted",
        "rehearsal.png",
        "report.json",
        "request.json",
        "uninterrupted",
    ]


def test_without_the_toolkit_it_is_the_same_and_the_report_says_so(tmp_path):
    out = tmp_path / "report"
    few = ["--set", "training.total_steps=12", "--interrupt", 5]
    done = rehearse("--out", out, "--without-toolkit", *SHORT, *few)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "report.json").read_text())
    assert report["equal"] is True
    assert report["toolkit"] is False
    assert "torchrun was started directly" in report["notes"][0]
    assert "torchrun was started directly" in done.stdout


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_it_takes_down_all_that_it_started(tmp_path, number):
    out = tmp_path / "report"
    started = subprocess.Popen(
        [*COMMAND, "--out", str(out), "--without-toolkit"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: len(left_behind(out)) > 3)
    os.kill(started.pid, number)
    asked = time.monotonic()
    assert started.wait(60) != 0
    assert time.monotonic() - asked < 20
    wait_until(lambda: not left_behind(out))


BAD = {
    ("--interrupt", "0"): "--interrupt 0 is not inside the run; it has 60 steps",
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


def test_a_taken_port_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", container.TOOLKIT_PORT))
        taken.listen()
        done = rehearse("--out", tmp_path / "report")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: port 7777 is taken")
