"""What is shipped to the container: the package `training/`, as it is in this clone."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.config import ROOT

ENTRY_POINT = "training/train.py"
# The toolkit would take a setup.py at the root for a package to install, which torchrun cannot run.
_NEVER = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "setup.py", "pyproject.toml")


@contextmanager
def staged() -> Iterator[Path]:
    """A temporary folder that holds what is shipped, and nothing else, for the SDK to pack."""
    with tempfile.TemporaryDirectory(prefix="spot-source-") as folder:
        shutil.copytree(ROOT / "training", Path(folder) / "training", ignore=_NEVER)
        yield Path(folder)
