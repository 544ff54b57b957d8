"""Preflight against the mocked AWS, and against stubbed clients for what the mock lacks."""

import datetime
import io
import json

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from botocore.stub import Stubber
from rich.console import Console

from launch import config as job_config
from launch import data, preflight

URI = "s3://my-bucket/spot-ddp/shakespeare/snapshots/"
SPOT = "ml.g5.2xlarge for spot training job usage"
TRUST = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}}
TRUST["Action"] = "sts:AssumeRole"


class Session:
    """boto3's session, with some of its clients prepared by the test."""

    def __init__(self):
        self.prepared = {}

    def client(self, name, **options):
        return self.prepared.get(name) or boto3.client(name, **options)

    def prepare(self, name, region="us-east-1"):
        self.prepared[name] = boto3.client(name, region_name=region)
        return self.prepared[name]


@pytest.fixture
def session(aws):
    """An account in which every check passes: a role, and a quota of four instances."""
    session = Session()
    create_role("training", TRUST)
    stub_quota(session, {"ml.g5.2xlarge for training job usage": 0, SPOT: 4})
    return session


@pytest.fixture
def checked(session, values):
    """Run preflight, with overrides of the configuration; returns the checks by name."""

    def run(*overrides):
        for override in overrides:
            job_config._apply(values, override)
        config = job_config.validate(values)
        checks = preflight.check(config, URI, data.channels(config), session)
        assert len({one.name for one in checks}) == len(checks)
        return {one.name: one for one in checks}

    return run


def create_role(name, *statements, path="/"):
    policy = json.dumps({"Version": "2012-10-17", "Statement": list(statements)})
    boto3.client("iam").create_role(RoleName=name, AssumeRolePolicyDocument=policy, Path=path)


def stub_quota(session, values, *, pages=1):
    """Service Quotas answers with these values, the last ones on the last page."""
    stub = Stubber(session.prepare("service-quotas"))
    for page in range(pages):
        last = page == pages - 1
        found = [{"QuotaName": n, "Value": float(v)} for n, v in values.items()] if last else []
        more = {} if last else {"NextToken": str(page + 1)}
        expected = {"ServiceCode": "sagemaker"} | ({"NextToken": str(page)} if page else {})
        stub.add_response("list_service_quotas", {"Quotas": found, **more}, expected)
    stub.activate()


def refuse(client, operation, code="AccessDenied", then=None):
    """From now on the client's `operation` is answered with an error, before it is sent."""

    def answer(**_):
        raise then or ClientError({"Error": {"Code": code, "Message": "no"}}, operation)

    service = client.meta.service_model.service_id.hyphenize()
    client.meta.events.register(f"before-call.{service}.{operation}", answer)


def failed(checks, name):
    """The sentence of the only check that failed."""
    assert [one.name for one in checks.values() if one.ok is False] == [name]
    (sentence,) = preflight.problems(checks.values())
    return sentence


def keys_in(bucket):
    return [o["Key"] for o in boto3.client("s3").list_objects_v2(Bucket=bucket).get("Contents", [])]


def test_an_account_that_is_ready_passes_every_check_and_is_left_as_it_was(checked):
    checks = checked()
    assert [(one.name, one.ok, one.detail, one.remedy) for one in checks.values()] == [
        ("credentials", True, "arn:aws:sts::123456789012:user/moto in us-east-1", ""),
        ("role", True, "SageMaker may assume arn:aws:iam::123456789012:role/training", ""),
        ("bucket", True, "my-bucket is in us-east-1", ""),
        ("writable", True, "s3://my-bucket/spot-ddp/ can be written", ""),
        ("quota", True, f"{SPOT}: 4, needed: 2", ""),
        ("jobs", True, f"no other job writes to {URI}", ""),
    ]
    assert preflight.problems(checks.values()) == []
    assert keys_in("my-bucket") == []


def test_the_table_shows_what_passed_what_failed_and_what_could_not_be_asked():
    console = Console(file=io.StringIO(), width=60)
    checks = [
        preflight.Check("role", True, "fine [really]"),
        preflight.Check("quota", False, "too small", "ask for more"),
        preflight.Check("jobs", None, "could not be asked"),
    ]
    console.print(preflight.table(checks))
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == [
        "✓ role  fine [really]",
        "✗ quota too small; ask for more",
        "– jobs  could not be asked",
    ]
    assert preflight.problems(checks) == ["too small; ask for more"]


def test_without_valid_credentials_nothing_else_is_asked(session, checked):
    refuse(session.prepare("sts"), "GetCallerIdentity", "ExpiredToken")
    checks = checked()
    assert list(checks) == ["credentials"]
    sentence = failed(checks, "credentials")
    assert "aws.region is us-east-1 and AWS does not let us in (" in sentence
    assert "ExpiredToken" in sentence
    assert sentence.endswith("set AWS_PROFILE, or correct aws.region")


def test_a_region_that_does_not_answer_is_named(session, checked):
    unreachable = EndpointConnectionError(endpoint_url="https://sts.us-east-9.amazonaws.com")
    refuse(session.prepare("sts"), "GetCallerIdentity", then=unreachable)
    assert "sts.us-east-9.amazonaws.com" in failed(checked(), "credentials")


def test_a_missing_role(checked):
    assert failed(checked("aws.role=arn:aws:iam::123456789012:role/other"), "role") == (
        "aws.role is arn:aws:iam::123456789012:role/other, which does not exist in this account; "
        "set aws.role to the ARN of a role of this account that SageMaker may assume"
    )


def test_a_role_of_another_account_is_not_taken_for_our_own_of_that_name(checked):
    sentence = failed(checked("aws.role=arn:aws:iam::210987654321:role/training"), "role")
    assert "but the role of that name here is arn:aws:iam::123456789012:role/training" in sentence


def test_a_role_with_a_path(checked):
    create_role("deep", TRUST, path="/service-role/")
    assert checked("aws.role=arn:aws:iam::123456789012:role/service-role/deep")["role"].ok


@pytest.mark.parametrize(
    "statement",
    [
        {**TRUST, "Principal": {"Service": "ec2.amazonaws.com"}},
        {**TRUST, "Principal": {"AWS": "arn:aws:iam::123456789012:root"}},
        {**TRUST, "Action": "sts:TagSession"},
        {**TRUST, "Effect": "Deny"},
    ],
)
def test_a_role_that_sagemaker_may_not_assume(checked, statement):
    create_role("closed", statement)
    assert failed(checked("aws.role=arn:aws:iam::123456789012:role/closed"), "role") == (
        "aws.role is arn:aws:iam::123456789012:role/closed, which SageMaker may not assume; "
        "add sagemaker.amazonaws.com with sts:AssumeRole to the role's trust policy"
    )


@pytest.mark.parametrize(
    "statements",
    [
        [{**TRUST, "Action": ["sts:TagSession", "sts:Assume*"]}],
        [{**TRUST, "Principal": {"Service": ["ec2.amazonaws.com", "sagemaker.amazonaws.com"]}}],
        [{**TRUST, "Principal": "*"}],
        [TRUST, {**TRUST, "Effect": "Deny", "Condition": {"Bool": {"aws:SecureTransport": "no"}}}],
    ],
)
def test_a_trust_policy_may_be_written_in_many_ways(checked, statements):
    create_role("open", *statements)
    assert checked("aws.role=arn:aws:iam::123456789012:role/open")["role"].ok


def test_a_deny_outweighs_an_allow(checked):
    create_role("torn", TRUST, {**TRUST, "Effect": "Deny"})
    assert failed(checked("aws.role=arn:aws:iam::123456789012:role/torn"), "role")


def test_a_role_that_may_not_be_looked_at_is_a_note(session, checked):
    refuse(session.prepare("iam"), "GetRole")
    note = checked()["role"]
    assert note.ok is None
    assert note.detail.startswith("could not be asked (")
    assert note.remedy == "allow iam:GetRole to your credentials to have it checked"


def test_a_missing_bucket_is_one_problem_and_not_two(checked):
    checks = checked("aws.bucket=nowhere")
    assert "writable" not in checks
    assert failed(checks, "bucket") == (
        "aws.bucket is nowhere, which does not exist; "
        "create it: aws s3 mb s3://nowhere --region us-east-1"
    )


def test_a_bucket_in_another_region(checked):
    create_bucket_in_europe("europe")
    assert failed(checked("aws.bucket=europe"), "bucket") == (
        "aws.bucket is europe, which lies in eu-west-1, but the job in us-east-1; "
        "SageMaker needs both in one region: set another aws.bucket or aws.region"
    )


def create_bucket_in_europe(name):
    boto3.client("s3", region_name="eu-west-1").create_bucket(
        Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("403", "which your credentials may not use (An error"),
        ("301", "which does not answer (An error"),
    ],
)
def test_a_bucket_that_does_not_let_us_in(session, checked, code, said):
    refuse(session.prepare("s3"), "HeadBucket", code)
    assert f"aws.bucket is my-bucket, {said}" in failed(checked(), "bucket")


@pytest.mark.parametrize(
    ("answer", "region"), [({}, "us-east-1"), ({"LocationConstraint": "eu-west-1"}, "eu-west-1")]
)
def test_a_store_that_does_not_name_the_region_is_asked_for_it(session, answer, region):
    client = session.prepare("s3")
    with Stubber(client) as stub:
        stub.add_response("head_bucket", {})
        stub.add_response("get_bucket_location", answer)
        assert preflight._region(client, "my-bucket") == region


def test_a_prefix_that_cannot_be_written(session, checked):
    refuse(session.prepare("s3"), "PutObject")
    sentence = failed(checked(), "writable")
    assert sentence.startswith("s3://my-bucket/spot-ddp/ cannot be written (")
    assert sentence.endswith(
        "allow s3:PutObject there to your credentials, or set another aws.bucket or aws.prefix"
    )


def test_the_probe_is_removed_also_when_it_cannot_be_read(session, checked):
    refuse(session.prepare("s3"), "GetObject")
    sentence = failed(checked(), "writable")
    assert sentence.startswith("s3://my-bucket/spot-ddp/ can be written but not read (")
    assert "allow s3:GetObject" in sentence
    assert keys_in("my-bucket") == []


def test_a_probe_that_cannot_be_removed_is_a_note_that_names_it(session, checked):
    refuse(session.prepare("s3"), "DeleteObject")
    note = checked()["writable"]
    (left,) = keys_in("my-bucket")
    assert left.startswith("spot-ddp/shakespeare/probe-")
    assert left.endswith(".sagemaker-ignore")
    assert note.ok is None
    assert f"the probe s3://my-bucket/{left} could not be removed again (" in note.detail
    assert note.remedy == "delete it, and allow s3:DeleteObject there to your credentials"


def test_data_prefixes_that_hold_objects(checked):
    put("texts/a.txt", "held-out/b.txt")
    checks = checked("data.train=s3://my-bucket/texts/", "data.validation=s3://my-bucket/held-out")
    assert (checks["data.train"].ok, checks["data.validation"].ok) == (True, True)
    assert checks["data.train"].detail == "s3://my-bucket/texts/ holds objects"


def put(*keys):
    for key in keys:
        boto3.client("s3").put_object(Bucket="my-bucket", Key=key, Body=b"x")


def test_a_data_prefix_without_objects(checked):
    put("texts-of-another/a.txt", "texts/")  # the second is the console's empty folder
    assert failed(checked("data.train=s3://my-bucket/texts"), "data.train") == (
        "data.train is s3://my-bucket/texts/, which holds no objects; upload the data there first"
    )


def test_a_data_bucket_that_does_not_exist(checked):
    sentence = failed(checked("data.train=s3://nowhere/texts"), "data.train")
    assert sentence.startswith("data.train is s3://nowhere/texts/, but there is no such bucket;")


def test_a_data_bucket_in_another_region(checked):
    create_bucket_in_europe("europe")
    sentence = failed(checked("data.train=s3://europe/texts"), "data.train")
    assert "which lies in eu-west-1, but the job in us-east-1; copy the data" in sentence


def test_data_that_only_the_role_may_list_is_a_note(session, checked):
    refuse(session.prepare("s3"), "ListObjectsV2")
    note = checked("data.train=s3://my-bucket/texts")["data.train"]
    assert note.ok is None
    assert note.remedy.startswith("allow s3:ListBucket on my-bucket to your credentials")


def test_a_quota_that_is_too_small(session, checked):
    stub_quota(session, {SPOT: 1}, pages=3)
    assert failed(checked(), "quota") == (
        f"compute.instance_count is 2, but the account's quota {SPOT!r} in us-east-1 is 1; "
        f"ask for 2 in the Service Quotas console, or set another compute.instance_type or "
        f"compute.instance_count"
    )


def test_on_demand_asks_for_the_quota_of_on_demand(checked):
    sentence = failed(checked("spot.enabled=false"), "quota")
    assert "quota 'ml.g5.2xlarge for training job usage' in us-east-1 is 0;" in sentence


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("AccessDeniedException", "allow servicequotas:ListServiceQuotas to your credentials "),
        ("TooManyRequestsException", ""),
    ],
)
def test_a_quota_that_may_not_be_asked_is_a_note(session, checked, code, remedy):
    refuse(session.prepare("service-quotas"), "ListServiceQuotas", code)
    note = checked()["quota"]
    assert note.ok is None
    assert note.detail.startswith("could not be asked (")
    assert note.remedy.startswith(remedy)


def test_an_instance_type_without_a_quota_is_a_note(session, checked):
    stub_quota(session, {})
    note = checked()["quota"]
    assert (note.ok, note.detail) == (None, f"Service Quotas lists no {SPOT!r} in us-east-1")


@pytest.mark.parametrize("status", ["InProgress", "Stopping"])
def test_a_job_that_still_writes_to_the_same_prefix(session, checked, status):
    stub_jobs(session, status, {"shakespeare-1": URI})
    assert failed(checked(), "jobs") == (
        f"the job shakespeare-1 is {status} and writes to {URI} too; wait until it has ended, or "
        f"stop it: aws sagemaker stop-training-job --region us-east-1 "
        f"--training-job-name shakespeare-1"
    )


def stub_jobs(session, status, jobs):
    """SageMaker lists these jobs (name → checkpoint address), all with `status`."""
    stub = Stubber(session.prepare("sagemaker"))
    now = datetime.datetime.now(datetime.UTC)
    for listed in preflight.STILL_WRITING:
        found = jobs if listed == status else {}
        summaries = [
            {
                "TrainingJobName": name,
                "TrainingJobArn": f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}",
                "CreationTime": now,
                "TrainingJobStatus": status,
            }
            for name in found
        ]
        expected = {
            "StatusEquals": listed,
            "NameContains": "shakespeare",
            "SortBy": "CreationTime",
            "SortOrder": "Descending",
            "MaxResults": 100,
        }
        stub.add_response("list_training_jobs", {"TrainingJobSummaries": summaries}, expected)
        for name, uri in found.items():
            if name.startswith("shakespeare-"):  # no other is asked about
                stub.add_response("describe_training_job", description(name, status, uri, now))
    stub.activate()
    return stub


def description(name, status, uri, now):
    job = {
        "TrainingJobName": name,
        "TrainingJobArn": f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}",
        "ModelArtifacts": {"S3ModelArtifacts": "s3://my-bucket/model.tar.gz"},
        "TrainingJobStatus": status,
        "SecondaryStatus": "Training",
        "AlgorithmSpecification": {"TrainingInputMode": "File"},
        "ResourceConfig": {"VolumeSizeInGB": 1},
        "StoppingCondition": {},
        "CreationTime": now,
    }
    return job | ({"CheckpointConfig": {"S3Uri": uri}} if uri else {})


def test_jobs_that_write_elsewhere_are_no_hindrance(session, checked):
    other = "s3://my-bucket/spot-ddp/shakespeare/snapshots-2/"
    jobs = {"shakespeare-1": other, "shakespeare-2": None, "not-shakespeare-3": URI}
    stub = stub_jobs(session, "InProgress", jobs)
    assert checked()["jobs"].ok
    stub.assert_no_pending_responses()


def test_jobs_that_may_not_be_listed_are_a_note(session, checked):
    refuse(session.prepare("sagemaker"), "ListTrainingJobs", "AccessDeniedException")
    note = checked()["jobs"]
    assert note.ok is None
    assert "sagemaker:ListTrainingJobs" in note.remedy
