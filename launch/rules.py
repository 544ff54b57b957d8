"""What SageMaker or the container would refuse, or what would waste money, known without AWS.

Each rule gives a sentence with the setting, the value seen, what is right, and what to type.
"""

import re

from launch.schema import JobConfig, readable
from training.settings import RUN_NAME_PATTERN

JOB_NAME_LIMIT = 63  # API_CreateTrainingJob: TrainingJobName
TIMESTAMP_LENGTH = len("-20261130-221530-123")
LONGEST_RUN = 28 * 86400  # API_StoppingCondition: MaxRuntimeInSeconds


def problems(config: JobConfig) -> list[str]:
    """Everything that is wrong with `config` as far as can be known without AWS."""
    problems = _run_name_problems(config.run_name)
    spot, aws = config.spot, config.aws
    if spot.enabled and spot.max_wait < spot.max_run:
        problems.append(
            f"spot.max_wait is {spot.max_wait} s but spot.max_run is {spot.max_run} s; a spot job "
            f"must be allowed to wait at least as long as it may run: "
            f"set spot.max_wait to {readable(spot.max_run)} or more"
        )
    if spot.max_run > LONGEST_RUN:
        problems.append(
            f"spot.max_run is {spot.max_run} s; SageMaker stops every job after 28 days: "
            f"set spot.max_run to 28d or less"
        )
    if bool(aws.subnets) != bool(aws.security_group_ids):
        given, missing = ("subnets", "security_group_ids")[:: 1 if aws.subnets else -1]
        problems.append(f"aws.{given} is set but aws.{missing} is not; a VPC needs both")
    return problems


def _run_name_problems(name: str) -> list[str]:
    longest = JOB_NAME_LIMIT - TIMESTAMP_LENGTH
    if not re.fullmatch(RUN_NAME_PATTERN, name):
        return [
            f"run_name is {name!r}; SageMaker allows letters, digits and hyphens, "
            f"beginning and ending with a letter or digit: set run_name to something like my-run-1"
        ]
    if len(name) > longest:
        return [
            f"run_name is {len(name)} characters long; with the time added a job name may have "
            f"{JOB_NAME_LIMIT}: set run_name to {longest} characters or less"
        ]
    return []
