"""The account's recent jobs of this project, which it finds by the tag that every start sets."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from launch.errors import Refused
from launch.following.job import Job
from launch.following.storage import newest_of
from launch.following.trouble import Passing, Withheld, sorted_out
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


def recent(sagemaker: Any, s3: Any) -> list[Row]:
    """The newest jobs of this project, newest first. Raises Refused if they cannot be listed."""
    try:
        with sorted_out():
            found = sagemaker.search(
                Resource="TrainingJob",
                SearchExpression={
                    "Filters": [
                        {"Name": f"Tags.{PROJECT_TAG}", "Operator": "Equals", "Value": PROJECT}
                    ]
                },
                SortBy="CreationTime",
                SortOrder="Descending",
                MaxResults=JOBS_SHOWN,
            )
    except (Withheld, Passing) as error:
        raise Refused(
            f"the jobs cannot be listed ({error}); your credentials need sagemaker:Search, or give "
            f"a job's name: python launch/follow.py JOB"
        ) from error
    jobs = [Job(one["TrainingJob"]) for one in found.get("Results") or [] if "TrainingJob" in one]
    return [Row(job, _step(s3, job)) for job in jobs]


def as_table(rows: Sequence[Row]) -> Table:
    """The list for a person."""
    table = Table(box=None)
    table.add_column("job", no_wrap=True)  # a name that is cut off cannot be typed
    for name in ("run", "status", "step", "interruptions", "savings"):
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


def _step(s3: Any, job: Job) -> int | None:
    if job.snapshots_uri is None:
        return None
    try:
        return newest_of(s3, job.snapshots_uri)
    except (Withheld, Passing):
        return None
