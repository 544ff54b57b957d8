"""JobConfig → sagemaker.pytorch.PyTorch. The only file that knows the SageMaker SDK (version 2)."""

import io
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch import images
from launch.errors import Refused
from launch.limits import ENVIRONMENT_LENGTH, PROJECT, PROJECT_TAG
from launch.schema import JobConfig
from launch.source import ENTRY_POINT
from training.metrics import METRIC_DEFINITIONS
from training.settings import CHECKPOINT_S3_URI, DEFAULT_CHECKPOINT_DIR

os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
# Before the import: the SDK otherwise gives its logger a handler that writes to stdout, where the
# request of a dry run belongs.
logging.getLogger("sagemaker").addHandler(logging.NullHandler())
for name in ("sagemaker", "sagemaker.config", "sagemaker.image_uris"):
    logging.getLogger(name).setLevel(logging.WARNING)

try:
    import boto3
    import sagemaker.session
    import sagemaker.utils
    from botocore.awsrequest import AWSResponse
    from sagemaker import Session
    from sagemaker.inputs import TrainingInput
    from sagemaker.pytorch import PyTorch
except ModuleNotFoundError as error:
    raise Refused(
        f"the module {error.name} is missing (SDK version 3 has no estimators); "
        f"install what this repository pins: pip install -r requirements.txt"
    ) from None

# The import also lets every library talk at INFO, and prints tracebacks to stdout, in boxes.
logging.getLogger().setLevel(logging.WARNING)
sys.excepthook = sys.__excepthook__

# Without this file's word the SDK reports every fit() to its makers, and reads defaults from files
# in the home directory that the request then silently depends on.
SDK_DEFAULTS = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}

# The SDK checks these defaults against their schema at each of the twenty look-ups that a job
# makes, a quarter of a second every time. They are the constant above, and a test checks them once.
for module in (sagemaker.session, sagemaker.utils):
    module.validate_sagemaker_config = lambda sagemaker_config: None

# torchrun ends its other ranks when one has failed, and gives them this many seconds for it: rank 0
# may be writing the last complete state to S3. 30 s by default; torch 2.12 and later read this.
SHUTDOWN_SECONDS = "110"

# The image's own entry point is a shell that runs `train` in the foreground: as the first process
# of the container it has no handler for SIGTERM, so the kernel drops the signal. This one forwards
# it to the training processes, which are those to which torchrun has given a LOCAL_RANK, and to
# nothing else. torchrun would kill them 30 s later and end the container, which SageMaker may take
# for a failed job; the toolkit would die at once and break the pipe that the script prints to.
DELIVER_SIGTERM = (
    "trap 'for d in /proc/[0-9]*;do grep -qs LOCAL_RANK= $d/environ&&kill ${d#/proc/};done' TERM;"
    "s=start_with_right_hostname.sh;"
    "if command -v $s>/dev/null;then bash -m $s train& else train& fi;"
    "p=$!;while :;do wait $p;r=$?;kill -0 $p 2>&-||break;done;exit $r"
)


def open_session(region: str) -> Session:
    """A session of the SDK for `region`, with the credentials that AWS clients find."""
    return _session(boto3.Session(region_name=region))


def recording_session(region: str, requests: list[dict[str, Any]]) -> Session:
    """A session that sends nothing: it appends each CreateTrainingJob request to `requests`.

    The SDK works as always, and every request is answered on this side of the wire. What `requests`
    holds is what would have been sent, byte for byte.
    """

    def answer(request: Any, event_name: str, **_: Any) -> Any:
        operation = event_name.removeprefix("before-send.")
        if operation == "sagemaker.CreateTrainingJob":
            requests.append(json.loads(request.body))
            arn = f"arn:aws:sagemaker:{region}:000000000000:training-job/dry-run"
            return _response(request.url, json.dumps({"TrainingJobArn": arn}).encode())
        if operation == "s3.ListObjectsV2":
            return _response(request.url, b"<ListBucketResult/>")
        if operation == "s3.PutObject":
            return _response(request.url, b"")
        raise RuntimeError(f"a dry run must not call {operation}")

    boto = boto3.Session(region_name=region)
    boto.events.register("before-send", answer)
    return _session(boto)


def build(config: JobConfig, session: Session, source_dir: Path, snapshots: str) -> PyTorch:
    """The estimator for `config`, whose bucket and role are known, with its snapshot prefix.

    Raises Refused for what the SDK does not accept: some of it would only be found in `fit`, after
    the upload.
    """
    compute, aws, spot = config.compute, config.aws, config.spot
    home = f"s3://{aws.bucket}/{aws.prefix}/{config.run_name}"
    try:
        with _default_session(session.boto_session):
            estimator = PyTorch(
                entry_point=ENTRY_POINT,
                source_dir=str(source_dir),
                code_location=f"{home}/code",
                output_path=f"{home}/output",
                checkpoint_s3_uri=snapshots,
                checkpoint_local_path=DEFAULT_CHECKPOINT_DIR,
                role=aws.role,
                sagemaker_session=session,
                instance_type=compute.instance_type,
                instance_count=compute.instance_count,
                volume_size=compute.volume_gb,
                framework_version=None if compute.image_uri else compute.framework_version,
                py_version=None if compute.image_uri else compute.py_version,
                image_uri=compute.image_uri and images.resolve(compute.image_uri, str(aws.region)),
                hyperparameters=config.hyperparameters(),
                distribution={"torch_distributed": {"enabled": True}},
                use_spot_instances=spot.enabled,
                max_run=spot.max_run,
                max_wait=spot.max_wait if spot.enabled else None,
                container_entry_point=_entry_point(spot.deliver_sigterm),
                environment={**_environment(snapshots), **compute.environment},
                metric_definitions=METRIC_DEFINITIONS,
                debugger_hook_config=False,
                disable_profiler=True,
                subnets=list(aws.subnets) or None,
                security_group_ids=list(aws.security_group_ids) or None,
                volume_kms_key=aws.volume_kms_key,
                encrypt_inter_container_traffic=aws.encrypt_inter_container_traffic,
                enable_network_isolation=aws.network_isolation,
                keep_alive_period_in_seconds=compute.warm_pool,
                output_kms_key=aws.kms_key,
                tags=_tags(aws.tags),
            )
        estimator.training_image_uri()
    except ValueError as error:
        raise Refused(
            f"the SageMaker SDK refuses this job: {' '.join(str(error).split())} "
            f"Name a container that it knows with compute.framework_version and "
            f"compute.py_version, or any other in full with compute.image_uri"
        ) from error
    return estimator


def start(estimator: PyTorch, inputs: Mapping[str, str], input_mode: str, job_name: str) -> None:
    """Pack and upload the code and send CreateTrainingJob; returns as soon as it was accepted.

    `inputs` are S3 prefixes by the name of their channel.
    """
    channels = {name: TrainingInput(uri, input_mode=input_mode) for name, uri in inputs.items()}
    estimator.fit(channels, wait=False, job_name=job_name)


@contextmanager
def _default_session(boto: Any) -> Iterator[None]:
    """Within the block, the clients that the SDK makes on the side belong to our session.

    They then use its answers in a dry run, and the descriptions of AWS that it has read already.
    """
    before, boto3.DEFAULT_SESSION = boto3.DEFAULT_SESSION, boto
    try:
        yield
    finally:
        boto3.DEFAULT_SESSION = before


def _environment(snapshots: str) -> dict[str, str]:
    # The container is not told where S3 has its checkpoint directory. An address that is too long
    # for a variable only means that rank 0 leaves all uploads to SageMaker.
    fits = len(snapshots) <= ENVIRONMENT_LENGTH
    return {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": SHUTDOWN_SECONDS,
        **({CHECKPOINT_S3_URI: snapshots} if fits else {}),
    }


def _tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """The configuration's tags, and ours, by which follow.py finds the jobs of this project."""
    return [{"Key": key, "Value": value} for key, value in {**tags, PROJECT_TAG: PROJECT}.items()]


def _entry_point(deliver_sigterm: bool) -> list[str] | None:
    return ["bash", "-c", DELIVER_SIGTERM] if deliver_sigterm else None


def _session(boto: Any) -> Session:
    client = boto.client("sagemaker")
    return Session(
        boto_session=boto,
        sagemaker_client=client,
        # Starting a job needs none of these, and the SDK would take a tenth of a second for each.
        sagemaker_runtime_client=client,
        sagemaker_featurestore_runtime_client=client,
        sagemaker_metrics_client=client,
        sagemaker_config=SDK_DEFAULTS,
    )


def _response(url: str, body: bytes) -> Any:
    return AWSResponse(url, 200, {}, _RawBody(body))


class _RawBody(io.BytesIO):
    """A response body in the shape that botocore reads."""

    def stream(self, amount: int = 1024) -> Any:
        while part := self.read(amount):
            yield part
