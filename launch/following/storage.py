"""What S3 has of a run's snapshots: cheaply while the job runs, and closely once it has ended."""

from collections.abc import Iterable
from typing import Any

from launch.following.trouble import Withheld, code_of, sorted_out
from launch.runs import split
from training.snapshots import manifest
from training.snapshots.manifest import NotASnapshot, data_name, manifest_name

_STEM = "step-"


class Storage:
    """The snapshots under one S3 prefix: `newest` is the newest step whose both files are listed.

    A listing answers a thousand names, the oldest first, so it goes on from where the last one saw
    the newest whole snapshot.
    """

    def __init__(self, s3: Any, uri: str) -> None:
        self._s3, self.uri = s3, uri
        self._bucket, self._prefix = split(uri)
        self._after = ""
        self._resuming = False  # whether the last page was cut off, so that the next one goes on
        self.newest: int | None = None

    def look(self) -> None:
        """Update `newest`; costs one call. Raises Withheld, Passing or Refused."""
        page = _page(self._s3, self._bucket, self._prefix, self._after)
        names = [item["Key"].removeprefix(self._prefix) for item in page.get("Contents") or []]
        whole = _whole(names)
        self.newest = max(whole, default=self.newest if self._resuming else None)
        if page.get("IsTruncated") and names:
            self._after, self._resuming = _before_step(self._prefix, names[-1]), True
        else:
            self._after = _before_step(self._prefix, data_name(self.newest or 0))
            self._resuming = False


def _before_step(prefix: str, name: str) -> str:
    """A key that sorts just before all files of the snapshot that `name` is a file of."""
    return prefix + name.partition(".")[0]


def newest_of(s3: Any, uri: str) -> int | None:
    """The newest step whose both files are listed. Raises Withheld, Passing or Refused."""
    return next(iter(_whole(_sizes(s3, uri))), None)


def resumable(s3: Any, uri: str, run_name: str | None) -> tuple[int | None, list[str]]:
    """The step that a new start resumes from, and why newer ones do not count.

    As far as can be seen from here: the manifest can be read and names the run, and the data file
    has its size. Raises Withheld, Passing or Refused.
    """
    sizes, rejected = _sizes(s3, uri), []
    for step in _whole(sizes):
        try:
            _check(s3, uri, step, sizes[data_name(step)], run_name)
        except NotASnapshot as error:
            rejected.append(f"{data_name(step)} does not count: {error}")
        else:
            return step, rejected
    return None, rejected


def _check(s3: Any, uri: str, step: int, size: int, run_name: str | None) -> None:
    bucket, prefix = split(uri)
    name = manifest_name(step)
    try:
        with sorted_out():
            text = s3.get_object(Bucket=bucket, Key=prefix + name)["Body"].read()
    except Withheld as error:
        if code_of(error.__cause__) != "NoSuchKey":
            raise
        raise NotASnapshot("the manifest was deleted meanwhile") from error
    described = manifest.parse(name, text)
    if run_name is not None and described.run_name != run_name:
        raise NotASnapshot(f"it is of the run {described.run_name!r}")
    if described.bytes != size:
        raise NotASnapshot(f"{size} bytes instead of {described.bytes}")


def _sizes(s3: Any, uri: str) -> dict[str, int]:
    bucket, prefix = split(uri)
    sizes: dict[str, int] = {}
    after, more = "", True
    while more:
        page = _page(s3, bucket, prefix, after)
        items = page.get("Contents") or []
        sizes |= {item["Key"].removeprefix(prefix): item["Size"] for item in items}
        after = items[-1]["Key"] if items else ""
        more = bool(items) and bool(page.get("IsTruncated"))
    return sizes


def _page(s3: Any, bucket: str, prefix: str, after: str) -> dict[str, Any]:
    start = {"StartAfter": after} if after else {}
    with sorted_out():
        page: dict[str, Any] = s3.list_objects_v2(Bucket=bucket, Prefix=prefix + _STEM, **start)
        return page


def _whole(names: Iterable[str]) -> list[int]:
    """The steps that have both files, newest first."""
    there = set(names)
    return [
        step
        for step in manifest.candidates(there)
        if {data_name(step), manifest_name(step)} <= there
    ]
