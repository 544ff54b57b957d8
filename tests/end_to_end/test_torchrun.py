"""Two ranks under real torchrun, killed and resumed: the same bits, or a reason within seconds."""

import os
import shutil
import signal
import time

import boto3
import pytest
import torch

from launch.rehearsal.aws import loopback_aws
from launch.rehearsal.sync import SyncAgent
from tests.end_to_end.torchrun import Torchrun, wait_until
from tests.states import differing
from training.snapshots import files

STEPS = 24


def final(home, step=STEPS):
    return torch.load(home / "checkpoints" / files.data_name(step), weights_only=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The final state of the run that nothing ever interrupted, and the data it was trained on."""
    import pydoc_data.topics

    home = tmp_path_factory.mktemp("whole")
    text = "".join(pydoc_data.topics.topics.values()).encode()
    (home / "text").mkdir()
    (home / "text" / "topics.txt").write_bytes(text[:40_000])
    with Torchrun(home / "text", home, total_steps=STEPS) as run:
        assert run.finish() == 0, run.log
    return home / "text", final(home)


def test_killed_at_several_steps_it_ends_with_the_same_bits(whole, tmp_path):
    text, uninterrupted = whole
    for attempt, kill_at in enumerate((4, 11, 17), start=1):
        with Torchrun(text, tmp_path, total_steps=STEPS) as run:
            run.until(rf"^step={kill_at} ")
            run.until(r"^snapshot step=")
            run.kill()
            assert attempt == 1 or run.find(rf"^resumed step=\d+ .* attempt={attempt}$")
    with Torchrun(text, tmp_path, total_steps=STEPS) as run:
        assert run.finish() == 0, run.log
        assert run.find(r"^resumed step=\d+ ")
    assert differing(uninterrupted, final(tmp_path)) == []
    exported = torch.load(tmp_path / "model" / "model.pt", weights_only=True)
    assert differing(exported, uninterrupted["model"]) == []


def test_only_rank_0_needs_the_files_and_only_rank_0_writes(whole, tmp_path):
    text, uninterrupted = whole
    script = "tests/end_to_end/own_disk.py"
    with Torchrun(text, tmp_path, script=script, total_steps=STEPS) as run:
        saved = int(run.until(r"^snapshot step=(\d+) ")[1])
        run.kill()
    assert not (tmp_path / "checkpoints-of-rank-1").exists()
    with Torchrun(text, tmp_path, script=script, total_steps=STEPS) as run:
        assert run.finish() == 0, run.log
        assert int(run.find(r"^resumed step=(\d+) ")[1]) >= saved
    assert not (tmp_path / "checkpoints-of-rank-1").exists()
    shutil.move(tmp_path / "checkpoints-of-rank-0", tmp_path / "checkpoints")
    assert differing(uninterrupted, final(tmp_path)) == []


def test_through_s3_wiped_and_restored(whole, tmp_path):
    text, uninterrupted = whole
    with loopback_aws("us-east-1"):
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="snapshots-through-s3")
        uri = "s3://snapshots-through-s3/run/snapshots/"
        with Torchrun(text, tmp_path, total_steps=STEPS) as run:
            saved = int(run.until(r"^snapshot step=(\d+) ")[1])
            run.kill()
        SyncAgent(s3, uri, tmp_path / "checkpoints").one_pass()
        shutil.rmtree(tmp_path / "checkpoints")
        SyncAgent(s3, uri, tmp_path / "checkpoints").restore()
    with Torchrun(text, tmp_path, total_steps=STEPS) as run:
        assert run.finish() == 0, run.log
        assert int(run.find(r"^resumed step=(\d+) ")[1]) >= saved
    assert differing(uninterrupted, final(tmp_path)) == []


def test_three_ranks_add_up_in_the_same_order_after_a_resume(whole, tmp_path):
    text, _ = whole
    options = {"ranks": 3, "decay_steps": 8, "snapshot_steps": 2}
    for name, budgets in {"straight": (8,), "parts": (3, 8)}.items():
        for total_steps in budgets:
            with Torchrun(text, tmp_path / name, total_steps=total_steps, **options) as run:
                assert run.finish() == 0, run.log
    assert differing(final(tmp_path / "straight", 8), final(tmp_path / "parts", 8)) == []


def test_sigterm_to_one_rank_makes_rank_0_write_and_training_go_on(whole, tmp_path):
    options = {"total_steps": 100_000, "snapshot_steps": 90_000, "dataloader_workers": 1}
    with Torchrun(whole[0], tmp_path, **options) as run:
        run.until(r"^step=2 ")
        os.kill(run.ranks()[1].pid, signal.SIGTERM)
        saved = int(run.until(r"^snapshot step=(\d+) ")[1])
        run.until(rf"^step={saved + 3} ")
        run.kill()
        assert len([line for line in run.lines if line.startswith("snapshot ")]) == 1
    assert files.verify(tmp_path / "checkpoints", saved).step == saved


def test_sigterm_to_torchrun_leaves_a_snapshot_of_the_step_that_was_reached(whole, tmp_path):
    text, _ = whole
    options = {"total_steps": 100_000, "snapshot_steps": 90_000, "dataloader_workers": 2}
    with Torchrun(text, tmp_path, **options) as run:
        run.until(r"^step=5 ")
        os.kill(run.process.pid, signal.SIGTERM)
        saved = int(run.until(r"^snapshot step=(\d+) ")[1])
        assert run.find(r"SIGTERM noticed")
        run.until(rf"^step={saved + 1} ")  # it trains on until it is killed
        run.kill()
    assert files.verify(tmp_path / "checkpoints", saved).step == saved


def stops_within_seconds(run, said):
    started = time.monotonic()
    assert run.finish() != 0
    assert said in run.failure
    assert run.failure.count("\n") == 1
    return time.monotonic() - started


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"checkpoint_dir": "/proc/nothing"}, "checkpoint_dir '/proc/nothing' cannot be written"),
        ({"model_heads": 3}, "model_heads is 3, which does not divide model_width 16"),
    ],
)
def test_what_cannot_work_stops_all_ranks_with_the_reason(whole, tmp_path, settings, said):
    with Torchrun(whole[0], tmp_path, **settings) as run:
        assert stops_within_seconds(run, said) < 60


def test_an_empty_channel_on_one_host_stops_all_ranks(whole, tmp_path):
    (tmp_path / "empty").mkdir()
    script = tmp_path / "one_empty.py"
    script.write_text(
        "import os, sys\n"
        "from training.failure import exit_code_of\n"
        "from training.train import main\n"
        "if os.environ['RANK'] == '1':\n"
        f"    sys.argv[sys.argv.index('--train-dir') + 1] = {str(tmp_path / 'empty')!r}\n"
        "sys.exit(exit_code_of(main))\n"
    )
    with Torchrun(whole[0], tmp_path, script=str(script)) as run:
        assert stops_within_seconds(run, "empty holds 0 bytes in 0 files") < 60
        assert run.find(r"^rank 0: rank 1 stopped: .*empty holds 0 bytes"), run.log


def test_two_hosts_without_torchrun_are_stopped(whole, tmp_path):
    environment = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_NUM_GPUS": "0"}
    with Torchrun(whole[0], tmp_path, ranks=1, env=environment) as run:
        assert stops_within_seconds(run, "WORLD_SIZE is 1, but 2 hosts") < 60


def test_a_mistake_in_the_users_model_reaches_the_failure_file(whole, tmp_path):
    shutil.copytree("training", tmp_path / "code" / "training")
    model = tmp_path / "code" / "training" / "model.py"
    model.write_text("import not_installed\n" + model.read_text())
    script = str(tmp_path / "code" / "training" / "train.py")
    with Torchrun(whole[0], tmp_path, ranks=1, script=script) as run:
        assert stops_within_seconds(run, "No module named 'not_installed'") < 60


def test_a_rank_that_dies_takes_the_job_down_within_seconds(whole, tmp_path):
    with Torchrun(whole[0], tmp_path, total_steps=100_000) as run:
        run.until(r"^step=3 ")
        os.kill(run.ranks()[1].pid, signal.SIGKILL)
        started = time.monotonic()
        assert run.finish() != 0
        assert time.monotonic() - started < 45
        wait_until(lambda: not run.ranks() if run.process.poll() is None else True)
