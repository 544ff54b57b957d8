"""The small rules: schedule, cadence, log lines, data windows, and SageMaker's hosts."""

import itertools
import json
import math
import os
import re

import pytest

from training import failure, metrics
from training.data import ByteWindows
from training.failure import TrainingError
from training.group import joined
from training.optimization import learning_rate
from training.settings import SettingsError, TrainingSettings


def test_the_learning_rate_is_a_function_of_settings_and_step():
    settings = TrainingSettings(
        total_steps=100, warmup_steps=10, learning_rate=1.0, learning_rate_floor=0.1
    )
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert learning_rate(settings, 100) == pytest.approx(0.1)
    assert learning_rate(settings, 10**9) == pytest.approx(0.1)


def test_decay_steps_pin_the_schedule_when_the_run_is_extended():
    pinned = [TrainingSettings(total_steps=n, decay_steps=50) for n in (50, 100)]
    assert [learning_rate(s, 30) for s in pinned] == [learning_rate(pinned[0], 30)] * 2


@pytest.mark.parametrize("value", [2.3456, -1.5, 0.0, 1e-12, 12345678.9, math.inf, -math.inf])
def test_the_metric_definitions_read_the_real_log_lines(value):
    lines = [
        metrics.step_line(
            120,
            loss=value,
            learning_rate=3e-4,
            gradient_norm=abs(value),
            samples_per_second=812.5,
            step_seconds=0.25,
            data_wait_seconds=0.0012,
            tokens_per_second=104000.0,
            mfu=0.4321,
        ),
        metrics.snapshot_line(120, stall_seconds=0.0014, write_seconds=0.41, bytes=10**9),
        metrics.validation_line(120, value),
        metrics.resumed_line(120, "step-0000000120.pt", 2),
    ]
    found = {
        definition["Name"]: [
            float(match[1]) for line in lines if (match := re.search(definition["Regex"], line))
        ]
        for definition in metrics.METRIC_DEFINITIONS
    }
    assert found.pop("train:loss") == [pytest.approx(value, abs=1e-4)]
    assert found.pop("validation:loss") == [pytest.approx(value, abs=1e-4)]
    assert found.pop("train:gradient_norm") == [pytest.approx(abs(value), abs=1e-3)]
    assert found == {
        "train:step": [120.0],
        "train:learning_rate": [3e-4],
        "train:samples_per_second": [812.5],
        "train:step_seconds": [0.25],
        "train:data_wait_seconds": [0.0012],
        "train:tokens_per_second": [104000.0],
        "train:mfu": [0.4321],
        "snapshot:step": [120.0],
        "snapshot:stall_ms": [1.4],
        "snapshot:write_s": [0.41],
    }


def test_the_log_lines_are_the_contract():
    assert re.match(
        r"step=120 loss=2\.3456 learning_rate=3\.0e-04 .*samples_per_second=812\.5",
        metrics.step_line(
            120,
            loss=2.34561,
            learning_rate=3e-4,
            gradient_norm=1.0,
            samples_per_second=812.52,
            step_seconds=0.1,
        ),
    )
    snapshot = metrics.snapshot_line(120, stall_seconds=0.0014, write_seconds=0.41, bytes=5)
    assert snapshot == "snapshot step=120 stall_ms=1.4 write_s=0.41 bytes=5"
    resumed = metrics.resumed_line(120, "step-0000000120.pt", 2)
    assert resumed == "resumed step=120 snapshot=step-0000000120.pt attempt=2"


def test_windows_join_all_files_and_leave_out_hidden_ones(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(bytes(range(10, 17)))
    (tmp_path / "a.txt").write_bytes(bytes(range(10)))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"x" * 99)
    windows = ByteWindows(tmp_path, 4)
    assert len(windows) == 4
    for index in range(4):
        inputs, targets = windows[index]
        assert inputs.tolist() == list(range(index * 4, index * 4 + 4))
        assert targets.tolist() == list(range(index * 4 + 1, index * 4 + 5))


def test_too_little_data_is_a_sentence(tmp_path):
    (tmp_path / "a").write_bytes(b"abcd")
    with pytest.raises(TrainingError, match="holds 4 bytes in 1 files; one sample"):
        ByteWindows(tmp_path, 4)
    with pytest.raises(TrainingError, match="does not exist"):
        ByteWindows(tmp_path / "nowhere", 4)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "started without torchrun"),
        ({"SM_HOSTS": '["a", "b"]', "RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE is 1, but 2"),
        (
            {"SM_HOSTS": '["a", "b"]', "RANK": "0", "WORLD_SIZE": "4", "SM_NUM_GPUS": "4"},
            "2 hosts with 4 GPUs each make 8",
        ),
        ({"SM_HOSTS": '["a"]', "SM_NUM_GPUS": "1"}, "torch .* cannot use them"),
    ],
)
def test_a_world_that_is_not_sagemakers_is_refused(monkeypatch, environment, said):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match=said), joined(5):
        pass


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (TrainingError("no data; add some"), 1, "rank 0: no data; add some\n"),
        (SettingsError(["a is 1", "b is 2"]), 2, "rank 0: a is 1; b is 2\n"),
        (ValueError("two\nlines"), 1, "rank 0: ValueError: two lines\n"),
    ],
)
def test_the_failure_file_holds_the_first_cause_in_one_line(
    tmp_path, monkeypatch, error, code, line
):
    monkeypatch.setenv("SM_OUTPUT_DIR", str(tmp_path))
    (tmp_path / "failure").write_text("of an earlier attempt")

    def fail():
        raise error

    assert failure.exit_code_of(fail) == code
    assert (tmp_path / "failure").read_text() == line
    # A second rank of the host comes later; torchrun made its folder before it started either.
    (tmp_path / "started").mkdir()
    os.utime(tmp_path / "started", (1, 1))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "started" / "error.json"))
    failure.exit_code_of(lambda: (_ for _ in ()).throw(TrainingError("a consequence")))
    assert (tmp_path / "failure").read_text() == line


def test_the_launcher_can_read_the_settings_without_torch():
    code = "import sys, training.settings, training.metrics; sys.exit('torch' in sys.modules)"
    assert os.system(f'{json.dumps(os.sys.executable)} -c "{code}"') == 0
