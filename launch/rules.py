"""What SageMaker or the container would refuse, or what would waste money, known without AWS.

Each rule yields sentences with the setting, the value seen, what is right, and what to type.
"""

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from launch import container_rules, limits
from launch.container_rules import named, shown
from launch.schema import JobConfig, readable
from training.settings import RUN_NAME_PATTERN

TRAINING = Path(__file__).resolve().parents[1] / "training"
TIMESTAMP_LENGTH = len("-20261130-221530-123")


def problems(config: JobConfig, source: Path = TRAINING) -> list[str]:
    """Everything that is wrong with `config` as far as can be known without AWS.

    `source` is the folder that is shipped, whose requirements.txt is judged if there is one.
    """
    found = [problem for rule in RULES for problem in rule(config)]
    return found + list(container_rules.requirements_problems(source / "requirements.txt", config))


def _run_name(config: JobConfig) -> Iterator[str]:
    name, longest = config.run_name, limits.JOB_NAME_LENGTH - TIMESTAMP_LENGTH
    if not re.fullmatch(RUN_NAME_PATTERN, name):
        yield (
            f"run_name is {shown(name)}; SageMaker allows letters, digits and hyphens, "
            f"beginning and ending with a letter or digit: set run_name to something like my-run-1"
        )
    elif len(name) > longest:
        yield (
            f"run_name is {len(name)} characters long; with the time added a job name may have "
            f"{limits.JOB_NAME_LENGTH}: set run_name to {longest} characters or less"
        )


def _durations(config: JobConfig) -> Iterator[str]:
    spot = config.spot
    if spot.enabled and spot.max_wait < spot.max_run:
        yield (
            f"spot.max_wait is {spot.max_wait} s but spot.max_run is {spot.max_run} s; a spot job "
            f"must be allowed to wait at least as long as it may run: "
            f"set spot.max_wait to {readable(spot.max_run)} or more"
        )
    if spot.max_run > limits.LONGEST_RUN:
        yield (
            f"spot.max_run is {spot.max_run} s; SageMaker stops every job after 28 days: "
            f"set spot.max_run to 28d or less"
        )
    if spot.enabled and spot.max_wait > limits.LONGEST_WAIT:
        yield (
            f"spot.max_wait is {spot.max_wait} s; a job lives for 30 days at most, waiting "
            f"included: set spot.max_wait to 30d or less"
        )


def _warm_pool(config: JobConfig) -> Iterator[str]:
    kept = config.compute.warm_pool
    if kept and config.spot.enabled:
        yield (
            f"compute.warm_pool is {kept} s and spot.enabled is true; spot instances cannot be "
            f"kept: set compute.warm_pool to null, or spot.enabled to false"
        )
    if kept and kept > limits.LONGEST_WARM_POOL:
        yield (
            f"compute.warm_pool is {kept} s; SageMaker keeps instances for an hour at most: "
            f"set compute.warm_pool to 1h or less"
        )


def _channels(config: JobConfig) -> Iterator[str]:
    data = config.data
    taken = {"TRAIN": "data.train", "VALIDATION": "data.validation"}
    sources = {"data.train": data.train, "data.validation": data.validation}
    for name in data.channels:
        setting = f"data.channels.{named(name)}"
        sources[setting] = data.channels[name]
        if not re.fullmatch(limits.CHANNEL_NAME, name):
            yield (
                f"data.channels has the name {shown(name)}; a channel's name is made of 1 to 64 "
                f"letters, digits, dots, hyphens and underscores: name it something like extra-text"
            )
        elif name in limits.RESERVED_CHANNELS:
            yield f"{setting} is a name that the SageMaker SDK keeps for itself: choose another"
        elif (other := taken.setdefault(name.upper(), setting)) != setting:
            yield (
                f"{setting} reaches the container as SM_CHANNEL_{name.upper()}, which {other} "
                f"means already: choose another name"
            )
    for setting, source in sources.items():
        if source is not None and not source.strip():
            yield f"{setting} is empty; set it to sample, an S3 prefix or a folder, or remove it"
        elif source and source.startswith("s3://") and len(source) >= limits.ADDRESS_LENGTH:
            yield (
                f"{setting} is {len(source)} characters long; SageMaker allows an address of "
                f"{limits.ADDRESS_LENGTH}, with its last slash: use a shorter prefix"
            )
    count = 1 + (data.validation is not None) + len(data.channels) + config.aws.network_isolation
    if count > limits.CHANNELS:
        code = ", the code's own included" if config.aws.network_isolation else ""
        yield (
            f"data has {count} channels{code}; SageMaker allows {limits.CHANNELS}: "
            f"remove {count - limits.CHANNELS} of data.channels"
        )


def _network(config: JobConfig) -> Iterator[str]:
    aws = config.aws
    if bool(aws.subnets) != bool(aws.security_group_ids):
        given, missing = ("subnets", "security_group_ids")[:: 1 if aws.subnets else -1]
        yield (
            f"aws.{given} is set but aws.{missing} is not; a VPC needs both: "
            f"set aws.{missing} too, or remove aws.{given}"
        )
    for name, ids, kind, most in (
        ("subnets", aws.subnets, "subnet", limits.SUBNETS),
        ("security_group_ids", aws.security_group_ids, "sg", limits.SECURITY_GROUPS),
    ):
        if len(ids) > most:
            yield f"aws.{name} has {len(ids)} entries; SageMaker allows {most}: name {most} or less"
        for one in ids:
            well_formed = re.fullmatch(rf"{kind}-[0-9a-zA-Z]+", one)
            if not well_formed or len(one) > limits.NETWORK_ID_LENGTH:
                yield f"aws.{name} has {shown(one)}; an entry looks like {kind}-0a1b2c3d4e5f67890"
        if len(set(ids)) < len(ids):
            yield f"aws.{name} names one entry twice; name each once"


def _addresses(config: JobConfig) -> Iterator[str]:
    bucket, prefix, most = config.aws.bucket, config.aws.prefix, limits.ADDRESS_LENGTH
    if bucket and (".." in bucket or re.fullmatch(r"\d+(\.\d+){3}", bucket)):
        yield (
            f"aws.bucket is {bucket!r}; a bucket's name has no two dots in a row and is no IP "
            f"address: name one that exists, such as my-bucket"
        )
    if {".", ".."} & set(prefix.split("/")):
        yield (
            f"aws.prefix is {shown(prefix)}; S3 takes . and .. for names, most tools for folders: "
            f"write aws.prefix without them, such as team/project"
        )
    job = "j" * limits.JOB_NAME_LENGTH
    longest = f"s3://{bucket or 'b' * 63}/{prefix}/{job}/code/{job}/source/sourcedir.tar.gz"
    if len(longest) > most:
        yield (
            f"aws.prefix is {len(prefix)} characters long; the addresses made from it may have "
            f"{most}: set aws.prefix to {len(prefix) - len(longest) + most} characters or less"
        )


def _role_and_keys(config: JobConfig) -> Iterator[str]:
    aws, (least, most) = config.aws, limits.ROLE_LENGTH
    if aws.role is not None and not least <= len(aws.role) <= most:
        yield (
            f"aws.role is {len(aws.role)} characters long; an ARN has {least} to {most}: "
            f"copy it from the role's page in the console"
        )
    for name, key in {"kms_key": aws.kms_key, "volume_kms_key": aws.volume_kms_key}.items():
        well_formed = key is None or re.fullmatch(limits.KMS_KEY, key)
        if key is not None and not (well_formed and len(key) <= limits.KMS_KEY_LENGTH):
            yield (
                f"aws.{name} is {shown(key)}; give the key's ID, its ARN, or alias/name, "
                f"or set aws.{name} to null"
            )
    if aws.volume_kms_key and limits.has_local_nvme(config.compute.instance_type):
        yield (
            f"aws.volume_kms_key is set but compute.instance_type is "
            f"{config.compute.instance_type}, whose own disks are always encrypted and take no "
            f"key: set aws.volume_kms_key to null"
        )


def _tags(config: JobConfig) -> Iterator[str]:
    tags = config.aws.tags
    if len(tags) >= limits.TAGS:
        yield (
            f"aws.tags has {len(tags)} tags; AWS allows {limits.TAGS}, and one is ours: remove some"
        )
    for key, value in tags.items():
        if not 1 <= len(key) <= limits.TAG_KEY_LENGTH:
            yield (
                f"aws.tags has the key {shown(key)}; a key has 1 to {limits.TAG_KEY_LENGTH} "
                f"characters: rename it"
            )
        elif key.lower().startswith("aws:"):
            yield f"aws.tags has the key {shown(key)}; AWS keeps aws: for itself: rename it"
        elif key == limits.PROJECT_TAG:
            yield (
                f"aws.tags has the key {shown(key)}, which is always {limits.PROJECT}, so that "
                f"follow.py finds its jobs: rename it"
            )
        elif len(value) > limits.TAG_VALUE_LENGTH:
            yield (
                f"aws.tags.{named(key)} is {len(value)} characters long; AWS allows "
                f"{limits.TAG_VALUE_LENGTH}: shorten it"
            )
        elif strange := [sign for sign in key + value if not _fits_a_tag(sign)]:
            yield (
                f"aws.tags has {shown(key)}: {shown(value)}; AWS does not allow {strange[0]!r} "
                f"there: use letters, digits, spaces and {limits.TAG_SIGNS} only"
            )


RULES = (
    *(_run_name, _durations, _warm_pool, _channels, _network, _addresses, _role_and_keys),
    *(_tags, *container_rules.RULES),
)


def _fits_a_tag(sign: str) -> bool:
    return sign in limits.TAG_SIGNS or unicodedata.category(sign)[0] in limits.TAG_CATEGORIES
