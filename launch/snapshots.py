"""Look into a run's snapshots: list, verify, fetch, diff and prune them.

RUN is a run name, an S3 address or a folder.
"""

import argparse
import datetime
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the clone, not its folder launch/

from launch.errors import DONE, FAILED, Refused, exit_code_of, installed
from launch.submit import add_config_options, load_config

if TYPE_CHECKING:  # imported late otherwise: --help must not wait for the SDK
    from launch.archive import Listing, Row
    from launch.places import Place, Progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and do what was asked for."""
    options = _parser().parse_args(arguments)
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    with installed():
        return int(options.command(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="snapshots.py", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Any, help: str, *names: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, description=help)
        for argument in names:
            one.add_argument(argument.lower(), metavar=argument)
        add_config_options(one, "config/default.yaml")
        one.set_defaults(command=command)
        return one

    listing = add("list", _list, "what a run has, newest first", "RUN")
    listing.add_argument("--json", action="store_true", help="for scripts")
    verify = add("verify", _verify, "check every byte of a snapshot", "RUN")
    verify.add_argument("step", nargs="?", default="latest", metavar="STEP|latest|best")
    fetch = add("fetch", _fetch, "bring a snapshot here, verified", "RUN")
    fetch.add_argument("step", nargs="?", default="latest", metavar="STEP|latest|best")
    fetch.add_argument("directory", type=Path, metavar="DIR")
    add("diff", _diff, "which tensors and settings differ; A is RUN or RUN@STEP", "A", "B")
    prune = add("prune", _prune, "delete all but the newest whole snapshots", "RUN")
    prune.add_argument("--keep", type=int, required=True, metavar="N", help="how many stay")
    prune.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def _list(options: argparse.Namespace) -> int:
    from launch import archive

    place, listing = _look(options, options.run)
    if options.json:
        rows = [archive.described(row) for row in listing.rows]
        best = archive.described(listing.best) if listing.best else None
        print(json.dumps({"address": place.address, "snapshots": rows, "best": best}, indent=1))
        return DONE
    if not listing.rows:
        print(f"{place.address} holds no snapshot")
        return DONE
    _console().print(_table(place, listing))
    return DONE


def _verify(options: argparse.Namespace) -> int:
    from launch import archive

    place, listing = _look(options, options.run)
    row = archive.find(listing, place, options.step)
    with _progress(row, "verifying") as progress:
        found = archive.verify(place, row, options.step, progress)
    print(f"step {row.step} is whole: {found.bytes} bytes, all digests match")
    return DONE


def _fetch(options: argparse.Namespace) -> int:
    from launch import archive

    place, listing = _look(options, options.run)
    row = archive.find(listing, place, options.step)
    with _progress(row, "fetching") as progress:
        path = archive.fetch(place, row, options.step, options.directory, progress)
    print(f"step {row.step} is in {path}")
    return DONE


def _diff(options: argparse.Namespace) -> int:
    from launch import archive, difference
    from training.snapshots import manifest

    sides = []
    for text in (options.a, options.b):
        named = re.search(r"@(\d+|latest|best)$", text)
        run, which = (text[: named.start()], named[1]) if named else (text, "latest")
        place, listing = _look(options, run)
        sides.append((place, archive.find(listing, place, which), which))
    with _progress(sides[0][1], "reading") as progress:
        paths = [archive.local(place, row, which, progress) for place, row, which in sides]
        with paths[0] as first, paths[1] as second:
            found = difference.differing(difference.load(first), difference.load(second))
    ours, theirs = (row.manifest.settings if row.manifest else {} for _, row, _ in sides)
    settings = manifest.differing(theirs, ours)
    if not found and not settings:
        print("no difference: the same tensors, values and settings")
        return DONE
    _console().print(_differences(settings, found))
    print(f"{len(settings)} settings and {len(found)} tensors or values differ")
    return DONE


def _prune(options: argparse.Namespace) -> int:
    from launch import archive

    if options.keep < 1:
        raise Refused(f"--keep is {options.keep}; at least 1 snapshot stays")
    place, listing = _look(options, options.run, limit=None)
    rows = archive.superfluous(listing, options.keep)
    if not rows:
        print(f"nothing to delete: {len(listing.whole)} whole snapshots are there")
        return DONE
    size = sum(row.size for row in rows)
    steps = ", ".join(str(row.step) for row in rows[:8]) + (", …" if len(rows) > 8 else "")
    question = f"delete {len(rows)} snapshots ({_bytes(size)}: steps {steps}) in {place.address}?"
    if not options.yes and not _agreed(question):
        print("nothing was deleted")
        return FAILED
    with _progress(listing.whole[0], "verifying") as progress:
        damaged = archive.prune(place, listing, rows, progress)
    for problem in damaged:
        print(f"warning: {problem}", file=sys.stderr)
    print(f"deleted {len(rows)} snapshots, {_bytes(size)}")
    return DONE


def _look(options: argparse.Namespace, run: str, **how: Any) -> "tuple[Place, Listing]":
    from launch import archive

    place, run_name = _place(options, run)
    return place, archive.look(place, run_name, **how)


def _place(options: argparse.Namespace, run: str) -> "tuple[Place, str | None]":
    """Where `run` lies, and its name if that is how it was given. Raises Refused."""
    from launch.places import Folder, Prefix
    from training.settings import RUN_NAME_PATTERN

    if run.startswith("s3://"):
        if not re.fullmatch(r"s3://[^/]+/.+", run):
            raise Refused(f"{run} is no S3 prefix; write s3://bucket/prefix/")
        return Prefix(_s3(options), run), None
    if "/" in run or os.sep in run or Path(run).is_dir():
        if not Path(run).is_dir():
            raise Refused(f"{run} is no folder here; give a run name, an S3 address or a folder")
        return Folder(Path(run)), None
    if not re.fullmatch(RUN_NAME_PATTERN, run):
        raise Refused(f"{run!r} is no run name, S3 address or folder")
    return _of_run(options, run), run


def _of_run(options: argparse.Namespace, run: str) -> "Place":
    from launch import account, runs
    from launch.places import Prefix

    options.overrides = [*options.overrides, f"run_name={run}"]
    config = load_config(options, "config/default.yaml")
    session = account.opened(config.aws.region)
    config, s3 = account.with_bucket(config, session), session.client("s3")
    return Prefix(s3, runs.current_uri(s3, config, from_scratch=False))


def _s3(options: argparse.Namespace) -> Any:
    """An S3 client for an address, in the region of the configuration or the environment."""
    from launch import account

    return account.opened(load_config(options, "config/default.yaml").aws.region).client("s3")


@contextmanager
def _progress(row: "Row", what: str) -> "Iterator[Progress]":
    """Yields a function that hears how many more bytes have arrived, and shows that."""
    from rich.console import Console
    from rich.progress import BarColumn as Bar
    from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), Bar(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(f"{what} step {row.step}", total=row.size)
        yield lambda count: shown.advance(task, count)


def _console() -> Any:
    from rich.console import Console

    # Whoever reads a file or a pipe has no screen that ends after 80 columns.
    return Console(width=None if sys.stdout.isatty() else 160)


def _table(place: "Place", listing: "Listing") -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=place.address, title_justify="left")
    for name in ("step", "age", "size", "ranks", "loss"):
        table.add_column(name, justify="right")
    table.add_column("state")
    best = [listing.best] if listing.best else []
    for row in [*listing.rows, *best]:
        step = f"best: {row.step}" if row is listing.best else str(row.step)
        ranks = str(row.manifest.world_size) if row.manifest else "-"
        loss = "-" if row.loss is None else f"{row.loss:.4f}"
        state = f"{row.state}: {row.note}" if row.note else row.state
        style = {"whole": "", "not looked into": "dim"}.get(row.state, "yellow")
        cells = (step, _age(row.written), _bytes(row.size), ranks, loss, state)
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def _differences(settings: Any, found: Any) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("what", "A", "B", "largest difference")
    for one in settings:
        table.add_row(*map(Text, (f"settings.{one.name}", str(one.in_snapshot), str(one.now), "")))
    for one in found[:_SHOWN]:
        largest = "" if one.largest is None else f"{one.largest:.3g}"
        table.add_row(*map(Text, (one.name, one.first, one.second, largest)))
    return table


_SHOWN = 100  # tensors; the line below the table counts all


def _age(written: datetime.datetime) -> str:
    seconds = max(0, int((datetime.datetime.now(datetime.UTC) - written).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _bytes(size: int) -> str:
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def _agreed(question: str) -> bool:
    """Ask, on a terminal. Raises Refused where nobody can answer."""
    if not sys.stdin.isatty():
        raise Refused(f"{question} Nobody is there to ask; type --yes")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        return False


if __name__ == "__main__":
    sys.exit(main())
