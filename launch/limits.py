"""What the platform allows, as numbers and tables, each with its source. Decides nothing.

"API" is botocore's own model of CreateTrainingJob, unless another page is named.
"""

import re

DAY = 86400
LONGEST_RUN = 28 * DAY  # API_StoppingCondition: MaxRuntimeInSeconds
LONGEST_WAIT = 30 * DAY  # Developer Guide, quotas: the life of a training job, waiting included
LONGEST_WARM_POOL = 3600  # Developer Guide, warm pools: KeepAlivePeriodInSeconds

JOB_NAME_LENGTH = 63  # API: TrainingJobName
ADDRESS_LENGTH = 1024  # API: S3Uri; S3 User Guide: also the bytes of an object's key
ROLE_LENGTH = (20, 2048)  # API: RoleArn
IMAGE_LENGTH = 255  # API: AlgorithmImage
KMS_KEY_LENGTH, KMS_KEY = 2048, r"[a-zA-Z0-9:/_-]+"  # API: KmsKeyId
SUBNETS, SECURITY_GROUPS = 16, 5  # API: VpcConfig
NETWORK_ID_LENGTH = 32  # API: SubnetId, SecurityGroupId
LARGEST_VOLUME_GB = 16384  # EBS User Guide: a gp2 volume has at most 16 TiB

CHANNELS, CHANNEL_NAME = 20, r"[A-Za-z0-9.\-_]{1,64}"  # API: InputDataConfig, ChannelName
# SDK 2 adds `code` under network isolation; SDK 3 always adds both.
RESERVED_CHANNELS = ("code", "sm_drivers")

HYPERPARAMETERS = 100  # API: HyperParameters
SDK_HYPERPARAMETERS = 8  # what SDK 2 adds, all of them named sagemaker_…
HYPERPARAMETER_LENGTH = 256  # API_CreateTrainingJob, of keys and, in its prose, of values

ENVIRONMENT, ENVIRONMENT_LENGTH = 100, 512  # API: TrainingEnvironmentMap
ENVIRONMENT_NAME = r"[a-zA-Z_][a-zA-Z0-9_]*"  # API: TrainingEnvironmentKey
# launch/estimator.py sets these itself.
LAUNCHER_ENVIRONMENT = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "CHECKPOINT_S3_URI")
# SageMaker and its toolkits (sagemaker_training/environment.py, sagemaker_pytorch_container/
# training.py), the credentials of the execution role, and torchrun (torch/distributed/run.py).
RESERVED_ENVIRONMENT = {
    *("TRAINING_JOB_NAME", "TRAINING_JOB_ARN", "NCCL_SOCKET_IFNAME"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
}
RESERVED_ENVIRONMENT_PREFIXES = ("SM_", "TORCHELASTIC_")

TAGS, TAG_KEY_LENGTH, TAG_VALUE_LENGTH = 50, 128, 256  # API: TagList, TagKey, TagValue
PROJECT_TAG, PROJECT = "project", "sagemaker-spot-ddp"  # ours, by which follow.py finds our jobs
TAG_CATEGORIES, TAG_SIGNS = "LZN", "_.:/=+-@"  # API: [\p{L}\p{Z}\p{N}_.:/=+\-@]*

# torchrun's long options (torch/distributed/run.py, torch 2.13). It allows abbreviations, and looks
# for its own options among the script's as well.
TORCHRUN_OPTIONS = (
    *("duplicate-stderr-filters", "duplicate-stdout-filters", "event-log-handler", "help"),
    *("local-addr", "local-ranks-filter", "log-dir", "logs-specs", "master-addr", "master-port"),
    *("max-restarts", "module", "monitor-interval", "nnodes", "no-python", "node-rank"),
    *("nproc-per-node", "numa-binding", "rdzv-backend", "rdzv-conf", "rdzv-endpoint", "rdzv-id"),
    *("redirects", "role", "run-path", "shutdown-timeout", "signals-to-handle", "standalone"),
    *("start-method", "tee", "virtual-local-rank"),
)

# Framework version → Python, for all GPU containers that SDK 2.257.7 both finds
# (image_uri_config/pytorch.json) and lets torch_distributed run in (fw_utils.py).
CONTAINERS = {
    "1.13.1": "py39",
    "2.0.0": "py310",
    "2.0.1": "py310",
    "2.1.0": "py310",
    "2.2.0": "py310",
    "2.3.0": "py311",
    "2.5.1": "py311",
    "2.6.0": "py312",
    "2.7.1": "py312",
    "2.8.0": "py312",
}
# What training/ needs: Python 3.11 (pyproject.toml) and StateDictOptions(broadcast_from_rank0),
# without which no snapshot can be resumed.
OLDEST_FRAMEWORK = (2, 4)

# What the container brings, built against each other and against its driver and NCCL.
BUNDLED_PACKAGES = {"torch", "torchvision", "torchaudio", "triton", "numpy"}
BUNDLED_LIBRARIES = r"nvidia-(cu|nccl|nvjitlink|nvtx|nvshmem)"

# Families whose instances have NVMe disks of their own, which SageMaker uses instead of an EBS
# volume (API_ResourceConfig: VolumeSizeInGB, VolumeKmsKeyId; EC2 User Guide: instance store).
LOCAL_NVME = {
    *("g4dn", "g5", "g6", "g6e", "gr6", "g7", "g7e"),
    *("p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300", "p6e-gb200"),
    *("trn1", "trn1n", "trn2", "c5d", "c6id", "m5d", "m6id", "r5d", "r6id"),
}

_UP_TO_8 = {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge 24xlarge", 8: "48xlarge"}
# EC2 User Guide, accelerated computing: GPUs → sizes, by family.
GPUS = {
    "g4dn": {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge"},
    "g5": _UP_TO_8,
    "g6": _UP_TO_8,
    "g6e": _UP_TO_8,
    "p2": {1: "xlarge", 8: "8xlarge", 16: "16xlarge"},
    "p3": {1: "2xlarge", 4: "8xlarge", 8: "16xlarge"},
    "p3dn": {8: "24xlarge"},
    "p4d": {8: "24xlarge"},
    "p4de": {8: "24xlarge"},
    "p5": {1: "4xlarge", 8: "48xlarge"},
    "p5e": {8: "48xlarge"},
    "p5en": {8: "48xlarge"},
    "p6-b200": {8: "48xlarge"},
    "p6-b300": {8: "48xlarge"},
}


def has_gpus(instance_type: str) -> bool:
    """Whether the SDK takes `instance_type` for a GPU instance (fw_utils._is_gpu_instance)."""
    return _family(instance_type).startswith(("p", "g"))


def has_local_nvme(instance_type: str) -> bool:
    """Whether SageMaker uses the instance's own disks and allows no key for them."""
    return _family(instance_type) in LOCAL_NVME


def ranks_per_host(instance_type: str) -> int | None:
    """Processes that the toolkit starts on a host: one per GPU, or one; None: type not known."""
    family, size = _family(instance_type), instance_type.rpartition(".")[2]
    if re.match(r"[cmrt]\d", family):
        return 1  # the general purpose, compute, memory and burstable families hold no GPU
    sizes = GPUS.get(family, {})
    return next((count for count, names in sizes.items() if size in names.split()), None)


def parameter_count(width: int, depth: int, length: int, tokens: int = 256) -> int:
    """Parameters of the transformer in training/model.py (GPT-2's architecture, tied output)."""
    block = 12 * width**2 + 13 * width  # attention, perceptron and two norms, with their biases
    return (tokens + length) * width + depth * block + 2 * width


def _family(instance_type: str) -> str:
    return instance_type.removeprefix("ml.").rpartition(".")[0]
