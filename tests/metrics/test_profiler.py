"""Traces of a window of updates, and nothing at all without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.system.in_process import configured, run_here
from tests.system.runs import ROOT, arguments, write_run
from trainer.metrics.profiler import Profilers, StepWindow, TraceRecorder

LEAVES_OUT = """
import sys
import train
from tests.system.runs import train_rank
assert train_rank(sys.argv[1:]) == 0
left_out = ("tensorboard", "torch.utils.tensorboard", "rich", "torch._inductor.compile_fx")
sys.exit(str([name for name in left_out if name in sys.modules]) if set(left_out) & set(sys.modules) else 0)
"""


def test_a_trace_of_its_window_is_written(tmp_path: Path) -> None:
    options = ("--profiler.trace_step", "2", "--profiler.trace_steps", "2", "--training.steps", "4")
    run_here(configured(write_run(tmp_path), tmp_path / "run", *options))
    logs = tmp_path / "run" / "logs"
    assert [path.name for path in logs.iterdir() if path.is_file()] == ["trace-step-2-rank-0.json"]
    trace = json.loads((logs / "trace-step-2-rank-0.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    # Two layers and the head: norms, seven products each, and one optimizer step per update of the window.
    assert "aten::mm" in names
    assert sum("Optimizer.step#AdamW.step" in str(name) for name in names) == 2


def test_without_a_window_there_is_no_profiler(tmp_path: Path) -> None:
    config = configured(write_run(tmp_path), tmp_path / "run")
    assert Profilers(config, tmp_path / "logs", rank=0, device=torch.device("cpu")).windows == []


class Counted:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.mark.parametrize("resumed_at", [0, 2, 3], ids=["before", "at its first", "inside"])
def test_a_window_records_once_what_is_left_of_it(resumed_at: int) -> None:
    recorder = Counted()
    window = StepWindow(recorder, first_step=3, num_steps=2)
    for done in range(resumed_at, 8):
        window.step(done)
    assert recorder.calls == ["start", "stop"]


def test_a_window_that_is_over_when_a_run_resumes_records_nothing() -> None:
    recorder = Counted()
    window = StepWindow(recorder, first_step=3, num_steps=2)
    for done in range(4, 8):
        window.step(done)
    assert recorder.calls == []


def test_memory_of_a_cpu_is_not_recorded(tmp_path: Path) -> None:
    config = configured(write_run(tmp_path), tmp_path / "run", "--profiler.memory_step", "1")
    profilers = Profilers(config, tmp_path / "logs", rank=0, device=torch.device("cpu"))
    assert profilers.windows == []
    told = profilers.report_out_of_memory(torch.OutOfMemoryError("tried to allocate"))
    first, second, *changes = told.splitlines()
    assert first == "out of device memory: tried to allocate"
    assert second.startswith("predicted peak memory per rank: ")
    assert len(changes) == 3
    assert all(" would free " in change for change in changes)


def test_every_rank_has_a_trace_of_its_own(tmp_path: Path) -> None:
    config = configured(write_run(tmp_path), tmp_path / "run", "--profiler.trace_step", "5")
    windows = [Profilers(config, tmp_path, rank=rank, device=torch.device("cpu")).windows[0] for rank in (0, 3)]
    paths = [window.recorder.path.name for window in windows if isinstance(window.recorder, TraceRecorder)]
    assert paths == ["trace-step-5-rank-0.json", "trace-step-5-rank-3.json"]


def test_what_is_off_is_not_imported(tmp_path: Path) -> None:
    argv = arguments(write_run(tmp_path), tmp_path / "run", "--training.steps", "2")
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_OUT, *argv], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
