"""Profiler windows, and what is not imported without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.system.in_process import configured, dataset_of, run_here
from tests.system.runs import ROOT, arguments, write_run
from trainer.config.parse import load
from trainer.metrics.profiler import Profilers, StepWindow

TRAIN_WITHOUT_OPTIONAL_IMPORTS = """
import sys
import train
from tests.system.runs import train_rank
assert train_rank(sys.argv[1:]) == 0
optional = ("tensorboard", "torch.utils.tensorboard", "rich", "torch._inductor.compile_fx")
sys.exit(str([name for name in optional if name in sys.modules]) if set(optional) & set(sys.modules) else 0)
"""


@pytest.mark.slow
def test_a_trace_covers_the_steps_of_its_window(tmp_path: Path) -> None:
    options = (
        "--profiler.trace_step",
        "2",
        "--profiler.trace_steps",
        "2",
        "--training.steps",
        "4",
    )
    run_here(configured(write_run(tmp_path), tmp_path / "run", *options))
    logs = tmp_path / "run" / "logs"
    assert [path.name for path in logs.iterdir() if path.is_file()] == ["trace-step-2-rank-0.json"]
    trace = json.loads((logs / "trace-step-2-rank-0.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    # One optimizer step for each of the window's two steps.
    assert "aten::mm" in names
    assert sum("clip and optimizer step" in str(name) for name in names) == 2


def test_without_a_window_there_is_no_profiler(tmp_path: Path) -> None:
    config = configured(write_run(tmp_path), tmp_path / "run")
    assert (
        Profilers(config.profiler, tmp_path / "logs", rank=0, device=torch.device("cpu")).windows
        == []
    )


class FakeRecorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.mark.parametrize("resumed_at", [0, 2, 3], ids=["before", "at its first", "inside"])
def test_a_resumed_window_records_its_remaining_steps_once(resumed_at: int) -> None:
    recorder = FakeRecorder()
    window = StepWindow(recorder, first_step=3, num_steps=2)
    for step in range(resumed_at, 8):
        window.step(step)
    assert recorder.calls == ["start", "stop"]


def test_a_window_before_the_resumed_step_records_nothing() -> None:
    recorder = FakeRecorder()
    window = StepWindow(recorder, first_step=3, num_steps=2)
    for step in range(4, 8):
        window.step(step)
    assert recorder.calls == []


def test_out_of_memory_on_a_cpu_reports_advice_without_a_snapshot(tmp_path: Path) -> None:
    config = configured(write_run(tmp_path), tmp_path / "run", "--profiler.memory_step", "1")
    advice = ["nothing is known yet"]
    profilers = Profilers(
        config.profiler,
        tmp_path / "logs",
        rank=0,
        device=torch.device("cpu"),
        advice=lambda: advice,
    )
    assert profilers.windows == []
    # What the planner has found by the time that memory runs out counts.
    advice[:] = ["predicted peak memory per rank: 9 GiB", "a change would free 1 GiB"]
    message = profilers.report_out_of_memory(torch.OutOfMemoryError("tried to allocate"))
    assert message.splitlines() == ["out of device memory: tried to allocate", *advice]


def test_each_rank_has_its_own_trace(tmp_path: Path) -> None:
    config = configured(write_run(tmp_path), tmp_path / "run", "--profiler.trace_step", "5")
    for rank in (0, 3):
        profilers = Profilers(
            config.profiler, tmp_path / "logs", rank=rank, device=torch.device("cpu")
        )
        for completed_step in range(4, 9):
            profilers.step(completed_step)
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "trace-step-5-rank-0.json",
        "trace-step-5-rank-3.json",
    }


@pytest.mark.slow
def test_disabled_features_are_not_imported(tmp_path: Path) -> None:
    argv = arguments(write_run(tmp_path), tmp_path / "run", "--training.steps", "2")
    dataset_of(load(argv))  # Preparing shows a progress bar.
    result = subprocess.run(
        [sys.executable, "-c", TRAIN_WITHOUT_OPTIONAL_IMPORTS, *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
