"""The least that a job needs: IAM policies for exactly the bucket, prefix and role of a JobConfig.

Everything is derived from the configuration; nothing is read from or sent to AWS.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch import images
from launch.schema import JobConfig

SAGEMAKER = "sagemaker.amazonaws.com"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"  # of all training jobs; also their metrics' namespace

Statement = dict[str, Any]


def policies(config: JobConfig) -> dict[str, dict[str, Any]]:
    """Three policy documents by name, ready for `json.dumps`; `config` names region, role, bucket.

    `execution_role` is what the job may do, `trust` who may take that role, `person` what whoever
    starts, follows and stops jobs may do. Raises Refused if the container's registry is unknown.
    """
    place = _Place.of(config)
    return {
        "execution_role": _document(_of_the_role(config, place)),
        "trust": _document([_trust()]),
        "person": _document(_of_the_person(config, place)),
    }


@dataclass(frozen=True)
class _Place:
    """Where the resources are: what their ARNs are made of."""

    partition: str
    region: str
    account: str

    @classmethod
    def of(cls, config: JobConfig) -> "_Place":
        region = str(config.aws.region)
        account = str(config.aws.role).split(":")[4]
        return cls(_partition(region), region, account)

    def arn(self, service: str, resource: str, *, account: str | None = None) -> str:
        """The ARN of something in this region, in the role's account unless another is given."""
        owner = self.account if account is None else account
        return f"arn:{self.partition}:{service}:{self.region}:{owner}:{resource}"

    def s3(self, path: str) -> str:
        """The ARN of a bucket or of objects, which have neither region nor account."""
        return f"arn:{self.partition}:s3:::{path}"


def _partition(region: str) -> str:
    if region.startswith("cn-"):
        return "aws-cn"
    return "aws-us-gov" if region.startswith("us-gov-") else "aws"


def _document(statements: Sequence[Statement]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _allow(
    why: str,
    actions: Sequence[str],
    resources: str | Sequence[str],
    condition: Mapping[str, Any] | None = None,
) -> Statement:
    statement = {"Sid": why, "Effect": "Allow", "Action": actions, "Resource": resources}
    return {**statement, "Condition": condition} if condition else statement


def _trust() -> Statement:
    return {
        "Sid": "SageMakerRunsTheJobAsThisRole",
        "Effect": "Allow",
        "Principal": {"Service": SAGEMAKER},
        "Action": "sts:AssumeRole",
    }


def _of_the_role(config: JobConfig, place: _Place) -> list[Statement]:
    return [
        *_files(config, place),
        *_data(config, place, readable=True),
        *_container(config, place),
        *_logs_and_metrics(place),
        *_keys(config, place),
        *_network(config, place),
    ]


def _of_the_person(config: JobConfig, place: _Place) -> list[Statement]:
    return [
        *_files(config, place),
        _buckets(config, place),
        *_data(config, place, readable=False),
        *_jobs(config, place),
        *_role(config),
        _allow(
            "ReadTheLogs",
            ["logs:DescribeLogStreams", "logs:GetLogEvents", "logs:FilterLogEvents"],
            _log_group(place),
        ),
        # Quotas have no resources that could be named for a list.
        _allow("SeeTheSpotQuota", ["servicequotas:ListServiceQuotas"], "*"),
        *_keys(config, place),
    ]


def _files(config: JobConfig, place: _Place) -> list[Statement]:
    bucket, prefix = str(config.aws.bucket), config.aws.prefix
    return [
        _allow(
            "KeepSnapshotsCodeDataAndOutput",
            ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
            place.s3(f"{bucket}/{prefix}/*"),
        ),
        _allow(
            "FindThemUnderThePrefix",
            ["s3:ListBucket"],
            place.s3(bucket),
            {"StringLike": {"s3:prefix": [f"{prefix}/*"]}},
        ),
    ]


def _data(config: JobConfig, place: _Place, *, readable: bool) -> list[Statement]:
    """Listing, and reading if `readable`, of the channels that are S3 prefixes already."""
    statements = []
    # A statement for each bucket: together, a prefix of one would count for the others as well.
    for number, (bucket, patterns) in enumerate(_sources(config).items(), start=1):
        condition = {"StringLike": {"s3:prefix": patterns}}
        statements.append(
            _allow(f"FindTheData{number}", ["s3:ListBucket"], place.s3(bucket), condition)
        )
        if readable:
            objects = [place.s3(f"{bucket}/{pattern}") for pattern in patterns]
            statements.append(_allow(f"ReadTheData{number}", ["s3:GetObject"], objects))
    return statements


def _buckets(config: JobConfig, place: _Place) -> Statement:
    """HeadBucket on the buckets: the same right as listing them, asked for without a prefix.

    S3 cannot grant it without also granting the list of all names in the bucket.
    """
    buckets = dict.fromkeys([str(config.aws.bucket), *_sources(config)])
    return _allow(
        "SeeThatTheBucketsAreThereAndWhere",
        ["s3:ListBucket"],
        [place.s3(bucket) for bucket in buckets],
        {"Null": {"s3:prefix": "true"}},
    )


def _sources(config: JobConfig) -> dict[str, list[str]]:
    """Bucket → patterns of the keys under the S3 prefixes that data is read from."""
    sources = [config.data.train, config.data.validation, *config.data.channels.values()]
    found: dict[str, set[str]] = {}
    for source in sources:
        if source and source.startswith("s3://"):
            bucket, _, prefix = source.removeprefix("s3://").rstrip("/").partition("/")
            found.setdefault(bucket, set()).add(f"{_literal(prefix)}/*")
    return {bucket: sorted(patterns) for bucket, patterns in found.items()}


def _literal(text: str) -> str:
    """`text` with nothing in it that IAM would read as a wildcard or a variable."""
    return re.sub(r"[$*?]", lambda match: f"${{{match[0]}}}", text)


def _container(config: JobConfig, place: _Place) -> list[Statement]:
    """Pulling the one container from ECR; nothing for a container that lies elsewhere."""
    image = config.compute.image_uri or f"pytorch-training:{config.compute.framework_version}"
    address = images.resolve(image, place.region)
    match = re.match(r"(\d{12})\.dkr\.ecr(?:-fips)?\.([a-z0-9\-]+)\.[^/]+/([^:@]+)", address)
    if not match:
        return []
    account, region, repository = match.groups()
    return [
        # The one action of ECR that cannot be limited to a repository.
        _allow("LogInToTheContainerRegistry", ["ecr:GetAuthorizationToken"], "*"),
        _allow(
            "PullTheContainer",
            ["ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage"],
            f"arn:{place.partition}:ecr:{region}:{account}:repository/{repository}",
        ),
    ]


def _log_group(place: _Place) -> list[str]:
    """The log group of training jobs, and the streams in it."""
    group = place.arn("logs", f"log-group:{LOG_GROUP}")
    return [group, f"{group}:*"]


def _logs_and_metrics(place: _Place) -> list[Statement]:
    return [
        _allow(
            "WriteTheLogs",
            [
                "logs:CreateLogGroup",
                "logs:CreateLogStream",
                "logs:DescribeLogStreams",
                "logs:PutLogEvents",
            ],
            _log_group(place),
        ),
        # CloudWatch has no resources to name; its condition key for the namespace is all there is.
        _allow(
            "ReportMetrics",
            ["cloudwatch:PutMetricData"],
            "*",
            {"StringEquals": {"cloudwatch:namespace": LOG_GROUP}},
        ),
    ]


def _keys(config: JobConfig, place: _Place) -> list[Statement]:
    """The KMS keys that are set, for S3 and for the volumes."""
    statements = []
    if key := config.aws.kms_key:
        actions = ["kms:Encrypt", "kms:Decrypt", "kms:GenerateDataKey", "kms:DescribeKey"]
        statements.append(_allow("EncryptFilesInS3", actions, *_key(key, place)))
    if key := config.aws.volume_kms_key:
        resource, condition = _key(key, place)
        statements.append(_allow("SeeTheKeyOfTheVolumes", ["kms:DescribeKey"], resource, condition))
        only_aws = {**condition, "Bool": {"kms:GrantIsForAWSResource": "true"}}
        statements.append(_allow("EncryptTheVolumes", ["kms:CreateGrant"], resource, only_aws))
    return statements


def _key(key: str, place: _Place) -> tuple[str, dict[str, Any]]:
    """Resource and condition that mean one key: by its ARN or id, or by an alias of it.

    IAM does not take the ARN of an alias for the key behind it.
    """
    resource = key if key.startswith("arn:") else place.arn("kms", key)
    head, _, name = resource.rpartition(":")
    if name.startswith("alias/"):
        return f"{head}:key/*", {"ForAnyValue:StringEquals": {"kms:ResourceAliases": name}}
    return f"{head}:key/{name.removeprefix('key/')}", {}


def _network(config: JobConfig, place: _Place) -> list[Statement]:
    """The network interfaces by which the instances join the VPC, where one is set."""
    if not config.aws.subnets:
        return []
    interfaces = place.arn("ec2", "network-interface/*")
    # Of any account: subnets may be shared with this one.
    joined = [place.arn("ec2", f"subnet/{name}", account="*") for name in config.aws.subnets]
    joined += [
        place.arn("ec2", f"security-group/{name}", account="*")
        for name in config.aws.security_group_ids
    ]
    return [
        _allow("JoinTheVpc", ["ec2:CreateNetworkInterface"], [interfaces, *joined]),
        _allow(
            "GiveTheInstancesTheirInterfaces",
            ["ec2:CreateNetworkInterfacePermission", "ec2:DeleteNetworkInterface"],
            interfaces,
        ),
        # These cannot be limited to a resource.
        _allow(
            "LookAtTheVpc",
            [
                "ec2:DeleteNetworkInterfacePermission",
                "ec2:DescribeNetworkInterfaces",
                "ec2:DescribeVpcs",
                "ec2:DescribeDhcpOptions",
                "ec2:DescribeSubnets",
                "ec2:DescribeSecurityGroups",
            ],
            "*",
        ),
    ]


def _jobs(config: JobConfig, place: _Place) -> list[Statement]:
    actions = ["CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob", "AddTags"]
    return [
        _allow(
            "StartFollowAndStopJobs",
            [f"sagemaker:{action}" for action in actions],
            place.arn("sagemaker", "training-job/*"),
        ),
        # SageMaker limits these to no resource.
        _allow("SeeWhichJobsRun", ["sagemaker:ListTrainingJobs", "sagemaker:Search"], "*"),
    ]


def _role(config: JobConfig) -> list[Statement]:
    role = str(config.aws.role)
    return [
        _allow(
            "HandTheRoleToSageMakerAlone",
            ["iam:PassRole"],
            role,
            {"StringEquals": {"iam:PassedToService": SAGEMAKER}},
        ),
        _allow("SeeThatTheRoleIsThere", ["iam:GetRole"], role),
    ]
