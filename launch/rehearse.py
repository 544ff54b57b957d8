"""Rehearse a job here: its own request, on simulated instances that are taken away.

`python launch/rehearse.py` needs no AWS account and reaches no network: a mocked AWS on the
loopback receives what `submit.py` would send, and what arrived there is what runs.
"""

import argparse
import datetime
import logging
import random
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the clone, not its folder launch/

from launch.errors import DONE, FAILED, Refused, exit_code_of
from launch.rehearsal import interruptions
from launch.rehearsal.interruptions import KINDS, Interruption
from launch.submit import add_config_options, load_config

if TYPE_CHECKING:  # imported late otherwise: --help must not wait for the SDK
    from launch.data import Channel
    from launch.rehearsal.report import Outcome
    from launch.rehearsal.screen import Screen
    from launch.rehearsal.trial import Trial

CONFIG = "config/rehearsal.yaml"
SPOT_DISCOUNT = 0.7


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and rehearse."""
    options = _parser().parse_args(arguments)
    return exit_code_of(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rehearse.py",
        description="Run a job here, on simulated instances that are taken away, and prove that "
        "it ends with the same bits as without.",
    )
    add_config_options(parser, CONFIG)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--interrupt",
        metavar="STEP[:KIND]",
        action="append",
        default=[],
        help="take the instances away after this step; can be repeated; default: once, in the "
        f"middle. KIND is one of {', '.join(KINDS)}; default: reclaim",
    )
    which.add_argument(
        "--random-interruptions", metavar="N", type=int, help="draw N interruptions of all kinds"
    )
    which.add_argument(
        "--campaign",
        metavar="N",
        type=int,
        help="draw N interruptions, over as many runs as that takes, and check each run's bits",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn; default: 0")
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        type=float,
        default=5.0,
        help="from SIGTERM to SIGKILL, unless a snapshot has reached S3 before; default: 5",
    )
    parser.add_argument(
        "--sync",
        choices=("unreliable", "stalled"),
        default="unreliable",
        help="how SageMaker's upload of snapshots behaves: in any order and late, or not at all",
    )
    parser.add_argument(
        "--hosts", metavar="N", type=int, default=2, help="most instances to simulate; default: 2"
    )
    parser.add_argument(
        "--discount",
        metavar="SHARE",
        type=float,
        default=SPOT_DISCOUNT,
        help=f"what spot is cheaper by, for the report; default: {SPOT_DISCOUNT}",
    )
    parser.add_argument("--out", type=Path, help="folder for the report; default: out/rehearsal-…")
    parser.add_argument(
        "--without-toolkit",
        action="store_true",
        help="start torchrun directly, as on systems that cannot install the SageMaker toolkit",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logging.disable(logging.INFO)  # moto, botocore and matplotlib talk; the screen is for people
    _check(options)
    config = load_config(options, CONFIG)
    from launch.rehearsal.scaling import scaled

    pinned = [override.partition("=")[0].strip() for override in options.overrides]
    config, changes = scaled(config, options.hosts, pinned)
    drawn = _interruptions(options, config.training.total_steps)

    from launch import data, start
    from launch.rehearsal import attempt, container, trial
    from launch.rehearsal.screen import Screen

    config, _ = start.with_stand_ins(config)
    channels = data.channels(config)
    _refuse_what_is_in_s3(channels)
    attempt.check_port()
    means = container.find_means(without_toolkit=options.without_toolkit)
    container.check_means(means)
    out = _empty(options.out or Path(f"out/rehearsal-{datetime.datetime.now():%Y%m%d-%H%M%S}"))
    stalled = options.sync == "stalled"
    with (
        Screen(config.training.total_steps) as screen,
        trial.opened(config, channels, means, out, grace=options.grace, stalled=stalled) as job,
    ):
        screen.began(job.request, means)
        screen.scaled(changes)
        if options.campaign:
            _campaign(job, options, out)
            return DONE
        outcome = _rehearse(job, drawn, options, out, screen, tuple(changes))
    return _conclude(outcome, options, out, screen)


def _check(options: argparse.Namespace) -> None:
    """Refuse what no configuration could make sense of."""
    problems = [
        f"--{name} is {count}; give 1 or more"
        for name, count in (
            ("campaign", options.campaign),
            ("random-interruptions", options.random_interruptions),
        )
        if count is not None and count < 1
    ]
    if not 0 <= options.grace <= 120:
        problems.append(f"--grace is {options.grace}; SageMaker gives 120 seconds: give 0 to 120")
    if not 0 <= options.discount < 1:
        problems.append(f"--discount is {options.discount}; give a share from 0 up to 1")
    if problems:
        raise Refused(problems)


def _interruptions(options: argparse.Namespace, total_steps: int) -> list[Interruption]:
    if total_steps < 2:
        raise Refused(
            f"training.total_steps is {total_steps}; a run needs 2 steps or more to be interrupted"
        )
    if options.random_interruptions:
        rng = random.Random(options.seed)
        return interruptions.draw(options.random_interruptions, total_steps, rng)
    middle = [Interruption(max(1, total_steps * 2 // 5))]
    return interruptions.parse(options.interrupt, total_steps) or middle


def _refuse_what_is_in_s3(channels: "Sequence[Channel]") -> None:
    if there := [channel.name for channel in channels if channel.s3_prefix]:
        raise Refused(
            f"data.{name} is an S3 prefix, which a rehearsal cannot reach; "
            f"rehearse with a local folder that holds some of it: --set data.{name}=FOLDER"
            for name in there
        )


def _empty(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise Refused(f"--out {directory} is not empty; name another folder, or empty it")
    except OSError as error:
        raise Refused(f"--out {directory} cannot be used: {error.strerror}") from error
    return directory.resolve()


def _rehearse(
    job: "Trial",
    drawn: Sequence[Interruption],
    options: argparse.Namespace,
    out: Path,
    screen: "Screen",
    changes: tuple[str, ...],
) -> "Outcome":
    from launch.rehearsal.report import Outcome

    result = job.interrupted(out / "interrupted", drawn, options.seed, screen.show)
    screen.control()
    control, reused = job.uninterrupted(out / "uninterrupted", screen.show)
    if reused:
        screen.reused()
    return Outcome(
        result.attempts,
        control.attempts[0],
        {"uninterrupted": control.digest, "interrupted": result.digest},
        job.means,
        discount=options.discount,
        changes=changes,
        unreached=tuple(map(str, result.unreached)),
        control_reused=reused,
        seed=options.seed,
        sync=options.sync,
    )


def _conclude(outcome: "Outcome", options: argparse.Namespace, out: Path, screen: "Screen") -> int:
    from launch.rehearsal import report

    report.write(outcome, out)
    screen.conclude(outcome, out)
    # An interruption that was asked for and did not happen proves nothing.
    proven = outcome.equal and not (options.interrupt and outcome.unreached)
    return DONE if proven else FAILED


def _campaign(job: "Trial", options: argparse.Namespace, out: Path) -> None:
    from launch.rehearsal import campaign

    def repeat(drawn: list[Interruption], seed: int) -> str:
        parts = ["python", "launch/rehearse.py", *_same_job(options)]
        for one in drawn:
            parts += ["--interrupt", str(one)]
        return shlex.join([*parts, "--seed", str(seed)])

    def say(line: str) -> None:
        print(line, flush=True)

    runs = campaign.run(job, options.campaign, options.seed, out, say, repeat)
    say(f"{options.campaign} interruptions in {runs} runs: every run ended with the same bits")


def _same_job(options: argparse.Namespace) -> list[str]:
    """The options that say which job is rehearsed, and on what."""
    parts = ["--config", str(options.config)] if options.config else []
    for override in options.overrides:
        parts += ["--set", override]
    parts += ["--hosts", str(options.hosts), "--grace", str(options.grace), "--sync", options.sync]
    return [*parts, *(["--without-toolkit"] if options.without_toolkit else [])]


if __name__ == "__main__":
    sys.exit(main())
