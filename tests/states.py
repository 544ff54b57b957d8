"""Comparing snapshots bit for bit."""

import torch


def flat(state, prefix=""):
    """The tensors and values of a nested state, by dotted name."""
    if isinstance(state, dict):
        items = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, (list, tuple)):
        items = [(str(index), value) for index, value in enumerate(state)]
    else:
        return {prefix: state}
    return {k: v for key, value in items for k, v in flat(value, f"{prefix}.{key}").items()}


def differing(one, other):
    """The names under which two states differ in any bit."""
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    return [name for name in one if not _same(one[name], other[name])]


def _same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other
