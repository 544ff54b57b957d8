"""training/ runs in the container: the standard library and torch are all that it may need."""

import ast
import subprocess
import sys
from pathlib import Path

import training

ROOT = Path(training.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_only_torch_and_the_standard_library_are_imported():
    allowed = set(sys.stdlib_module_names) | {"torch", "training"}
    optional = {ROOT / "snapshots" / "delivery.py": {"boto3", "botocore"}}
    for path in FILES:
        known = allowed | optional.get(path, set())
        assert {name.split(".")[0] for name in imported(path)} <= known, path


def test_without_boto3_everything_can_be_imported():
    block = "import sys; sys.modules.update(boto3=None, botocore=None); "
    run = subprocess.run([sys.executable, "-c", block + "import training.train"], check=False)
    assert run.returncode == 0


def test_imports_go_one_way():
    depends = {
        ".".join(("training", *path.relative_to(ROOT).with_suffix("").parts)): {
            name for name in imported(path) if name.startswith("training")
        }
        for path in FILES
    }

    def reached(name, trail=()):
        assert name not in trail, f"circle: {' → '.join((*trail, name))}"
        for other in depends.get(name, ()):
            reached(other, (*trail, name))

    for name in depends:
        reached(name)
    ground_floor = {"training.snapshots.manifest", "training.snapshots.digests"}
    assert {n for n in depends["training.snapshots.files"] if n in depends} <= {
        *ground_floor,
        "training.snapshots",
    }
    assert depends["training.snapshots.digests"] == set()
    assert depends["training.snapshots.manifest"] == set()
    assert depends["training.settings"] == set()
