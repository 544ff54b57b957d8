"""← yours: images from one file, as many of each class, shifted and dimmed at random."""

import random
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from training.settings import TrainingSettings


def build_dataset(settings: TrainingSettings, directory: str) -> Dataset[tuple[Tensor, ...]]:
    """The images in `digits.pt`."""
    return BalancedDigits(torch.load(Path(directory) / "digits.pt", weights_only=True))


class BalancedDigits(Dataset[tuple[Tensor, ...]]):
    """A sample is (image, label): float32 of shape (1, 8, 8), and int64.

    Classes take turns; the samples of the smaller ones come more than once.
    """

    def __init__(self, digits: dict[str, Tensor]) -> None:
        self._images, labels = digits["images"], digits["labels"]
        self._members = [torch.nonzero(labels == label)[:, 0] for label in range(10)]

    def __len__(self) -> int:
        return 10 * max(len(members) for members in self._members)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        turn, label = divmod(index, 10)
        members = self._members[label]
        image = self._images[members[turn % len(members)]].float() / 16
        down, right = torch.randint(-1, 2, (2,)).tolist()
        image = image.roll((down, right), dims=(0, 1)) * random.uniform(0.8, 1.0)
        noise = torch.from_numpy(numpy.random.normal(0, 0.02, (8, 8))).float()
        return (image + noise)[None], torch.tensor(label)
