"""The container's address: a full one as it is, a short name in the region's own registry.

The registries are those of the SDK's account table, which is read as a file: importing the SDK
takes two seconds, and the newest containers are in the registries but in no release of it.
"""

import difflib
import json
import re
from importlib.util import find_spec
from pathlib import Path

from launch.errors import Refused

EXAMPLE = "pytorch:2.13-cu133-amzn2023-sagemaker"
# AWS publishes PyTorch up to 2.10 as pytorch-training, and from 2.11 as pytorch.
_SHORT = r"(pytorch|pytorch-training):[\w][\w.\-]{0,127}"
_FULL = r"[a-z0-9][a-z0-9.\-]*(:\d+)?(/[a-z0-9._\-]+)+(:[\w][\w.\-]*)?(@sha256:[0-9a-f]{64})?"


def resolve(image: str, region: str) -> str:
    """The address of `image` for a job in `region`; `image` is a short name or a full address.

    Raises Refused if it is neither, if it is a container for EC2, and if the SDK's table has no
    registry for the region.
    """
    if re.fullmatch(_SHORT, image):
        return _in_registry(image, region)
    if "." in image.partition("/")[0] and re.fullmatch(_FULL, image):
        return image
    raise Refused(
        f"compute.image_uri is {image!r}; it must be a full address "
        f"(123456789012.dkr.ecr.us-east-1.amazonaws.com/name:tag), or the short name of one of "
        f"AWS's PyTorch containers, such as {EXAMPLE}"
    )


def _in_registry(image: str, region: str) -> str:
    if "-ec2" in image:
        raise Refused(
            f"compute.image_uri is {image!r}, a container for EC2 without SageMaker's toolkit: "
            f"set it to {image.replace('-ec2', '-sagemaker')}"
        )
    accounts = registries()
    if region not in accounts:
        near = difflib.get_close_matches(region, accounts, n=3, cutoff=0.0)
        raise Refused(
            f"aws.region is {region!r}, for which the SDK knows no registry of containers (it "
            f"does for {', '.join(near)}): set aws.region to one of these, or give "
            f"compute.image_uri in full"
        )
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"{accounts[region]}.dkr.ecr.{region}.{suffix}/{image}"


def registries() -> dict[str, str]:
    """Region → the account whose registry holds AWS's PyTorch training containers.

    Raises Refused if the SDK's table is not where version 2 keeps it.
    """
    spec = find_spec("sagemaker")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or []:
        path = Path(folder, "image_uri_config", "pytorch.json")
        if path.is_file():
            versions = json.loads(path.read_text())["training"]["versions"]
            newest = max(versions, key=lambda version: [int(part) for part in version.split(".")])
            return dict(versions[newest]["registries"])
    raise Refused(
        "the SageMaker SDK's table of registries is not installed; "
        "install what this repository pins: pip install -r requirements.txt"
    )
