"""Stop a job: `python launch/stop.py JOB` asks for it, and waits for what is saved at the end."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the clone, not its folder launch/

from launch.errors import DONE, FAILED, INTERRUPTED, Failed, Refused, exit_code_of
from launch.follow import add_region_option, open_clients, system_time

if TYPE_CHECKING:  # imported late otherwise: --help must not wait for boto3
    from launch.following.ending import Resumable
    from launch.following.follower import Clients, Follower, Time
    from launch.following.picture import Picture

SECONDS_BETWEEN_LOOKS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and stop the job."""
    options = _parser().parse_args(arguments)
    return exit_code_of(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stop.py",
        description="Stop a training job, and wait until its last snapshot is whole in S3.",
        epilog="exit codes: 0 stopped, 1 its last snapshot did not arrive, 2 nothing was stopped",
    )
    parser.add_argument("job", help="its name; `python launch/follow.py` lists the recent ones")
    add_region_option(parser)
    return parser


def _run(options: argparse.Namespace) -> int:
    return stop(open_clients(options.region), system_time(), options.job)


def stop(aws: "Clients", time: "Time", name: str) -> int:
    """Ask SageMaker to stop the job and wait for its end; returns the exit code.

    Raises Refused if there is no such job or it may not be stopped, Failed if it cannot be watched
    to its end.
    """
    from launch.following.follower import Follower

    try:
        print(_ask(aws, time, name))
    except KeyboardInterrupt:
        print(f"interrupted; whether {name} was asked to stop is not known", file=sys.stderr)
        return INTERRUPTED
    follower = Follower(aws, name, 10, time)
    try:
        picture = _wait(follower)
        return _tell(picture, follower.resumable())
    except Refused as error:
        raise Failed(f"{name} was asked to stop, but not watched to its end: {error}") from error
    except KeyboardInterrupt:
        print(f"not waited for; {name} is being stopped all the same", file=sys.stderr)
        return INTERRUPTED


def _ask(aws: "Clients", time: "Time", name: str) -> str:
    """Ask for the stop, unless that was done already; returns what is to be said about it."""
    from launch.following.job import describe
    from launch.following.trouble import Passing, Withheld, patiently, sorted_out

    def request() -> None:
        with sorted_out():
            aws.sagemaker.stop_training_job(TrainingJobName=name)

    try:
        job = patiently(lambda: describe(aws.sagemaker, name), time.sleep)
        if job.ended:
            return f"nothing to stop: {name} has ended ({job.secondary_status})"
        if "Stopping" not in (job.status, job.secondary_status):
            patiently(request, time.sleep)
    except (Withheld, Passing) as error:
        raise Refused(f"AWS does not stop {name}: {error}") from error
    return f"stopping   {name}; it has two minutes to save its state"


def _wait(follower: "Follower") -> "Picture":
    """Say every new state and snapshot until the job has ended; returns the last picture."""
    state, shown = "", None
    for picture in follower.pictures(SECONDS_BETWEEN_LOOKS):
        if picture.job.secondary_status != state:
            state = picture.job.secondary_status
            print(f"{picture.now:%H:%M:%S}   {state}", flush=True)
        if picture.in_s3 != shown and picture.in_s3 is not None:
            shown = picture.in_s3
            print(f"{picture.now:%H:%M:%S}   snapshot of step {shown} is whole in S3", flush=True)
    return picture


def _tell(picture: "Picture", found: "Resumable") -> int:
    """Say what is left of a job that has ended; returns the exit code."""
    from launch.following.ending import ending_of, what_is_left

    if picture.job.status == "Completed":  # before it could be stopped
        ending = ending_of(picture, found, stalled=False, strict=False)
        print("\n".join(ending.lines))
        return ending.code
    print("\n".join(what_is_left(picture, found)))
    if not (picture.s3_known and picture.log_known):
        print("note       whether its last snapshot reached S3 is not known")
    elif picture.logged is not None and picture.logged > (picture.in_s3 or 0):
        print(f"warning    the log has a snapshot of step {picture.logged}, which S3 did not get")
        return FAILED
    return DONE


if __name__ == "__main__":
    sys.exit(main())
