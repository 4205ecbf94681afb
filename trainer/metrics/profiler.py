"""Profiler traces and memory snapshots of a window of steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from trainer.config.job_config import Config

log = logging.getLogger(__name__)


class Recorder(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...


class TraceRecorder:
    """A torch.profiler trace, for chrome://tracing or Perfetto."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.profile = torch.profiler.profile(record_shapes=True)

    def start(self) -> None:
        self.profile.start()

    def stop(self) -> None:
        self.profile.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.profile.export_chrome_trace(str(self.path))
        log.info("trace %s", self.path)


class MemorySnapshotRecorder:
    """The history of CUDA allocations, for pytorch.org/memory_viz."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)

    def stop(self) -> None:
        dump_memory_snapshot(self.path)
        torch.cuda.memory._record_memory_history(enabled=None)


class StepWindow:
    """Records steps `first_step` to `first_step + num_steps - 1`; after a resume, the rest of them."""

    def __init__(self, recorder: Recorder, *, first_step: int, num_steps: int) -> None:
        self.recorder = recorder
        self.steps = range(first_step, first_step + num_steps)
        self.is_recording = False

    def step(self, completed_step: int) -> None:
        next_step = completed_step + 1
        if next_step in self.steps and not self.is_recording:
            self.recorder.start()
            self.is_recording = True
        elif self.is_recording and next_step not in self.steps:
            self.recorder.stop()
            self.is_recording = False


class Profilers:
    """The windows of the `[profiler]` section."""

    def __init__(
        self, config: Config, folder: Path, *, rank: int, device: torch.device, advice: Sequence[str] = ()
    ) -> None:
        """`advice` is reported when device memory runs out."""
        self.advice = advice
        section = config.profiler
        self.windows: list[StepWindow] = []
        self.oom_snapshot_path = folder / f"memory-exhausted-rank-{rank}.pickle" if device.type == "cuda" else None
        if (first_step := section.trace_step) is not None:
            trace = TraceRecorder(folder / f"trace-step-{first_step}-rank-{rank}.json")
            self.windows.append(StepWindow(trace, first_step=first_step, num_steps=section.trace_steps))
        if (first_step := section.memory_step) is not None and device.type == "cuda":
            memory = MemorySnapshotRecorder(folder / f"memory-step-{first_step}-rank-{rank}.pickle")
            self.windows.append(StepWindow(memory, first_step=first_step, num_steps=section.memory_steps))

    def step(self, completed_step: int) -> None:
        """Starts and stops recordings. Call before the first step and after each step."""
        for window in self.windows:
            window.step(completed_step)

    def report_out_of_memory(self, error: torch.OutOfMemoryError) -> str:
        """Dumps a memory snapshot of a CUDA device; returns the error message with advice."""
        if self.oom_snapshot_path is not None:
            dump_memory_snapshot(self.oom_snapshot_path)
        return "\n".join((f"out of device memory: {error}", *self.advice))


def dump_memory_snapshot(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    log.warning("memory snapshot %s", path)
