"""Watch a job: `python launch/follow.py JOB`, or without a name, list the recent ones."""

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the clone, not its folder launch/

from launch.errors import DONE, INTERRUPTED, Refused, exit_code_of, installed

WIDTH = 300  # of a table that goes into a file or a pipe

if TYPE_CHECKING:  # imported late otherwise: --help must not wait for boto3
    from launch.following.follower import Clients, Time
    from launch.following.screen import Screen


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and follow the job to its end, or list the jobs."""
    options = _parser().parse_args(arguments)
    return exit_code_of(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="follow.py",
        description="Watch a training job until it ends. Ctrl-C leaves the job alone.",
        epilog="exit codes: 0 completed, 1 failed, 2 not followed, 3 stopped short of the goal",
    )
    parser.add_argument("job", nargs="?", help="its name; without one, the recent jobs are listed")
    add_region_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, an object a line")
    parser.add_argument(
        "--stall-minutes",
        type=_positive,
        default=10,
        metavar="MINUTES",
        help="how late a snapshot may reach S3, or a log line come, before a warning; default: 10",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if snapshots were that late"
    )
    parser.add_argument("--refresh", type=_positive, default=10, help=argparse.SUPPRESS)
    return parser


def add_region_option(parser: argparse.ArgumentParser) -> None:
    """Where to look for a job."""
    parser.add_argument(
        "--region",
        help="where the job runs; default: that of config/default.yaml, or of your environment",
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _run(options: argparse.Namespace) -> int:
    aws = open_clients(options.region)
    if options.job is None:
        return list_jobs(aws, system_time(), as_json=options.json)
    return follow(aws, system_time(), options)


def follow_started(job_name: str, region: str) -> int:
    """Follow a job that was just started, as the command without options would."""
    options = _parser().parse_args([job_name, "--region", region])
    return _run(options)


def open_clients(region: str | None) -> "Clients":
    """The clients with which a job is watched. Raises Refused if there can be none."""
    with installed():
        from launch.config import DEFAULT_CONFIG, load
        from launch.following.clients import clients
    if region is None:
        with suppress(Refused):  # a configuration that is being edited keeps nobody from watching
            region = load(DEFAULT_CONFIG).aws.region
    return clients(region)


def list_jobs(aws: "Clients", time: "Time", *, as_json: bool) -> int:
    """Print the recent jobs of this project. Raises Refused if they cannot be listed."""
    from rich.console import Console

    from launch.following import jobs

    rows = jobs.recent(aws.sagemaker, aws.s3, time.sleep)
    if as_json:
        print("\n".join(jobs.as_lines(rows)))
    elif rows:
        console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
        console.print(jobs.as_table(rows))
    else:
        region = aws.sagemaker.meta.region_name
        print(f"no jobs of this project in {region} yet; type `python launch/submit.py`")
    return DONE


def follow(aws: "Clients", time: "Time", options: argparse.Namespace) -> int:
    """Show the job until it ends; returns the exit code that its end means.

    Raises Refused if there is no such job, or the credentials do not count any more.
    """
    from launch.following.ending import ending_of
    from launch.following.follower import Follower

    follower = Follower(aws, options.job, options.stall_minutes, time)
    try:
        with _screen(options) as screen:
            for picture in follower.pictures(options.refresh):
                if not follower.over:  # the last one is shown with the last words
                    screen.show(picture)
            ending = ending_of(
                picture, follower.resumable(), stalled=follower.stalled, strict=options.strict
            )
            screen.end(picture, ending)
    except KeyboardInterrupt:
        print(f"not followed any more; the job {options.job} goes on", file=sys.stderr)
        return INTERRUPTED
    return ending.code


def _screen(options: argparse.Namespace) -> "Screen":
    from rich.console import Console

    from launch.following.screen import JsonScreen, LiveScreen, PlainScreen

    if options.json:
        return JsonScreen()
    console = Console()
    live = sys.stdout.isatty() and not console.is_dumb_terminal
    return LiveScreen(console) if live else PlainScreen()


def system_time() -> "Time":
    """The clock and the wait that are not a test's."""
    import datetime
    import time

    from launch.following.follower import Time

    return Time(lambda: datetime.datetime.now(datetime.UTC), time.sleep)


if __name__ == "__main__":
    sys.exit(main())
