"""← yours: a small convolutional network with all that makes resuming hard."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.sampling import derive_seed
from training.settings import TrainingSettings


def build_model(settings: TrainingSettings) -> nn.Module:
    """The model at step 0: the same on every rank and at every start."""
    torch.manual_seed(derive_seed("model", settings.seed))
    return Classifier(settings)


class Classifier(nn.Module):
    """Two convolutions with BatchNorm, for images of 8 × 8 pixels in ten classes."""

    def __init__(self, settings: TrainingSettings) -> None:
        super().__init__()
        width = settings.model_width
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(settings.dropout)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of `labels` (batch,) given `images` (batch, 1, 8, 8)."""
        pooled = self.features(images).mean(dim=(2, 3))
        return functional.cross_entropy(self.head(self.dropout(pooled)).float(), labels)
