"""What a person sees: speed, TensorBoard without doubles, a heartbeat, a loss that is no number."""

import itertools
import re
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from training import failure, flops, heartbeat, watch
from training.metrics import Pace
from training.model import build_model
from training.settings import TrainingSettings


def curve(directory, tag):
    """The (step, value) pairs that TensorBoard shows."""
    events = EventAccumulator(str(directory), purge_orphaned_data=True)
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_goes_on_across_attempts_and_doubles_nothing(run, tmp_path, monkeypatch):
    options = {"total_steps": 9, "decay_steps": 9, "snapshot_steps": 3, "tensorboard": True}
    options |= {"validation_share": 0.1, "evaluate_every": 3}
    run(**options, checkpoint_dir=str(tmp_path / "straight"))
    take_step, taken = watch.Watch.after_step, itertools.count(1)

    def interrupted(self, step, *arguments):
        take_step(self, step, *arguments)
        if next(taken) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(watch.Watch, "after_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(**options)
        torch.distributed.destroy_process_group()
    run(**options)
    folders = [tmp_path / name / watch.FOLDER for name in ("straight", "checkpoints")]
    assert len(list((folders[1] / "train").iterdir())) == 2
    for part, tag in (("train", "loss"), ("train", "learning_rate"), ("validation", "loss")):
        straight, in_parts = (curve(folder / part, tag) for folder in folders)
        assert straight == in_parts
    assert [step for step, _ in curve(folders[1] / "train", "loss")] == list(range(1, 10))
    assert [step for step, _ in curve(folders[1] / "validation", "loss")] == [3, 6, 9]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("room", [0, 9])
def test_a_disk_that_refuses_ends_the_curves_and_not_the_run(run, monkeypatch, capfd, room):
    write, written = RecordWriter.write, itertools.count()

    def full(self, data):
        if next(written) >= room:
            raise OSError(28, "No space left on device")
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", full)
    run(tensorboard=True, validation_share=0.1)
    out = capfd.readouterr().out
    assert out.count("tensorboard_failed") == 1
    assert re.search(r"^tensorboard_failed reason=OSError: .*No space left", out, re.M)
    assert "finished step=6" in out


def test_tensorboard_without_its_package_is_refused(monkeypatch):
    wanted = TrainingSettings(tensorboard=True)
    assert watch.tensorboard_problems(wanted) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = watch.tensorboard_problems(wanted)
    assert problem.startswith("tensorboard is true, but the package tensorboard is not installed")
    assert watch.tensorboard_problems(TrainingSettings()) == []


def test_a_log_line_has_the_speed_in_samples_and_tokens_and_the_wait_for_data(run, capfd):
    run(log_every=2)
    lines = [x for x in capfd.readouterr().out.splitlines() if x.startswith("step=")]
    assert [line.split()[0] for line in lines] == ["step=2", "step=4", "step=6"]
    for line in lines:
        found = {k: float(v) for k, v in re.findall(r"(\w+)=([-+.e\d]+)", line)}
        assert found["tokens_per_second"] == pytest.approx(
            16 * found["samples_per_second"], rel=0.001, abs=1.5
        )
        # The line has samples to a tenth and seconds to four digits, however short a step is.
        assert found["samples_per_second"] == pytest.approx(
            8 / found["step_seconds"], rel=0.001, abs=0.05
        )
        assert 0 <= found["data_wait_seconds"] <= found["step_seconds"]


def test_the_wait_for_data_is_counted_per_step():
    def slow():
        for _ in range(4):
            time.sleep(0.05)
            yield

    pace = Pace(0)
    assert len(list(pace.waits(slow()))) == 4
    seconds, waited = pace.since_last(4)
    assert 0.05 <= waited <= seconds
    assert pace.since_last(5)[1] == 0


def test_an_evaluation_is_not_counted_as_a_steps_time(run, monkeypatch, capfd):
    now = [1000.0]

    def slow(*arguments):
        now[0] += 60
        return 1.0

    monkeypatch.setattr("training.metrics.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("training.evaluation.validation_loss", slow)
    run(validation_share=0.1, evaluate_every=2)
    seconds = re.findall(r"^step=\d .*step_seconds=(\S+)", capfd.readouterr().out, re.M)
    assert len(seconds) == 6
    assert all(float(one) < 1 for one in seconds)


@pytest.mark.parametrize(
    ("device", "values", "peak"),
    [
        ("NVIDIA A10G", {"precision": "bf16"}, 70e12),
        ("NVIDIA A100-SXM4-40GB", {"precision": "fp16"}, 312e12),
        ("NVIDIA A100-SXM4-40GB", {"tf32": True}, 156e12),
        ("NVIDIA A100-SXM4-40GB", {}, None),
        ("NVIDIA L40S", {"precision": "bf16"}, 362e12),
        ("NVIDIA L40", {"precision": "bf16"}, None),
        ("Tesla V100-SXM2-16GB", {"precision": "fp16"}, 125e12),
        ("Tesla V100-SXM2-16GB", {"precision": "bf16"}, None),
    ],
)
def test_the_peak_is_the_devices_in_the_runs_arithmetic(device, values, peak):
    assert flops.peak_of(device, TrainingSettings(**values)) == peak


def test_the_flops_of_a_sample_are_six_for_each_weight_and_token_and_attention():
    settings = TrainingSettings(model_width=8, model_depth=2, model_heads=2, sequence_length=4)
    model = build_model(settings)
    multiplied = sum(p.numel() for p in model.parameters()) - 4 * 8
    assert model.flops_per_sample == 4 * (6 * multiplied + 12 * 2 * 8 * 4)
    assert model.tokens_per_sample == 4


def test_a_long_silence_is_broken_by_a_sign_of_life(capfd):
    with heartbeat.heartbeat(every=0.05), heartbeat.alive("evaluating"):
        failure.say("begun")
        deadline, said = time.monotonic() + 10, ""
        while said.count("alive ") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capfd.readouterr().out
    assert re.search(r"^alive phase=evaluating seconds=0$", said, re.M), said


def test_who_speaks_needs_no_sign_of_life(capfd):
    with heartbeat.heartbeat(every=5):
        for _ in range(10):
            failure.say("something")
    assert "alive" not in capfd.readouterr().out


def test_only_rank_0_gives_a_sign_of_life(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    with heartbeat.heartbeat(every=0.01):
        time.sleep(0.1)
    assert capfd.readouterr().out == ""
