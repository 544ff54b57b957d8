"""Train with DDP, and go on where the last attempt was interrupted.

    torchrun --nproc_per_node 2 training/train.py --train-dir … --checkpoint-dir … --model-dir …

The story of a job: join the other processes, build the model and the data, resume from the newest
whole snapshot, take the steps that are left, write the model. What you change for a project of your
own is in model.py and data.py.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

if __name__ == "__main__":
    # torchrun puts this file's folder on the path; the package is that folder's own name.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from training import failure, interruption

    interruption.hold_back()
    # A mistake in model.py or data.py shows when they are imported: the `failure` file says so too.
    sys.excepthook = lambda kind, error, trace: failure.report(error)

import torch
from torch import nn

from training.data import build_dataset
from training.failure import TrainingError, exit_code_of, say
from training.group import Group, joined
from training.interruption import Interruption
from training.metrics import Pace, step_line, validation_line
from training.model import build_model
from training.optimization import learning_rate, mean_over_ranks, take_step
from training.parallel import distribute, settle_buckets
from training.sampling import check_batch, seed_step, steps_of_data
from training.settings import TrainingSettings
from training.snapshots.files import prepare, write_atomically
from training.snapshots.names import plain
from training.snapshots.resume import resume
from training.snapshots.snapshotter import Snapshotter
from training.snapshots.tensors import mapped
from training.validation import validation_loss


def main() -> None:
    """Run one attempt of the job that the command line and SageMaker's environment describe."""
    settings = TrainingSettings.from_arguments(sys.argv[1:])
    with joined(settings.collective_timeout, deterministic=settings.deterministic) as group:
        train(settings, group)


def train(settings: TrainingSettings, group: Group) -> None:
    """Everything between joining the group and leaving it."""
    interruption = Interruption(group)

    with group.agreement():
        check_outputs(settings, group)
        dataset = build_dataset(settings, settings.train_dir)
        validation = None
        if settings.validation_dir:
            validation = build_dataset(settings, settings.validation_dir)
        samples = len(dataset)  # type: ignore[arg-type]
        check_batch(settings, samples, group.world_size)
        model = build_model(settings)
    check_same(samples, group)
    replica = distribute(model, settings, group)
    settle_buckets(replica, dataset, settings, group)

    resumed = resume(settings, group, replica, samples)
    step, pace = resumed.step, Pace(settings.global_batch_size, resumed.step)
    if step >= settings.total_steps and group.rank == 0:
        say(f"already finished: step {step} of {settings.total_steps}; writing the model")

    with Snapshotter(settings, group, replica, resumed, samples, interruption) as snapshots:
        for micro_batches in steps_of_data(dataset, settings, group, first_step=step):
            rate = learning_rate(settings, step)
            seed_step(settings.seed, step, group.rank)
            loss, norm = take_step(replica, micro_batches, rate, settings, group.device)
            step += 1

            snapshots.after_step(step, norm)
            if step % settings.log_every == 0 or step == settings.total_steps:
                log_step(step, loss, norm, rate, pace, group)

        snapshots.finish(step)
        if group.rank == 0:
            export(model, settings)
        if validation:
            mean_loss = validation_loss(model, validation, settings, group, snapshots.look)
            if group.rank == 0:
                say(validation_line(step, mean_loss))
    if group.rank == 0:
        say(f"finished step={step} model={settings.model_dir}/model.pt")


def check_outputs(settings: TrainingSettings, group: Group) -> None:
    """Refuse a precision that this device lacks, or a model directory that cannot be written."""
    if settings.precision == "fp16" and group.device.type == "cpu":
        raise TrainingError("precision is fp16, which needs a GPU; use bf16 or fp32 on a CPU")
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


def log_step(
    step: int, loss: torch.Tensor, norm: torch.Tensor, rate: float, pace: Pace, group: Group
) -> None:
    """Rank 0 prints the line; all ranks stop together when the loss is no number any more."""
    mean_loss, gradient_norm = mean_over_ranks(loss, group.world_size), float(norm)
    samples_per_second, seconds = pace.since_last(step)
    if group.rank == 0:
        say(
            step_line(
                step,
                loss=mean_loss,
                learning_rate=rate,
                gradient_norm=gradient_norm,
                samples_per_second=samples_per_second,
                step_seconds=seconds,
            )
        )
    if not (math.isfinite(mean_loss) and math.isfinite(gradient_norm)):
        raise TrainingError(
            f"the loss is {mean_loss} and the gradient norm {gradient_norm} at step {step}; "
            f"start again under another run_name, with a lower learning_rate or a longer warm-up. "
            f"The snapshots of this run are from before"
        )


def export(model: nn.Module, settings: TrainingSettings) -> None:
    """Write `model.pt`, a plain state dict, and `settings.json` into the model directory."""
    directory = Path(settings.model_dir)
    named = {plain(name): value for name, value in model.state_dict().items()}
    state = mapped(named, lambda tensor: tensor.detach().cpu())
    described = json.dumps(dataclasses.asdict(settings), indent=1).encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / "model.pt", lambda file: torch.save(state, file))
        write_atomically(directory / "settings.json", lambda file: file.write(described))
    except OSError as error:
        raise TrainingError(
            f"the model could not be written to {directory} ({error.strerror}); start again "
            f"with a --model-dir that can be written: no step will be repeated"
        ) from error


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
