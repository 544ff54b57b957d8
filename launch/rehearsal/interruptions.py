"""The ways in which an instance can vanish, written down or drawn."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from launch.errors import Refused

RECLAIM, KILL, HOST, SAVE, COMMIT, UPLOAD, FREEZE = KINDS = (
    "reclaim",  # SIGTERM to each container's first process, SIGKILL after the grace
    "kill",  # SIGKILL without a warning
    "host",  # one instance vanishes, the others find out, then all are replaced
    "save",  # SIGKILL in the middle of writing a data file
    "commit",  # SIGKILL between data file and manifest
    "upload",  # SIGKILL while half of a data file is on its way to S3
    "freeze",  # one instance stops dead, its peers wait for it, then SIGKILL
)


@dataclass(frozen=True)
class Interruption:
    """All instances are taken away, in one of KINDS, once optimizer step `step` is done.

    The kinds `save`, `commit` and `upload` wait for the next snapshot of that step or a later one.
    """

    step: int
    kind: str = RECLAIM

    def __str__(self) -> str:
        return f"{self.step}:{self.kind}"


def parse(texts: Sequence[str], total_steps: int) -> list[Interruption]:
    """Interruptions as `STEP` or `STEP:KIND`, in the order of their steps.

    Raises Refused, with a sentence for each that is not inside the run.
    """
    found, problems = [], []
    for text in texts:
        number, _, kind = text.partition(":")
        kind = kind or RECLAIM
        if not number.isdecimal():
            problems.append(
                f"--interrupt {text} is no step; write STEP or STEP:KIND, such as 17:kill"
            )
        elif not 1 <= int(number) < total_steps:
            problems.append(
                f"--interrupt {text} is not inside the run; it has {total_steps} steps, so give a "
                f"number from 1 to {total_steps - 1}"
            )
        elif kind not in KINDS:
            problems.append(f"--interrupt {text} names no kind; there are {', '.join(KINDS)}")
        else:
            found.append(Interruption(int(number), kind))
    if problems:
        raise Refused(problems)
    return sorted(found, key=lambda one: one.step)


def draw(count: int, total_steps: int, rng: random.Random) -> list[Interruption]:
    """`count` interruptions at random steps, in their order; the kinds come round evenly."""
    kinds = [kind for _ in range(-(-count // len(KINDS))) for kind in rng.sample(KINDS, len(KINDS))]
    steps = sorted(rng.randint(1, total_steps - 1) for _ in range(count))
    return [Interruption(*pair) for pair in zip(steps, kinds, strict=False)]
