"""The state of a snapshot, from rank 0 into the model, optimizer and scaler of every rank.

torch has functions for this, but they take an optimizer step to create what they then overwrite,
which alone takes longer than reading a snapshot.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.failure import TrainingError
from training.group import Group
from training.replica import Replica
from training.snapshots.mapping import Mapping
from training.snapshots.names import plain
from training.snapshots.tensors import mapped


def apply(
    group: Group, replica: Replica, state: dict[str, Any], file: Mapping | None = None
) -> None:
    """Give every rank rank 0's `state`, whose tensors are copied; other ranks pass an empty one.

    It has to fit: rank 0 checks that before, because a rank that fails alone leaves the others
    waiting.
    """
    _apply_model(group, replica, state.get("model", {}), file)
    _apply_optimizer(group, replica, state.get("optimizer"), file)
    scaler_state = group.from_rank_0(state.get("scaler"))
    if replica.scaler.is_enabled() and scaler_state:
        replica.scaler.load_state_dict(scaler_state)
    if group.world_size > 1:
        check_ranks_agree(group, replica)


def check_ranks_agree(group: Group, replica: Replica) -> None:
    """Prove once that all ranks hold the same bits: DDP never notices optimizers that differ."""
    values = list(replica.plain_model.state_dict().values())
    values += [value for kept in replica.optimizer.state.values() for value in kept.values()]
    sums = [_bit_sum(value) for value in values if isinstance(value, Tensor)]
    if len(set(group.gather(tuple(sums)))) != 1:
        raise TrainingError(
            "after resuming, the ranks hold different parameters or optimizer states; "
            "this is a defect of the code that loads them, and training would silently diverge"
        )


def _apply_model(
    group: Group, replica: Replica, saved: dict[str, Any], file: Mapping | None
) -> None:
    model = replica.plain_model
    if group.rank == 0:
        model.load_state_dict({name: saved[plain(name)] for name in model.state_dict()})
        if file:
            file.copied(sys.maxsize)
    if group.world_size == 1:
        return
    own = model.state_dict()
    extra = {name: value for name, value in own.items() if not isinstance(value, Tensor)}
    if extra := group.from_rank_0(extra):
        model.load_state_dict(extra, strict=False)
    mapped(own, _broadcast)


def _apply_optimizer(
    group: Group, replica: Replica, saved: dict[str, Any] | None, file: Mapping | None
) -> None:
    """The optimizer keeps what it is given, so that is a copy: the snapshot's lie in a file."""
    layout = group.from_rank_0(mapped(saved, _outline)) if group.world_size > 1 else saved
    if not layout or not layout["state"]:
        return
    mine = saved if group.rank == 0 else layout
    owned = mapped(mine, lambda value: _owned(value, group, file))
    if group.world_size > 1:
        mapped(owned, _broadcast)
    replica.optimizer.load_state_dict(_by_index(owned, replica))


def _by_index(saved: dict[str, Any], replica: Replica) -> dict[str, Any]:
    """The state under the numbers that torch's optimizers give to their parameters."""
    names = {p: plain(name) for name, p in replica.plain_model.named_parameters()}
    groups: list[dict[str, Any]] = []
    index: dict[str, int] = {}
    count = 0
    for own in replica.optimizer.param_groups:
        members = [names[p] for p in own["params"]]
        numbers = list(range(count, count := count + len(members)))
        index.update(zip(members, numbers, strict=True))
        same = next(one for one in saved["param_groups"] if set(one["params"]) == set(members))
        groups.append({**same, "params": numbers})
    return {"state": {index[n]: kept for n, kept in saved["state"].items()}, "param_groups": groups}


def _outline(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="meta")


def _owned(value: Tensor, group: Group, file: Mapping | None) -> Tensor:
    """Memory of this process, on the device from which it is sent; the content is rank 0's."""
    if value.is_meta:
        return torch.empty_like(value, device="cpu" if value.dim() == 0 else group.device)
    # Numbers, such as a step count, stay on the CPU, where torch keeps them.
    copy = value.clone() if value.dim() == 0 else value.to(group.device, copy=True)
    if file:
        file.copied(value.nbytes)
    return copy


def _broadcast(value: Tensor) -> Tensor:
    """Overwrite `value` with rank 0's."""
    sent = value if value.is_contiguous() else value.contiguous()
    dist.broadcast(sent, src=0)
    return value if sent is value else value.copy_(sent)


def _bit_sum(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size(), torch.uint8)
    return int(flat.view(whole).sum(dtype=torch.int64))
