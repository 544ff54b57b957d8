"""Data is read whole or refused, and uploaded once."""

import os

import boto3
import pytest

from launch import config, data
from launch.errors import Refused


@pytest.fixture
def job(values):
    """The configuration with other data, as `job(train=…, validation=…)`."""

    def make(**sources):
        values["data"].update({name: str(source) for name, source in sources.items()})
        return config.validate(values)

    return make


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "data" / "deep" / "b.txt").write_text("bb")
    return tmp_path / "data"


def test_a_folder_goes_under_the_address_of_its_content(job, folder):
    (channel,) = data.channels(job(train=folder))
    assert list(channel.files) == ["a.txt", "deep/b.txt"]
    uri = channel.uri(job(), "my-bucket")
    assert uri == f"s3://my-bucket/spot-ddp/data/{channel.address}/"
    (folder / "a.txt").write_text("A")
    (changed,) = data.channels(job(train=folder))
    assert changed.address != channel.address


def test_links_are_followed_and_hidden_files_stay(job, folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.txt").write_text("c")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    (folder / ".env").write_text("secret")
    (channel,) = data.channels(job(train=folder))
    assert list(channel.files) == ["a.txt", "deep/b.txt", "linked/c.txt"]


def test_an_s3_prefix_is_passed_through_with_one_slash(job):
    for source in ("s3://their-bucket/text", "s3://their-bucket/text/"):
        (channel,) = data.channels(job(train=source))
        assert channel.uri(job(), "my-bucket") == "s3://their-bucket/text/"
        assert data.upload(channel, "s3://their-bucket/text/", s3=None) == 0


@pytest.mark.parametrize("source", ["s3://", "s3://b", "s3://b//x", "S3://b/x", "https://b/x"])
def test_other_addresses_are_refused(job, source):
    with pytest.raises(Refused, match="an S3 prefix is written as"):
        data.channels(job(train=source))


def test_all_channels_that_cannot_be_read_are_named(job, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".hidden").write_text("x")
    with pytest.raises(Refused) as caught:
        data.channels(job(train=tmp_path / "nowhere", validation=tmp_path / "empty"))
    first, second = caught.value.problems
    assert "nowhere', which is no folder here" in first
    assert "data.validation is" in second
    assert "holds no data" in second


@pytest.mark.parametrize("source", ["~nobody-of-that-name/x", "x" * 5000])
def test_a_path_that_cannot_even_be_looked_at_is_refused(job, source):
    with pytest.raises(Refused, match=r"data\.train is"):
        data.channels(job(train=source))


def test_only_what_is_missing_is_uploaded(job, folder, aws):
    s3 = boto3.client("s3")
    (channel,) = data.channels(job(train=folder))
    uri = channel.uri(job(), "my-bucket")
    assert data.upload(channel, uri, s3) == 2
    assert data.upload(channel, uri, s3) == 0
    s3.delete_object(Bucket="my-bucket", Key=f"spot-ddp/data/{channel.address}/deep/b.txt")
    assert data.upload(channel, uri, s3) == 1
    s3.put_object(Bucket="my-bucket", Key=f"spot-ddp/data/{channel.address}/a.txt", Body=b"")
    assert data.upload(channel, uri, s3) == 1


def test_the_sample_is_text_that_every_machine_has(job):
    (channel,) = data.channels(job(train="sample"))
    ((name, content),) = channel.files.items()
    assert os.path.splitext(name)[1] == ".txt"
    assert len(content) > 300_000
