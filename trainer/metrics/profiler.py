"""Profiler traces and memory snapshots of a window of steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from trainer.config.sections import ProfilerSection

log = logging.getLogger(__name__)


class Recorder(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...


def trace_recorder(path: Path) -> torch.profiler.profile:
    """A torch.profiler trace, for chrome://tracing or Perfetto."""

    def export(profile: torch.profiler.profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
        log.info("trace %s", path)

    return torch.profiler.profile(record_shapes=True, on_trace_ready=export, acc_events=True)


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
    """Records steps `first_step` to `first_step + num_steps - 1`; after a resume, the rest of
    them.
    """

    def __init__(self, recorder: Recorder, *, first_step: int, num_steps: int) -> None:
        self.recorder = recorder
        self.steps = range(first_step, first_step + num_steps)
        self.is_recording = False

    def step(self, completed_step: int) -> None:
        # The next step decides. A resume inside the window records the rest of it.
        should_record = completed_step + 1 in self.steps
        if should_record and not self.is_recording:
            self.recorder.start()
        elif self.is_recording and not should_record:
            self.recorder.stop()
        self.is_recording = should_record


class Profilers:
    """The windows of the `[profiler]` section."""

    def __init__(
        self,
        section: ProfilerSection,
        folder: Path,
        *,
        rank: int,
        device: torch.device,
        advice: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`advice`: what is reported when device memory runs out."""
        self.advice = advice
        is_cuda = device.type == "cuda"
        self.windows: list[StepWindow] = []
        self.oom_snapshot_path = (
            folder / f"memory-exhausted-rank-{rank}.pickle" if is_cuda else None
        )
        if (first := section.trace_step) is not None:
            trace = trace_recorder(folder / f"trace-step-{first}-rank-{rank}.json")
            self.windows.append(StepWindow(trace, first_step=first, num_steps=section.trace_steps))
        if (first := section.memory_step) is not None and is_cuda:
            memory = MemorySnapshotRecorder(folder / f"memory-step-{first}-rank-{rank}.pickle")
            self.windows.append(
                StepWindow(memory, first_step=first, num_steps=section.memory_steps)
            )

    def step(self, completed_step: int) -> None:
        """Starts and stops recordings. Call before the first step and after each step."""
        for window in self.windows:
            window.step(completed_step)

    def report_out_of_memory(self, error: torch.OutOfMemoryError) -> str:
        """Dumps a memory snapshot of a CUDA device; returns the error message with advice."""
        if self.oom_snapshot_path is not None:
            dump_memory_snapshot(self.oom_snapshot_path)
        return "\n".join((f"out of device memory: {error}", *self.advice()))


def dump_memory_snapshot(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    log.warning("memory snapshot %s", path)
