"""The account's recent jobs of this project, which it finds by the tag that every start sets."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from launch.errors import Refused
from launch.following.job import Job
from launch.following.storage import newest_of
from launch.following.trouble import Passing, Withheld, patiently, sorted_out
from launch.following.words import UNKNOWN, number, percent
from launch.limits import PROJECT, PROJECT_TAG

JOBS_SHOWN = 20


@dataclass(frozen=True)
class Row:
    """A job of the list; `step` is the newest that S3 has whole, None where that is not known."""

    job: Job
    step: int | None

    def as_json(self) -> dict[str, Any]:
        """For scripts: the same keys for every job."""
        job = self.job
        return {
            "job": job.name,
            "run_name": job.run_name,
            "status": job.status,
            "secondary_status": job.secondary_status,
            "created": job.created and job.created.isoformat(),
            "snapshot_in_s3": self.step,
            "total_steps": job.total_steps,
            "interruptions": job.interruptions,
            "savings": job.savings,
        }


def recent(sagemaker: Any, s3: Any, sleep: Callable[[float], None]) -> list[Row]:
    """The newest jobs of this project, newest first. Raises Refused if they cannot be listed."""
    try:
        jobs = patiently(lambda: _search(sagemaker), sleep)
    except (Withheld, Passing) as error:
        raise Refused(
            f"the jobs cannot be listed ({error}); your credentials need sagemaker:Search, or give "
            f"a job's name: python launch/follow.py JOB"
        ) from error
    return [Row(job, _step(s3, job, sleep)) for job in jobs]


def _search(sagemaker: Any) -> list[Job]:
    ours = {"Name": f"Tags.{PROJECT_TAG}", "Operator": "Equals", "Value": PROJECT}
    with sorted_out():
        found = sagemaker.search(
            Resource="TrainingJob",
            SearchExpression={"Filters": [ours]},
            SortBy="CreationTime",
            SortOrder="Descending",
            MaxResults=JOBS_SHOWN,
        )
    return [Job(one["TrainingJob"]) for one in found.get("Results") or [] if "TrainingJob" in one]


def as_table(rows: Sequence[Row]) -> Table:
    """The list for a person."""
    table = Table(box=None)
    table.add_column("job", no_wrap=True)  # a name that is cut off cannot be typed
    for name in ("run", "status", "step", "interrupted", "savings"):
        table.add_column(name, overflow="fold")
    for row in rows:
        job = row.job
        cells = [
            *(job.name, job.run_name or UNKNOWN, job.secondary_status),
            f"{number(row.step)} / {number(job.total_steps)}",
            *(str(job.interruptions), percent(job.savings)),
        ]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def as_lines(rows: Sequence[Row]) -> list[str]:
    """The list for scripts: a JSON object a line."""
    return [json.dumps(row.as_json()) for row in rows]


def _step(s3: Any, job: Job, sleep: Callable[[float], None]) -> int | None:
    uri = job.snapshots_uri
    if uri is None:
        return None
    try:
        return patiently(lambda: newest_of(s3, uri), sleep)
    except (Withheld, Passing):
        return None
