"""What a rank trains: the model under DDP, its optimizer, and the loss scaler of fp16."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Replica:
    """One rank's copy of the state; between two steps all ranks hold the same."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    @property
    def plain_model(self) -> nn.Module:
        """The model as `build_model` made it: the names that files carry."""
        module: nn.Module = self.model.module
        return module
