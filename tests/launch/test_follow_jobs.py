"""The list of jobs, and following with real clients against the mocked AWS."""

import json

import boto3
import pytest

from launch import follow
from launch.errors import exit_code_of
from launch.following import jobs
from tests.launch.scripted import NAME, Aws, refused


@pytest.fixture
def played():
    played = Aws().life(
        *[("Training", 100), ("Interrupted", 50), ("Training", 100), ("Interrupted", 5)],
        *[("Training", 100), ("Completed",)],
    )
    played.seconds = 500
    return played.put(10, 390)


def listed(played, capsys, *, as_json=False):
    code = exit_code_of(lambda: follow.list_jobs(played.clients, played.time, as_json=as_json))
    return (code, *capsys.readouterr())


def test_the_list_shows_how_the_jobs_fared(played, capsys):
    code, out, _ = listed(played, capsys)
    head, row = out.splitlines()
    assert code == 0
    assert head.split() == ["job", "run", "status", "step", "interrupted", "savings"]
    assert row.split() == [NAME, "shakespeare", "Completed", "390", "/", "400", "2", "68%"]
    assert played.asked["SearchExpression"]["Filters"] == [
        {"Name": "Tags.project", "Operator": "Equals", "Value": "sagemaker-spot-ddp"}
    ]


def test_the_list_for_scripts(played, capsys):
    _, out, _ = listed(played, capsys, as_json=True)
    told = json.loads(out)
    assert (told["job"], told["snapshot_in_s3"], told["interruptions"]) == (NAME, 390, 2)


def test_a_step_that_cannot_be_read_is_left_out(played, capsys):
    played.fail("list", refused("AccessDenied", "ListObjectsV2"))
    code, out, _ = listed(played, capsys)
    assert code == 0
    assert "– / 400" in out


@pytest.mark.parametrize("code", ["AccessDeniedException", "ThrottlingException"])
def test_a_list_that_is_refused_is_one_sentence(played, capsys, code):
    played.fail("search", refused(code, "Search"))
    code, out, err = listed(played, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: the jobs cannot be listed (")
    assert "sagemaker:Search" in err


def test_a_list_that_is_throttled_is_asked_for_again(played, capsys):
    played.fail("search", refused("ThrottlingException", "Search"), times=2)
    played.fail("list", refused("SlowDown", "ListObjectsV2"), times=1)
    code, out, _ = listed(played, capsys)
    assert (code, played.slept) == (0, [1, 2, 1])
    assert "390 / 400" in out


def test_no_jobs_yet(played, capsys, monkeypatch):
    monkeypatch.setattr(jobs, "recent", lambda *_: [])
    assert "type `python launch/submit.py`" in listed(played, capsys)[1]


def test_real_clients_understand_the_questions(send, monkeypatch, capsys):
    """moto completes every job at once, trains nothing, and checks the form of each call."""
    name = send()["TrainingJobName"]
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert follow.main([name, "--refresh", "0.01"]) == 1
    out = capsys.readouterr().out
    assert "but its last whole snapshot is none, not step 5000" in out
    assert "python launch/submit.py --set run_name=shakespeare" in out
    logs = boto3.client("logs")
    logs.create_log_group(logGroupName="/aws/sagemaker/TrainingJobs")
    stream = {"logGroupName": "/aws/sagemaker/TrainingJobs", "logStreamName": f"{name}/algo-1-1"}
    logs.create_log_stream(**stream)
    when = int(
        boto3.client("sagemaker")
        .describe_training_job(TrainingJobName=name)["CreationTime"]
        .timestamp()
        * 1000
    )
    logs.put_log_events(**stream, logEvents=[{"timestamp": when, "message": "step=5000 loss=1.5"}])
    for ending in ("json", "pt"):
        key = f"spot-ddp/shakespeare/snapshots/step-0000005000.{ending}"
        boto3.client("s3").put_object(Bucket="my-bucket", Key=key, Body=b"{}")
    assert follow.main([name, "--refresh", "0.01", "--json"]) == 1  # the manifest is garbage
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["step"], last["loss"], last["snapshot_in_s3"]) == (5000, 1.5, 5000)
    assert follow.main(["nobody"]) == 2
    assert "error: there is no training job 'nobody' in us-east-1" in capsys.readouterr().err
    assert follow.main([]) == 0
    assert name in capsys.readouterr().out
