"""What a device can compute at best, to tell how much of it a model uses."""

import torch

from training.settings import TrainingSettings

# Dense tensor-core peaks in 10^12 operations per second, from NVIDIA's data sheets, by a word of
# the name that the driver gives.
_BF16 = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10G": 70.0,
}
_FP16 = {**_BF16, "V100": 125.0, "T4": 65.0}
_TF32_PART = 0.5  # of what bf16 does, on all of them


def peak_flops(device: torch.device, settings: TrainingSettings) -> float | None:
    """Operations per second of `device` in the run's arithmetic; None where that is unknown."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), settings)


def peak_of(name: str, settings: TrainingSettings) -> float | None:
    """The same for a device by its name."""
    if settings.precision == "fp32" and not settings.tf32:
        return None  # ordinary cores, whose peak has nothing to do with these
    table = _FP16 if settings.precision == "fp16" else _BF16
    words = name.replace("-", " ").split()
    peak = next((table[word] for word in words if word in table), None)
    if peak is None:
        return None
    return peak * 1e12 * (_TF32_PART if settings.precision == "fp32" else 1)
