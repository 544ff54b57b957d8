"""What AWS can tell before a job costs anything: a table of checks, each with its remedy.

Nothing stays behind: the one object that is written is removed again.
"""

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from rich.table import Table
from rich.text import Text

from launch.data import Channel
from launch.errors import one_line
from launch.runs import split
from launch.schema import JobConfig, encryption
from training.snapshots.manifest import TEMPORARY

# A person waits for the answers: an endpoint that is silent (a VPC without one) costs seconds.
IMPATIENT = Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 3})
SAGEMAKER = "sagemaker.amazonaws.com"
ASSUME_ROLE = "sts:AssumeRole"
DENIED = {"AccessDenied", "AccessDeniedException", "403", "Forbidden"}
STILL_WRITING = ("InProgress", "Stopping")
JOBS_SEEN = 100  # API_ListTrainingJobs: the most that one request answers

AWS_ERRORS: tuple[type[Exception], ...] = (BotoCoreError, ClientError)


@dataclass(frozen=True)
class Check:
    """One answer: `ok` is None when it could not be asked, which is a note and not a failure.

    `detail` is what was found, `remedy` what to do about it.
    """

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


def check(
    config: JobConfig, uri: str, channels: Sequence[Channel], boto_session: Any
) -> list[Check]:
    """Ask AWS everything that could make this job fail, with the person's own credentials.

    `config` names its region, role and bucket; `uri` is where the snapshots will go. Without valid
    credentials nothing else is asked. Never raises an error of AWS's: it becomes a check.
    """
    names = ("sts", "iam", "s3", "sagemaker", "service-quotas")
    # Made here, because a session must not be shared by threads; clients may.
    clients = {
        name: boto_session.client(name, region_name=config.aws.region, config=IMPATIENT)
        for name in names
    }
    first = credentials(clients["sts"], config)
    if not first.ok:
        return [first]
    questions: list[Callable[[], list[Check]]] = [
        lambda: [role(clients["iam"], config)],
        lambda: bucket(clients["s3"], config),
        lambda: data(clients["s3"], config, channels),
        lambda: [quota(clients["service-quotas"], config)],
        lambda: [jobs(clients["sagemaker"], config, uri)],
    ]
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = pool.map(lambda question: question(), questions)
        return [first, *(one for answer in answers for one in answer)]


def problems(checks: Iterable[Check]) -> list[str]:
    """A sentence with its remedy for every check that failed."""
    return [f"{one.detail}; {one.remedy}" for one in checks if one.ok is False]


def table(checks: Iterable[Check]) -> Table:
    """The checks for a person: ✓ passed, ✗ failed, – could not be asked."""
    marks = {True: Text("✓", "green"), False: Text("✗", "red"), None: Text("–", "yellow")}
    shown = Table.grid(padding=(0, 1))
    for one in checks:
        said = "; ".join(part for part in (one.detail, one.remedy) if part)
        shown.add_row(marks[one.ok], Text(one.name), Text(said))
    return shown


def credentials(sts: Any, config: JobConfig) -> Check:
    """Whether the credentials are valid, and the region is one that answers."""
    try:
        arn = sts.get_caller_identity()["Arn"]
    except AWS_ERRORS as error:
        return Check(
            "credentials",
            False,
            f"aws.region is {config.aws.region} and AWS does not let us in ({one_line(error)})",
            "type `aws configure` or `aws sso login`, set AWS_PROFILE, or correct aws.region",
        )
    return Check("credentials", True, f"{arn} in {config.aws.region}")


def role(iam: Any, config: JobConfig) -> Check:
    """Whether the execution role exists, in this account, and SageMaker may assume it."""
    wanted = str(config.aws.role)
    try:
        found = iam.get_role(RoleName=wanted.rpartition("/")[2])["Role"]
    except AWS_ERRORS as error:
        if _code(error) == "NoSuchEntity":
            return _no_role(f"aws.role is {wanted}, which does not exist in this account")
        return _not_asked("role", error, "iam:GetRole")
    if found["Arn"] != wanted:
        return _no_role(f"aws.role is {wanted}, but the role of that name here is {found['Arn']}")
    if not _trusts_sagemaker(found["AssumeRolePolicyDocument"]):
        return Check(
            "role",
            False,
            f"aws.role is {wanted}, which SageMaker may not assume",
            f"add {SAGEMAKER} with {ASSUME_ROLE} to the role's trust policy",
        )
    return Check("role", True, f"SageMaker may assume {wanted}")


def bucket(s3: Any, config: JobConfig) -> list[Check]:
    """Whether the bucket answers in the job's region and, if so, can be written."""
    name = str(config.aws.bucket)
    try:
        region = _region(s3, name)
    except AWS_ERRORS as error:
        return [_no_bucket(error, config)]
    if region != config.aws.region:
        problem = (
            f"aws.bucket is {name}, which lies in {region}, but the job in {config.aws.region}"
        )
        remedy = "SageMaker needs both in one region: set another aws.bucket or aws.region"
        return [Check("bucket", False, problem, remedy)]
    return [Check("bucket", True, f"{name} is in {region}"), writable(s3, config)]


def writable(s3: Any, config: JobConfig) -> Check:
    """Whether an object can be written, read and removed under the run's prefix."""
    name = str(config.aws.bucket)
    key = f"{config.aws.prefix}/{config.run_name}/probe-{uuid.uuid4().hex}{TEMPORARY}"
    place = f"s3://{name}/{config.aws.prefix}/"
    encrypted = encryption(config.aws.kms_key)
    failed = _error_of(lambda: s3.put_object(Bucket=name, Key=key, Body=b"probe", **encrypted))
    if failed:
        problem, action = "cannot be written", "s3:PutObject"
    else:
        failed = _error_of(lambda: s3.get_object(Bucket=name, Key=key)["Body"].read())
        problem, action = "can be written but not read", "s3:GetObject"
    # Also after a failure: a request that timed out may have been carried out.
    left = _error_of(lambda: s3.delete_object(Bucket=name, Key=key))
    if failed:
        return Check(
            "writable",
            False,
            f"{place} {problem} ({one_line(failed)})",
            f"allow {action} there to your credentials, or set another aws.bucket or aws.prefix",
        )
    if left:
        return Check(
            "writable",
            None,
            f"{place} can be written, but the probe s3://{name}/{key} could not be removed again "
            f"({one_line(left)})",
            "delete it, and allow s3:DeleteObject there to your credentials",
        )
    return Check("writable", True, f"{place} can be written")


def data(s3: Any, config: JobConfig, channels: Sequence[Channel]) -> list[Check]:
    """Whether every S3 prefix that is passed through holds objects, in the job's region."""
    return [
        _holds_objects(s3, config, channel.name, channel.s3_prefix)
        for channel in channels
        if channel.s3_prefix
    ]


def quota(quotas: Any, config: JobConfig) -> Check:
    """Whether the account may run as many instances of this type, on spot or on demand."""
    compute = config.compute
    kind = "spot training job usage" if config.spot.enabled else "training job usage"
    wanted = f"{compute.instance_type} for {kind}"
    try:
        allowed = _quota(quotas, wanted)
    except AWS_ERRORS as error:
        return _not_asked("quota", error, "servicequotas:ListServiceQuotas")
    if allowed is None:
        return Check(
            "quota",
            None,
            f"Service Quotas lists no {wanted!r} in {config.aws.region}",
            f"make sure that compute.instance_type {compute.instance_type} is offered there",
        )
    if allowed < compute.instance_count:
        return Check(
            "quota",
            False,
            f"compute.instance_count is {compute.instance_count}, but the account's quota "
            f"{wanted!r} in {config.aws.region} is {allowed:g}",
            f"ask for {compute.instance_count} in the Service Quotas console, "
            f"or set another compute.instance_type or compute.instance_count",
        )
    return Check("quota", True, f"{wanted}: {allowed:g}, needed: {compute.instance_count}")


def jobs(sagemaker: Any, config: JobConfig, uri: str) -> Check:
    """Whether another job of this run still writes to the same checkpoint prefix."""
    try:
        for name in _running(sagemaker, config.run_name):
            job = sagemaker.describe_training_job(TrainingJobName=name)
            written = job.get("CheckpointConfig", {}).get("S3Uri", "")
            if written.rstrip("/") == uri.rstrip("/"):
                return Check(
                    "jobs",
                    False,
                    f"the job {name} is {job['TrainingJobStatus']} and writes to {uri} too",
                    f"wait until it has ended, or stop it: aws sagemaker stop-training-job "
                    f"--region {config.aws.region} --training-job-name {name}",
                )
    except AWS_ERRORS as error:
        return _not_asked(
            "jobs", error, "sagemaker:ListTrainingJobs and sagemaker:DescribeTrainingJob"
        )
    return Check("jobs", True, f"no other job writes to {uri}")


def _code(error: Exception) -> str:
    return str(error.response["Error"]["Code"]) if isinstance(error, ClientError) else ""


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except AWS_ERRORS as error:
        return error
    return None


def _not_asked(name: str, error: Exception, action: str) -> Check:
    remedy = f"allow {action} to your credentials to have it checked" if _denied(error) else ""
    return Check(name, None, f"could not be asked ({one_line(error)})", remedy)


def _denied(error: Exception) -> bool:
    return _code(error) in DENIED


def _no_role(problem: str) -> Check:
    remedy = "set aws.role to the ARN of a role of this account that SageMaker may assume"
    return Check("role", False, problem, remedy)


def _trusts_sagemaker(policy: dict[str, Any]) -> bool:
    """Whether a trust policy lets SageMaker in; conditions, which only IAM knows, count as met."""
    statements = _listed(policy.get("Statement", []))
    effects = {one.get("Effect") for one in statements if _is_about_sagemaker(one)}
    return effects == {"Allow"}


def _is_about_sagemaker(statement: dict[str, Any]) -> bool:
    principal = statement.get("Principal", {})
    services = ["*"] if principal == "*" else _listed(principal.get("Service", []))
    actions = [str(action).lower() for action in _listed(statement.get("Action", []))]
    conditional_deny = statement.get("Effect") == "Deny" and "Condition" in statement
    return (
        not conditional_deny
        and any(service in ("*", SAGEMAKER) for service in services)
        and any(fnmatchcase(ASSUME_ROLE.lower(), action) for action in actions)
    )


def _listed(value: Any) -> list[Any]:
    """A policy writes a list of one without its brackets."""
    return value if isinstance(value, list) else [value]


def _region(s3: Any, name: str) -> str:
    """The bucket's region. Amazon's S3 names it in the answer to HeadBucket; a stand-in may not."""
    if named := s3.head_bucket(Bucket=name).get("BucketRegion"):
        return str(named)
    # No location stands for the oldest region.
    return str(s3.get_bucket_location(Bucket=name).get("LocationConstraint") or "us-east-1")


def _no_bucket(error: Exception, config: JobConfig) -> Check:
    name, region = config.aws.bucket, config.aws.region
    if _code(error) in ("404", "NoSuchBucket"):
        problem = f"aws.bucket is {name}, which does not exist"
        remedy = f"create it: aws s3 mb s3://{name} --region {region}"
    elif _denied(error):
        problem = f"aws.bucket is {name}, which your credentials may not use ({one_line(error)})"
        remedy = "allow s3:ListBucket on it, or set aws.bucket to one of your account's"
    else:
        problem = f"aws.bucket is {name}, which does not answer ({one_line(error)})"
        remedy = f"set aws.bucket to a bucket in {region}"
    return Check("bucket", False, problem, remedy)


def _holds_objects(s3: Any, config: JobConfig, channel: str, uri: str) -> Check:
    name, prefix = split(uri)
    said, label = f"data.{channel} is {uri}", f"data.{channel}"
    try:
        region = _region(s3, name)
        page = s3.list_objects_v2(Bucket=name, Prefix=prefix, MaxKeys=2)
    except AWS_ERRORS as error:
        if _code(error) in ("404", "NoSuchBucket"):
            return Check(label, False, f"{said}, but there is no such bucket", "correct its name")
        # The job reads the data with its own role, which may do more.
        return _not_asked(label, error, f"s3:ListBucket on {name}")
    if region != config.aws.region:
        problem = f"{said}, which lies in {region}, but the job in {config.aws.region}"
        remedy = f"copy the data to a bucket in {config.aws.region}, or set another aws.region"
        return Check(label, False, problem, remedy)
    # The S3 console makes an empty object of the folder's own name.
    if not any(item["Key"] != prefix for item in page.get("Contents", [])):
        return Check(label, False, f"{said}, which holds no objects", "upload the data there first")
    return Check(label, True, f"{uri} holds objects")


def _quota(quotas: Any, name: str) -> float | None:
    pages = quotas.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
    found = (one for page in pages for one in page["Quotas"] if one["QuotaName"] == name)
    return next((float(one["Value"]) for one in found), None)


def _running(sagemaker: Any, run_name: str) -> Iterator[str]:
    """The run's jobs that may still write, the newest of each status."""
    for status in STILL_WRITING:
        page = sagemaker.list_training_jobs(
            StatusEquals=status,
            NameContains=run_name,
            SortBy="CreationTime",
            SortOrder="Descending",
            MaxResults=JOBS_SEEN,
        )
        for job in page["TrainingJobSummaries"]:
            if job["TrainingJobName"].startswith(f"{run_name}-"):
                yield job["TrainingJobName"]
