"""Following a job from its start to its end, whatever the end: exit codes and last words."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from launch import follow
from launch.config import ROOT, load
from launch.errors import exit_code_of
from launch.submit import _parser as submit_parser
from tests.launch.scripted import MODEL, NAME, TOTAL, Aws, refused, resumed, saved, stepped

CONTINUE = "python launch/submit.py --set run_name=shakespeare"


@pytest.fixture
def aws():
    return Aws()


@pytest.fixture
def run(aws, capsys):
    """Follow the job; returns the exit code, stdout and stderr."""

    def follow_it(*arguments, job=NAME):
        options = follow._parser().parse_args([job, *arguments])
        code = exit_code_of(lambda: follow.follow(aws.clients, aws.time, options))
        return (code, *capsys.readouterr())

    return follow_it


def interrupted_three_times(aws):
    """Four attempts of 100 steps each, 200 s apiece; every snapshot reaches S3 10 s later."""
    states = []
    for attempt in range(1, 5):
        states += [("Starting", 60), ("Downloading", 30), ("Training", 210)]
        states += [("Interrupted", 100)] if attempt < 4 else [("Uploading", 20), ("Completed",)]
        begin = 400 * (attempt - 1) + 90
        first = 100 * (attempt - 1)
        stream = f"algo-1-177236640{attempt}"
        if first:
            aws.say(begin, resumed(first, attempt), stream)
        for step in range(first + 10, first + 101, 10):
            aws.say(begin + 2 * (step - first), stepped(step), stream)
        aws.say(begin + 200, saved(first + 100), stream).put(begin + 205, first + 100)
    return aws.life(*states)


def interrupted_and_out_of_wait(aws):
    aws.say(190, stepped(50)).say(191, saved(50)).put(195, 50)
    return aws.life(
        *[("Starting", 60), ("Downloading", 30), ("Training", 200), ("Interrupted", 10)],
        *[("Starting", 3000), ("Stopping", 10), ("MaxWaitTimeExceeded",)],
    )


def test_interrupted_three_times_and_completed(aws, run):
    interrupted_three_times(aws)
    code, out, err = run()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    statuses = [line.split()[2] for line in lines if len(line.split()) == 3]
    attempt = ["Starting", "Downloading", "Training"]
    assert statuses == [*[*attempt, "Interrupted"] * 3, *attempt, "Uploading", "Completed"]
    assert lines[-3:] == [
        f"completed  {NAME}",
        f"model      {MODEL}",
        "savings    68% (trained 16 min 40 s, billed 5 min 20 s)",
    ]
    assert "attempt 4 · step 400 / 400" in lines[-4]


def test_out_of_wait_is_no_success_and_says_how_to_go_on(aws, run):
    code, out, _ = interrupted_and_out_of_wait(aws) and run()
    assert code == 3
    last = out.splitlines()[-4:]
    assert last[0] == f"stopped    {NAME} was stopped because spot.max_wait was over; " + (
        "the run is not finished"
    )
    assert last[2] == "resumes    a new start goes on at step 50 of 400"
    assert last[3].startswith(f"continue   {CONTINUE} ")


def test_out_of_run_time_and_stopped_by_hand_are_no_success_either(run, aws):
    aws.life(("Training", 100), ("Stopping", 5), ("MaxRuntimeExceeded",))
    code, out, _ = run()
    assert code == 3
    assert "because spot.max_run was over" in out
    aws.states, aws.seconds = [], 0
    aws.life(("Training", 100), ("Stopping", 5), ("Stopped",))
    code, out, _ = run()
    assert code == 3
    assert "was stopped by hand" in out
    assert f"continue   {CONTINUE} " in out


def test_the_command_that_continues_is_the_same_job_again(aws, run):
    aws.request |= {
        "ResourceConfig": {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 4},
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200},
        "AlgorithmSpecification": {
            "TrainingImage": "763104351884.dkr.ecr.us-east-1.amazonaws.com/"
            "pytorch-training:2.6.0-gpu-py312"
        },
        "InputDataConfig": [
            {"ChannelName": "train", "DataSource": {"S3DataSource": {"S3Uri": "s3://d/text/"}}}
        ],
    }
    aws.request["CheckpointConfig"] = {"S3Uri": "s3://my-bucket/team/x/shakespeare/snapshots-2/"}
    aws.request["HyperParameters"] |= {
        **{"learning_rate": "0.002", "precision": '"bf16"', "deadline_seconds": "3600.0"},
        **{"snapshot_seconds": '"auto"', "sagemaker_program": '"training/train.py"'},
    }
    _, out, _ = aws.life(("Training", 100), ("Stopped",)) and run()
    command = shlex.split(out.splitlines()[-1].removeprefix("continue"))
    assert command[:2] == ["python", "launch/submit.py"]
    options = submit_parser().parse_args(command[2:])
    again = load(ROOT / "config" / "default.yaml", options.overrides)
    assert again.run_name == "shakespeare"
    assert (again.aws.bucket, again.aws.prefix, again.aws.region) == (
        *("my-bucket", "team/x", "us-east-1"),
    )
    assert (again.compute.instance_type, again.compute.instance_count) == ("ml.p4d.24xlarge", 4)
    assert again.compute.framework_version == "2.6.0"
    assert (again.spot.max_run, again.spot.max_wait) == (3600, 7200)
    assert (again.training.learning_rate, again.training.total_steps) == (0.002, TOTAL)
    assert again.data.train == "s3://d/text/"
    assert not [one for one in options.overrides if "precision" in one or "deadline" in one]


def test_failed_on_rank_3_shows_the_lines_of_its_host(aws, run):
    reason = "AlgorithmError: rank 3: the loss is nan, " + "and so on " * 100 + "exit code: 1"
    aws.request["FailureReason"] = reason
    aws.say(100, stepped(10)).say(101, saved(10)).put(105, 10)
    aws.say(150, "reading shard 7", "algo-2-1772366401")
    aws.say(151, "rank 3: KeyError: 'tokens'", "algo-2-1772366401", late=15)
    # Their host's clock is behind: they complain before rank 3 does.
    aws.say(150.5, "rank 0: rank 3 on host algo-2 stopped: KeyError: 'tokens'")
    aws.say(150.2, "rank 1: host algo-1 lost the connection to another rank, which is gone (x)")
    code, out, _ = aws.life(("Starting", 60), ("Training", 100), ("Failed",)) and run()
    assert code == 1
    lines = out.splitlines()
    end = lines[lines.index(f"failed     {NAME}") :]
    assert end[1:5] == [
        f"reason     {reason}",
        "the last lines of the host that failed first, algo-2, rank 3:",
        "  reading shard 7",
        "  rank 3: KeyError: 'tokens'",
    ]
    assert "resumes    a new start goes on at step 10 of 400" in end
    assert end[-1].startswith(f"continue   {CONTINUE}")


def test_the_cause_is_shown_though_torchrun_talks_on(aws, run):
    for number in range(20):
        aws.say(100 + number, f"before {number}")
    aws.say(150, "rank 0: KeyError: 'tokens'")
    for number in range(300):
        aws.say(151 + number / 1000, f"torchrun says {number}")
    _, out, _ = aws.life(("Training", 200), ("Failed",)) and run()
    assert "rank 0:\n  rank 0: KeyError: 'tokens'\n  torchrun says 286\n" in out
    aws.events, aws.seconds = aws.events[:60], 0
    _, out, _ = run()
    assert "before 19\n  rank 0: KeyError: 'tokens'\n  torchrun says 0\n" in out
    assert "torchrun says 3" not in out


def test_what_failed_before_an_interruption_is_not_why_the_job_failed(aws, run):
    aws.say(10, "rank 5: old", "algo-3-1772366400").say(510, "rank 2: new", "algo-2-1772366900")
    _, out, _ = aws.life(
        ("Training", 50), ("Interrupted", 400), ("Training", 80), ("Failed",)
    ) and (run())
    assert "failed first, algo-2, rank 2:\n  rank 2: new\n" in out


@pytest.mark.parametrize(
    ("said", "host"),
    [
        ("rank 0: rank 3 on host algo-2 stopped: KeyError", "algo-2, rank 3:"),
        ("rank 0: host algo-2 vanished (rank 3 left without a word); start", "algo-2, rank 3:"),
        ("Killed", "algo-2:"),
    ],
)
def test_a_host_that_says_nothing_is_named_by_its_peers_or_by_its_silence(aws, run, said, host):
    aws.say(100, "the last that was heard", "algo-2-1772366401").say(150, said)
    _, out, _ = aws.life(("Training", 200), ("Failed",)) and run()
    assert f"failed first, {host}\n  the last that was heard\n" in out


def test_completed_short_of_the_last_step_is_a_failure(aws, run):
    aws.say(100, stepped(390)).say(101, saved(390)).put(110, 390)
    code, out, _ = aws.life(("Training", 120), ("Completed",)) and run()
    assert code == 1
    assert "but its last whole snapshot is step 390, not step 400" in out


def test_a_garbage_manifest_is_one_sentence_and_does_not_count(aws, run):
    aws.put(50, 390).put(100, 400, manifest=b"<xml>Slow Down</xml>")
    code, out, err = aws.life(("Training", 120), ("Completed",)) and run()
    assert (code, err) == (1, "")
    assert "but its last whole snapshot is step 390, not step 400" in out
    assert "step-0000000400.pt does not count: manifest cannot be read (JSONDecodeError)" in out


def test_half_a_snapshot_is_not_whole(aws, run):
    aws.put(50, 390).put(60, 400)
    aws.objects.pop()
    assert "step 390 in S3" in (aws.life(("Training", 120), ("Completed",)) and run()[1])


@pytest.mark.parametrize(
    "times",
    [{}, {"TrainingTimeInSeconds": 0, "BillableTimeInSeconds": 0}, {"TrainingTimeInSeconds": 5}],
)
def test_missing_and_zero_times_do_not_divide(aws, run, times):
    aws.at_the_end = times
    code, out, _ = aws.put(50, 400).life(("Training", 120), ("Completed",)) and run()
    assert code == 0
    assert "savings    – (trained" in out


def test_a_job_of_somebody_else_is_followed_as_far_as_it_goes(aws, run):
    del aws.request["HyperParameters"], aws.request["CheckpointConfig"]
    code, out, _ = aws.life(("Starting", 60), ("Training", 100), ("Completed",)) and run()
    assert code == 0
    assert "note: this job has no checkpoint location in S3" in out
    aws.states, aws.seconds = [], 0
    _, out, _ = aws.life(("Training", 100), ("Stopped",)) and run()
    assert out.splitlines()[-1] == "continue   unknown: this job has no run_name"


def test_throttling_and_dropped_connections_are_waited_out(aws, run):
    from botocore.exceptions import EndpointConnectionError

    interrupted_three_times(aws)
    aws.fail("describe", EndpointConnectionError(endpoint_url="https://x"), after=100, times=9)
    aws.fail("logs", refused("ThrottlingException", "FilterLogEvents"), times=3)
    aws.fail("list", refused("SlowDown", "ListObjectsV2"), after=300, times=1)
    code, out, _ = run()
    assert code == 0
    assert "note: log: AWS is busy (ThrottlingException); asking again in 1 s" in out
    assert aws.slept[:4] == [1, 2, 4, 10]
    waits = [s for s in aws.slept if s not in (10, 0.3)]
    assert waits == [1, 2, 4, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


def test_aws_that_was_never_within_reach_is_one_sentence(aws, run):
    from botocore.exceptions import EndpointConnectionError

    aws.life(("Training", 100)).fail("describe", EndpointConnectionError(endpoint_url="https://x"))
    code, out, err = run()
    assert (code, out) == (2, "")
    assert err.startswith("error: AWS cannot be reached: ")
    assert err.count("\n") == 1


def test_a_job_that_does_not_exist_is_one_sentence(aws, run):
    code, out, err = run(job="nobody")
    assert (code, out) == (2, "")
    assert err.startswith("error: there is no training job 'nobody' in us-east-1 ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("after", [0, 150])
@pytest.mark.parametrize("call", ["describe", "logs", "list"])
def test_credentials_that_ran_out_are_one_sentence(aws, run, after, call):
    interrupted_three_times(aws).fail(call, refused("ExpiredTokenException"), after=after)
    code, _, err = run()
    assert code == 2
    assert err.startswith("error: AWS does not accept your credentials any more")
    assert err.count("\n") == 1


def test_no_permission_to_describe_is_one_sentence(aws, run):
    code, _, err = aws.fail("describe", refused("AccessDeniedException")) and run()
    assert code == 2
    assert err.startswith(f"error: the training job '{NAME}' cannot be read: no permission")


def test_without_permission_for_the_log_the_rest_works(aws, run):
    interrupted_three_times(aws).fail("logs", refused("AccessDeniedException", "FilterLogEvents"))
    code, out, err = run("--stall-minutes", "1")
    assert (code, err) == (0, "")
    assert out.count("note: the log cannot be read: no permission") == 1
    assert "step 300 in S3" in out
    assert "no sign of life" not in out


def test_without_permission_for_s3_the_rest_works(aws, run):
    interrupted_three_times(aws)
    aws.states[-1] = (1400 + 700, "Completed")
    aws.fail("list", refused("AccessDenied", "ListObjectsV2"))
    code, out, err = run("--strict", "--stall-minutes", "5")
    assert (code, err) == (0, "")
    assert out.count("cannot be listed: no permission") == 1
    assert "step 300 logged" in out
    assert "stalled" not in out


def test_without_s3_no_new_start_is_promised_anything(aws, run):
    interrupted_and_out_of_wait(aws).fail("list", refused("AccessDenied", "ListObjectsV2"))
    assert "resumes    S3 could not be read; a new start says where it resumes" in run()[1]


def test_a_log_of_garbage_is_followed(aws, run):
    for text in ("step=1.2.3 loss=abc", "snapshot step=1e400", "step=-3", "resumed step=inf", "\0"):
        aws.say(50, text)
    aws.say(60, "step=20 loss=nan samples_per_second=..").say(61, "\x1b[2J\x1b]0;title\x07 step")
    aws.events.append((0, {"eventId": None, "timestamp": "x"}))
    aws.events.sort(key=lambda one: one[0])
    aws.events.pop(0)
    code, out, _ = aws.put(70, 400).life(("Training", 100), ("Completed",)) and run("--json")
    assert code == 0
    last = json.loads(out.splitlines()[-1])
    assert (last["step"], last["loss"], last["samples_per_second"]) == (20, None, None)


def test_a_stalled_sync_is_named_and_fails_a_strict_run(aws, run):
    aws.say(100, saved(100)).say(400, saved(200)).put(105, 100)
    for seconds in range(120, 3000, 120):
        aws.say(seconds, stepped(seconds // 2))
    aws.life(("Training", 2900), ("Completed",)).put(2800, 400)
    code, out, _ = run()
    assert code == 0
    warnings = [line for line in out.splitlines() if line.startswith("warning")]
    assert warnings == [
        "warning: the sync is stalled: step-0000000200.pt did not reach S3 within 10 min of being "
        "written; an interruption now would lose them"
    ]
    aws.seconds = 0
    code, out, _ = run("--strict")
    assert code == 1
    assert out.splitlines()[-1].startswith("failed by --strict: ")


def test_what_an_interruption_took_is_not_called_stalled(aws, run):
    aws.say(100, saved(100)).put(105, 100).say(290, saved(200)).say(510, resumed(100, 2))
    for step in range(110, TOTAL + 1, 10):
        aws.say(500 + 10 * (step - 100), stepped(step))
    aws.put(3500, 400)
    aws.life(("Training", 300), ("Interrupted", 200), ("Training", 3100), ("Completed",))
    code, out, _ = run("--strict")
    assert code == 0
    assert "stalled" not in out


def test_a_job_that_trains_in_silence_is_noticed(aws, run):
    aws.say(100, stepped(10)).put(2000, 400)
    _, out, _ = aws.life(("Training", 2000), ("Completed",)) and run()
    said = "warning: no sign of life since 2026-03-01 12:01:40 UTC, though the job is Training"
    assert out.splitlines().count(said) == 1


def test_a_job_that_waits_in_silence_is_none_of_that(aws, run):
    _, out, _ = interrupted_and_out_of_wait(aws) and run("--stall-minutes", "5")
    assert "no sign of life" not in out


def test_a_refresh_costs_three_calls(aws, run):
    run_code, *_ = interrupted_three_times(aws) and run()
    assert run_code == 0
    refreshes = " ".join(aws.calls).split(" sleep ")
    assert set(refreshes[:-1]) == {"describe logs list"}
    assert refreshes[-1] == "describe logs list list get"


def test_a_log_that_is_behind_is_read_on_without_asking_for_the_rest(aws, run):
    aws.page, aws.seconds = 10, 3000
    for number in range(100):
        aws.say(number, f"line {number}")
    code, *_ = aws.put(50, 400).life(("Training", 120), ("Completed",)) and run()
    assert code == 0
    assert " ".join(aws.calls) == "describe logs list" + " sleep logs" * 9 + " list get"
    assert set(aws.slept) == {0.3}


def test_json_has_the_same_keys_on_every_line(aws, run):
    _, out, err = interrupted_three_times(aws) and run("--json")
    told = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert {tuple(one) for one in told} == {tuple(told[0])}
    assert [one["exit_code"] for one in told] == [None] * (len(told) - 1) + [0]
    assert told[0]["secondary_status"] == "Starting"
    last = told[-1]
    assert (last["attempts"], last["interruptions"], last["step"]) == (4, 3, 400)
    assert (last["snapshot_logged"], last["snapshot_in_s3"], last["savings"]) == (400, 400, 0.68)
    assert last["ending"][0] == f"completed  {NAME}"


def test_started_late_it_knows_what_the_log_said_hours_ago(aws, run):
    aws.say(100, stepped(10)).say(101, saved(10)).put(105, 10)
    aws.life(("Training", 200), ("Interrupted", 20 * 3600), ("Stopped",))
    aws.seconds = 10 * 3600
    _, out, _ = run()
    assert "12:03:20 Interrupted" in out
    assert "step 10 / 400" in out


def test_ctrl_c_leaves_the_job_alone(aws, run):
    aws.life(("Training", 100), ("Completed",)).fail("describe", KeyboardInterrupt(), after=30)
    code, _, err = run()
    assert (code, err) == (130, f"not followed any more; the job {NAME} goes on\n")


def test_unknown_states_are_shown_as_they_come(aws, run):
    aws.put(1, 400).life(("Pending", 60), ("Levitating", 100), ("Completed",))
    assert "12:01:00 Levitating" in run()[1]


def test_help_imports_no_boto3():
    code = (
        "import sys\nfrom launch import follow\n"
        "try: follow.main(['--help'])\n"
        "except SystemExit: print({'boto3', 'botocore', 'sagemaker', 'rich'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")
    assert "--stall-minutes" in done.stdout
    assert "--refresh" not in done.stdout


def test_the_region_is_that_of_the_default_configuration(monkeypatch, tmp_path):
    mine = tmp_path / "default.yaml"
    monkeypatch.setattr("launch.config.DEFAULT_CONFIG", mine)
    text = (ROOT / "config" / "default.yaml").read_text()
    mine.write_text(re.sub(r"region: null.*", "region: eu-central-1", text))
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert follow.open_clients(None).sagemaker.meta.region_name == "eu-central-1"
    assert follow.open_clients("us-east-2").sagemaker.meta.region_name == "us-east-2"
    mine.write_text("it: is being edited")
    assert follow.open_clients(None).sagemaker.meta.region_name == "us-west-2"


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "soon"])
def test_minutes_that_are_none_are_refused(minutes, capsys):
    with pytest.raises(SystemExit) as end:
        follow.main([NAME, "--stall-minutes", minutes])
    assert end.value.code == 2
    assert "is no number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "no AWS region is set"),
        ({"AWS_REGION": "bad region"}, "the AWS region is 'bad region'"),
        ({"AWS_REGION": "us-east-1"}, "AWS does not accept your credentials any more, or found"),
        ({"AWS_PROFILE": "nope"}, "the AWS configuration cannot be used"),
    ],
)
@pytest.mark.parametrize("arguments", [(), (NAME,)])
def test_without_an_account_it_is_one_sentence(tmp_path, environment, said, arguments):
    done = subprocess.run(
        [sys.executable, ROOT / "launch" / "follow.py", *arguments],
        capture_output=True,
        text=True,
        env={"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true", **environment},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.count("\n") == 1
