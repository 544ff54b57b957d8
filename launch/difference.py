"""What differs between two snapshots: tensors, settings, and by how much."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launch.errors import Failed


@dataclass(frozen=True)
class Differing:
    """A tensor or value of the state; `largest` is the largest absolute difference, if any."""

    name: str
    first: str
    second: str
    largest: float | None = None


def load(path: Path) -> dict[str, Any]:
    """The state in a data file, on the CPU. Raises Failed if it is none."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise Failed(f"{path.name} cannot be loaded ({type(error).__name__})") from error
    return state


def differing(first: Any, second: Any) -> list[Differing]:
    """Every tensor and value that is not the same in both states, in the order of names."""
    one, other = dict(_flat(first)), dict(_flat(second))
    found = (_compare(name, one, other) for name in sorted(one.keys() | other.keys()))
    return [difference for difference in found if difference]


def _flat(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, (dict, list, tuple)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, state


def _compare(name: str, one: dict[str, Any], other: dict[str, Any]) -> Differing | None:
    first, second = (_described(side[name]) if name in side else "absent" for side in (one, other))
    if first != second:
        return Differing(name, first, second)
    a, b = one[name], other[name]
    if not isinstance(a, torch.Tensor) or torch.equal(a, b):
        return None
    if not a.is_floating_point():
        a, b = a.double(), b.double()
    largest = float((a - b).abs().nan_to_num(nan=float("inf")).max())
    return Differing(name, first, second, largest)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
