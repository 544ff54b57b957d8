"""The policies allow what a job and a person do under one bucket and prefix, and nothing else."""

import fnmatch
import json
import re

import pytest

from launch import config, iam, start
from launch.errors import Refused


@pytest.fixture
def policies(values):
    """The three documents for the default job, with `section.key=value` overrides."""

    def make(*overrides):
        for override in overrides:
            config._apply(values, override)
        return iam.policies(config.validate(values))

    return make


def statements(document):
    """The document's statements by their Sid, which must be unique."""
    found = {statement["Sid"]: statement for statement in document["Statement"]}
    assert len(found) == len(document["Statement"])
    return found


def actions(document):
    return {action for statement in document["Statement"] for action in statement["Action"]}


def listed(value):
    return [value] if isinstance(value, str) else value


EVERYTHING = (
    "aws.subnets=[subnet-1, subnet-2]",
    "aws.security_group_ids=[sg-1]",
    "aws.kms_key=alias/files",
    "aws.volume_kms_key=1234abcd-12ab-34cd-56ef-1234567890ab",
    "compute.instance_type=ml.p3.2xlarge",
    "aws.tags={team: vision}",
    "data.train=s3://their-bucket/text/",
)


@pytest.mark.parametrize("overrides", [(), EVERYTHING])
def test_the_documents_are_policies_that_iam_takes(policies, overrides):
    documents = policies(*overrides)
    assert list(documents) == ["execution_role", "trust", "person"]
    for document in documents.values():
        assert document["Version"] == "2012-10-17"
        # The limit of a managed policy; IAM does not count white space.
        assert len(json.dumps(document, separators=(",", ":"))) <= 6144
        for sid, statement in statements(document).items():
            assert re.fullmatch("[A-Za-z0-9]+", sid)
            assert statement["Effect"] == "Allow"
            assert "*" not in "".join(statement["Action"])


def test_sagemaker_alone_may_take_the_role(policies):
    (statement,) = policies()["trust"]["Statement"]
    assert statement["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    assert statement["Action"] == "sts:AssumeRole"


def test_the_roles_files_end_at_the_prefix(policies):
    found = statements(policies("aws.prefix=team/project")["execution_role"])
    files = found["KeepSnapshotsCodeDataAndOutput"]
    assert files["Resource"] == "arn:aws:s3:::my-bucket/team/project/*"
    assert {"s3:GetObject", "s3:PutObject", "s3:DeleteObject"} <= set(files["Action"])
    listing = found["FindThemUnderThePrefix"]
    assert listing["Resource"] == "arn:aws:s3:::my-bucket"
    assert listing["Condition"] == {"StringLike": {"s3:prefix": ["team/project/*"]}}
    buckets = [s for s in found.values() if "s3:ListBucket" in s["Action"]]
    assert buckets == [listing]


def test_every_address_in_the_request_is_within_the_roles_rights(policies, values):
    overrides = ("data.validation=s3://their-bucket/text",)
    found = statements(policies(*overrides)["execution_role"])
    request = start.request_of(config.validate(values))
    addresses = re.findall(r"s3://([^\"\\]+)", json.dumps(request))
    granted = [
        resource.removeprefix("arn:aws:s3:::")
        for statement in found.values()
        if "s3:GetObject" in statement["Action"]
        for resource in listed(statement["Resource"])
    ]
    assert len(addresses) >= 5
    for address in addresses:
        assert any(fnmatch.fnmatchcase(address, pattern) for pattern in granted), address


def test_data_that_lies_elsewhere_is_read_and_never_written(policies):
    documents = policies(
        "data.train=s3://their-bucket/text/",
        "data.validation=s3://their-bucket/held-out",
        "data.channels={extra: s3://other-bucket/a/b/}",
    )
    found = statements(documents["execution_role"])
    assert found["ReadTheData1"]["Action"] == ["s3:GetObject"]
    assert found["ReadTheData1"]["Resource"] == [
        "arn:aws:s3:::their-bucket/held-out/*",
        "arn:aws:s3:::their-bucket/text/*",
    ]
    assert found["FindTheData1"]["Resource"] == "arn:aws:s3:::their-bucket"
    assert found["FindTheData1"]["Condition"] == {
        "StringLike": {"s3:prefix": ["held-out/*", "text/*"]}
    }
    assert found["ReadTheData2"]["Resource"] == ["arn:aws:s3:::other-bucket/a/b/*"]
    assert "ReadTheData1" not in statements(documents["person"])
    assert "FindTheData2" in statements(documents["person"])


def test_a_star_in_a_name_is_no_wildcard(policies):
    found = statements(policies("data.train=s3://their-bucket/a*b$c?/")["execution_role"])
    assert found["ReadTheData1"]["Resource"] == ["arn:aws:s3:::their-bucket/a${*}b${$}c${?}/*"]


@pytest.mark.parametrize(
    ("image", "repository"),
    [
        ("null", "us-east-1:763104351884:repository/pytorch-training"),
        (
            "pytorch:2.13-cu133-amzn2023-sagemaker",
            "us-east-1:763104351884:repository/pytorch",
        ),
        (
            "123456789012.dkr.ecr.eu-west-1.amazonaws.com/team/mine@sha256:" + "0" * 64,
            "eu-west-1:123456789012:repository/team/mine",
        ),
    ],
)
def test_the_role_pulls_one_container(policies, image, repository):
    found = statements(policies(f"compute.image_uri={image}")["execution_role"])
    assert found["PullTheContainer"]["Resource"] == f"arn:aws:ecr:{repository}"


def test_a_container_that_is_not_in_ecr_needs_no_right_there(policies):
    document = policies("compute.image_uri=docker.my-company.com/mine:1")["execution_role"]
    assert not [action for action in actions(document) if action.startswith("ecr:")]


def test_a_region_without_a_registry_is_refused(policies):
    with pytest.raises(Refused, match=r"aws\.region is 'us-west-9'"):
        policies("aws.region=us-west-9")


def test_logs_and_metrics_are_those_of_training_jobs(policies):
    documents = policies()
    found = statements(documents["execution_role"])
    group = "arn:aws:logs:us-east-1:123456789012:log-group:/aws/sagemaker/TrainingJobs"
    assert found["WriteTheLogs"]["Resource"] == [group, f"{group}:*"]
    assert found["ReportMetrics"]["Condition"] == {
        "StringEquals": {"cloudwatch:namespace": "/aws/sagemaker/TrainingJobs"}
    }
    reading = statements(documents["person"])["ReadTheLogs"]
    assert reading["Resource"] == [group, f"{group}:*"]
    assert not [action for action in reading["Action"] if "Put" in action or "Create" in action]


def test_no_key_and_no_network_means_no_right_to_any(policies):
    documents = policies()
    for name in ("execution_role", "person"):
        assert not [a for a in actions(documents[name]) if a.startswith(("kms:", "ec2:"))]


KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
OTHER = "arn:aws:kms:eu-west-1:999999999999:key/1234abcd-12ab-34cd-56ef-1234567890ab"


@pytest.mark.parametrize(
    ("key", "resource"),
    [(KEY.partition("key/")[2], KEY), (KEY.rpartition(":")[2], KEY), (KEY, KEY), (OTHER, OTHER)],
)
def test_a_key_is_named_however_it_is_written(policies, key, resource):
    documents = policies(f"aws.kms_key={key}")
    for name in ("execution_role", "person"):
        statement = statements(documents[name])["EncryptFilesInS3"]
        assert statement["Resource"] == resource
        assert "Condition" not in statement
        assert {"kms:GenerateDataKey", "kms:Decrypt"} <= set(statement["Action"])


@pytest.mark.parametrize("alias", ["alias/files", "arn:aws:kms:us-east-1:123456789012:alias/files"])
def test_an_alias_stands_for_the_key_behind_it(policies, alias):
    statement = statements(policies(f"aws.kms_key={alias}")["execution_role"])["EncryptFilesInS3"]
    assert statement["Resource"] == "arn:aws:kms:us-east-1:123456789012:key/*"
    assert statement["Condition"] == {
        "ForAnyValue:StringEquals": {"kms:ResourceAliases": "alias/files"}
    }


def test_grants_on_the_volumes_key_are_for_aws_alone(policies):
    found = statements(
        policies(f"aws.volume_kms_key={KEY}", "compute.instance_type=ml.p3.2xlarge")[
            "execution_role"
        ]
    )
    assert found["EncryptTheVolumes"]["Action"] == ["kms:CreateGrant"]
    assert found["EncryptTheVolumes"]["Resource"] == KEY
    assert found["EncryptTheVolumes"]["Condition"] == {
        "Bool": {"kms:GrantIsForAWSResource": "true"}
    }


def test_the_role_joins_the_networks_that_are_set(policies):
    found = statements(policies(*EVERYTHING)["execution_role"])
    assert found["JoinTheVpc"]["Resource"] == [
        "arn:aws:ec2:us-east-1:123456789012:network-interface/*",
        "arn:aws:ec2:us-east-1:*:subnet/subnet-1",
        "arn:aws:ec2:us-east-1:*:subnet/subnet-2",
        "arn:aws:ec2:us-east-1:*:security-group/sg-1",
    ]
    # What the page "CreateTrainingJob API: Execution Role Permissions" asks for with a VPC.
    assert {action for action in actions({"Statement": found.values()}) if "ec2:" in action} == {
        "ec2:CreateNetworkInterface",
        "ec2:CreateNetworkInterfacePermission",
        "ec2:DeleteNetworkInterface",
        "ec2:DeleteNetworkInterfacePermission",
        "ec2:DescribeNetworkInterfaces",
        "ec2:DescribeVpcs",
        "ec2:DescribeDhcpOptions",
        "ec2:DescribeSubnets",
        "ec2:DescribeSecurityGroups",
    }


def test_a_person_hands_over_this_role_to_sagemaker_alone(policies):
    statement = statements(policies()["person"])["HandTheRoleToSageMakerAlone"]
    assert statement["Action"] == ["iam:PassRole"]
    assert statement["Resource"] == "arn:aws:iam::123456789012:role/training"
    assert statement["Condition"] == {
        "StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}
    }


def test_a_person_starts_follows_and_stops_jobs(policies):
    found = statements(policies()["person"])
    jobs = found["StartFollowAndStopJobs"]
    assert jobs["Resource"] == "arn:aws:sagemaker:us-east-1:123456789012:training-job/*"
    assert jobs["Action"] == [
        "sagemaker:CreateTrainingJob",
        "sagemaker:DescribeTrainingJob",
        "sagemaker:StopTrainingJob",
        "sagemaker:AddTags",
    ]
    assert found["SeeWhichJobsRun"]["Action"] == [
        "sagemaker:ListTrainingJobs",
        "sagemaker:Search",
    ]
    assert found["SeeTheSpotQuota"]["Action"] == ["servicequotas:ListServiceQuotas"]
    assert found["SeeThatTheRoleIsThere"]["Action"] == ["iam:GetRole"]


def test_a_person_may_ask_whether_the_buckets_are_there(policies):
    documents = policies("data.train=s3://their-bucket/text/")
    statement = statements(documents["person"])["SeeThatTheBucketsAreThereAndWhere"]
    assert statement["Action"] == ["s3:ListBucket"]
    assert statement["Resource"] == ["arn:aws:s3:::my-bucket", "arn:aws:s3:::their-bucket"]
    assert statement["Condition"] == {"Null": {"s3:prefix": "true"}}
    assert "SeeThatTheBucketsAreThereAndWhere" not in statements(documents["execution_role"])


def test_a_role_with_a_path_keeps_it(policies):
    role = "arn:aws:iam::123456789012:role/service-role/training"
    found = statements(policies(f"aws.role={role}")["person"])
    assert found["HandTheRoleToSageMakerAlone"]["Resource"] == role


@pytest.mark.parametrize(
    ("region", "partition"),
    [
        ("us-east-1", "aws"),
        ("eu-central-2", "aws"),
        ("cn-north-1", "aws-cn"),
        ("us-gov-west-1", "aws-us-gov"),
    ],
)
def test_every_arn_is_of_the_regions_partition(policies, region, partition):
    role = f"arn:{partition}:iam::123456789012:role/training"
    documents = policies(*EVERYTHING, f"aws.region={region}", f"aws.role={role}")
    arns = re.findall(r"arn:[a-z\-]+:[a-z0-9]+:[a-z0-9\-]*", json.dumps(documents))
    assert {arn.split(":")[1] for arn in arns} == {partition}
    assert {arn.split(":")[3] for arn in arns} == {region, ""}


def test_stand_ins_are_shown_where_nothing_is_set(values):
    values["aws"].update(region=None, role=None, bucket=None)
    filled, missing = start.with_stand_ins(config.validate(values))
    documents = iam.policies(filled)
    assert missing == ["region", "role", "bucket"]
    text = json.dumps(documents)
    assert "arn:aws:s3:::set-aws.bucket/spot-ddp/*" in text
    assert "arn:aws:iam::000000000000:role/set-aws.role" in text
