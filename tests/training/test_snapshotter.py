"""What rank 0 keeps when a signal comes or a peer goes: the state of one step boundary, whole."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from training import interruption, train
from training.failure import TrainingError
from training.snapshots import cadence, delivery, files, host_memory, snapshotter, writer
from training.snapshots.keeper import Keeper


class Counting(nn.Module):
    """A model whose buffer changes in every forward pass, as BatchNorm's do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)

    def forward(self, tokens, targets):
        self.passes += 1
        self.scratch += 1
        return (self.weight[0] * tokens.float().mean() - 1) ** 2


@pytest.fixture
def checkpoints(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setattr(train, "build_model", lambda settings: Counting())


def break_at(monkeypatch, step, error):
    """Let optimizer step `step` fail after its forward and backward pass."""
    take_step, seen = train.take_step, []

    def failing(replica, micro_batches, rate, settings, device):
        seen.append(rate)
        if len(seen) < step:
            return take_step(replica, micro_batches, rate, settings, device)
        replica.model(*micro_batches[0]).backward()
        raise error

    monkeypatch.setattr(train, "take_step", failing)


GLOO = RuntimeError("[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


@pytest.mark.parametrize("error", [GLOO, ValueError("no such token"), TrainingError("no sample 7")])
def test_a_failure_between_two_steps_leaves_the_last_complete_state(
    run, checkpoints, counting, monkeypatch, error
):
    with monkeypatch.context() as patch:
        break_at(patch, 4, error)
        with pytest.raises((TrainingError, ValueError)):
            run(snapshot_steps=100)
    torch.distributed.destroy_process_group()
    assert files.verify(checkpoints, 3).step == 3
    state = files.load(checkpoints, 3)
    assert state["model"]["passes"] == 3
    resumed = run(snapshot_steps=100)
    whole = run(snapshot_steps=100, checkpoint_dir=str(checkpoints.parent / "other"))
    assert torch.equal(resumed["model"]["weight"], whole["model"]["weight"])
    assert torch.equal(resumed["model"]["passes"], whole["model"]["passes"])


def test_a_half_done_optimizer_step_is_not_kept(run, checkpoints, monkeypatch):
    def fails(optimizer, *_):
        raise RuntimeError("out of memory in the middle of the update")

    take_step = train.take_step

    def failing(replica, *rest):
        if replica.optimizer.state:  # from the second step on
            replica.optimizer.register_step_post_hook(fails)
        return take_step(replica, *rest)

    monkeypatch.setattr(train, "take_step", failing)
    with pytest.raises(RuntimeError, match="in the middle"):
        run(snapshot_steps=100)
    assert files.candidates(os.listdir(checkpoints)) == []


def test_a_failure_before_the_first_step_writes_nothing(run, checkpoints, monkeypatch):
    break_at(monkeypatch, 1, GLOO)
    with pytest.raises(TrainingError):
        run(snapshot_steps=100)
    assert files.candidates(os.listdir(checkpoints)) == []


def test_a_signal_in_the_middle_of_a_step_is_answered_at_its_end_and_training_goes_on(
    run, checkpoints, monkeypatch
):
    take_step, sent = train.take_step, []

    def signalled(*arguments):
        sent.append(None)
        if len(sent) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return take_step(*arguments)

    started = []
    monkeypatch.setattr(
        delivery.Delivery, "send", lambda self, step, grace: started.append((step, grace))
    )
    monkeypatch.setattr(train, "take_step", signalled)
    run(snapshot_steps=100)
    steps = files.candidates(os.listdir(checkpoints))
    assert steps == [6, 3]
    (step, ends), (last, _) = started
    assert (step, last) == (3, 6)  # the last one of a run is always taken to S3
    assert 0 < ends - time.monotonic() <= interruption.GRACE_SECONDS


@pytest.mark.parametrize("cause", ["signal", "deadline"])
def test_a_signal_or_the_deadline_during_validation_is_answered_there(
    run, text_dir, monkeypatch, cause
):
    look, seen, started = snapshotter.Snapshotter.look, [], []

    def signalled(self):
        seen.append(None)
        if len(seen) == 8 and cause == "signal":  # in the middle of the batches
            os.kill(os.getpid(), signal.SIGTERM)
        look(self)

    if cause == "deadline":
        monkeypatch.setattr(cadence.Cadence, "deadline_is_near", lambda self: len(seen) == 8)

    monkeypatch.setattr(snapshotter.Snapshotter, "look", signalled)
    monkeypatch.setattr(
        delivery.Delivery, "send", lambda self, step, grace: started.append(len(seen))
    )
    run(validation_dir=str(text_dir))
    assert len(started) == 2  # the first is the run's last step, which is validated after it
    assert 8 <= started[1] < len(seen)


def test_a_snapshot_that_becomes_due_during_validation_does_not_wait_for_its_end(
    run, text_dir, monkeypatch
):
    look, seen, begun = snapshotter.Snapshotter.look, [], []

    def counted(self):
        seen.append(None)
        look(self)

    monkeypatch.setattr(snapshotter.Snapshotter, "look", counted)
    monkeypatch.setattr(cadence.Cadence, "due", lambda self, step: step == 3 and len(seen) == 8)
    monkeypatch.setattr(
        writer.Writer, "start", lambda self, step, *_, **__: begun.append((step, len(seen)))
    )
    monkeypatch.setattr(Keeper, "finish", lambda self, step: None)
    with pytest.raises(FileNotFoundError):  # nothing was written
        run(validation_dir=str(text_dir), evaluate_every=3)
    assert begun == [(3, 8)]
    assert len(seen) > 20


def test_a_signal_that_comes_before_training_listens_is_kept_for_it():
    script = (
        "import os, signal, sys, types\n"
        "from training import interruption\n"
        "interruption.hold_back()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "watching = interruption.Interruption(types.SimpleNamespace(rank=0, store=None))\n"
        "assert watching.noticed() and not watching.noticed()\n"
        "assert 'torch' not in sys.modules  # importing it takes seconds in which signals come\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr[:16]) == (0, "SIGTERM noticed:"), done.stderr


def test_a_signal_while_the_writer_is_busy_is_answered_when_it_is_free(
    hasty_run, checkpoints, monkeypatch
):
    take_step, sent, delivered = train.take_step, [], []
    monkeypatch.setattr(delivery.Delivery, "send", lambda self, step, grace: delivered.append(step))
    write, free = files.write, threading.Event()
    start, working = writer.Writer.start, []

    def hanging(directory, state, **described):
        assert free.wait(60)
        return write(directory, state, **described)

    def noted(self, *arguments, **options):
        start(self, *arguments, **options)
        working.append(self._work)

    def signalled(*arguments):
        sent.append(None)
        if len(sent) == 3:  # the snapshot of step 2 is being written
            os.kill(os.getpid(), signal.SIGTERM)
        if len(sent) == 5:
            free.set()
            working[0].result(60)
        return take_step(*arguments)

    monkeypatch.setattr(files, "write", hanging)
    monkeypatch.setattr(writer.Writer, "start", noted)
    monkeypatch.setattr(train, "take_step", signalled)
    hasty_run(snapshot_steps=2, total_steps=12, decay_steps=12)
    assert delivered == [5, 12]
    assert kept(checkpoints)[0] == 12


def kept(checkpoints):
    return files.candidates(os.listdir(checkpoints))


def test_each_cause_of_failure_is_told_once_and_the_next_due_time_tries_again(
    run, checkpoints, monkeypatch, capfd
):
    write = files.write

    def sometimes(directory, state, **described):
        if described["step"] < 5:
            raise OSError(28, "No space left on device")
        return write(directory, state, **described)

    monkeypatch.setattr(files, "write", sometimes)
    run(snapshot_steps=1)
    out = capfd.readouterr().out
    assert out.count("snapshot_failed") == 1
    assert "snapshot_failed step=1 reason=[Errno 28] No space left on device" in out
    assert kept(checkpoints)[0] == 6


def test_training_does_not_wait_for_a_disk_that_hangs_but_skips_and_counts(
    hasty_run, checkpoints, monkeypatch, capfd
):
    write, free, steps = files.write, threading.Event(), []

    def hanging(directory, state, **described):
        assert free.wait(60)
        return write(directory, state, **described)

    take_step = train.take_step

    def counted(*arguments):
        steps.append(None)
        if len(steps) == 6:
            free.set()
        return take_step(*arguments)

    monkeypatch.setattr(files, "write", hanging)
    monkeypatch.setattr(train, "take_step", counted)
    hasty_run(snapshot_steps=1)
    assert kept(checkpoints) == [6, 1]
    told = re.search(r"snapshots_skipped count=(\d) reason=the one before", capfd.readouterr().out)
    assert told[1] in "45"  # step 6 may or may not have found the writer busy


def test_a_copy_that_does_not_fit_into_memory_stops_the_run_at_its_first_step(run, monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    with pytest.raises(TrainingError, match=r"but only 0\.0 GiB are available"):
        run()


def test_the_best_model_and_its_successor_are_counted(run, text_dir, tmp_path, capfd):
    def counted(**settings):
        run(**settings)
        return int(re.search(r"snapshot_memory bytes=(\d+)", capfd.readouterr().out)[1])

    alone = counted(total_steps=2, decay_steps=6, checkpoint_dir=str(tmp_path / "other"))
    validating = {"decay_steps": 6, "validation_dir": str(text_dir), "evaluate_every": 1}
    with_best = counted(total_steps=2, **validating)
    # A model is a third of what a snapshot holds: itself and AdamW's two moments.
    assert with_best / alone == pytest.approx(1 + 2 / 3, rel=0.02)
    assert counted(total_steps=4, **validating) / alone == pytest.approx(1 + 1 / 3, rel=0.02)


def test_before_the_job_is_stopped_for_its_run_time_a_last_snapshot_is_taken_to_s3(
    run, checkpoints, monkeypatch
):
    delivered = []
    monkeypatch.setattr(delivery.Delivery, "send", lambda self, step, grace: delivered.append(step))
    run(snapshot_steps=100, deadline_seconds=1.0)  # less than the margin
    assert delivered == [1, 6]
    assert files.verify(checkpoints, 6).seconds_trained > 0


def test_the_deadline_is_each_jobs_own_and_counts_all_of_its_attempts(
    run, checkpoints, monkeypatch
):
    def attempt(job, total_steps):
        monkeypatch.setenv("TRAINING_JOB_NAME", job)
        run(total_steps=total_steps, decay_steps=6)
        return files.verify(checkpoints, total_steps)

    first, again, second = attempt("one", 2), attempt("one", 3), attempt("two", 4)
    assert (first.seconds_before_job, again.seconds_before_job) == (0, 0)
    assert second.seconds_before_job == again.seconds_trained > first.seconds_trained > 0


def test_no_thread_of_ours_is_left(hasty_run):
    before = set(threading.enumerate())
    hasty_run(snapshot_steps=1)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in left if "snapshot" in name or "staging" in name]


@pytest.mark.parametrize(
    ("pace", "said"),
    [
        ({"snapshot_steps": 100}, "the 12 steps that are left end before, so only the last one"),
        ({"snapshot_steps": 0, "snapshot_seconds": None}, "before that; only the last one will be"),
    ],
)
def test_a_run_too_short_for_any_snapshot_but_the_last_says_so(run, capfd, pace, said):
    run(total_steps=12, decay_steps=12, **pace)
    out = capfd.readouterr().out
    assert out.count("only the last one") == 1
    assert said in out
    assert out.index(said) < out.index("\nstep=7 ")
