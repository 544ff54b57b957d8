"""← yours: build_dataset(settings, directory) returns a map-style data set with a length.

The contract: a sample is a tuple of tensors, which reaches the model as its arguments, batched.
Randomness inside `__getitem__` (torch, random, numpy) is seeded for you from (seed, epoch, index).
"""

import bisect
import itertools
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from training.failure import TrainingError
from training.settings import TrainingSettings


def build_dataset(settings: TrainingSettings, directory: str) -> Dataset[tuple[Tensor, ...]]:
    """The samples under `directory`: a channel that SageMaker has filled."""
    return ByteWindows(Path(directory), settings.sequence_length)


class ByteWindows(Dataset[tuple[Tensor, ...]]):
    """All files under a directory as one text, cut into windows of `length` bytes.

    A sample is (inputs, targets), both int64 of shape (length,); targets are the next bytes. Files
    come in the order of their paths; hidden ones are left out.
    """

    def __init__(self, directory: Path, length: int) -> None:
        if not directory.is_dir():
            raise TrainingError(
                f"the data directory {str(directory)!r} does not exist; give the job a channel for "
                f"it, or name a folder with --train-dir or --validation-dir"
            )
        found = sorted(path for path in directory.rglob("*") if path.is_file())
        self._files = [f for f in found if not _is_hidden(f.relative_to(directory))]
        self._ends = list(itertools.accumulate(path.stat().st_size for path in self._files))
        self._length = length
        if len(self) < 1:
            held = self._ends[-1] if self._ends else 0
            raise TrainingError(
                f"{directory} holds {held} bytes in {len(self._files)} files; one sample of "
                f"sequence_length {length} needs {length + 1}: add data to the channel"
            )

    def __len__(self) -> int:
        return max(0, (self._ends[-1] if self._ends else 0) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        window = bytearray(self._read(index * self._length, self._length + 1))
        text = torch.frombuffer(window, dtype=torch.uint8).long()
        return text[:-1], text[1:]

    def _read(self, start: int, count: int) -> bytes:
        parts = []
        number = bisect.bisect_right(self._ends, start)
        while count:
            offset = start - (self._ends[number - 1] if number else 0)
            with open(self._files[number], "rb") as file:
                file.seek(offset)
                part = file.read(count)
            if not part and start < self._ends[number]:
                raise TrainingError(f"{self._files[number]} became shorter while it was read")
            parts.append(part)
            start, count, number = start + len(part), count - len(part), number + 1
        return b"".join(parts)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
