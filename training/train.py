"""Train with DDP, and go on where the last attempt was interrupted.

    torchrun --nproc_per_node 2 training/train.py --train-dir … --checkpoint-dir … --model-dir …

The story of a job: join the other processes, build the model and the data, resume from the newest
whole snapshot, take the steps that are left, write the model. What you change for a project of your
own is in model.py and data.py.
"""

import dataclasses
import functools
import json
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

if __name__ == "__main__":
    # torchrun puts this file's folder on the path; the package is that folder's own name.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from training import failure, interruption

    interruption.hold_back()
    # A mistake in model.py or data.py shows when they are imported: the `failure` file says so too.
    sys.excepthook = lambda kind, error, trace: failure.report(error)

import torch
from torch import nn
from torch.utils.data import Dataset

from training.data import build_dataset
from training.evaluation import Evaluation
from training.failure import TrainingError, exit_code_of, say
from training.group import Group, joined
from training.heartbeat import alive, heartbeat
from training.interruption import Interruption
from training.model import build_model
from training.optimization import learning_rate, take_step
from training.parallel import distribute, settle_buckets
from training.sampling import check_batch, held_out, seed_step, steps_of_data
from training.settings import SettingsError, TrainingSettings, validation_problems
from training.snapshots.best import Best
from training.snapshots.files import prepare, serialise, write_atomically
from training.snapshots.names import plain
from training.snapshots.resume import resume
from training.snapshots.snapshotter import Snapshotter
from training.snapshots.tensors import mapped
from training.watch import Watch, tensorboard_problems


def main() -> None:
    """Run one attempt of the job that the command line and SageMaker's environment describe."""
    settings = TrainingSettings.from_arguments(sys.argv[1:])
    check_settings(settings)
    with (
        heartbeat(),
        joined(settings.collective_timeout, deterministic=settings.deterministic) as group,
    ):
        train(settings, group)


def train(settings: TrainingSettings, group: Group) -> None:
    """Everything between joining the group and leaving it."""
    interruption = Interruption(group)

    with group.agreement():
        check_outputs(settings, group)
        dataset, validation = build_data(settings)
        samples = len(dataset)  # type: ignore[arg-type]
        check_batch(settings, samples, group.world_size)
        model = build_model(settings)
    check_same(samples, group)
    replica = distribute(model, settings, group)
    with alive("compiling" if settings.compile else "warming up"):
        settle_buckets(replica, dataset, settings, group)

    with alive("resuming"):
        resumed = resume(settings, group, replica, samples)
    step = resumed.step
    if step >= settings.total_steps and group.rank == 0:
        say(f"already finished: step {step} of {settings.total_steps}; writing the model")

    watch = Watch(settings, group, model, resumed)
    evaluation = Evaluation(settings, group, model, validation, resumed, watch.evaluated)
    # By a name of its own, the data outlives a failure in the loop: taking its processes apart may
    # wait for them, and the peers are told and the state is written first.
    data = watch.waits(steps_of_data(dataset, settings, group, first_step=step))
    with (
        closing(watch),
        closing(evaluation),
        alive("training"),
        Snapshotter(
            *(settings, group, replica, resumed, samples, interruption),
            also=evaluation.state,
            metrics=watch.metrics,
        ) as snapshots,
    ):
        evaluation.after_step(step, snapshots.look)  # what an interruption may have cut short
        for micro_batches in data:
            rate = learning_rate(settings, step)
            seed_step(settings.seed, step, group.rank)
            loss, norm = take_step(replica, micro_batches, rate, settings, group.device)
            step += 1

            snapshots.reached(step, norm)
            watch.after_step(step, loss, norm, rate)
            evaluation.after_step(step, snapshots.look)
            snapshots.take(step)

        snapshots.finish(step)
        group.wait_for_rank_0("the last snapshot")
        evaluation.finish(step, snapshots.look)
        if group.rank == 0:
            exported = export(model, step, evaluation.best, settings)
    if group.rank == 0:
        say(f"finished step={step} model={settings.model_dir}/model.pt {exported}")


def check_settings(settings: TrainingSettings) -> None:
    """Refuse, before anybody waits for anybody, what this machine or its channels cannot do."""
    problems = validation_problems(settings, channel=bool(settings.validation_dir))
    problems += tensorboard_problems(settings)
    if not torch.cuda.is_available():
        if settings.precision == "fp16":
            problems.append("precision is fp16, which needs a GPU; use bf16 or fp32 on a CPU")
        if settings.compile and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            problems.append(
                "compile is true, which needs a C++ compiler on a CPU, and there is none; install "
                "g++, or set compile to false"
            )
    if problems:
        raise SettingsError(problems)


def build_data(settings: TrainingSettings) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """What is trained on, and what is validated on: a channel, a part held out, or nothing."""
    dataset, validation = held_out(build_dataset(settings, settings.train_dir), settings)
    if settings.validation_dir:
        validation = build_dataset(settings, settings.validation_dir)
    return dataset, validation


def check_outputs(settings: TrainingSettings, group: Group) -> None:
    """Refuse a model directory that cannot be written."""
    if group.rank == 0:
        try:
            prepare(Path(settings.model_dir))
        except OSError as error:
            raise TrainingError(
                f"model_dir {settings.model_dir!r} cannot be written ({error.strerror}); "
                f"give a directory that can, with --model-dir"
            ) from error


def check_same(samples: int, group: Group) -> None:
    """Refuse data sets that differ between ranks: each would deal from a deck of its own."""
    if len(set(seen := group.gather(samples))) > 1:
        raise TrainingError(
            f"the ranks see data sets of different sizes: {seen} samples, in the order of ranks; "
            f"every host needs all of the training data"
        )


def export(model: nn.Module, step: int, best: Best | None, settings: TrainingSettings) -> str:
    """Write the last or the best state as `model.pt`, a plain state dict. Returns which it is.

    `settings.json` and `exported.json` beside it say how it was trained, and which state it is.
    """
    chosen: dict[str, Any] = {"export": settings.export, "step": step}
    if settings.export == "best" and best and best.state:
        state = best.state["model"]
        chosen.update(step=best.state["step"], validation_loss=best.state["validation_loss"])
    else:
        named = {plain(name): value for name, value in model.state_dict().items()}
        state = mapped(named, lambda tensor: tensor.detach().cpu())
    directory = Path(settings.model_dir)
    described = {"settings.json": dataclasses.asdict(settings), "exported.json": chosen}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / "model.pt", lambda file: serialise(state, file))
        for name, values in described.items():
            text = json.dumps(values, indent=1).encode()
            write_atomically(directory / name, functools.partial(_put, text))
    except OSError as error:
        raise TrainingError(
            f"the model could not be written to {directory} ({error.strerror}); start again "
            f"with a --model-dir that can be written: no step will be repeated"
        ) from error
    return " ".join(f"{name}={value}" for name, value in chosen.items() if name != "step")


def _put(text: bytes, file: BinaryIO) -> None:
    file.write(text)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
