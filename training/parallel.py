"""The model on every rank, with gradients summed in the same order at every start."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, default_collate

from training.group import Group
from training.optimization import autocast, build_optimizer, to_device
from training.replica import Replica
from training.settings import TrainingSettings


def distribute(model: nn.Module, settings: TrainingSettings, group: Group) -> Replica:
    """The model on this rank's device, its gradients averaged over all ranks, and its optimizer."""
    on_device = [group.device] if group.device.type == "cuda" else None
    if settings.tf32:
        torch.set_float32_matmul_precision("high")
    if settings.compile:
        # In place and inside of DDP: names and gradients stay as they are. One graph for each size
        # of a batch: one that fits all may round differently, and when torch would make it depends
        # on which sizes this process has seen.
        model.compile(dynamic=False)
    distributed = DistributedDataParallel(
        model.to(group.device), device_ids=on_device, gradient_as_bucket_view=True
    )
    return Replica(
        distributed,
        build_optimizer(distributed, settings),
        torch.amp.GradScaler(group.device.type, enabled=settings.precision == "fp16"),
    )


def settle_buckets(
    replica: Replica,
    dataset: Dataset[tuple[torch.Tensor, ...]],
    settings: TrainingSettings,
    group: Group,
) -> None:
    """Run one forward and backward pass that changes nothing but DDP's layout of the gradients.

    DDP regroups its buckets after the first pass it sees, and from three ranks on the place in a
    bucket decides the order in which an all-reduce adds: without this, the first step after a
    resume would be rounded differently than the same step of a run that was never interrupted.
    """
    size = settings.micro_batch_size or settings.global_batch_size // group.world_size
    with group.agreement():
        batch = default_collate([dataset[index] for index in range(size)])
    model = replica.model
    kept = [buffer.clone() for buffer in model.buffers()]
    with autocast(settings, group.device):
        loss = model(*to_device(batch, group.device))
    loss.backward()
    model.zero_grad(set_to_none=True)
    for buffer, value in zip(model.buffers(), kept, strict=True):
        buffer.copy_(value)
