"""What is shipped is the package: no bytecode, no secret, no data, and nothing from elsewhere."""

import subprocess
import sys

import pytest

from launch import source
from launch.errors import Refused


@pytest.fixture
def clone(tmp_path):
    """A clone whose package holds an entry point and a module."""
    (tmp_path / "clone" / "training" / "deep").mkdir(parents=True)
    (tmp_path / "clone" / "training" / "train.py").write_text("print('step')\n")
    (tmp_path / "clone" / "training" / "deep" / "layer.py").write_text("width = 1\n")
    (tmp_path / "clone" / "README.md").write_text("not shipped\n")
    return tmp_path / "clone"


def problems(clone):
    with pytest.raises(Refused) as caught:
        source.files(clone)
    return caught.value.problems


def shipped(clone):
    """The files in the staging folder, as a tree that the SDK would pack."""
    with source.staged(clone) as folder:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }


def test_what_is_listed_is_what_is_staged(clone):
    assert source.files(clone) == {"training/deep/layer.py": 10, "training/train.py": 14}
    assert list(shipped(clone)) == list(shipped(clone))
    assert {name: len(content) for name, content in shipped(clone).items()} == source.files(clone)


def test_this_clone_ships_its_package_alone():
    listed = source.files()
    assert list(listed) == sorted(listed)
    assert {"training/train.py", "training/snapshots/files.py"} <= listed.keys()
    assert {name.partition("/")[0] for name in listed} == {"training"}
    with source.staged() as folder:
        assert (folder / source.ENTRY_POINT).is_file()


@pytest.mark.parametrize(
    "name",
    [
        "__pycache__/train.cpython-311.pyc",
        "deep/old.pyc",
        "deep/old.pyo",
        ".notes",
        ".git/config",
        ".venv/lib/module.py",
        "setup.py",
        "deep/setup.py",
        "pyproject.toml",
    ],
)
def test_what_the_container_must_not_see_stays_here(clone, name):
    path = clone / "training" / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("x")
    assert shipped(clone).keys() == {"training/train.py", "training/deep/layer.py"}


def test_requirements_lie_where_the_toolkit_installs_them_from(clone):
    (clone / "training" / "requirements.txt").write_text("einops\n")
    assert list(source.files(clone)) == [
        "requirements.txt",
        "training/deep/layer.py",
        "training/requirements.txt",
        "training/train.py",
    ]
    assert shipped(clone)["requirements.txt"] == b"einops\n"


@pytest.mark.parametrize(
    "name",
    [
        ".env",
        ".env.local",
        ".netrc",
        "deep/server.pem",
        "SERVER.KEY",
        "id_rsa",
        "id_ed25519",
        "credentials",
        "credentials.json",
        "me_accessKeys.csv",
        "store.p12",
        "store.pfx",
    ],
)
def test_a_file_with_the_name_of_a_secret_stops_everything(clone, name):
    (clone / "training" / name).write_text("x")
    (problem,) = problems(clone)
    assert problem == (
        f"training/{name} has the name of a secret, and what is in training/ is copied to S3 and "
        f"to every instance: move it out of training/; a job gets its rights from aws.role"
    )


@pytest.mark.parametrize("name", ["environment.py", "monkey.py", "keys.py", "credentials_check.py"])
def test_names_that_only_sound_like_secrets_are_shipped(clone, name):
    (clone / "training" / name).write_text("x = 1\n")
    assert f"training/{name}" in source.files(clone)


KEY_ID = "AKIA" + "0123456789ABCDEF"  # in two parts: this file must not look like a secret itself
PRIVATE = "-----BEGIN {}PRIVATE " + "KEY-----"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (f"key = '{KEY_ID}'\n", "an AWS access key"),
        (f"key = '{KEY_ID.replace('AKIA', 'ASIA')}'\n", "an AWS access key"),
        (PRIVATE.format(""), "a private key"),
        (PRIVATE.format("RSA "), "a private key"),
        (PRIVATE.format("OPENSSH "), "a private key"),
    ],
)
def test_a_file_with_a_secret_in_it_stops_everything(clone, content, what):
    (clone / "training" / "deep" / "layer.py").write_text(f"# code\n{content}")
    (problem,) = problems(clone)
    assert problem.startswith(f"training/deep/layer.py contains {what}, and what is in training/")


@pytest.mark.parametrize("content", ["AKIA", KEY_ID + "0", "x" + KEY_ID, "-----BEGIN PUBLIC KEY"])
def test_text_that_is_no_secret_is_shipped(clone, content):
    (clone / "training" / "text.txt").write_text(content)
    assert "training/text.txt" in source.files(clone)


def test_a_large_file_is_not_searched_for_secrets(clone):
    (clone / "training" / "tables.py").write_text("#" * 1_000_000 + KEY_ID)
    assert "training/tables.py" in source.files(clone)


def test_every_secret_is_named_at_once(clone):
    (clone / "training" / ".env").write_text("x")
    (clone / "training" / "deep" / "server.pem").write_text("x")
    (clone / "training" / "train.py").write_text(KEY_ID)
    named = [problem.split()[0] for problem in problems(clone)]
    assert named == ["training/.env", "training/deep/server.pem", "training/train.py"]


def test_data_is_too_large_to_be_shipped_as_code(clone):
    for name, size in {"a.bin": 30_000_000, "b.bin": 20_000_000, "c.bin": 1_500}.items():
        with open(clone / "training" / "deep" / name, "wb") as file:
            file.truncate(size)
    assert problems(clone) == [
        "training/ holds 50.0 MB to ship, the most is 50.0 MB, and the largest are "
        "training/deep/a.bin (30.0 MB), training/deep/b.bin (20.0 MB), training/deep/c.bin "
        "(1.5 kB): data belongs into data.train, code alone into training/"
    ]


def test_a_link_inside_the_package_is_shipped_as_what_it_names(clone):
    (clone / "training" / "same.py").symlink_to("train.py")
    (clone / "training" / "shallow").symlink_to("deep")
    found = shipped(clone)
    assert found["training/same.py"] == b"print('step')\n"
    assert found["training/shallow/layer.py"] == b"width = 1\n"


def test_a_link_that_leaves_the_package_stops_everything(clone):
    target = clone / "README.md"
    (clone / "training" / "notes").symlink_to(target)
    assert problems(clone) == [
        f"training/notes is a link to {target}, outside training/, and only what is inside "
        f"travels: copy the code here, give data with data.train, or remove the link"
    ]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere", "nowhere, which does not exist: remove the link"),
        ("link", "link, which does not exist: remove the link"),
        ("..", "is a link to a folder that it lies in: remove the link"),
    ],
)
def test_a_link_that_leads_nowhere_or_in_a_circle_is_refused(clone, target, said):
    (clone / "training" / "deep" / "link").symlink_to(target)
    (problem,) = problems(clone)
    assert problem.startswith("training/deep/link is a link to ")
    assert problem.endswith(said)


def test_a_secret_is_found_behind_a_link(clone):
    (clone / "training" / "deep" / ".env").write_text("x")
    (clone / "training" / "settings").symlink_to("deep/.env")
    assert [problem.split(",")[0] for problem in problems(clone)] == [
        "training/deep/.env has the name of a secret",
        "training/settings is a link to .env",
    ]


def test_a_clone_without_the_entry_point_is_refused(clone):
    (clone / "training" / "train.py").unlink()
    assert problems(clone) == [
        "training/train.py is missing, and the container starts it; restore the file"
    ]


def test_a_clone_without_the_package_is_refused(tmp_path):
    assert problems(tmp_path) == [
        f"{tmp_path}/training cannot be shipped: No such file or directory"
    ]


def test_the_table_shows_sizes_as_people_read_them():
    files = {"training/a.py": 999, "training/b.py": 1_500, "training/c.bin": 2_500_000}
    assert source.table(files).splitlines() == [
        "    999 B  training/a.py",
        "   1.5 kB  training/b.py",
        "   2.5 MB  training/c.bin",
        "   2.5 MB  in 3 files, before compression",
    ]


def test_listing_needs_no_sdk():
    code = "import sys; from launch import source; source.files(); "
    code += "print([m for m in ('sagemaker', 'boto3', 'rich', 'torch') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
