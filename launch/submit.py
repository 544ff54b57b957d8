"""Start a job: `python launch/submit.py` builds the request of config/default.yaml and sends it."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the clone, not its folder launch/

from launch.errors import DONE, STOPPED_SHORT, Failed, Refused, exit_code_of, installed, one_line

if TYPE_CHECKING:  # imported late otherwise: --help must not wait for the SDK
    from sagemaker import Session

    from launch.data import Channel
    from launch.schema import JobConfig
    from launch.start import Started


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and start the job, or print what was asked for."""
    options = _parser().parse_args(arguments)
    return exit_code_of(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="submit.py", description="Start a spot training job that survives interruptions."
    )
    add_config_options(parser, "config/default.yaml")
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="start the run again from step 0, in a new snapshot prefix; nothing is deleted",
    )
    parser.add_argument(
        "--skip-preflight",
        action="store_true",
        help="do not ask AWS first whether the job can run",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--follow", action="store_true", help="watch the job until it ends, as follow.py does"
    )
    instead.add_argument(
        "--dry-run",
        action="store_true",
        help="print the exact request as JSON and touch nothing; needs no account",
    )
    instead.add_argument(
        "--print-iam-policy",
        action="store_true",
        help="print the least that the execution role and you need, for this job",
    )
    return parser


def add_config_options(parser: argparse.ArgumentParser, default: str) -> None:
    """The options that say which job is meant."""
    parser.add_argument("--config", type=Path, help=f"a YAML file; default: {default}")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override one value of the configuration; can be repeated",
    )


def load_config(options: argparse.Namespace, default: str) -> "JobConfig":
    """The validated configuration that the options name. Raises Refused."""
    with installed():
        from launch.config import ROOT, load
    return load(options.config or ROOT / default, options.overrides)


def _run(options: argparse.Namespace) -> int:
    config = _with_region(load_config(options, "config/default.yaml"))
    if options.dry_run:
        _print_request(config)
    elif options.print_iam_policy:
        _print_policies(config)
    else:
        started = _start_on_aws(config, options)
        print(_summary(started, options))
        if options.follow:
            return _follow(started)
    return DONE


def _follow(started: "Started") -> int:
    """Watch the job; that this cannot go on is not what `Refused` means, for the job does."""
    from launch.follow import follow_started

    try:
        return follow_started(started.job_name, started.region)
    except Refused as error:
        _say("\n".join(f"error: {problem}" for problem in error.problems))
        _say(
            f"the job goes on, only nobody watches it; when you can again, type `python "
            f"launch/follow.py {started.job_name} --region {started.region}`"
        )
        return STOPPED_SHORT


def _print_request(config: "JobConfig") -> None:
    from launch import source, start

    config, missing = start.with_stand_ins(config)
    for name in missing:
        _say(f"note: aws.{name} is not set; the request shows a stand-in")
    request = start.request_of(config)
    _say(source.table(source.files()))
    print(json.dumps(request, indent=2))


def _print_policies(config: "JobConfig") -> None:
    from launch import iam, start

    config, missing = start.with_stand_ins(config)
    for name in missing:
        _say(f"note: aws.{name} is not set; the policies show a stand-in, so do not apply them")
    print(json.dumps(iam.policies(config), indent=2))


def _with_region(config: "JobConfig") -> "JobConfig":
    """The configuration with the region that the environment or the AWS configuration names."""
    from launch import account
    from launch.start import with_aws

    return with_aws(config, region=account.region_of(config.aws.region))


def _start_on_aws(config: "JobConfig", options: argparse.Namespace) -> "Started":
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    channels = _refuse_without_asking(config)
    from launch import account, estimator, runs, start

    try:
        session = estimator.open_session(str(config.aws.region))
        bucket = config.aws.bucket or account.default_bucket(session.boto_session)
    except (Boto3Error, BotoCoreError, ClientError) as error:
        raise Refused(f"AWS does not let us in: {one_line(error)}") from error
    config = start.with_aws(config, bucket=bucket)
    snapshots = _preflight(config, channels, session, options)
    s3, kms_key = session.boto_session.client("s3"), config.aws.kms_key
    moved = runs.claimed(s3, snapshots, kms_key) if options.from_scratch else nullcontext()
    try:
        with moved:
            return start.start_job(config, session, channels, snapshots, _say)
    except (Boto3Error, BotoCoreError, ClientError) as error:
        raise Failed(f"AWS did not start the job: {one_line(error)}") from error


def _refuse_without_asking(config: "JobConfig") -> "list[Channel]":
    """The job's data channels, if nothing is wrong that can be seen from here. Raises Refused."""
    from launch import account, data, source, start

    problems = []
    if config.aws.region is None:
        problems.append(account.NO_REGION)
    if config.aws.role is None:
        problems.append(
            "aws.role is not set; give the execution role's ARN: "
            "--set aws.role=arn:aws:iam::123456789012:role/name (the README says how to make one)"
        )
    problems += account.credential_problems()
    channels: list[Channel] = []
    looks: list[Callable[[], Any]] = [
        lambda: channels.extend(data.channels(config)),
        lambda: start.check_volume(config, channels),
        source.files,
    ]
    for look in looks:
        try:
            look()
        except Refused as error:
            problems += error.problems
    if problems:
        raise Refused(problems)
    return channels


def _preflight(
    config: "JobConfig",
    channels: "Sequence[Channel]",
    session: "Session",
    options: argparse.Namespace,
) -> str:
    """The job's snapshot prefix, if AWS and the run itself have nothing against it.

    Raises Refused with everything that has.
    """
    from rich.console import Console

    from launch import preflight, runs, verdict

    console = Console(stderr=True)
    s3 = session.boto_session.client("s3")
    unlisted: Refused | None = None
    try:
        snapshots = runs.current_uri(s3, config, from_scratch=options.from_scratch)
    except Refused as error:
        snapshots, unlisted = runs.snapshots_uri(config), error
    if not options.skip_preflight:
        checks = preflight.check(config, snapshots, channels, session.boto_session)
        console.print(preflight.table(checks))
        if problems := preflight.problems(checks):
            raise Refused(problems)
    if unlisted:
        raise unlisted
    found = verdict.judge(s3, snapshots, config)
    if found.differing:
        console.print(verdict.table(found))
    if found.problems:
        raise Refused(found.problems)
    _say(f"{config.run_name} {found.text}")
    return snapshots


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _summary(started: "Started", options: argparse.Namespace) -> str:
    again = ["python", "launch/submit.py"]
    again += ["--config", str(options.config)] if options.config else []
    again += [part for override in options.overrides for part in ("--set", override)]
    region = f"--region {started.region}"
    return "\n".join(
        [
            f"started    {started.job_name}",
            f"console    {started.console}",
            f"snapshots  {started.snapshots}",
            f"follow     python launch/follow.py {started.job_name} {region}",
            f"stop       python launch/stop.py {started.job_name} {region}",
            f"continue   {shlex.join(again)}",
            "           once it has stopped: the same run_name resumes from the newest snapshot",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
