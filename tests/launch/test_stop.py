"""Stopping a job: it is asked once, and what it saves at the end is waited for."""

from types import SimpleNamespace

import pytest
from botocore.exceptions import EndpointConnectionError

from launch import stop
from launch.errors import exit_code_of
from launch.following.follower import Clients
from tests.launch.scripted import NAME, Aws, refused, saved, stepped


@pytest.fixture
def aws():
    return Aws()


@pytest.fixture
def run(aws, capsys):
    """Stop the job; returns the exit code, stdout and stderr."""
    asked = []

    def stop_training_job(*, TrainingJobName):  # noqa: N803
        asked.append(TrainingJobName)
        aws._called("stop")

    def stop_it(job=NAME):
        sagemaker = SimpleNamespace(
            **vars(aws.clients.sagemaker), stop_training_job=stop_training_job
        )
        clients = Clients(sagemaker, aws.clients.logs, aws.clients.s3)
        code = exit_code_of(lambda: stop.stop(clients, aws.time, job))
        return (code, *capsys.readouterr())

    stop_it.asked = asked
    return stop_it


def training_then_stopped(aws):
    """It is stopped at once; the snapshot of step 77 that the signal asked for arrives later."""
    aws.say(0, stepped(77)).put(0, 50).say(2, saved(77))
    return aws.life(("Training", 1), ("Stopping", 40), ("Stopped",))


def test_the_snapshot_of_the_last_step_is_waited_for(aws, run):
    training_then_stopped(aws).put(30, 77)
    code, out, err = run()
    assert (code, err) == (0, "")
    assert run.asked == [NAME]
    assert "snapshot of step 50 is whole in S3" in out
    assert "snapshot of step 77 is whole in S3" in out
    assert "resumes    a new start goes on at step 77 of 400\n" in out
    assert "continue   python launch/submit.py --set run_name=shakespeare" in out
    assert aws.seconds >= 41


def test_a_snapshot_that_never_arrives_is_told_and_is_a_failure(aws, run):
    training_then_stopped(aws)
    code, out, _ = run()
    assert code == 1
    assert "resumes    a new start goes on at step 50 of 400\n" in out
    assert "warning    the log has a snapshot of step 77, which S3 did not get\n" in out


def test_a_job_that_has_ended_is_not_stopped_again(aws, run):
    aws.life(("Completed",)).put(0, 400)
    code, out, _ = run()
    assert code == 0
    assert run.asked == []
    assert out.startswith(f"nothing to stop: {NAME} has ended (Completed)\n")


def test_a_job_that_is_being_stopped_is_only_waited_for(aws, run):
    aws.life(("Stopping", 20), ("Stopped",)).put(0, 10)
    code, out, _ = run()
    assert (code, run.asked) == (0, [])
    assert "resumes    a new start goes on at step 10 of 400" in out


def test_an_unknown_job_is_refused(aws, run):
    code, out, err = run("no-such-job")
    assert (code, out) == (2, "")
    assert err.startswith("error: there is no training job 'no-such-job' in us-east-1")


def test_without_the_permission_nothing_is_stopped(aws, run):
    training_then_stopped(aws).fail("stop", refused("AccessDeniedException", "StopTrainingJob"))
    code, _, err = run()
    assert code == 2
    assert err.startswith(f"error: AWS does not stop {NAME}: no permission")


def test_out_of_reach_is_one_sentence_and_nothing_was_stopped(aws, run):
    training_then_stopped(aws).fail("describe", EndpointConnectionError(endpoint_url="https://x"))
    code, _, err = run()
    assert (code, run.asked) == (2, [])
    assert err.startswith(f"error: AWS does not stop {NAME}: ")


def test_credentials_that_run_out_after_the_request_do_not_mean_that_it_was_not_made(aws, run):
    training_then_stopped(aws).fail("describe", refused("ExpiredTokenException"), after=10)
    code, _, err = run()
    assert (code, run.asked) == (1, [NAME])
    assert err.startswith(f"error: {NAME} was asked to stop, but not watched to its end: AWS does")


@pytest.mark.parametrize("call", ["logs", "list"])
def test_what_cannot_be_read_is_not_known_instead_of_missing(aws, run, call):
    training_then_stopped(aws).fail(call, refused("AccessDeniedException"))
    code, out, _ = run()
    assert code == 0
    assert "note       whether its last snapshot reached S3 is not known\n" in out
    assert "warning" not in out


def test_a_job_that_completed_before_it_could_be_stopped_is_told_so(aws, run):
    aws.say(0, stepped(400)).say(1, saved(400)).put(3, 400)
    code, out, _ = aws.life(("Training", 1), ("Completed",)) and run()
    assert code == 0
    assert f"completed  {NAME}\n" in out
    assert "continue" not in out


def test_throttling_is_waited_out(aws, run):
    training_then_stopped(aws).put(30, 77)
    aws.fail("stop", refused("ThrottlingException", "StopTrainingJob"), times=2)
    assert run()[0] == 0
    assert run.asked == [NAME] * 3


def test_ctrl_c_leaves_the_job_to_its_end(aws, run, monkeypatch):
    training_then_stopped(aws)
    monkeypatch.setattr(stop, "_wait", lambda follower: (_ for _ in ()).throw(KeyboardInterrupt))
    code, _, err = run()
    assert code == 130
    assert f"{NAME} is being stopped all the same" in err
