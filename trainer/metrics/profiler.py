"""Traces and memory recordings of a window of updates, by configuration."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import torch

from trainer.config.job_config import Config
from trainer.memory.report import advice

log = logging.getLogger(__name__)


class Recorder(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...


class Trace:
    """torch.profiler, as a file for chrome://tracing or Perfetto."""

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


class MemoryRecording:
    """Every CUDA allocation, as a file for pytorch.org/memory_viz."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)

    def stop(self) -> None:
        dump_memory(self.path)
        torch.cuda.memory._record_memory_history(enabled=None)


class Window:
    """Records `count` updates from update `first` on, or what is left of them after a resume."""

    def __init__(self, recorder: Recorder, *, first: int, count: int) -> None:
        self.recorder = recorder
        self.updates = range(first, first + count)
        self.on = False

    def step(self, done: int) -> None:
        following = done + 1
        if following in self.updates and not self.on:
            self.recorder.start()
            self.on = True
        elif self.on and following not in self.updates:
            self.recorder.stop()
            self.on = False


class Profilers:
    """The windows that the configuration asks for; mostly none."""

    def __init__(self, config: Config, folder: Path, *, rank: int, world_size: int, device: torch.device) -> None:
        self.config, self.world_size = config, world_size
        section = config.profiler
        self.windows: list[Window] = []
        self.snapshot = folder / f"memory-exhausted-rank-{rank}.pickle" if device.type == "cuda" else None
        if (first := section.trace_step) is not None:
            trace = Trace(folder / f"trace-step-{first}-rank-{rank}.json")
            self.windows.append(Window(trace, first=first, count=section.trace_steps))
        if (first := section.memory_step) is not None and device.type == "cuda":
            memory = MemoryRecording(folder / f"memory-step-{first}-rank-{rank}.pickle")
            self.windows.append(Window(memory, first=first, count=section.memory_steps))

    def step(self, done: int) -> None:
        """Called when `done` updates have run: before the first, and after each."""
        for window in self.windows:
            window.step(done)

    def out_of_memory(self, error: torch.OutOfMemoryError) -> str:
        """Saves what fills the device; returns what to tell the user."""
        if self.snapshot is not None:
            dump_memory(self.snapshot)
        return "\n".join((f"out of device memory: {error}", *advice(self.config, self.world_size)))


def dump_memory(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    log.warning("memory snapshot %s", path)
