"""How a command ends when it cannot go on: every problem is one sentence, and nothing was done."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

DONE, FAILED, REFUSED, STOPPED_SHORT = 0, 1, 2, 3
INTERRUPTED = 130  # as shells report Ctrl-C


class Refused(Exception):
    """Nothing was done, because of these problems; each is a sentence with its remedy."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class Failed(Exception):
    """It was begun and did not work; the text is one sentence."""


@contextmanager
def installed() -> Iterator[None]:
    """Turn a package that is missing in a block into a sentence. Raises Refused."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise Refused(
            f"the module {error.name} is missing; type `make setup` and use .venv/bin/python, "
            f"or install requirements.txt"
        ) from None


def one_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command and print what stopped it: problems one a line on stderr, no traceback."""
    try:
        return command()
    except Refused as error:
        print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)
        return REFUSED
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # whoever read our output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
