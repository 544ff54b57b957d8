"""What a job gives up to fit on a laptop: instances, steps and samples, never its model or data."""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

from launch import container_rules, limits, rules
from launch.errors import Refused
from launch.schema import JobConfig
from training.settings import SettingsError

MOST_STEPS = 60  # a run as long as config/rehearsal.yaml stays as it is
FEW_STEPS = 12
SAMPLES_PER_HOST = 2

HOSTS = "--hosts"
COUNT = "compute.instance_count"
ISOLATION = "aws.network_isolation"
STEPS = "training.total_steps"
WARMUP = "training.warmup_steps"
DECAY = "training.decay_steps"
SNAPSHOT = "training.snapshot_steps"
LOG = "training.log_every"
BATCH = "training.global_batch_size"
MICRO = "training.micro_batch_size"
PRECISION = "training.precision"
EVALUATE = "training.evaluate_every"
COMPILE = "training.compile"
WORKERS = "training.dataloader_workers"

_ONE_RANK = "ml.c5.xlarge"  # a type on which the toolkit starts one process, as on any host here

Values = dict[str, Any]  # by dotted key


def scaled(config: JobConfig, hosts: int, pinned: Collection[str]) -> tuple[JobConfig, list[str]]:
    """`config` made small enough for a laptop, and one line for each change.

    At most `hosts` instances remain. What `pinned` names, by dotted key or by section, keeps its
    value. Raises Refused where what then results cannot work.
    """
    if hosts < 1:
        raise Refused(f"--hosts is {hosts}; a rehearsal needs at least 1")
    before = {HOSTS: hosts, **{key: _value(config, key) for key, _, _ in _RULES}}
    changed: Values = {}
    lines = list(_about_gpus(config.compute.instance_type))
    for key, rule, why in _RULES:
        value = before[key] if _is_pinned(key, pinned) else rule(before, before | changed)
        if value != before[key]:
            changed[key] = value
            lines.append(f"{key}: {_text(before[key])} → {_text(value)} ({why.format(hosts)})")
    return _validated(config, changed), lines


def _steps(before: Values, now: Values) -> int:
    return FEW_STEPS if before[STEPS] > MOST_STEPS else int(before[STEPS])


def _warmup(before: Values, now: Values) -> int:
    return _in_proportion(before[WARMUP], before, now)


def _decay(before: Values, now: Values) -> int:
    steps = _in_proportion(before[DECAY], before, now)
    return steps and max(steps, int(now[WARMUP]))


def _snapshot(before: Values, now: Values) -> int:
    often_enough = 0 < before[SNAPSHOT] <= now[STEPS] / 2
    return int(before[SNAPSHOT] if often_enough else max(1, now[STEPS] // 4))


def _log(before: Values, now: Values) -> int:
    return 1 if before[LOG] > now[STEPS] / FEW_STEPS else int(before[LOG])


def _batch(before: Values, now: Values) -> int:
    count, batch = now[COUNT], before[BATCH]
    most = batch if now[STEPS] == before[STEPS] else min(batch, SAMPLES_PER_HOST * count)
    return int(max(count, most - most % count))


def _micro(before: Values, now: Values) -> int:
    share, rest = divmod(now[BATCH], now[COUNT])
    if rest or not before[MICRO]:
        return int(before[MICRO])
    return next(d for d in range(min(before[MICRO], share), 0, -1) if share % d == 0)


def _evaluate(before: Values, now: Values) -> int:
    return _in_proportion(before[EVALUATE], before, now)


def _precision(before: Values, now: Values) -> str:
    return "bf16" if before[PRECISION] == "fp16" else str(before[PRECISION])


# A rule gets the values before and the values so far: those that stand above it are final.
_RULES: tuple[tuple[str, Callable[[Values, Values], Any], str], ...] = (
    (COUNT, lambda before, now: min(before[COUNT], before[HOSTS]), "--hosts {}"),
    (ISOLATION, lambda before, now: False, "the code comes from the mocked S3"),
    (STEPS, _steps, "few steps"),
    (WARMUP, _warmup, "in proportion to the steps"),
    (DECAY, _decay, "in proportion to the steps"),
    (SNAPSHOT, _snapshot, "several snapshots"),
    (LOG, _log, "the rehearsal counts step lines"),
    (BATCH, _batch, "few samples, as many on each instance"),
    (MICRO, _micro, "divides an instance's samples"),
    (PRECISION, _precision, "fp16 needs a GPU"),
    (EVALUATE, _evaluate, "in proportion to the steps"),
    (COMPILE, lambda before, now: False, "compiling takes longer than the steps"),
    (WORKERS, lambda before, now: min(before[WORKERS], 1), "all instances share this CPU"),
)


def _in_proportion(steps: int, before: Values, now: Values) -> int:
    """As large a part of the run as before; 0 stays 0, and nothing else becomes 0."""
    return steps and max(1, round(steps * now[STEPS] / before[STEPS]))


def _is_pinned(key: str, pinned: Collection[str]) -> bool:
    return key in pinned or key.partition(".")[0] in pinned


def _about_gpus(instance_type: str) -> Iterator[str]:
    count = limits.ranks_per_host(instance_type)
    if count and limits.has_gpus(instance_type):
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        yield f"{instance_type} has {gpus}; here each instance is one process on the CPU"


def _value(config: JobConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _validated(config: JobConfig, values: Values) -> JobConfig:
    """`config` with other values, checked as every configuration is.

    But for its batch, which is not shared by the instances' GPUs here, but by one process on each.
    """
    sections: dict[str, Values] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    try:
        training = dataclasses.replace(config.training, **sections.pop("training", {}))
    except SettingsError as error:
        raise Refused(f"training.{problem}" for problem in error.problems) from None
    config = _with(config, **{s: _with(getattr(config, s), **sections[s]) for s in sections})
    config = _with(config, training=training)
    here = _with(config, compute=_with(config.compute, instance_type=_ONE_RANK))
    elsewhere = set(container_rules.batch(config))
    problems = [problem for problem in rules.problems(config) if problem not in elsewhere]
    problems += [p.replace(_ONE_RANK, "one process") for p in container_rules.batch(here)]
    if problems:
        raise Refused(problems)
    return config


def _with(section: Any, **values: Any) -> Any:
    return section.model_copy(update=values)
