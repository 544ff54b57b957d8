"""What an instance runs: the request's entry point in a PID namespace, or torchrun by itself.

In the container the SageMaker toolkit turns a request into a torchrun command. Where the toolkit
cannot be installed (it needs Linux and a compiler) this file says what it would have started.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import Refused

TOOLKIT_PORT = 7777
_RESERVED = "sagemaker_"  # hyperparameters with this prefix are the SDK's, not the script's


@dataclass(frozen=True)
class Means:
    """What this machine offers to a simulated instance."""

    toolkit: bool
    pid_namespace: tuple[str, ...]  # the command that gives one; empty: none can be had

    def notes(self) -> list[str]:
        """What is not as it would be on SageMaker, for the report."""
        notes = []
        if not self.toolkit:
            notes.append(
                "torchrun was started directly, with the command and environment that the "
                "SageMaker toolkit would give it: the toolkit itself was not rehearsed"
            )
        if not self.pid_namespace:
            notes.append(
                "this system gives no PID namespace: the container's entry point was not "
                "rehearsed, and SIGTERM went to torchrun directly"
            )
        return notes


def find_means(*, without_toolkit: bool) -> Means:
    """Look at what is installed and allowed here."""
    installed = importlib.util.find_spec("sagemaker_pytorch_container") is not None
    return Means(
        toolkit=installed and sys.platform == "linux" and not without_toolkit,
        pid_namespace=_pid_namespace(),
    )


def check_means(means: Means) -> None:
    """Raise Refused where the container's chain could only be rehearsed in part."""
    if means.toolkit and not means.pid_namespace:
        raise Refused(
            "this system gives no PID namespace, in which a container's entry point runs; install "
            "unshare and setpriv (util-linux) and allow user namespaces, or rehearse without the "
            "container: --without-toolkit"
        )


def command(means: Means, request: dict[str, Any], host: str, hosts: list[str]) -> list[str]:
    """The command line of one instance's container."""
    if not means.toolkit:
        return [*means.pid_namespace, *_torchrun(request, host, hosts)]
    specification = request["AlgorithmSpecification"]
    entry_point = specification.get("ContainerEntrypoint") if means.pid_namespace else None
    return [
        *means.pid_namespace,
        *(entry_point or ["train"]),
        *specification.get("ContainerArguments", []),
    ]


def environment(means: Means, request: dict[str, Any], base: Path, host: str) -> dict[str, str]:
    """What SageMaker and the image set; without the toolkit, also what the toolkit would add."""
    tools = str(Path(sys.executable).parent)
    values = {
        **request.get("Environment", {}),
        # What follows belongs to this machine, whatever the job says of its own.
        "PATH": f"{base / 'bin'}:{tools}:{os.environ.get('PATH', os.defpath)}",
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(base),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
        "TRAINING_JOB_NAME": request["TrainingJobName"],
    }
    return values if means.toolkit else {**values, **_toolkit_environment(request, base, host)}


def script_arguments(request: dict[str, Any]) -> list[str]:
    """The hyperparameters as the toolkit puts them on the command line: sorted, `--key value`."""
    values = {
        key: json.loads(text)
        for key, text in request["HyperParameters"].items()
        if not key.startswith(_RESERVED)
    }
    return [part for key in sorted(values) for part in (f"--{key}", str(values[key]))]


def _torchrun(request: dict[str, Any], host: str, hosts: list[str]) -> list[str]:
    multi_node = [
        *("--master_addr", "127.0.0.1", "--master_port", str(TOOLKIT_PORT)),
        *("--node_rank", str(hosts.index(host))),
    ]
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(len(hosts)), "--nproc_per_node", "1"),
        *(multi_node if len(hosts) > 1 else []),
        json.loads(request["HyperParameters"]["sagemaker_program"]),
        *script_arguments(request),
    ]


def _toolkit_environment(request: dict[str, Any], base: Path, host: str) -> dict[str, str]:
    resources = json.loads((base / "input/config/resourceconfig.json").read_text())
    channels = [channel["ChannelName"] for channel in request.get("InputDataConfig", [])]
    return {
        "PYTHONPATH": str(base / "code"),
        "SM_HOSTS": json.dumps(resources["hosts"]),
        "SM_CURRENT_HOST": host,
        "SM_NUM_GPUS": "0",
        "SM_NETWORK_INTERFACE_NAME": resources["network_interface_name"],
        "SM_INPUT_CONFIG_DIR": str(base / "input/config"),
        "SM_OUTPUT_DIR": str(base / "output"),
        "SM_MODEL_DIR": str(base / "model"),
        **{f"SM_CHANNEL_{name.upper()}": str(base / "input/data" / name) for name in channels},
    }


def _pid_namespace() -> tuple[str, ...]:
    """The wrapper that gives a command its own PID namespace, which dies with this process."""
    if sys.platform != "linux" or not shutil.which("unshare") or not shutil.which("setpriv"):
        return ()
    as_user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    namespace = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *as_user)
    wrapper = ("setpriv", "--pdeathsig", "KILL", *namespace)
    tried = subprocess.run([*wrapper, "true"], capture_output=True, check=False)
    return wrapper if tried.returncode == 0 else ()
