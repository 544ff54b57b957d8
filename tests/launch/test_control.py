"""The uninterrupted run is kept exactly as long as nothing that decides its bits has changed."""

import copy
import io
import json
import tarfile

import pytest

from launch.rehearsal import control
from launch.rehearsal.attempt import Attempt


def packed(**files):
    """A source archive, as a stand-in for S3 that always returns it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(text), id(buffer) % 10**6  # times do not matter
            archive.addfile(member, io.BytesIO(text.encode()))

    class S3:
        def get_object(self, Bucket, Key):  # noqa: N803 - boto3's names
            return {"Body": io.BytesIO(buffer.getvalue())}

    return S3()


REQUEST = {
    "TrainingJobName": "job-1",
    "HyperParameters": {
        "seed": "0",
        "sagemaker_job_name": '"job-1"',
        "sagemaker_submit_directory": '"s3://bucket/job-1/sourcedir.tar.gz"',
    },
    "Environment": {"A": "1"},
    "InputDataConfig": [{"ChannelName": "train", "S3Uri": "s3://bucket/data/abc/"}],
    "ResourceConfig": {"InstanceCount": 2},
}


def changed(*path, value):
    request = copy.deepcopy(REQUEST)
    place = request
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return request


def test_another_job_of_the_same_code_settings_and_data_has_the_same_key():
    again = changed("HyperParameters", "sagemaker_job_name", value='"job-2"')
    again["TrainingJobName"] = "job-2"
    code = {"train": "pass", "model": "pass"}
    assert control.key_of(REQUEST, packed(**code)) == control.key_of(again, packed(**code))


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (REQUEST, {"train": "fail"}),
        (REQUEST, {"train": "pass", "more": ""}),
        (changed("HyperParameters", "seed", value="1"), {"train": "pass"}),
        (changed("Environment", "A", value="2"), {"train": "pass"}),
        (changed("ResourceConfig", "InstanceCount", value=1), {"train": "pass"}),
        (changed("InputDataConfig", 0, "S3Uri", value="s3://bucket/data/d/"), {"train": "pass"}),
    ],
)
def test_whatever_decides_the_bits_changes_the_key(request_, code):
    assert control.key_of(request_, packed(**code)) != control.key_of(REQUEST, packed(train="pass"))


def test_what_was_kept_is_recalled_and_rubbish_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "KEPT_IN", tmp_path / "kept")
    attempt = Attempt(1, 0.0, ended=9.0, kind="completed", resumed_from=None)
    attempt.hear("step=1 loss=2.5 learning_rate=1.0e-03 step_seconds=0.5", 7.0)
    assert control.recall("key") is None
    control.keep("key", attempt, "digest")
    kept, digest = control.recall("key")
    assert (digest, kept.last_step, kept.ended) == ("digest", 1, 9.0)
    assert json.loads(json.dumps(kept.steps)) == [[7.0, 1, 2.5, 0.5]]
    (tmp_path / "kept" / "key.json").write_text("{")
    assert control.recall("key") is None
