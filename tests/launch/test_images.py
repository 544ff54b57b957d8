"""A container's short name becomes the address that the SDK itself would give in that region."""

import subprocess
import sys

import pytest
from sagemaker import image_uris

from launch import images
from launch.errors import Refused

DIGEST = "sha256:" + "0" * 64
REGIONS = [
    "us-east-1",
    "eu-central-1",
    "eu-central-2",
    "af-south-1",
    "ap-east-1",
    "ap-southeast-7",
    "il-central-1",
    "mx-central-1",
    "cn-north-1",
    "cn-northwest-1",
    "us-gov-west-1",
    "us-gov-east-1",
]


def problem(image, region="us-east-1"):
    with pytest.raises(Refused) as caught:
        images.resolve(image, region)
    (sentence,) = caught.value.problems
    return sentence


@pytest.mark.parametrize("region", REGIONS)
def test_the_registry_is_the_one_that_the_sdk_would_use(region):
    of_the_sdk = image_uris.retrieve(
        "pytorch",
        region,
        version="2.8.0",
        py_version="py312",
        instance_type="ml.g5.2xlarge",
        image_scope="training",
    )
    assert images.resolve("pytorch-training:2.8.0-gpu-py312", region) == of_the_sdk


@pytest.mark.parametrize(
    "short",
    [
        "pytorch:2.13-cu133-amzn2023-sagemaker",
        "pytorch:2.13-cpu-amzn2023-sagemaker",
        "pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-sagemaker",
    ],
)
def test_short_names_resolve_in_the_regions_registry(short):
    registry = "763104351884.dkr.ecr.us-west-2.amazonaws.com"
    assert images.resolve(short, "us-west-2") == f"{registry}/{short}"


def test_china_has_another_domain():
    assert images.resolve("pytorch:2.13-cpu-amzn2023-sagemaker", "cn-north-1") == (
        "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch:2.13-cpu-amzn2023-sagemaker"
    )


@pytest.mark.parametrize(
    "full",
    [
        "123456789012.dkr.ecr.us-east-1.amazonaws.com/mine",
        "123456789012.dkr.ecr.us-east-1.amazonaws.com/team/mine:latest",
        f"123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn/mine@{DIGEST}",
        f"123456789012.dkr.ecr.us-east-1.amazonaws.com/mine:1@{DIGEST}",
        "docker.my-company.com:5000/team/mine:1",
    ],
)
def test_a_full_address_is_taken_as_it_is(full):
    assert images.resolve(full, "nowhere-1") == full


@pytest.mark.parametrize(
    "image",
    [
        "",
        "pytorch",
        "pytorch:",
        "pytorch:a b",
        "tensorflow-training:2.19",
        "pytorch/mine:1",
        "https://123456789012.dkr.ecr.us-east-1.amazonaws.com/mine:1",
        "123456789012.dkr.ecr.us-east-1.amazonaws.com/mine:1:2",
        "123456789012.dkr.ecr.us-east-1.amazonaws.com/mine@sha256:0",
    ],
)
def test_anything_else_is_refused_with_an_example(image):
    assert problem(image) == (
        f"compute.image_uri is {image!r}; it must be a full address "
        f"(123456789012.dkr.ecr.us-east-1.amazonaws.com/name:tag), or the short name of one of "
        f"AWS's PyTorch containers, such as pytorch:2.13-cu133-amzn2023-sagemaker"
    )


def test_the_example_is_a_valid_name():
    assert images.resolve(images.EXAMPLE, "us-east-1").endswith(f"/{images.EXAMPLE}")


def test_a_container_for_ec2_is_refused_with_the_one_for_sagemaker():
    assert problem("pytorch:2.13-cu133-amzn2023-ec2") == (
        "compute.image_uri is 'pytorch:2.13-cu133-amzn2023-ec2', a container for EC2 without "
        "SageMaker's toolkit: set it to pytorch:2.13-cu133-amzn2023-sagemaker"
    )


def test_an_unknown_region_is_refused_with_those_near_it():
    said = problem(images.EXAMPLE, "us-east-9")
    assert said.startswith("aws.region is 'us-east-9', for which the SDK knows no registry")
    near = said.partition("(it does for ")[2].partition(")")[0].split(", ")
    assert {"us-east-1", "us-east-2"} <= set(near) <= images.registries().keys()
    assert said.endswith("set aws.region to one of these, or give compute.image_uri in full")


@pytest.mark.parametrize("spec", [None, type("Spec", (), {"submodule_search_locations": ["/no"]})])
def test_without_the_sdks_table_it_says_what_to_install(monkeypatch, spec):
    monkeypatch.setattr(images, "find_spec", lambda name: spec)
    assert "pip install -r requirements.txt" in problem(images.EXAMPLE)


def test_resolving_does_not_import_the_sdk():
    code = "import sys; from launch import images; images.resolve(images.EXAMPLE, 'us-east-1'); "
    code += "print([name for name in ('sagemaker', 'boto3') if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
