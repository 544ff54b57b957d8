"""What is shipped to the container: the package `training/`, as it is in this clone.

Never a secret, never bytecode, never data; what cannot be shipped is refused before anything is.
"""

import fnmatch
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from launch.config import ROOT
from launch.errors import Refused

PACKAGE = "training"
ENTRY_POINT = f"{PACKAGE}/train.py"
# Every host downloads and unpacks it at every start and after every reclaim.
SIZE_LIMIT = 50_000_000
# The toolkit would take a setup.py at the root for a package to install, which torchrun cannot run.
_NEVER = {"__pycache__", "setup.py", "pyproject.toml"}
_BYTECODE = (".pyc", ".pyo")
# The toolkit installs the requirements.txt beside the package, at the archive's root, and no other.
_REQUIREMENTS = "requirements.txt"

_SECRET_NAMES = (
    ".env",
    ".env.*",
    ".git-credentials",
    ".netrc",
    ".pypirc",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.ppk",
    "id_rsa",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
    "credentials",
    "credentials.json",
    "credentials.csv",
    "*accesskeys.csv",
)
_SECRET_CONTENT = {
    "an AWS access key": re.compile(rb"(?<![0-9A-Za-z])A[KS]IA[0-9A-Z]{16}(?![0-9A-Za-z])"),
    "a private key": re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY"),
}
_READ_LIMIT = 1_000_000  # bytes; a file with a secret written into it is smaller


def files(root: Path = ROOT) -> dict[str, int]:
    """What would be shipped from the clone at `root`: path inside the archive → bytes, sorted.

    Raises Refused, with all problems at once, for secrets, for links that leave `training/`, for a
    missing entry point, for what cannot be read, and for more than SIZE_LIMIT bytes.
    """
    return {name: path.stat().st_size for name, path in _checked(root).items()}


@contextmanager
def staged(root: Path = ROOT) -> Iterator[Path]:
    """A temporary folder that holds what is shipped, and nothing else, for the SDK to pack.

    Raises Refused where `files` does.
    """
    with tempfile.TemporaryDirectory(prefix="spot-source-") as folder:
        for name, path in _checked(root).items():
            copy = Path(folder, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        yield Path(folder)


def table(files: Mapping[str, int]) -> str:
    """The files as text: a line each, with its size, and the total."""
    rows = [(_human(size), name) for name, size in files.items()]
    rows.append((_human(sum(files.values())), f"in {len(files)} files, before compression"))
    return "\n".join(f"{size:>9}  {name}" for size, name in rows)


def _checked(root: Path) -> dict[str, Path]:
    """Path inside the archive → file on this disk, sorted. Raises Refused."""
    problems: list[str] = []
    package = root / PACKAGE
    try:
        found = {p.relative_to(root).as_posix(): p for p in _walk(package, package, problems)}
        problems += _secrets(found) + _oversize(found)
    except OSError as error:
        raise Refused(f"{error.filename} cannot be shipped: {error.strerror}") from None
    if ENTRY_POINT not in found:
        problems.append(f"{ENTRY_POINT} is missing, and the container starts it; restore the file")
    if problems:
        raise Refused(problems)
    if requirements := found.get(f"{PACKAGE}/{_REQUIREMENTS}"):
        found[_REQUIREMENTS] = requirements
    return dict(sorted(found.items()))


def _walk(folder: Path, package: Path, problems: list[str]) -> Iterator[Path]:
    """The files to ship under `folder`; what is wrong with links or names goes to `problems`."""
    for path in sorted(folder.iterdir()):
        if _is_secret(path.name):
            problems.append(_secret(path.relative_to(package.parent), "has the name of a secret"))
        elif path.name in _NEVER or path.name.startswith(".") or path.suffix in _BYTECODE:
            continue
        elif path.is_symlink() and (problem := _link_problem(path, package)):
            problems.append(problem)
        elif path.is_dir():
            yield from _walk(path, package, problems)
        elif path.is_file():
            yield path


def _link_problem(link: Path, package: Path) -> str | None:
    """Why a link cannot be shipped; None for one to a file or folder inside the package."""
    name, target = link.relative_to(package.parent), Path(os.path.realpath(link))
    if not target.is_relative_to(package.resolve()):
        return (
            f"{name} is a link to {target}, outside {PACKAGE}/, and only what is inside travels: "
            f"copy the code here, give data with data.train, or remove the link"
        )
    if not target.exists():
        return f"{name} is a link to {target}, which does not exist: remove the link"
    if any(target == parent.resolve() for parent in link.parents):
        return f"{name} is a link to a folder that it lies in: remove the link"
    if _is_secret(target.name):
        return _secret(name, f"is a link to {target.name}, the name of a secret,")
    return None


def _is_secret(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _SECRET_NAMES)


def _secrets(found: Mapping[str, Path]) -> list[str]:
    small = {name: path for name, path in found.items() if path.stat().st_size <= _READ_LIMIT}
    return [
        _secret(name, f"contains {what}")
        for name, path in small.items()
        for what, pattern in _SECRET_CONTENT.items()
        if pattern.search(path.read_bytes())
    ]


def _secret(name: str | Path, why: str) -> str:
    return (
        f"{name} {why}, and what is in {PACKAGE}/ is copied to S3 and to every instance: move it "
        f"out of {PACKAGE}/; a job gets its rights from aws.role"
    )


def _oversize(found: Mapping[str, Path]) -> list[str]:
    sizes = {name: path.stat().st_size for name, path in found.items()}
    total = sum(sizes.values())
    if total <= SIZE_LIMIT:
        return []
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    named = ", ".join(f"{name} ({_human(sizes[name])})" for name in largest)
    return [
        f"{PACKAGE}/ holds {_human(total)} to ship, the most is {_human(SIZE_LIMIT)}, and the "
        f"largest are {named}: data belongs into data.train, code alone into {PACKAGE}/"
    ]


def _human(size: int) -> str:
    """A number of bytes as people read it: 1234567 → 1.2 MB."""
    if size < 1000:
        return f"{size} B"
    if size < 1_000_000:
        return f"{size / 1000:.1f} kB"
    return f"{size / 1_000_000:.1f} MB"
