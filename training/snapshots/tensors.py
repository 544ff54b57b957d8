"""Nested states: dictionaries and lists that hold tensors somewhere."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def copied_to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory that nothing else refers to."""
    return tensor.detach().to("cpu", copy=True)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same state in containers of its own, each tensor changed, and tuples as lists."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, change) for item in value]
    return value
