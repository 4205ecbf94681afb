"""Traces and memory recordings of a window of updates, by configuration."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import torch

from trainer.config import Config

log = logging.getLogger(__name__)

LEVERS = (
    'less memory: memory.recompute = "full"; a smaller training.micro_batch_size, memory.head_chunk_mib or '
    'training.seq_len; training.dtype = "bfloat16"; more ranks in parallelism.dp_shard'
)


class Profiler(Protocol):
    def step(self, done: int) -> None:
        """Called when `done` updates have run: before the first, and after each."""


class NullProfiler:
    def step(self, done: int) -> None:
        pass


class Trace:
    """torch.profiler over a window, as a file for chrome://tracing or Perfetto."""

    def __init__(self, folder: Path, *, rank: int, first: int, count: int) -> None:
        self.path = folder / f"trace-step-{first}-rank-{rank}.json"
        self.window = (first - 1, first - 1 + count)
        self.profile = torch.profiler.profile(record_shapes=True)

    def step(self, done: int) -> None:
        if done == self.window[0]:
            self.profile.start()
        if done == self.window[1]:
            self.profile.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.profile.export_chrome_trace(str(self.path))
            log.info("trace %s", self.path)


class MemoryRecording:
    """Every CUDA allocation of a window, as a file for pytorch.org/memory_viz; also written when memory runs out."""

    def __init__(self, folder: Path, *, rank: int, first: int, count: int) -> None:
        self.path = folder / f"memory-step-{first}-rank-{rank}.pickle"
        self.window = (first - 1, first - 1 + count)

    def step(self, done: int) -> None:
        if done == self.window[0]:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        if done == self.window[1]:
            self.dump()
            torch.cuda.memory._record_memory_history(enabled=None)

    def dump(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(self.path))
        log.info("memory snapshot %s", self.path)


class Profilers:
    """The recordings that the configuration asks for, as one."""

    def __init__(self, config: Config, folder: Path, *, rank: int, device: torch.device) -> None:
        section = config.profiler
        self.trace: Profiler = NullProfiler()
        self.memory: Profiler = NullProfiler()
        if section.trace_step is not None:
            self.trace = Trace(folder, rank=rank, first=section.trace_step, count=section.trace_steps)
        if section.memory_step is not None and device.type == "cuda":
            self.memory = MemoryRecording(folder, rank=rank, first=section.memory_step, count=section.memory_steps)

    def step(self, done: int) -> None:
        self.trace.step(done)
        self.memory.step(done)

    def out_of_memory(self, error: torch.OutOfMemoryError) -> str:
        """Saves what was recorded; returns what to tell the user."""
        if isinstance(self.memory, MemoryRecording):
            self.memory.dump()
        return f"out of device memory: {error}\n{LEVERS}"
