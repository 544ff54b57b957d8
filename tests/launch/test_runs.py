"""What a run's prefix says before anything is uploaded, and which prefix is the current one."""

import datetime
import io
import json
import subprocess
import sys

import boto3
import pytest
from botocore.exceptions import ClientError
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from rich.console import Console

from launch import config as job_config
from launch import runs
from launch import verdict as verdicts
from launch.errors import Refused
from training.snapshots.manifest import data_name, manifest_name

HOME = "spot-ddp/shakespeare/"
URI = f"s3://my-bucket/{HOME}snapshots/"


@pytest.fixture
def s3(aws):
    return boto3.client("s3")


@pytest.fixture
def config(values):
    return job_config.validate(values)


@pytest.fixture
def put(s3, config):
    """Write a snapshot of a step, with some of its manifest's values replaced."""

    def write(step, *, folder="snapshots/", size=3, manifest=True, data=True, **replaced):
        described = {
            "format": 1,
            "run_name": config.run_name,
            "step": step,
            "samples_seen": 64 * step,
            "world_size": 2,
            "saved_at": "2026-01-01T00:00:00+00:00",
            "bytes": 3,
            "digests": {},
            "settings": config.training.fingerprint(),
            "versions": {},
            **replaced,
        }
        place = {"Bucket": "my-bucket"}
        if data:
            s3.put_object(**place, Key=f"{HOME}{folder}{data_name(step)}", Body=b"x" * size)
        if manifest:
            body = manifest if isinstance(manifest, str) else json.dumps(described)
            s3.put_object(**place, Key=f"{HOME}{folder}{manifest_name(step)}", Body=body.encode())

    return write


@pytest.fixture
def requests(s3):
    """The S3 operations that are sent, in order."""
    sent = []

    def note(event_name, **_):
        sent.append(event_name.rpartition(".")[2])

    s3.meta.events.register("before-send.s3", note)
    return sent


def only_problem(verdict):
    assert verdict.kind == "refused"
    assert verdict.step == 0
    assert len(verdict.problems) == 1
    assert verdict.text == f"is refused: {verdict.problems[0]}"
    return verdict.problems[0]


def test_an_empty_prefix_starts_fresh(s3, config):
    assert verdicts.judge(s3, URI, config) == verdicts.Verdict(
        kind="fresh", uri=URI, text="starts fresh"
    )


def test_whole_snapshots_with_the_same_settings_resume_at_the_newest(s3, config, put):
    saved_at = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=14, seconds=5)
    put(100)
    put(120, saved_at=saved_at.isoformat())
    verdict = verdicts.judge(s3, URI, config)
    assert verdict == verdicts.Verdict(
        kind="resumes",
        uri=URI,
        text="resumes at step 120 (saved 14 min ago)",
        step=120,
        saved_at=saved_at,
    )


@pytest.mark.parametrize(
    ("ago", "said"),
    [
        ({"seconds": -30}, "0 s ago"),
        ({"seconds": 119.5}, "119 s ago"),
        ({"minutes": 119}, "119 min ago"),
        ({"hours": 5}, "5 h ago"),
        ({"days": 3}, "3 days ago"),
    ],
)
def test_the_age_of_a_snapshot_is_said_in_the_unit_that_a_person_would_take(ago, said):
    assert verdicts._ago(datetime.datetime.now(datetime.UTC) - datetime.timedelta(**ago)) == said


def test_a_time_without_a_zone_is_utc_and_one_that_is_none_is_left_out(s3, config, put):
    put(120, saved_at="2026-01-01T00:00:00")
    assert verdicts.judge(s3, URI, config).saved_at == datetime.datetime(
        2026, 1, 1, tzinfo=datetime.UTC
    )
    put(130, saved_at="yesterday")
    verdict = verdicts.judge(s3, URI, config)
    assert (verdict.text, verdict.saved_at) == ("resumes at step 130", None)


def test_settings_that_may_change_do_not_hinder(s3, values, put):
    put(120)
    values["training"].update(snapshot_seconds=60, total_steps=9000, log_every=1)
    assert verdicts.judge(s3, URI, job_config.validate(values)).step == 120


def test_other_fixed_settings_are_refused_with_what_differs_and_both_ways_out(s3, values, put):
    put(120)
    values["training"].update(learning_rate=0.001, seed=7)
    verdict = verdicts.judge(s3, URI, job_config.validate(values))
    assert only_problem(verdict) == (
        "step-0000000120.pt of the run 'shakespeare' was written with other settings "
        "(learning_rate: 0.0006 in the snapshot, 0.001 now; seed: 0 in the snapshot, 7 now); "
        "set them back, or give the run another name with --set run_name=…, or type "
        "`python launch/submit.py --from-scratch`, which begins again at the next prefix and "
        "deletes nothing"
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(verdicts.table(verdict))
    rows = [line.strip("│ ").split("│") for line in console.file.getvalue().splitlines()]
    cells = [[cell.strip() for cell in row] for row in rows if len(row) == 3]
    assert cells == [["training.learning_rate", "0.0006", "0.001"], ["training.seed", "0", "7"]]


def deliver_model(s3):
    """What SageMaker uploads when a job of the run completes."""
    s3.put_object(Bucket="my-bucket", Key=f"{HOME}output/job-1/output/model.tar.gz", Body=b"")


def test_a_finished_run_is_refused_with_how_to_extend_it(s3, config, put):
    put(5000)
    deliver_model(s3)
    problem = only_problem(verdicts.judge(s3, URI, config))
    assert problem.startswith(
        "training.total_steps is 5000 and the run 'shakespeare' has reached step 5000: it is "
        "finished; to go on, type --set training.total_steps=10000 or any number above 5000, or "
    )


def test_a_finished_run_with_other_settings_is_told_both_at_once(s3, values, put):
    put(5000)
    deliver_model(s3)
    values["training"]["seed"] = 7
    verdict = verdicts.judge(s3, URI, job_config.validate(values))
    assert ["other settings" in verdict.problems[0], "finished" in verdict.problems[1]] == [
        True
    ] * 2


def test_a_torn_newest_snapshot_leaves_the_older_one(s3, config, put):
    put(100)
    put(120, size=2)
    verdict = verdicts.judge(s3, URI, config)
    assert verdict.step == 100
    assert verdict.text.endswith("passes over step-0000000120.pt (2 bytes instead of 3)")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"manifest": "{"}, "manifest cannot be read (JSONDecodeError)"),
        ({"manifest": "[]"}, "manifest cannot be read (AttributeError)"),
        ({"format": 2}, "format 2; this code reads 1"),
        ({"bytes": True}, "manifest has bytes = True"),
        ({"manifest": False}, "no manifest"),
        ({"data": False}, "no data file"),
    ],
)
def test_what_is_not_whole_is_passed_over_for_its_reason(s3, config, put, broken, reason):
    put(100)
    put(120, **broken)
    verdict = verdicts.judge(s3, URI, config)
    assert verdict.step == 100
    assert verdict.text.endswith(f"; passes over step-0000000120.pt ({reason})")


def test_another_runs_snapshots_alone_are_refused(s3, config, put):
    put(120, run_name="hamlet")
    problem = only_problem(verdicts.judge(s3, URI, config))
    assert problem.startswith(
        f"{URI} holds snapshots that the run 'shakespeare' cannot go on with: snapshots of other "
        f"runs are there: step-0000000120.pt (of the run 'hamlet'); give the run another name"
    )


def test_another_runs_newer_snapshot_does_not_hide_ours(s3, config, put):
    put(100)
    put(120, run_name="hamlet")
    assert verdicts.judge(s3, URI, config).step == 100


def test_another_runs_snapshot_where_our_last_one_would_go_is_refused(s3, config, put):
    put(100)
    put(5000, run_name="hamlet")
    assert "of the run 'hamlet'" in only_problem(verdicts.judge(s3, URI, config))


def test_snapshots_of_which_none_is_whole_are_refused_by_name(s3, config, put):
    put(100, size=2)
    put(120, manifest="{")
    problem = only_problem(verdicts.judge(s3, URI, config))
    assert (
        "none of this run's snapshots is whole: step-0000000120.pt (manifest cannot be read "
        "(JSONDecodeError)), step-0000000100.pt (2 bytes instead of 3); give the run"
    ) in problem


def test_of_many_damaged_snapshots_five_are_named_and_the_rest_counted(s3, config, put):
    for step in range(1, 8):
        put(step, size=2)
    problem = only_problem(verdicts.judge(s3, URI, config))
    assert problem.count("step-") == 5
    assert "step-0000000003.pt (2 bytes instead of 3) and 2 more;" in problem


@pytest.mark.parametrize("half", [{"manifest": False}, {"data": False}])
def test_half_a_pair_of_the_first_attempt_is_only_an_unfinished_delivery(s3, config, put, half):
    put(120, **half)
    verdict = verdicts.judge(s3, URI, config)
    assert verdict.kind == "fresh"
    assert verdict.text.startswith("starts fresh; only what was delivered in part: step-0000000120")


def test_half_a_pair_of_a_later_attempt_is_lost_work(s3, config, put):
    put(120, data=False, attempt=2)
    assert "step-0000000120.pt (no data file)" in only_problem(verdicts.judge(s3, URI, config))


def test_stray_names_are_no_snapshots(s3, config):
    for name in ("step-12.pt", "step-0000000120.pt.sagemaker-uploaded", "old/step-0000000120.pt"):
        s3.put_object(Bucket="my-bucket", Key=f"{HOME}snapshots/{name}", Body=b"x")
    assert verdicts.judge(s3, URI, config).text == "starts fresh"


def test_another_run_whose_name_begins_alike_is_not_seen(s3, config, put):
    s3.put_object(Bucket="my-bucket", Key="spot-ddp/shakespeare-2/snapshots-9/x", Body=b"x")
    assert runs.current_uri(s3, config, from_scratch=False) == URI


def test_five_thousand_objects_take_six_lists_and_one_manifest(s3, config, put, requests):
    for step in range(1, 2500):
        for name in (data_name(step), manifest_name(step)):
            in_one_stroke(f"{HOME}snapshots/{name}", b"xxx")
    put(2500)
    requests.clear()
    uri = runs.current_uri(s3, config, from_scratch=False)
    assert verdicts.judge(s3, uri, config).step == 2500
    assert requests == ["ListObjectsV2"] * 6 + ["GetObject"]


def in_one_stroke(key, body):
    """Store an object without a request, which would take ten milliseconds."""
    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object("my-bucket", key, body)


def test_only_as_many_manifests_are_read_as_it_takes(s3, config, put, requests):
    for step, size in ((10, 3), (20, 3), (30, 2), (40, 2)):
        put(step, size=size)
    requests.clear()
    assert verdicts.judge(s3, URI, config).step == 20
    assert requests == ["ListObjectsV2"] + ["GetObject"] * 3


def test_a_manifest_that_vanishes_after_the_listing_is_no_snapshot(s3, config, put):
    put(100)
    put(120)
    gone = f"{HOME}snapshots/{manifest_name(120)}"

    def delete(**_):
        s3.delete_object(Bucket="my-bucket", Key=gone)

    s3.meta.events.register_first("before-call.s3.GetObject", delete)
    verdict = verdicts.judge(s3, URI, config)
    assert verdict.step == 100
    assert "the manifest was deleted meanwhile" in verdict.text


def test_a_manifest_that_may_not_be_read_is_told_in_a_sentence(s3, config, put):
    put(120)

    def deny(**_):
        raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "GetObject")

    s3.meta.events.register("before-call.s3.GetObject", deny)
    with pytest.raises(Refused, match=r"snapshots/ cannot be read \(.*AccessDenied.*aws\.bucket"):
        verdicts.judge(s3, URI, config)


def test_a_bucket_that_is_missing_is_told_in_a_sentence(s3, values):
    values["aws"]["bucket"] = "elsewhere"
    with pytest.raises(Refused, match=r"s3://elsewhere/spot-ddp/shakespeare/ cannot be read"):
        runs.current_uri(s3, job_config.validate(values), from_scratch=False)


def test_the_highest_number_is_the_current_prefix(s3, config):
    assert runs.current_uri(s3, config, from_scratch=False) == URI
    folders = ("snapshots", "snapshots-9", "snapshots-10")
    strays = ("snapshots-011", "snapshots-1", "snapshots-old", "snapshots-99x", "output")
    for folder in (*folders, *strays):
        s3.put_object(Bucket="my-bucket", Key=f"{HOME}{folder}/x", Body=b"x")
    assert runs.current_uri(s3, config, from_scratch=False).endswith("/snapshots-10/")


def test_from_scratch_moves_on_and_stays_there_before_the_first_snapshot(s3, config, put):
    put(120)
    second = runs.current_uri(s3, config, from_scratch=True)
    assert second == f"s3://my-bucket/{HOME}snapshots-2/"
    assert runs.current_uri(s3, config, from_scratch=False) == URI  # nothing has happened yet
    with pytest.raises(RuntimeError), runs.claimed(s3, second):
        raise RuntimeError("AWS did not start the job")
    assert runs.current_uri(s3, config, from_scratch=False) == URI
    with runs.claimed(s3, second):
        pass
    assert runs.current_uri(s3, config, from_scratch=False) == second
    with pytest.raises(RuntimeError), runs.claimed(s3, second):
        raise RuntimeError("the second start from scratch fails, the first one stays")
    assert runs.current_uri(s3, config, from_scratch=False) == second
    assert verdicts.judge(s3, second, config).text == "starts fresh"
    assert verdicts.judge(s3, URI, config).step == 120


def test_from_scratch_twice_moves_on_only_once_there_is_something_to_leave(s3, config, put):
    put(120)
    second = runs.current_uri(s3, config, from_scratch=True)
    with runs.claimed(s3, second):
        pass
    assert runs.current_uri(s3, config, from_scratch=True) == second
    put(10, folder="snapshots-2/")
    third = runs.current_uri(s3, config, from_scratch=True)
    assert third == f"s3://my-bucket/{HOME}snapshots-3/"
    with runs.claimed(s3, third):
        pass
    with runs.claimed(s3, third):
        pass
    assert runs.current_uri(s3, config, from_scratch=False) == third
    keys = {o["Key"] for o in s3.list_objects_v2(Bucket="my-bucket")["Contents"]}
    assert {f"{HOME}snapshots/{data_name(120)}", f"{HOME}snapshots-2/{data_name(10)}"} <= keys


def test_from_scratch_in_an_empty_prefix_stays_at_the_first(s3, config):
    s3.put_object(Bucket="my-bucket", Key=f"{HOME}snapshots/", Body=b"")  # the console's folder
    assert runs.current_uri(s3, config, from_scratch=True) == URI


def test_a_prefix_is_judged_without_torch():
    code = "import sys, launch.runs, launch.preflight; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
