"""Staging: the state of exactly one step boundary, while training goes on beside the copy."""

import gc
import io
import os
import queue
import random
import sys
import threading
import time
import zipfile

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from tests.states import differing, flat
from training.group import joined
from training.replica import Replica
from training.snapshots.staging import Staging, host_bytes

DEADLINE = 30.0
MAIN = threading.main_thread()


@pytest.fixture
def group():
    with joined(60) as group:
        yield group


@pytest.fixture
def stage():
    """Make a staging of a given kind; it is closed when the test ends."""
    made = []

    def make(replica, kind=Staging):
        made.append(kind(replica))
        return made[-1]

    yield make
    for staging in made:
        staging.close()


class Gated(Staging):
    """Copies nothing in the background before the gate opens: by hand, or while training waits."""

    def __init__(self, replica):
        super().__init__(replica)
        self.gate = threading.Event()

    def _copy(self, buffer, source):
        if threading.current_thread() is not MAIN:
            assert self.gate.wait(DEADLINE)
        super()._copy(buffer, source)

    def wait(self):
        if not self.gate.is_set():
            threading.Timer(0.1, self.gate.set).start()
        super().wait()


class Net(nn.Module):
    """Parameters of odd shapes, a frozen one, tied ones, and buffers that a forward pass moves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.tall = nn.Parameter(torch.randn(6, 6).t())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rows", torch.arange(12.0).reshape(3, 4)[1])

    def forward(self, x):
        self.calls += 1
        hidden = self.frozen(self.norm(self.embed(x))) @ self.tall
        return self.scale * self.head(hidden).square().mean()


class Odd(torch.optim.Optimizer):
    """Replaces its state at every step, and keeps other states for some parameters than others."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "factors": (0.9, (0.99, None))})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                kept, step = self.state[p], self.state[p].get("step", 0) + 1
                p -= group["lr"] * p.grad
                kept.update(step=step, ratio=1 / step, last=p.clone(), none=None)
                if number % 2:
                    kept["history"] = [p.clone(), {"sum": p.sum(), 3: (p.mean(), step)}]


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW with a tensor for its rate": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.01), foreach=False
    ),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "an odd one": Odd,
}


def replicate(model, make_optimizer=torch.optim.AdamW, scaling=False):
    trained = [p for p in model.parameters() if p.requires_grad]
    few, rest = trained[:1], trained[1:]
    optimizer = make_optimizer([{"params": few}, {"params": rest}] if rest else few)
    scaler = torch.amp.GradScaler("cpu", enabled=scaling, init_scale=8.0)
    return Replica(DistributedDataParallel(model), optimizer, scaler)


def take_step(replica, passes=1):
    device = next(replica.model.parameters()).device
    replica.optimizer.zero_grad()
    for _ in range(passes):
        replica.model(torch.randint(0, 7, (5,)).to(device)).backward()
    replica.optimizer.step()


def as_lists(value):
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    return value


def written(state):
    """The file of a state: (what loads from it, the sizes of the storages in it)."""
    file = io.BytesIO()
    torch.save(state, file)
    sizes = [i.file_size for i in zipfile.ZipFile(file).infolist() if "/data/" in i.filename]
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu"), sorted(sizes)


def torchs_own(replica, step):
    """What torch's own functions give, as a file; the truth that staging must reproduce."""
    state = {
        "model": get_model_state_dict(replica.model),
        "optimizer": get_optimizer_state_dict(replica.model, replica.optimizer),
        "step": step,
    }
    if replica.scaler.is_enabled():
        state["scaler"] = replica.scaler.state_dict()
    return written(as_lists(state))


def containers(value):
    """The types of a nested state's containers, in order."""
    if not isinstance(value, (dict, list, tuple)):
        return []
    items = value.values() if isinstance(value, dict) else value
    return [type(value), *(kind for item in items for kind in containers(item))]


def assert_same(staged, expected):
    assert containers(staged) == containers(expected)
    assert list(flat(staged)) == list(flat(expected))
    assert differing(staged, expected) == []


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_the_file_holds_what_torchs_own_functions_give(group, stage, make_optimizer):
    replica = replicate(Net(), make_optimizer)
    staging = stage(replica)
    for step in range(1, 4):
        take_step(replica)
        expected, sizes = torchs_own(replica, step)
        staging.begin(step)
        state, staged_sizes = written(staging.state())
        staging.release()
        assert_same(state, expected)
        assert staged_sizes == sizes  # tied parameters and views of one storage are stored once
        assert sum(sizes) == staging.host_bytes == host_bytes(replica)


def test_names_are_the_plain_models_when_it_is_compiled(group, stage):
    replica = replicate(torch.compile(Net(), backend="eager"))
    take_step(replica)
    staging = stage(replica)
    staging.begin(1)
    assert_same(written(staging.state())[0], torchs_own(replica, 1)[0])
    assert "embed.weight" in staging.state()["model"]


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_later_passes_rates_and_scales_do_not_leak_into_the_state(group, stage, make_optimizer):
    replica = replicate(Net(), make_optimizer, scaling=True)
    take_step(replica)
    replica.scaler.scale(torch.zeros(()))  # makes the scale a tensor
    expected, _ = torchs_own(replica, 1)
    staging = stage(replica, Gated)
    staging.begin(1)
    for settings in replica.optimizer.param_groups:
        if isinstance(settings["lr"], torch.Tensor):
            settings["lr"].fill_(77.0)
        else:
            settings["lr"] = 77.0
    replica.scaler.update(new_scale=2.0)
    for _ in range(3):  # an accumulation of gradients
        replica.model(torch.randint(0, 7, (5,))).backward()
    assert replica.plain_model.calls == 4
    staging.gate.set()
    assert_same(written(staging.state())[0], expected)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_the_optimizer_waits_for_the_copy_by_itself(group, stage, make_optimizer):
    replica = replicate(Net(), make_optimizer)
    take_step(replica)
    expected, _ = torchs_own(replica, 1)
    staging = stage(replica, Gated)
    staging.begin(1)
    take_step(replica)
    staging.gate.set()
    assert differing(torchs_own(replica, 1)[0], expected) != []
    assert_same(written(staging.state())[0], expected)
    assert staging.waited_seconds > 0
    staging.release()
    staging.begin(2)
    staging.state()
    take_step(replica)
    assert staging.waited_seconds == 0


def test_a_step_that_the_scaler_skips_waits_for_nothing_and_changes_nothing(group, stage):
    replica = replicate(Net(), scaling=True)
    take_step(replica)
    replica.scaler.scale(torch.zeros(()))
    expected, _ = torchs_own(replica, 1)
    staging = stage(replica, Gated)
    staging.begin(1)
    loss = replica.model(torch.randint(0, 7, (5,))) * float("inf")
    replica.scaler.scale(loss).backward()
    replica.scaler.step(replica.optimizer)
    replica.scaler.update()
    assert replica.scaler.get_scale() == 4.0
    assert staging.waited_seconds == 0
    staging.gate.set()
    take_step(replica)
    state, _ = written(staging.state())
    assert_same(state, expected)
    assert state["scaler"]["scale"] == 8.0


class Stamped(nn.Module):
    """Every forward pass writes the number of the coming step into all buffers."""

    def __init__(self):
        super().__init__()
        self.coming = 1
        shapes = [(), (0,), (1,), (3, 5), (40_000,)]
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        for number, shape in enumerate(shapes):
            self.register_buffer(f"buffer{number}", torch.zeros(shape))
        self.register_buffer("replaced", torch.zeros(3))

    def forward(self, x):
        for number in range(5):
            getattr(self, f"buffer{number}").fill_(self.coming)
        self.replaced = torch.full((3,), float(self.coming))
        return x * sum(w.sum() for w in self.weights)


class Stamper(torch.optim.Optimizer):
    """Writes its step into every parameter and every state, in place or anew, one by one."""

    def __init__(self, parameters, model):
        super().__init__(parameters, {"lr": 0.0})
        self.model = model

    @torch.no_grad()
    def step(self, closure=None):
        step = self.model.coming
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p]
                p.fill_(step)
                kept.setdefault("moment", torch.zeros_like(p)).fill_(step)
                kept.setdefault("step", torch.zeros(())).fill_(step)
                kept["replaced"] = torch.full_like(p, step)
                kept["number"] = step
                time.sleep(0)
        self.model.coming += 1


class Slow(Staging):
    """Pauses at random before it copies a storage."""

    def _copy(self, buffer, source):
        if threading.current_thread() is not MAIN:
            time.sleep(random.choice([0, 0, 0, 0.0005, 0.001]))
        super()._copy(buffer, source)


def strangers(state):
    """What in a stamped state is not of the state's own step."""
    values = flat({key: state[key] for key in ("model", "optimizer")})
    return [
        name
        for name, value in values.items()
        if (isinstance(value, torch.Tensor) and not torch.all(value == state["step"]))
        or (name.endswith((".number", ".lr")) and value != state["step"])
    ]


@pytest.mark.parametrize("seed", range(8))
def test_a_state_is_of_one_step_however_training_copying_and_writing_interleave(group, stage, seed):
    model = Stamped()
    replica = replicate(model, lambda parameters: Stamper(parameters, model))
    staging, chance = stage(replica, Slow), random.Random(seed)
    begun, found, written_steps = queue.Queue(), [], []

    def write():
        while (step := begun.get()) is not None:
            try:
                state = staging.state()
                for _ in range(3):  # a slow writer still reads what it was given
                    found.extend((step, name) for name in strangers(state))
                    time.sleep(chance.random() / 500)
                written_steps.append(state["step"])
            except Exception as error:
                found.append((step, repr(error)))
            staging.release()

    writer = threading.Thread(target=write)
    writer.start()
    asked, step, ends = [], 0, time.monotonic() + DEADLINE
    while len(asked) < 12 and time.monotonic() < ends:
        step += 1
        replica.optimizer.param_groups[0]["lr"] = replica.optimizer.param_groups[1]["lr"] = step
        take_stamped_step(replica, chance.choice([1, 1, 2, 4]))
        if not staging.in_use and chance.random() < 0.7:
            staging.begin(step)
            asked.append(step)
            begun.put(step)
    begun.put(None)
    writer.join(DEADLINE)
    assert not writer.is_alive()
    assert found == []
    assert written_steps == asked


def take_stamped_step(replica, passes):
    replica.optimizer.zero_grad()
    for _ in range(passes):
        replica.model(torch.ones(())).backward()
    replica.optimizer.step()


def test_buffers_are_allocated_once_and_used_again(group, stage):
    replica = replicate(Net(), Odd)
    staging = stage(replica)
    places = []
    for step in range(1, 5):
        take_step(replica)
        staging.begin(step)
        tensors = [v for v in flat(staging.state()).values() if isinstance(v, torch.Tensor)]
        places.append([tensor.data_ptr() for tensor in tensors])
        staging.release()
    assert places[0] == places[1] == places[2] == places[3]


def test_a_state_that_grows_or_shrinks_gets_buffers_that_fit(group, stage):
    replica = replicate(Net())
    staging = stage(replica)
    take_step(replica)
    for step in range(1, 5):
        if step == 2:
            for kept in replica.optimizer.state.values():
                kept["extra"] = torch.full((step, 3), 9.0)
        if step == 3:
            for kept in replica.optimizer.state.values():
                kept["extra"] = torch.full((2, 3), 9, dtype=torch.int32)  # as many bytes
        if step == 4:
            for kept in replica.optimizer.state.values():
                del kept["extra"]
        staging.begin(step)
        assert_same(written(staging.state())[0], torchs_own(replica, step)[0])
        staging.release()
        assert staging.host_bytes == host_bytes(replica)


def test_a_state_in_use_is_not_overwritten(group, stage):
    replica = replicate(Net())
    take_step(replica)
    staging = stage(replica)
    assert not staging.in_use
    with pytest.raises(RuntimeError, match="no state is staged"):
        staging.state()
    staging.begin(1)
    assert staging.in_use
    with pytest.raises(RuntimeError, match="step 2 cannot be staged"):
        staging.begin(2)
    staging.release()
    assert not staging.in_use
    staging.begin(2)
    assert staging.state()["step"] == 2


def test_release_waits_for_a_copy_that_nobody_asked_for(group, stage):
    replica = replicate(Net())
    take_step(replica)
    staging = stage(replica, Gated)
    staging.begin(1)
    threading.Timer(0.1, staging.gate.set).start()
    staging.release()
    assert staging.gate.is_set()


def test_an_error_in_copying_costs_that_state_and_not_the_training(group, stage):
    class Broken(Gated):
        working = False

        def _copy(self, buffer, source):
            if not self.working and threading.current_thread() is not MAIN:
                assert self.gate.wait(DEADLINE)
                raise MemoryError("no room")
            super()._copy(buffer, source)

    replica = replicate(Net())
    take_step(replica)
    staging = stage(replica, Broken)
    staging.begin(1)
    take_step(replica)
    assert staging.waited_seconds > 0
    with pytest.raises(MemoryError, match="no room"):
        staging.state()
    assert staging.host_bytes == 0
    staging.release()
    staging.working = True
    staging.begin(2)
    assert_same(written(staging.state())[0], torchs_own(replica, 2)[0])


@pytest.mark.parametrize("what", ["a parameter", "a state of the optimizer"])
def test_a_change_outside_of_the_optimizer_is_noticed_unless_it_waited(group, stage, what):
    replica = replicate(Net())
    take_step(replica)
    staging = stage(replica, Gated)
    parameter = replica.plain_model.tall
    changed = {
        "a parameter": parameter,
        "a state of the optimizer": replica.optimizer.state[parameter]["exp_avg"],
    }[what]
    staging.begin(1)
    with torch.no_grad():
        changed.mul_(2)
    staging.gate.set()
    with pytest.raises(RuntimeError, match=r"shape \(6, 6\), were changed outside of optimizer"):
        staging.state()
    staging.release()

    expected, _ = torchs_own(replica, 1)
    staging.gate.clear()
    staging.begin(1)
    staging.wait()
    with torch.no_grad():
        changed.mul_(2)
    assert_same(written(staging.state())[0], expected)


def test_tensors_that_are_not_plain_memory_are_copied_too(group, stage):
    replica = replicate(Net())
    take_step(replica)
    sparse = torch.eye(3).to_sparse()
    for number, kept in enumerate(replica.optimizer.state.values()):
        kept["odd"] = [torch.view_as_complex(torch.ones(2, 2)).conj(), sparse][number % 2]
    staging = stage(replica)
    staging.begin(1)
    odd = [kept["odd"] for kept in staging.state()["optimizer"]["state"].values()]
    sparse.mul_(5)
    assert torch.equal(odd[0], torch.tensor([1 - 1j, 1 - 1j]))
    assert torch.equal(odd[1].to_dense(), torch.eye(3))


def test_after_close_no_thread_and_no_hook_are_left(group):
    before = set(threading.enumerate())
    replica = replicate(Net())
    take_step(replica)
    staging = Staging(replica)
    staging.begin(1)
    state = staging.state()
    staging.close()
    staging.close()
    assert set(threading.enumerate()) == before
    assert staging.host_bytes == 0
    take_step(replica)
    assert state["model"]["calls"] == 1
    assert not replica.optimizer._optimizer_step_pre_hooks
    gc.collect()


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_copy_takes_one_thread_only(group, stage):
    threads, wide = torch.get_num_threads(), nn.Linear(1000, 500)
    torch.set_num_threads(2)
    try:
        replica = replicate(wide, lambda p: torch.optim.SGD(p, lr=0.1))
        staging = stage(replica)
        replica.model(torch.ones(2, 1000)).sum().backward()
        replica.optimizer.step()
        before = len(os.listdir("/proc/self/task"))
        staging.begin(1)
        staging.state()
        assert len(os.listdir("/proc/self/task")) <= before + 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_state_is_of_one_step_too(group, stage):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 512), nn.Linear(512, 4096), nn.LayerNorm(4096), nn.Linear(4096, 512)
    ).to(group.device)
    model.append(nn.BatchNorm1d(512).to(group.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    replica = Replica(DistributedDataParallel(model, device_ids=[group.device]), optimizer, scaler)
    staging = stage(replica)

    def step():
        optimizer.zero_grad()
        replica.model(torch.randint(0, 7, (64,), device=group.device)).square().mean().backward()
        optimizer.step()

    places = set()
    for number in range(1, 20):
        step()
        expected, _ = torchs_own(replica, number)
        staging.begin(number)
        step()
        state = staging.state()
        assert_same(written(state)[0], expected)
        assert all(v.device.type == "cpu" for v in flat(state).values() if hasattr(v, "device"))
        assert state["model"]["1.weight"].is_pinned()
        places.add(state["model"]["1.weight"].data_ptr())
        assert staging.host_bytes == host_bytes(replica)
        staging.release()
    assert len(places) == 1
