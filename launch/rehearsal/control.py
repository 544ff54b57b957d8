"""The run that nothing interrupts, kept while code, settings and data stay what they are."""

import dataclasses
import hashlib
import io
import json
import os
import platform
import tarfile
from typing import Any

import torch

from launch.config import ROOT
from launch.rehearsal.attempt import Attempt
from launch.runs import split

KEPT_IN = ROOT / "out" / "uninterrupted"
_NAMES_THE_JOB = ("sagemaker_job_name", "sagemaker_submit_directory")


def key_of(request: dict[str, Any], s3: Any) -> str:
    """A name for everything that decides the bits of the request's result on this machine."""
    hyperparameters = request["HyperParameters"]
    address = json.loads(hyperparameters["sagemaker_submit_directory"])
    decides = {
        "code": _digest_of_code(address, s3),
        "settings": {k: v for k, v in hyperparameters.items() if k not in _NAMES_THE_JOB},
        "environment": request.get("Environment", {}),
        "data": request.get("InputDataConfig", []),  # addressed by its content
        "instances": request["ResourceConfig"]["InstanceCount"],
        "machine": [torch.backends.cpu.get_cpu_capability(), os.cpu_count()],
        "versions": [torch.__version__, platform.python_version()],
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def recall(key: str) -> tuple[Attempt, str] | None:
    """The attempt and the digest of an earlier uninterrupted run, if there was one."""
    try:
        kept = json.loads((KEPT_IN / f"{key}.json").read_text())
        return Attempt(**kept["attempt"]), str(kept["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(key: str, attempt: Attempt, digest: str) -> None:
    """Keep an uninterrupted run's account for the next rehearsal."""
    KEPT_IN.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"attempt": dataclasses.asdict(attempt), "digest": digest})
    whole = KEPT_IN / f"{key}.{os.getpid()}.new"
    whole.write_text(text)
    whole.replace(KEPT_IN / f"{key}.json")


def _digest_of_code(address: str, s3: Any) -> str:
    bucket, key = split(address)
    packed = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    digest = hashlib.sha256()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in sorted(archive.getmembers(), key=lambda one: one.name):
            file = archive.extractfile(member)
            content = file.read() if file else b""
            digest.update(f"{member.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
