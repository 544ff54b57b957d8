"""A job from the command to the mocked AWS: refused before it costs, or started and resumed."""

import json
import re

import boto3
import pytest
import yaml
from botocore.exceptions import ClientError

from launch import environment, follow, preflight, start, submit
from launch.config import DEFAULT_CONFIG
from launch.errors import Refused
from training.settings import TrainingSettings

TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
}


@pytest.fixture
def job(aws, monkeypatch):
    """Type `submit.py` with a role and a bucket that exist; returns the exit code."""
    role = boto3.client("iam").create_role(
        RoleName="training", AssumeRolePolicyDocument=json.dumps(TRUST)
    )["Role"]["Arn"]
    # moto has no quotas and calls every job completed; both have tests of their own.
    enough = preflight.Check("quota", True, "4 instances are allowed")
    monkeypatch.setattr(preflight, "quota", lambda quotas, config: enough)

    def start(*arguments):
        given = [f"aws.role={role}", "aws.bucket=my-bucket", "aws.region=us-east-1"]
        flags = [part for value in given for part in ("--set", value)]
        return submit.main([*flags, *arguments])

    return start


def put_snapshot(step, **settings):
    loaded = yaml.safe_load(DEFAULT_CONFIG.read_text())["training"]
    fixed = TrainingSettings.from_mapping({**loaded, **settings}).fingerprint()
    manifest = {
        "format": 1,
        "run_name": "shakespeare",
        "step": step,
        "samples_seen": step * 64,
        "world_size": 2,
        "saved_at": "2026-11-30T12:00:00+00:00",
        "bytes": 4,
        "digests": {},
        "settings": fixed,
        "versions": {},
    }
    home = f"spot-ddp/shakespeare/snapshots/step-{step:010d}"
    s3 = boto3.client("s3")
    s3.put_object(Bucket="my-bucket", Key=f"{home}.pt", Body=b"data")
    s3.put_object(Bucket="my-bucket", Key=f"{home}.json", Body=json.dumps(manifest).encode())


def keys():
    listed = boto3.client("s3").list_objects_v2(Bucket="my-bucket").get("Contents", [])
    return {item["Key"] for item in listed}


def test_a_new_run_starts_and_says_what_it_does(job, aws, capsys):
    assert job() == 0
    out, err = capsys.readouterr()
    name = aws.requests[-1]["TrainingJobName"]
    assert f"started    {name}" in out
    assert "snapshots  s3://my-bucket/spot-ddp/shakespeare/snapshots/" in out
    assert "python launch/submit.py --set aws.role=" in out
    assert "✓" in err
    assert "✗" not in err
    assert "fresh" in err
    assert "data.train was uploaded" in err
    assert job() == 0
    assert "data.train is already uploaded" in capsys.readouterr().err


def test_a_run_with_snapshots_resumes(job, aws, capsys):
    put_snapshot(120)
    assert job() == 0
    assert "resumes at step 120" in capsys.readouterr().err
    assert aws.requests[-1]["CheckpointConfig"]["S3Uri"].endswith("/shakespeare/snapshots/")


def test_other_settings_are_refused_before_any_upload_with_the_ways_out(job, aws, capsys):
    put_snapshot(120, learning_rate=1e-3)
    before = keys()
    assert job() == 2
    err = capsys.readouterr().err
    assert "learning_rate" in err
    assert "0.001" in err
    assert "--from-scratch" in err
    assert aws.requests == []
    assert keys() == before


def test_from_scratch_moves_on_and_stays_there(job, aws, capsys):
    put_snapshot(120, learning_rate=1e-3)
    before = keys()
    assert job("--from-scratch") == 0
    assert job() == 0
    uris = {request["CheckpointConfig"]["S3Uri"] for request in aws.requests}
    assert uris == {"s3://my-bucket/spot-ddp/shakespeare/snapshots-2/"}
    assert before <= keys()


def test_from_scratch_that_fails_leaves_the_run_where_it_was(job, aws, capsys, monkeypatch):
    put_snapshot(30)
    error = ClientError({"Error": {"Code": "ResourceLimitExceeded"}}, "CreateTrainingJob")

    def fail(*arguments):
        raise error

    monkeypatch.setattr(start, "start_job", fail)
    assert job("--from-scratch") == 1
    assert "AWS did not start the job" in capsys.readouterr().err
    monkeypatch.undo()
    assert not [key for key in keys() if "/snapshots-2/" in key]


def test_a_job_that_cannot_be_watched_any_more_goes_on_and_is_not_refused(
    job, aws, capsys, monkeypatch
):
    def lost(job_name, region):
        raise Refused("AWS does not accept your credentials any more")

    monkeypatch.setattr(follow, "follow_started", lost)
    assert job("--follow") == 3
    said = capsys.readouterr()
    assert "error: AWS does not accept your credentials any more\n" in said.err
    name = re.search(r"started    (\S+)", said.out)[1]
    assert f"type `python launch/follow.py {name} --region us-east-1`" in said.err


def test_a_finished_run_is_refused_with_how_to_extend_it(job, aws, capsys):
    put_snapshot(5000)
    delivered = "spot-ddp/shakespeare/output/shakespeare-1/output/model.tar.gz"
    boto3.client("s3").put_object(Bucket="my-bucket", Key=delivered, Body=b"")
    assert job() == 2
    assert "training.total_steps" in capsys.readouterr().err
    assert job("--set", "training.total_steps=6000") == 0


def test_a_finished_run_whose_model_was_never_delivered_may_deliver_it(job, aws, capsys):
    put_snapshot(5000)
    assert job() == 0
    assert "takes no step, and writes the model" in capsys.readouterr().err
    assert len(aws.requests) == 1


def test_data_that_the_volume_cannot_hold_is_refused(job, aws, capsys, tmp_path):
    (tmp_path / "huge").mkdir()
    with open(tmp_path / "huge" / "sparse", "wb") as file:
        file.truncate(2**30)
    options = [f"data.train={tmp_path / 'huge'}", "data.input_mode=File", "compute.volume_gb=2"]
    options += ["compute.instance_type=ml.p3.8xlarge", "training.model_width=64"]
    flags = [part for option in options for part in ("--set", option)]
    assert job(*flags) == 2
    assert "1.0 GiB of data need 3 GiB: set compute.volume_gb to 3" in capsys.readouterr().err


def test_what_the_account_says_is_told_at_once_and_can_be_skipped(job, aws, capsys):
    bad = ["--set", "aws.role=arn:aws:iam::123456789012:role/nobody"]
    bad += ["--set", "data.train=s3://my-bucket/nothing-here/"]
    before = keys()
    assert job(*bad) == 2
    errors = [e for e in capsys.readouterr().err.splitlines() if e.startswith("error: ")]
    assert len(errors) == 2
    assert keys() == before
    assert aws.requests == []
    assert job("--skip-preflight", *bad) == 0


def test_a_missing_bucket_shows_the_table(job, aws, capsys):
    assert job("--set", "aws.bucket=nowhere-to-be-found") == 2
    err = capsys.readouterr().err
    assert "✗" in err
    assert "nowhere-to-be-found" in err
    assert aws.requests == []


def test_the_policies_name_exactly_this_bucket_and_role(capsys):
    arguments = ["--print-iam-policy", "--set", "aws.bucket=my-bucket"]
    with environment.replaced(environment.NO_ACCOUNT):
        assert submit.main(arguments) == 0
    policies = json.loads(capsys.readouterr().out)
    assert policies.keys() == {"execution_role", "trust", "person"}
    assert "arn:aws:s3:::my-bucket/spot-ddp/" in json.dumps(policies["execution_role"])
