"""Data is read whole or refused, and uploaded once."""

import io
import os
import subprocess
import sys

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


@pytest.mark.parametrize("source", ["s3://", "s3://b//x", "S3://b/x", "https://b/x"])
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


class Terminal(io.StringIO):
    """A stream that a person looks at."""

    def isatty(self):
        return True


def test_on_a_terminal_the_bytes_are_shown(job, folder, aws, monkeypatch, capsys):
    (folder / "big.bin").write_bytes(b"x" * 2_500_000)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    (channel,) = data.channels(job(train=folder))
    assert data.upload(channel, channel.uri(job(), "my-bucket"), boto3.client("s3")) == 3
    assert "data.train" in terminal.getvalue()
    assert "2.5/2.5 MB" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert data.upload(channel, channel.uri(job(), "my-bucket"), boto3.client("s3")) == 0
    assert terminal.getvalue() == ""
    assert capsys.readouterr().out == ""


def test_the_samples_bytes_are_shown_too(job, aws, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    (channel,) = data.channels(job(train="sample"))
    assert data.upload(channel, channel.uri(job(), "my-bucket"), boto3.client("s3")) == 1
    size = len(channel.files["python-topics.txt"])
    shown = f"{size / 1000:.1f}"
    assert f"{shown}/{shown} kB" in terminal.getvalue()


def test_where_nobody_looks_nothing_is_shown(job, folder, aws, capsys):
    (channel,) = data.channels(job(train=folder))
    assert data.upload(channel, channel.uri(job(), "my-bucket"), boto3.client("s3")) == 2
    assert capsys.readouterr() == ("", "")


def test_reading_the_channels_does_not_wait_for_the_progress_bar():
    code = "import sys; from launch import data; print('rich' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


@pytest.mark.parametrize("train", ["sample", "folder"])
def test_what_is_uploaded_is_encrypted_with_the_key_that_is_set(job, folder, aws, train):
    s3 = boto3.client("s3")
    (channel,) = data.channels(job(train=folder if train == "folder" else train))
    uri = channel.uri(job(), "my-bucket")
    assert data.upload(channel, uri, s3, kms_key="my-key") == len(channel.files)
    for name in channel.files:
        key = uri.removeprefix("s3://my-bucket/") + name
        head = s3.head_object(Bucket="my-bucket", Key=key)
        assert head["ServerSideEncryption"] == "aws:kms"
        assert head["SSEKMSKeyId"].endswith("my-key")


def test_without_a_key_the_bucket_decides_about_encryption(job, aws):
    s3 = boto3.client("s3")
    (channel,) = data.channels(job(train="sample"))
    uri = channel.uri(job(), "my-bucket")
    data.upload(channel, uri, s3)
    key = uri.removeprefix("s3://my-bucket/") + "python-topics.txt"
    assert "SSEKMSKeyId" not in s3.head_object(Bucket="my-bucket", Key=key)


def test_a_person_is_told_what_became_of_each_channel(job, folder):
    (channel,) = data.channels(job(train=folder))
    assert data.outcome(channel, 2) == "data.train was uploaded (2 of 2 files)"
    assert data.outcome(channel, 0) == "data.train is already uploaded (2 files)"
    (channel,) = data.channels(job(train="sample"))
    assert data.outcome(channel, 1) == "data.train was uploaded (1 of 1 file)"
    (channel,) = data.channels(job(train="s3://their-bucket/text"))
    assert data.outcome(channel, 0) == "data.train stays where it is, s3://their-bucket/text/"
