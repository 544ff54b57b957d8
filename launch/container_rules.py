"""What the instances, the container and its command line can take, known without AWS.

Each rule yields sentences with the setting, the value seen, what is right, and what to type.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launch import limits
from launch.schema import JobConfig
from training.settings import validation_problems

BYTES_PER_PARAMETER = 12  # in a snapshot: fp32, and AdamW's two moments
BYTES_OF_MODEL = 4
GIB = 2**30


def shown(text: str) -> str:
    """A value in quotes, on one line, cut where it is long."""
    return repr(text if len(text) <= 80 else text[:77] + "…")


def named(text: str) -> str:
    """A name as `shown`, without the quotes."""
    return shown(text)[1:-1]


def container(config: JobConfig) -> Iterator[str]:
    compute = config.compute
    if compute.image_uri is not None:
        if not re.fullmatch(rf"[\w.:/@-]{{1,{limits.IMAGE_LENGTH}}}", compute.image_uri, re.ASCII):
            yield (
                f"compute.image_uri is {shown(compute.image_uri)}; an image is named without "
                f"spaces, in {limits.IMAGE_LENGTH} characters or less: copy its URI from ECR, or "
                f"set compute.image_uri to null"
            )
        return
    if not limits.has_gpus(compute.instance_type):
        yield (
            f"compute.instance_type is {compute.instance_type}, which holds no NVIDIA GPU; the SDK "
            f"finds containers with torchrun for those only: choose an instance type such as "
            f"ml.g5.2xlarge, or name a container for this one with compute.image_uri, such as "
            f"pytorch-training:2.8.0-cpu-py312"
        )
    version, python = compute.framework_version, limits.CONTAINERS.get(compute.framework_version)
    if python is None or not _new_enough(version):
        why = (
            "too old for training/" if python else "which the SageMaker SDK cannot run torchrun in"
        )
        near = _nearest_version(version)
        yield (
            f"compute.framework_version is {shown(version)}, {why}: set it to {near} and "
            f"compute.py_version to {limits.CONTAINERS[near]}, "
            f"or name a container with compute.image_uri"
        )
    elif compute.py_version != python:
        yield (
            f"compute.py_version is {shown(compute.py_version)}, but the container of "
            f"compute.framework_version {version} has {python}: set compute.py_version to "
            f"{python}, or name a container with compute.image_uri"
        )


def volume(config: JobConfig, data_bytes: int = 0) -> Iterator[str]:
    """`data_bytes` is what input_mode File will download, where that is known."""
    training, size = config.training, config.compute.volume_gb
    if limits.has_local_nvme(config.compute.instance_type):
        return  # its disks have a size of their own
    parameters = limits.parameter_count(
        training.model_width, training.model_depth, training.sequence_length
    )
    validates = config.data.validation is not None or training.validation_share > 0
    best = BYTES_OF_MODEL * parameters if validates else 0  # in each snapshot, and beside them
    snapshot, count = BYTES_PER_PARAMETER * parameters + best, training.snapshots_kept + 2
    # The one that is being written, and one whose successors have not reached S3 yet; the final
    # model, plain and as an archive; the best one and the one that it replaces.
    models = 2 * BYTES_OF_MODEL * parameters + 2 * best
    needed = math.ceil((snapshot * count + models + data_bytes) / GIB + 1)
    if size < needed:
        data = f"and {data_bytes / GIB:.1f} GiB of data need {needed} GiB"
        yield (
            f"compute.volume_gb is {size}, but {count} snapshots of {snapshot / GIB:.1f} GiB, "
            f"the final model and its archive "
            f"{data if data_bytes else f'need {needed} GiB before any data'}: "
            f"set compute.volume_gb to {needed} or more"
        )
    if size > limits.LARGEST_VOLUME_GB:
        yield (
            f"compute.volume_gb is {size}; a volume has at most {limits.LARGEST_VOLUME_GB}: "
            f"set compute.volume_gb to that or less"
        )


def arithmetic(config: JobConfig) -> Iterator[str]:
    instance_type = config.compute.instance_type
    if config.training.precision == "fp16" and not limits.has_gpus(instance_type):
        yield (
            f"training.precision is fp16, but {instance_type} has no GPU: set training.precision "
            f"to bf16 or fp32, or take an instance type with GPUs"
        )


def validation(config: JobConfig) -> Iterator[str]:
    channel = config.data.validation is not None
    for problem in validation_problems(config.training, channel=channel):
        yield f"training.{problem}"


def batch(config: JobConfig) -> Iterator[str]:
    compute, batch = config.compute, config.training.global_batch_size
    per_host = limits.ranks_per_host(compute.instance_type)
    if per_host is None:
        return
    ranks, micro = compute.instance_count * per_host, config.training.micro_batch_size
    share, rest = divmod(batch, ranks)
    ranks_of = f"{compute.instance_count} × {compute.instance_type}"
    if rest:
        nearest_sizes = f"{batch - rest} or {batch - rest + ranks}" if share else f"{ranks}"
        yield (
            f"training.global_batch_size is {batch}, which the {ranks} ranks of {ranks_of} cannot "
            f"share evenly: set training.global_batch_size to {nearest_sizes}"
        )
    elif micro and share % micro:
        fits = next(d for d in range(min(micro, share), 0, -1) if share % d == 0)
        yield (
            f"training.micro_batch_size is {micro}, which does not divide the {share} samples of a "
            f"rank (training.global_batch_size {batch} on {ranks_of}): "
            f"set training.micro_batch_size to {fits} or 0"
        )


def hyperparameters(config: JobConfig) -> Iterator[str]:
    values = config.hyperparameters()
    del values["run_name"]  # its own rule is stricter
    yield from hyperparameter_problems(values)
    most = limits.HYPERPARAMETERS - limits.SDK_HYPERPARAMETERS
    if len(values) + 1 > most:
        yield (
            f"training has {len(values) + 1} settings; SageMaker allows "
            f"{limits.HYPERPARAMETERS} hyperparameters, and the SDK adds "
            f"{limits.SDK_HYPERPARAMETERS}: keep {most} fields of TrainingSettings"
        )


def hyperparameter_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """What could not travel to `train.py` as `--name value`.

    The toolkit up to 5.1.2, which the newest containers hold, joins the command with spaces and
    gives it to a shell; torchrun then looks for its own options in it.
    """
    for name, value in values.items():
        if problem := _name_problem(name) or _value_problem(value):
            yield f"training.{named(name)} {problem}"


def _name_problem(name: str) -> str | None:
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_]+", name) or name.startswith("sagemaker_"):
        return (
            "cannot be a flag of train.py; a setting's name has two or more letters, digits and "
            "underscores and does not begin with sagemaker_: rename the field of TrainingSettings"
        )
    if len(name) > limits.HYPERPARAMETER_LENGTH:
        return f"is a name of {len(name)} characters; {limits.HYPERPARAMETER_LENGTH} are allowed"
    mistaken = name.replace("_", "-")
    if option := next((o for o in limits.TORCHRUN_OPTIONS if o.startswith(mistaken)), None):
        return f"would be taken by torchrun for its own --{option}; rename the field"
    return None


def _value_problem(value: Any) -> str | None:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if value is None or text == "":
        return "is empty, so that its flag would take the next one for its value; give it a value"
    if not re.fullmatch(r"[A-Za-z0-9_@%+=:,./-]+", text):
        return (
            f"is {shown(text)}, which the container's shell would split or expand; "
            f"use letters, digits and _@%+=:,./- only"
        )
    if isinstance(value, str) and re.match(r"-(?!\d|\.\d)", text):
        return f"is {shown(text)}, which would be taken for a flag; begin it with another sign"
    if len(json.dumps(value)) > limits.HYPERPARAMETER_LENGTH:
        return (
            f"is {len(text)} characters long; {limits.HYPERPARAMETER_LENGTH} are allowed, "
            f"quotes included: put it in a file of training/"
        )
    return None


def environment(config: JobConfig) -> Iterator[str]:
    environment, longest = config.compute.environment, limits.ENVIRONMENT_LENGTH
    most = limits.ENVIRONMENT - len(limits.LAUNCHER_ENVIRONMENT)
    if len(environment) > most:
        yield (
            f"compute.environment has {len(environment)} variables; SageMaker allows "
            f"{limits.ENVIRONMENT} with the launcher's own: keep {most} or less"
        )
    for name, value in environment.items():
        if not re.fullmatch(limits.ENVIRONMENT_NAME, name) or len(name) > longest:
            yield (
                f"compute.environment has the name {shown(name)}; a variable's name is made of "
                f"up to {longest} letters, digits and underscores and begins with no digit"
            )
        elif name in limits.LAUNCHER_ENVIRONMENT:
            yield f"compute.environment sets {name}, which the launcher sets: remove it"
        elif name in limits.RESERVED_ENVIRONMENT or name.startswith(
            limits.RESERVED_ENVIRONMENT_PREFIXES
        ):
            yield (
                f"compute.environment sets {named(name)}, which SageMaker, its role or "
                f"torchrun sets: remove it"
            )
        elif len(value) > longest:
            yield (
                f"compute.environment.{named(name)} is {len(value)} characters long; "
                f"SageMaker allows {longest}: shorten it, or put it in a file of training/"
            )


def requirements_problems(path: Path, config: JobConfig) -> Iterator[str]:
    """What is wrong with the requirements.txt that the container would install, if there is one.

    It is installed again on every host at every restart.
    """
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        yield f"{_place(path)} cannot be read: {getattr(error, 'strerror', None) or 'not text'}"
        return
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    wanted = [
        line for text in joined.splitlines() if (line := re.sub(r"(^|\s)#.*", "", text).strip())
    ]
    if wanted and config.aws.network_isolation:
        yield (
            f"{_place(path)} asks for packages but aws.network_isolation is true, so that none can "
            f"be installed: remove the file, or bring them in an image with compute.image_uri"
        )
    for line in wanted:
        if re.match(r"-[rce]\b|--(requirement|constraint|editable)\b", line):
            yield (
                f"{_place(path)} has {shown(line)}; of all such files only this one reaches the "
                f"container: write the packages themselves here"
            )
        if line.startswith("-"):
            continue
        name = re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", line)[0]).lower()
        if name in limits.BUNDLED_PACKAGES or re.match(limits.BUNDLED_LIBRARIES, name):
            yield (
                f"{_place(path)} has {shown(line)}, which would replace the container's own "
                f"{name}: remove the line, and choose another with compute.framework_version"
            )
        elif not re.fullmatch(
            r"[\w.-]+\s*(\[[^\]]*\])?\s*(===?\s*[\w.+!-]+|@\s*\S+://\S+)"
            r"(\s*;.*?)?(\s+--hash=\S+)*|git\+\S+@[0-9a-f]{7,40}(#\S+)?",
            line,
            re.ASCII,
        ):
            yield (
                f"{_place(path)} has {shown(line)}; a restart could install another version, or "
                f"nothing: pin every line as name==1.2.3"
            )


def _new_enough(version: str) -> bool:
    return tuple(_numbers(version)) >= limits.OLDEST_FRAMEWORK


def _nearest_version(version: str) -> str:
    """The closest version that can be used, by its numbers; the newest for what is no version."""
    usable = [known for known in limits.CONTAINERS if _new_enough(known)]
    if not re.fullmatch(r"\d+(\.\d+)*", version, re.ASCII):
        return usable[-1]

    def distance(known: str) -> tuple[int, ...]:
        pairs = zip(_numbers(known), _numbers(version), strict=True)
        return tuple(abs(ours - theirs) for ours, theirs in pairs)

    return min(reversed(usable), key=distance)


def _numbers(version: str) -> list[int]:
    return ([int(part[:9]) for part in version.split(".")] + [0, 0])[:3]


def _place(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


RULES = (container, volume, batch, arithmetic, validation, hyperparameters, environment)
