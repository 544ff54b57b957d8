"""The loss on data that is not trained on, each sample counted once, over all ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, Subset

from training.group import Group
from training.optimization import autocast, to_device
from training.sampling import SeededSamples, batches_of
from training.settings import TrainingSettings


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    dataset: Dataset[Any],
    settings: TrainingSettings,
    group: Group,
    after_batch: Callable[[], None],
) -> float:
    """Mean loss per sample, the same number on every rank.

    `model` is the plain module: DDP would wait for a peer that has one sample less.
    """
    size = len(dataset)  # type: ignore[arg-type]
    places: Any = [(0, index) for index in range(group.rank, size, group.world_size)]
    mine = Subset(SeededSamples(dataset, settings.seed), places)
    batch_size = settings.micro_batch_size or settings.global_batch_size // group.world_size
    total = torch.zeros(2, dtype=torch.float64, device=group.device)
    for buffer in model.buffers():  # running statistics are each rank's own until the next forward
        dist.broadcast(buffer, src=0)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    # A name of its own keeps it until the failure of a batch has been told: see `train`.
    batches = batches_of(mine, settings, group, batch_size=batch_size)
    for batch in batches:
        with autocast(settings, group.device):
            loss = model(*to_device(batch, group.device))
        count = len(batch[0])
        total += torch.stack([loss.double() * count, total.new_tensor(count)])
        after_batch()
    for module, training in modes.items():  # a part that its owner has frozen stays as it was
        module.training = training
    dist.all_reduce(total)
    return float(total[0] / total[1])
