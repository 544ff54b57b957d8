"""Joins torchrun's process group, checks it against SageMaker's hosts, and lets ranks agree."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from training.failure import TrainingError, sentence
from training.peers import Peers

PATIENCE_WITH_RANK_0 = timedelta(hours=1)


@dataclass(frozen=True)
class Group:
    """This process among its peers: `rank` of `world_size`, computing on `device`."""

    rank: int
    world_size: int
    device: torch.device
    store: dist.Store
    peers: Peers

    def wait_for_rank_0(self, place: str) -> None:
        """Hold up the other ranks until rank 0 has come to `place`, too, which all of them call.

        In a collective they would give up after collective_timeout, which is about steps; here
        rank 0 reads or writes files. Raises DistError when its host is gone.
        """
        if self.rank == 0:
            self.store.set(place, "1")
        else:
            self.store.wait([place], PATIENCE_WITH_RANK_0)

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Run a block on every rank; when it fails on any, all ranks raise the first one's words.

        Without this a rank that raises alone leaves its peers waiting in their next collective.
        """
        cause: Exception | None = None
        try:
            yield
        except Exception as error:
            cause = error
        problems = self.gather(sentence(cause) if cause else None)
        for rank, problem in enumerate(problems):
            if problem is not None:
                if cause and rank == self.rank:
                    raise cause
                raise TrainingError(f"rank {rank} stopped: {problem}")

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's value, on every rank; what the others pass is ignored."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


@contextmanager
def joined(timeout_seconds: float, *, deterministic: bool = True) -> Iterator[Group]:
    """Join the process group that torchrun describes; alone, be a group of one.

    Raises TrainingError when the processes that torchrun started are not the ones that SageMaker's
    hosts need: each host would train a model of its own, and all would write the same prefix.
    With `deterministic`, operations on a GPU that could round differently each time raise instead.
    """
    _check_against_sagemaker(os.environ)
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        _use_sagemaker_interface()
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    device = _device(deterministic)
    # gloo carries the small agreements, so that a broken GPU collective cannot hang them.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    notes = dist.PrefixStore("notes", store)
    peers = Peers(rank, _hosts(world_size), notes)
    group = Group(rank, world_size, device, notes, peers)
    try:
        yield group
        group.wait_for_rank_0("the end")
        _wait_for_all(dist.PrefixStore("leaving", store), world_size, timeout)
    except Exception as error:
        explained = peers.explained(error)
        if explained is error:
            raise
        raise explained from error
    # Not in a `finally`: after a failure, leaving the group politely could wait for dead peers.
    dist.destroy_process_group()


def _hosts(world_size: int) -> tuple[str, ...]:
    names: list[str] = [""] * world_size
    dist.all_gather_object(names, os.environ.get("SM_CURRENT_HOST") or socket.gethostname())
    return tuple(names)


def _wait_for_all(store: dist.Store, world_size: int, timeout: timedelta) -> None:
    """Let no rank leave before all are done: a connection that closes early looks like a failure.

    Through the store, which outlives the ranks: a collective would end in the same race.
    """
    if store.add("arrived", 1) == world_size:
        store.set("all", "1")
    store.wait(["all"], timeout)


def _device(deterministic: bool) -> torch.device:
    if not torch.cuda.is_available():
        if gpus := int(os.environ.get("SM_NUM_GPUS") or 0):
            raise TrainingError(
                f"SageMaker counts {gpus} GPUs on this host, but torch {torch.__version__} cannot "
                f"use them; does a requirements.txt replace the container's torch?"
            )
        return torch.device("cpu")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _check_against_sagemaker(environment: Any) -> None:
    hosts = json.loads(environment.get("SM_HOSTS") or "[]")
    if not hosts:
        return
    if len(hosts) > 1 and "RANK" not in environment:
        raise TrainingError(
            f"SageMaker runs {len(hosts)} hosts ({', '.join(hosts)}), but this script was started "
            f"without torchrun, so every host would train alone and write the same snapshots; "
            f'set distribution={{"torch_distributed": {{"enabled": True}}}} on the estimator'
        )
    gpus = int(environment.get("SM_NUM_GPUS") or 0)
    per_host = gpus or int(environment.get("LOCAL_WORLD_SIZE", "1"))
    expected, found = len(hosts) * per_host, int(environment.get("WORLD_SIZE", "1"))
    if expected != found:
        raise TrainingError(
            f"WORLD_SIZE is {found}, but {len(hosts)} hosts with {per_host} "
            f"{'GPUs' if gpus else 'processes'} each make {expected}; "
            f"start one process per {'GPU' if gpus else 'host'} on every host"
        )


def _use_sagemaker_interface() -> None:
    # The toolkit tells NCCL which interface joins the hosts, but not gloo, which then resolves the
    # host's name; in the newest images that name is not this host's.
    interface = os.environ.get("SM_NETWORK_INTERFACE_NAME", "")
    if interface in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
