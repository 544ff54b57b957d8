"""The state at one step boundary, copied to the host while the next passes run.

It takes no collective, and the optimizer never changes what is still being copied.
"""

import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from training.replica import Replica
from training.snapshots.names import plain
from training.snapshots.tensors import mapped

State = dict[str, Any]


class Staging:
    """Training calls `begin` between two optimizer steps; the writer `state`, then `release`.

    The next `optimizer.step` waits for the copy by itself. A loop that changes parameters in any
    other way (a replayed CUDA graph, an average of weights) calls `wait` before. If it forgets,
    torch's version counters tell and `state` raises; only changes behind `.data` go unnoticed.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        # DDP fixes the parameters when it wraps the model, so their names need no second look.
        self._names = {p: plain(name) for name, p in replica.plain_model.named_parameters()}
        self._buffers: list[_Buffer] = []
        self._staged: Future[State] | None = None
        self._waited_seconds = 0.0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
        device = next(iter(self._names)).device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._hook = replica.optimizer.register_step_pre_hook(lambda *_: self.wait())

    @property
    def in_use(self) -> bool:
        """Whether a state is staged: being copied, waiting to be written or being written."""
        return self._staged is not None

    @property
    def waited_seconds(self) -> float:
        """How long `wait` has held up training for the state of the last `begin`."""
        return self._waited_seconds

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the buffers hold, from the first `begin` until `close`."""
        return sum(_allocated(buffer.size, buffer.pinned) for buffer in self._buffers)

    def begin(self, step: int) -> None:
        """Take the state after `step` steps, and return while its largest part is being copied.

        Raises RuntimeError if the last state has not been released.
        """
        if self.in_use:
            raise RuntimeError(f"step {step} cannot be staged: the last state was not released")
        self._waited_seconds = 0.0
        taken = _take(self._replica, step, self._names)
        self._copy_fleeting(taken)
        boundary = None
        if self._stream:
            boundary = torch.cuda.current_stream(self._stream.device).record_event()
        self._staged = self._thread.submit(self._copy_lasting, taken, boundary)

    def wait(self) -> None:
        """Hold up the caller until all is copied; an error is for `state` to raise."""
        staged = self._staged
        if staged is None or staged.done():
            return
        started = time.perf_counter()
        staged.exception()
        self._waited_seconds += time.perf_counter() - started

    def state(self) -> State:
        """The staged state on the host, once it is copied; the `begin` after `release` overwrites.

        Raises what the copy raised: RuntimeError or MemoryError when memory is short, RuntimeError
        when the state was changed while it was being copied.
        """
        if self._staged is None:
            raise RuntimeError("no state is staged; call begin first")
        return self._staged.result()

    def release(self) -> None:
        """Give the buffers back for the next `begin`, whether or not the copy succeeded."""
        if self._staged is not None:
            self._staged.exception()
        self._staged = None

    def close(self) -> None:
        """Let a running copy end, stop the thread, and let go of the optimizer and the memory."""
        self._hook.remove()
        self._thread.shutdown()
        self._buffers = []

    def _copy_fleeting(self, taken: "_Taken") -> None:
        """Copy now what a forward pass or a schedule may change."""
        state = taken.state
        for name, value in state["model"].items():
            if not _is_lasting(value):
                state["model"][name] = self._on_host(value, taken)
        state["optimizer"]["param_groups"] = self._on_host(
            state["optimizer"]["param_groups"], taken
        )

    def _copy_lasting(self, taken: "_Taken", boundary: torch.cuda.Event | None) -> State:
        """Copy what only the optimizer changes, from this object's own thread."""
        try:
            if self._stream is None or boundary is None:
                self._put_lasting(taken)
            else:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(boundary)
                    self._put_lasting(taken)
                    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    done.record()
                    done.synchronize()
        except Exception:
            self._buffers = []  # memory may be what was missing
            raise
        del self._buffers[len(taken.copied) :]
        taken.check_unchanged()
        return taken.state

    def _put_lasting(self, taken: "_Taken") -> None:
        model, optimizer = taken.state["model"], taken.state["optimizer"]
        for name, value in model.items():
            if _is_lasting(value):
                model[name] = self._on_host(value, taken)
        optimizer["state"] = self._on_host(optimizer["state"], taken)

    def _on_host(self, value: Any, taken: "_Taken") -> Any:
        """A nested state with its tensors copied, in containers of its own, and tuples as lists."""

        def copied(tensor: Tensor) -> Tensor:
            if not _is_plain(tensor):
                return tensor.detach().clone().cpu()
            source = tensor.untyped_storage()
            buffer = taken.buffer_of(source)
            if buffer is None:
                buffer = self._buffer(len(taken.copied), source)
                self._copy(buffer.storage, source)
                taken.copied[source._cdata] = (source, buffer)
            return buffer.view(tensor)

        return mapped(value, copied)

    def _buffer(self, index: int, source: UntypedStorage) -> "_Buffer":
        """The buffer that served in this place last time, or a new one where that does not fit."""
        size, pinned = source.nbytes(), source.device.type == "cuda"
        if index < len(self._buffers):
            buffer = self._buffers[index]
            if (buffer.size, buffer.pinned) == (size, pinned):
                return buffer
        buffer = _Buffer(size, pinned)
        self._buffers[index : index + 1] = [buffer]
        return buffer

    def _copy(self, buffer: UntypedStorage, source: UntypedStorage) -> None:
        if source.device.type == "cpu":
            # Not Tensor.copy_, which starts a team of threads beside training's own; this takes
            # one and does not hold the interpreter's lock.
            ctypes.memmove(buffer.data_ptr(), source.data_ptr(), source.nbytes())
        else:
            _bytes_of(buffer).copy_(_bytes_of(source), non_blocking=True)


def host_bytes(replica: Replica) -> int:
    """Bytes of host memory that staging takes; ask after the first step, which makes the state."""
    names = {p: plain(name) for name, p in replica.plain_model.named_parameters()}
    tensors = _tensors(_take(replica, 0, names).state)
    storages = [tensor.untyped_storage() for tensor in tensors if _is_plain(tensor)]
    sizes = {s._cdata: _allocated(s.nbytes(), s.device.type == "cuda") for s in storages}
    return sum(sizes.values())


class _Buffer:
    """Host memory for the bytes of one storage."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.size, self.pinned = size, pinned
        flat = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.storage = flat.untyped_storage()
        self._views: dict[Any, Tensor] = {}

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor that lies in this buffer as `tensor` lies in its own storage."""
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        if (key := (tensor.dtype, *place)) not in self._views:
            empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
            self._views[key] = empty.set_(self.storage, *place)
        return self._views[key]


@dataclass
class _Taken:
    """A state by reference, in which one part after the other is replaced by its copy."""

    state: State
    lasting: list[Tensor]  # what only the optimizer changes
    versions: list[int]  # of `lasting`: torch counts the changes in place
    # By the source's identity. Keeping the source keeps its memory from being used for anything
    # else until the bytes have left.
    copied: dict[int, tuple[UntypedStorage, _Buffer]] = field(default_factory=dict)

    def buffer_of(self, source: UntypedStorage) -> _Buffer | None:
        """Where the bytes of `source` are, if another tensor of the state shares them."""
        pair = self.copied.get(source._cdata)
        return pair and pair[1]

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the optimizer's own tensors have changed since they were taken."""
        pairs = zip(self.lasting, self.versions, strict=True)
        if changed := [tensor for tensor, version in pairs if tensor._version != version]:
            raise RuntimeError(
                f"{len(changed)} tensors of the state, the first of shape "
                f"{tuple(changed[0].shape)}, were changed outside of optimizer.step while they "
                f"were being copied; call the staging's wait() before changing them"
            )


def _take(replica: Replica, step: int, names: dict[nn.Parameter, str]) -> _Taken:
    """References to the state that cannot be derived, after `step` steps.

    What torch's get_model_state_dict and get_optimizer_state_dict return, but those take ten times
    as long, and may take an optimizer step so that there be a state.
    """
    model = replica.plain_model.state_dict(keep_vars=True)
    optimizer = replica.optimizer.state_dict()
    order = [names[p] for group in replica.optimizer.param_groups for p in group["params"]]
    state: State = {
        "model": {plain(name): value for name, value in model.items()},
        "optimizer": {
            "state": {order[index]: kept for index, kept in optimizer["state"].items()},
            "param_groups": [
                {**group, "params": [order[index] for index in group["params"]]}
                for group in optimizer["param_groups"]
            ],
        },
        "step": step,
    }
    if replica.scaler.is_enabled():
        state["scaler"] = replica.scaler.state_dict()  # numbers
    lasting: list[Tensor] = [value for value in model.values() if _is_lasting(value)]
    lasting += _tensors(optimizer["state"])
    return _Taken(state, lasting, [tensor._version for tensor in lasting])


def _is_lasting(value: Any) -> bool:
    """Whether this part of a model's state is left alone by its forward pass."""
    return type(value) is nn.Parameter


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is its storage's bytes and nothing else, so that these can be copied."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _allocated(size: int, pinned: bool) -> int:
    """Bytes that a buffer takes: torch rounds page-locked memory up to a power of two."""
    return 1 << (size - 1).bit_length() if pinned and size else size
