"""A rehearsed job is as small as a laptop needs, still valid, and says what it gave up."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import config, limits, start
from launch.errors import Refused
from launch.rehearsal.scaling import scaled

CONFIGS = sorted(config.DEFAULT_CONFIG.parent.glob("*.yaml"))
GPU = "{} has {}; here each instance is one process on the CPU"
# What every preset that is the default on other instances gives up.
AS_THE_DEFAULT = {
    "training.total_steps": "5000 → 12",
    "training.warmup_steps": "100 → 1",
    "training.snapshot_steps": "0 → 3",
    "training.log_every": "10 → 1",
}
PRESETS = {
    "rehearsal": {},
    "cpu-smoke": {"training.dataloader_workers": "2 → 1"},
    "default": {
        **AS_THE_DEFAULT,
        "training.global_batch_size": "64 → 4",
        "training.dataloader_workers": "2 → 1",
    },
    "on-demand": {
        **AS_THE_DEFAULT,
        "training.global_batch_size": "64 → 4",
        "training.dataloader_workers": "2 → 1",
    },
    "one-gpu": {
        **AS_THE_DEFAULT,
        "training.global_batch_size": "64 → 2",
        "training.dataloader_workers": "2 → 1",
    },
    "one-node": {
        **AS_THE_DEFAULT,
        "training.global_batch_size": "512 → 2",
        "training.dataloader_workers": "4 → 1",
    },
    "multi-node": {
        "compute.instance_count": "4 → 2",
        **AS_THE_DEFAULT,
        "training.global_batch_size": "512 → 4",
        "training.dataloader_workers": "4 → 1",
    },
}
CPU = (
    "compute.instance_type=ml.c5.xlarge",
    "compute.image_uri=pytorch-training:2.8.0-cpu-py312",
)


def job(*overrides, name="default"):
    return config.load(config.DEFAULT_CONFIG.parent / f"{name}.yaml", overrides)


def cpu_job(*, hosts=2, **training):
    """A job on CPU instances whose other training settings are all small enough already."""
    return small_job(*CPU, hosts=hosts, **training)


def small_job(*overrides, hosts=2, **training):
    """The same on the default's instances, which have a GPU each."""
    small = {"total_steps": 60, "warmup_steps": 6, "snapshot_steps": 10, "log_every": 1}
    values = {"dataloader_workers": 0, "precision": "fp32", **small, **training}
    settings = [f"training.{name}={value}" for name, value in values.items()]
    return job(*overrides, f"compute.instance_count={hosts}", *settings)


def table(lines):
    """The changes by setting, without their reasons."""
    found = (re.fullmatch(r"([a-z_.]+): (\S+ → \S+) \((.+)\)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def after(job, hosts=2, pinned=()):
    """The training settings of the scaled job."""
    return scaled(job, hosts, pinned)[0].training


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_preset_says_exactly_what_it_gives_up(path):
    before = config.load(path)
    small, lines = scaled(before, 2, ())
    count, kind = limits.ranks_per_host(before.compute.instance_type), before.compute.instance_type
    gpus = {1: "1 GPU", 8: "8 GPUs"}[count]
    said = [GPU.format(kind, gpus)] if limits.has_gpus(kind) else []
    assert table(lines) == PRESETS[path.stem]
    assert lines[: len(said)] == said
    assert len(lines) == len(said) + len(PRESETS[path.stem])
    for key, change in PRESETS[path.stem].items():
        section, name = key.split(".")
        assert str(getattr(getattr(small, section), name)) == change.rpartition(" ")[2]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_nothing_but_what_was_said_is_another(path):
    before = config.load(path)
    small, lines = scaled(before, 2, ())
    differing = {
        f"{section}.{name}"
        for section in ("aws", "compute", "spot", "data", "training")
        for name, value in _values(getattr(small, section)).items()
        if value != _values(getattr(before, section))[name]
    }
    assert small.run_name == before.run_name
    assert differing == set(table(lines))


def _values(section):
    return dataclasses.asdict(section) if dataclasses.is_dataclass(section) else dict(section)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_request_can_be_made_of_every_scaled_preset(path):
    before = config.load(path)
    small, _ = start.with_stand_ins(scaled(before, 2, ())[0])
    request = start.request_of(small)
    assert request["ResourceConfig"]["InstanceCount"] == min(before.compute.instance_count, 2)
    assert request["ResourceConfig"]["InstanceType"] == before.compute.instance_type
    assert int(request["HyperParameters"]["total_steps"]) == small.training.total_steps
    assert int(request["HyperParameters"]["global_batch_size"]) == small.training.global_batch_size


def test_the_rehearsals_own_job_stays_as_it_is():
    before = job(name="rehearsal")
    assert scaled(before, 2, ()) == (before, [])


def test_a_job_that_was_scaled_is_small_enough():
    small, _ = scaled(job(name="multi-node"), 2, ())
    again, lines = scaled(small, 2, ())
    assert again == small
    assert lines == [GPU.format("ml.g5.48xlarge", "8 GPUs")]


def test_a_change_is_told_with_its_reason():
    lines = scaled(job("aws.network_isolation=true", name="multi-node"), 3, ())[1]
    assert lines[1:4] == [
        "compute.instance_count: 4 → 3 (--hosts 3)",
        "aws.network_isolation: true → false (the code comes from the mocked S3)",
        "training.total_steps: 5000 → 12 (few steps)",
    ]


def test_no_more_hosts_than_the_job_has():
    assert scaled(job(), 8, ())[0].compute.instance_count == 2


@pytest.mark.parametrize("hosts", [0, -1])
def test_a_rehearsal_needs_a_host(hosts):
    with pytest.raises(Refused) as refused:
        scaled(job(), hosts, ())
    assert refused.value.problems == [f"--hosts is {hosts}; a rehearsal needs at least 1"]


def test_of_a_type_that_nobody_knows_nothing_is_said():
    lines = scaled(job("compute.instance_type=ml.p9.giant"), 2, ())[1]
    assert [line for line in lines if "GPU" in line] == []


@pytest.mark.parametrize(("steps", "left"), [(1, 1), (59, 59), (60, 60), (61, 12), (10**7, 12)])
def test_a_long_run_becomes_a_short_one(steps, left):
    assert after(cpu_job(total_steps=steps, warmup_steps=0)).total_steps == left


@pytest.mark.parametrize(
    ("warmup", "decay", "left"),
    [(0, 0, (0, 0)), (1, 600, (1, 6)), (300, 900, (3, 9)), (600, 601, (6, 6)), (0, 1, (0, 1))],
)
def test_the_schedule_keeps_its_shape(warmup, decay, left):
    small = after(cpu_job(total_steps=1200, warmup_steps=warmup, decay_steps=decay))
    assert (small.warmup_steps, small.decay_steps) == left


def test_a_schedule_that_ends_after_the_run_still_does():
    assert after(cpu_job(total_steps=1200, decay_steps=2400)).decay_steps == 24


def test_a_decay_never_ends_before_a_pinned_warmup():
    before = cpu_job(total_steps=1200, warmup_steps=8, decay_steps=100)
    small = after(before, pinned=["training.warmup_steps"])
    assert (small.warmup_steps, small.decay_steps) == (8, 8)


@pytest.mark.parametrize(
    ("steps", "between", "left"),
    [(60, 30, 30), (60, 31, 15), (60, 0, 15), (5000, 6, 6), (5000, 7, 3), (3, 0, 1), (1, 0, 1)],
)
def test_several_snapshots_fit_into_the_run(steps, between, left):
    before = cpu_job(total_steps=steps, warmup_steps=0, snapshot_steps=between)
    assert after(before).snapshot_steps == left


@pytest.mark.parametrize(
    ("steps", "every", "left"), [(60, 5, 5), (60, 6, 1), (5000, 2, 1), (5000, 1, 1)]
)
def test_steps_are_logged_often_enough_to_be_counted(steps, every, left):
    assert after(cpu_job(total_steps=steps, log_every=every)).log_every == left


@pytest.mark.parametrize(
    ("hosts_before", "steps", "batch", "micro", "left"),
    [
        (2, 60, 16, 0, (16, 0)),  # a short run keeps its samples
        (3, 60, 9, 0, (8, 0)),
        (3, 60, 3, 0, (2, 0)),
        (3, 60, 12, 4, (12, 3)),  # four samples at once do not divide the six of a host
        (2, 5000, 16, 4, (4, 2)),
        (2, 5000, 16, 0, (4, 0)),
        (2, 5000, 2, 1, (2, 1)),
        (3, 5000, 3, 1, (2, 1)),
        (1, 5000, 7, 7, (2, 2)),
        (1, 5000, 1, 1, (1, 1)),
    ],
)
def test_every_host_gets_the_same_number_of_samples(hosts_before, steps, batch, micro, left):
    small = after(
        cpu_job(
            hosts=hosts_before, total_steps=steps, global_batch_size=batch, micro_batch_size=micro
        )
    )
    assert (small.global_batch_size, small.micro_batch_size) == left


def test_what_needs_a_gpu_or_many_cores_is_replaced():
    lines = scaled(small_job(precision="fp16", dataloader_workers=8), 2, ())[1]
    assert table(lines) == {
        "training.precision": "fp16 → bf16",
        "training.dataloader_workers": "8 → 1",
    }
    small = after(cpu_job(precision="bf16", dataloader_workers=0))
    assert (small.precision, small.dataloader_workers) == ("bf16", 0)


def test_what_only_aws_looks_at_is_sent_as_it_is():
    before = job(
        "aws.subnets=[subnet-1]",
        "aws.security_group_ids=[sg-1]",
        "aws.kms_key=alias/key",
        "aws.tags={team: text}",
        "aws.encrypt_inter_container_traffic=true",
        "compute.warm_pool=1h",
        "compute.environment={NCCL_DEBUG: INFO}",
        "spot.enabled=false",
    )
    small, _ = scaled(before, 2, ())
    assert (small.aws, small.compute, small.spot) == (before.aws, before.compute, before.spot)


def test_what_is_pinned_keeps_its_value():
    overrides = {
        "compute.instance_count": "3",
        "aws.network_isolation": "true",
        "training.total_steps": "600",
        "training.warmup_steps": "300",
        "training.decay_steps": "400",
        "training.snapshot_steps": "500",
        "training.log_every": "100",
        "training.global_batch_size": "33",
        "training.micro_batch_size": "11",
        "training.precision": "fp16",
        "training.dataloader_workers": "9",
        "training.validation_share": "0.1",
        "training.evaluate_every": "200",
        "training.compile": "true",
    }
    before = job(*(f"{key}={value}" for key, value in overrides.items()))
    assert scaled(before, 2, overrides) == (
        before,
        ["ml.g5.2xlarge has 1 GPU; here each instance is one process on the CPU"],
    )
    left_alone = {"training.validation_share"}
    assert table(scaled(before, 2, ())[1]).keys() == overrides.keys() - left_alone


def test_a_section_that_is_pinned_keeps_all_its_values():
    before = job(name="multi-node")
    small, lines = scaled(before, 2, ["training"])
    assert small.training == before.training
    assert table(lines) == {"compute.instance_count": "4 → 2"}


@pytest.mark.parametrize(
    ("pinned", "said"),
    [
        (
            "training.warmup_steps=100",
            "training.warmup_steps is 100, but the run ends at total_steps 12; "
            "set warmup_steps to that or less",
        ),
        (
            "training.global_batch_size=9",
            "training.global_batch_size is 9, which the 2 ranks of 2 × one process cannot share "
            "evenly: set training.global_batch_size to 8 or 10",
        ),
        (
            "training.micro_batch_size=4",
            "training.micro_batch_size is 4, which does not divide the 2 samples of a rank "
            "(training.global_batch_size 4 on 2 × one process): "
            "set training.micro_batch_size to 2 or 0",
        ),
    ],
)
def test_what_cannot_work_as_pinned_is_refused(pinned, said):
    shares = ("training.global_batch_size=36", "training.micro_batch_size=3")
    before = job(*CPU, "compute.instance_count=3", *shares, pinned)
    with pytest.raises(Refused) as refused:
        scaled(before, 2, [pinned.partition("=")[0]])
    assert refused.value.problems == [said]


@given(
    hosts=st.integers(1, 5),
    count=st.integers(1, 6),
    share=st.integers(1, 40),
    steps=st.integers(1, 10_000),
    data=st.data(),
)
def test_any_valid_job_gives_a_valid_one(hosts, count, share, steps, data):
    warmup = data.draw(st.integers(0, steps))
    small = after(
        cpu_job(
            hosts=count,
            total_steps=steps,
            warmup_steps=warmup,
            decay_steps=data.draw(st.just(0) | st.integers(max(1, warmup), 20_000)),
            snapshot_steps=data.draw(st.integers(0, 10_000)),
            global_batch_size=share * count,
            micro_batch_size=data.draw(
                st.sampled_from([0, *(d for d in range(1, share + 1) if share % d == 0)])
            ),
        ),
        hosts,
    )
    ranks = min(hosts, count)
    assert small.total_steps <= 60
    assert small.global_batch_size % ranks == 0
    if small.micro_batch_size:
        assert (small.global_batch_size // ranks) % small.micro_batch_size == 0
    assert small.snapshot_steps <= max(1, small.total_steps / 2)
    assert (small.warmup_steps > 0) == (warmup > 0)
