"""The optimizer, the learning rate of a step, and the step itself."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.failure import TrainingError
from training.replica import Replica
from training.settings import TrainingSettings

SMALLEST_SCALE = 1e-6  # a loss scale below this means that every gradient overflows


def build_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019); weights decay, biases and norms do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        fused=all(p.device.type in ("cpu", "cuda") for p in trained),
    )


def learning_rate(settings: TrainingSettings, step: int) -> float:
    """The learning rate of the optimizer step that follows `step` finished ones.

    Linear warm-up, then half a cosine (SGDR, Loshchilov & Hutter 2017) down to the floor. A larger
    total_steps stretches the cosine from then on, unless decay_steps pins its end.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    end = settings.decay_steps or settings.total_steps
    done = min(1.0, (step - settings.warmup_steps) / max(1, end - settings.warmup_steps))
    floor = settings.learning_rate_floor
    return settings.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)


def take_step(
    replica: Replica,
    micro_batches: Sequence[Any],
    rate: float,
    settings: TrainingSettings,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """One optimizer step at learning rate `rate`; returns (mean loss, gradient norm), scalars.

    The norm is that of the gradient averaged over all ranks, before clipping, so it is the same
    number on each. The gradients stay in place: whoever captures the state needs them there.
    With fp16 a step whose gradients overflow is taken again at a smaller scale until it counts.
    Raises TrainingError when no scale is small enough.
    """
    optimizer, scaler = replica.optimizer, replica.scaler
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    loss = _accumulate(replica, micro_batches, settings, device)
    scaler.unscale_(optimizer)
    limit = settings.gradient_clip or math.inf
    norm = nn.utils.clip_grad_norm_(replica.model.parameters(), limit)
    if not scaler.is_enabled():
        optimizer.step()
        return loss, norm
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        return loss, norm
    if scaler.get_scale() < SMALLEST_SCALE:
        raise TrainingError("every fp16 gradient overflows; use --precision bf16 or fp32")
    return take_step(replica, micro_batches, rate, settings, device)


def mean_over_ranks(value: Tensor, world_size: int) -> float:
    """The mean of a scalar tensor over all ranks, on all ranks."""
    total = value.detach().double()
    dist.all_reduce(total)
    return float(total) / world_size


def autocast(settings: TrainingSettings, device: torch.device) -> torch.autocast:
    """The arithmetic that `precision` names."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(
        device.type, dtype=dtype[settings.precision], enabled=settings.precision != "fp32"
    )


def to_device(batch: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """A batch's tensors on the device; the copy may still be under way there."""
    return [tensor.to(device, non_blocking=True) for tensor in batch]


def _accumulate(
    replica: Replica,
    micro_batches: Sequence[Any],
    settings: TrainingSettings,
    device: torch.device,
) -> Tensor:
    """Sum the gradients of all micro batches; the ranks exchange them in the last one only."""
    total = torch.zeros((), device=device)
    for number, batch in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else replica.model.no_sync():
            with autocast(settings, device):
                loss = replica.model(*to_device(batch, device)) / len(micro_batches)
            replica.scaler.scale(loss).backward()
        total += loss.detach()
    return total
