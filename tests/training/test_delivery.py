"""What rank 0 takes to S3 by itself: data, then manifest, once, and never at training's cost."""

import os
import sys

import boto3
import pytest
from moto import mock_aws

from training.snapshots import delivery
from training.snapshots.delivery import Delivery
from training.snapshots.manifest import data_name, manifest_name

URI = "s3://bucket/team/run/snapshots/"
DATA, MANIFEST = (f"team/run/snapshots/{name(7)}" for name in (data_name, manifest_name))


@pytest.fixture
def s3(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        yield client


@pytest.fixture
def checkpoints(tmp_path):
    (tmp_path / data_name(7)).write_bytes(b"data" * 1000)
    (tmp_path / manifest_name(7)).write_bytes(b"{}")
    return tmp_path


def held(s3):
    return {
        item["Key"]: item["Size"]
        for item in s3.list_objects_v2(Bucket="bucket").get("Contents", [])
    }


def puts(monkeypatch):
    """The keys that are uploaded from now on, in their order."""
    seen, client = [], delivery._client

    def watched():
        s3 = client()
        upload = s3.upload_file
        s3.upload_file = lambda path, bucket, key: (seen.append(key), upload(path, bucket, key))
        return s3

    monkeypatch.setattr(delivery, "_client", watched)
    return seen


def test_the_data_goes_before_the_manifest_and_both_arrive(s3, checkpoints, monkeypatch, capfd):
    sent = puts(monkeypatch)
    taken = Delivery(checkpoints, URI)
    taken.send(7, grace_ends=delivery.time.monotonic() + 100)
    assert sent == [DATA, MANIFEST]
    assert held(s3) == {DATA: 4000, MANIFEST: 2}
    assert taken.arrived == {7}
    line = capfd.readouterr().out
    assert line.startswith("delivered step=7 upload_s=")
    assert "files_sent=2" in line
    assert 0 < float(line.rpartition("grace_left_s=")[2]) <= 100


def test_what_the_agent_has_delivered_is_not_sent_again(s3, checkpoints, monkeypatch, capfd):
    s3.upload_file(str(checkpoints / data_name(7)), "bucket", DATA)
    sent = puts(monkeypatch)
    taken = Delivery(checkpoints, URI)
    taken.send(7)
    assert sent == [MANIFEST]
    taken.send(7)
    assert sent == [MANIFEST]
    assert capfd.readouterr().out.count("delivered step=7") == 1


def test_half_a_file_is_replaced(s3, checkpoints):
    s3.put_object(Bucket="bucket", Key=DATA, Body=b"half")
    Delivery(checkpoints, URI).send(7)
    assert held(s3)[DATA] == 4000


def test_an_older_object_of_the_same_size_is_replaced(s3, checkpoints, monkeypatch):
    s3.put_object(Bucket="bucket", Key=DATA, Body=b"x" * 4000)
    path = checkpoints / data_name(7)
    os.utime(path, (later := path.stat().st_mtime + 60, later))
    client = delivery._client()
    monkeypatch.setattr(delivery, "_client", lambda: client)
    upload = client.upload_file
    client.upload_file = lambda *sent: (upload(*sent), os.utime(path))  # a minute has passed
    Delivery(checkpoints, URI).send(7)
    assert s3.get_object(Bucket="bucket", Key=DATA)["Body"].read() == b"data" * 1000


def test_without_an_address_nothing_is_done(checkpoints, capfd):
    Delivery(checkpoints, "").send(7)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("trouble", ["no boto3", "no bucket", "no file"])
def test_whatever_prevents_it_is_one_warning(s3, checkpoints, monkeypatch, capfd, trouble):
    uri = URI
    if trouble == "no boto3":
        monkeypatch.setitem(sys.modules, "boto3", None)
    elif trouble == "no bucket":
        uri = "s3://another/run/"
    else:
        (checkpoints / data_name(7)).unlink()
    taken = Delivery(checkpoints, uri)
    taken.send(7)
    taken.send(7)
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    assert out.startswith("snapshot_not_delivered step=7 reason=")
    assert "Traceback" not in out
    assert taken.arrived == set()


def test_an_object_that_is_shorter_than_the_file_is_not_delivered(s3, checkpoints, monkeypatch):
    client = delivery._client()
    monkeypatch.setattr(delivery, "_client", lambda: client)
    client.upload_file = lambda path, bucket, key: s3.put_object(
        Bucket=bucket, Key=key, Body=b"short"
    )
    taken = Delivery(checkpoints, URI)
    taken.send(7)
    assert taken.arrived == set()
