"""A mocked AWS on the loopback, and jobs to send to it."""

import urllib.request

import pytest
import yaml

from launch import config as job_config
from launch import data, estimator, runs, start
from launch.rehearsal.aws import loopback_aws

ACCOUNT = {
    "region": "us-east-1",
    "role": "arn:aws:iam::123456789012:role/training",
    "bucket": "my-bucket",
}


@pytest.fixture
def values():
    """The default configuration with an account filled in, as plain dictionaries."""
    loaded = yaml.safe_load(job_config.DEFAULT_CONFIG.read_text())
    loaded["aws"].update(ACCOUNT)
    return loaded


@pytest.fixture
def aws():
    """The mocked AWS, holding the bucket `my-bucket`."""
    import boto3

    with loopback_aws("us-east-1") as server:
        urllib.request.urlopen(f"{server.endpoint}/moto-api/reset", data=b"").close()
        boto3.client("s3").create_bucket(Bucket="my-bucket")
        yield server


@pytest.fixture
def send(aws, values):
    """Start a job, with `section.key=value` overrides; returns the request as it arrived."""

    def submit(*overrides):
        for override in overrides:
            job_config._apply(values, override)
        config = job_config.validate(values)
        session = estimator.open_session("us-east-1")
        start.start_job(config, session, data.channels(config), runs.snapshots_uri(config), print)
        return aws.requests[-1]

    return submit
