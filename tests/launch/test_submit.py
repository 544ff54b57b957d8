"""The command as a person types it: its exit codes, its words, and what it does not touch."""

import json
import os
import resource
import subprocess
import sys

import pytest

from launch.config import ROOT


@pytest.fixture
def submit(tmp_path):
    """Run submit.py with no account and an empty home; returns the finished process."""

    def run(*arguments, **environment):
        clean = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        return subprocess.run(
            [sys.executable, ROOT / "launch" / "submit.py", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={
                **clean,
                "HOME": str(tmp_path),
                "AWS_EC2_METADATA_DISABLED": "true",
                **environment,
            },
            timeout=60,
            check=False,
        )

    return run


def test_the_dry_run_needs_no_account_and_prints_only_json(submit, tmp_path):
    done = submit("--dry-run", "--set", "compute.instance_count=4")
    assert done.returncode == 0
    assert json.loads(done.stdout)["ResourceConfig"]["InstanceCount"] == 4
    assert [line.split(";")[0] for line in done.stderr.splitlines()][:3] == [
        "note: aws.region is not set",
        "note: aws.role is not set",
        "note: aws.bucket is not set",
    ]
    assert "training/train.py" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_dry_run_takes_the_region_of_the_environment(submit):
    done = submit("--dry-run", AWS_DEFAULT_REGION="eu-west-1")
    assert "ecr.eu-west-1.amazonaws.com" in done.stdout
    assert "aws.region" not in done.stderr


def test_a_region_that_is_none_is_refused(submit):
    assert_refused(submit("--dry-run", AWS_REGION="bad region"), "the AWS region of your env")


def test_the_dry_run_survives_a_broken_account(submit, tmp_path):
    (tmp_path / "broken").write_text("[[[")
    done = submit("--dry-run", AWS_PROFILE="nope", AWS_CONFIG_FILE=str(tmp_path / "broken"))
    assert done.returncode == 0, done.stderr


def assert_refused(done, *sentences):
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == len(sentences), done.stderr
    for line, sentence in zip(lines, sentences, strict=True):
        assert line.startswith(f"error: {sentence}")


def test_without_an_account_every_missing_thing_is_named(submit):
    assert_refused(
        submit(), "aws.region is not set", "aws.role is not set", "no AWS credentials were found"
    )


def test_a_broken_account_is_one_sentence(submit):
    role = "aws.role=arn:aws:iam::123456789012:role/training"
    for broken in ({"AWS_PROFILE": "nope"}, {"AWS_ACCESS_KEY_ID": "only-half"}):
        done = submit("--set", role, "--set", "aws.region=us-east-1", **broken)
        assert_refused(done, "the AWS configuration cannot be used")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.total_stepz=1", "training.total_stepz is not a training setting"),
        ("data.train=/nowhere", "data.train is '/nowhere', which is no folder here"),
        ("data.train=s3://", "data.train is 's3://'; an S3 prefix is written as"),
        ("compute.framework_version=2.9.0", "compute.framework_version is '2.9.0', which"),
    ],
)
def test_bad_input_is_refused_without_a_traceback(submit, override, said):
    done = submit("--dry-run", "--set", override, AWS_DEFAULT_REGION="us-east-1")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("note:")]
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {said}")


def test_a_missing_configuration_is_refused(submit):
    assert_refused(submit("--config", "nowhere.yaml"), "the configuration nowhere.yaml cannot be")


def cpu_seconds(command):
    """The processor time of a command: it hardly depends on what else the machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True, env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_and_dry_run_start_fast():
    script = str(ROOT / "launch" / "submit.py")
    commands = (["-c", "import sagemaker.pytorch"], [script, "--help"], [script, "--dry-run"])
    rounds = [[cpu_seconds([sys.executable, *command]) for command in commands] for _ in range(2)]
    imported, helped, dry = map(min, zip(*rounds, strict=True))
    assert helped < imported / 5
    assert dry < imported * 1.5
