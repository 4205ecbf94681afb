"""Bytes that a run really holds, counted: every allocation and release that torch's CPU allocator reports.

torch.profiler sees them all: inside operators and kernels, in storages that are resized, in the backward pass. Left out
are copies that gloo makes of what it sends, since NCCL makes none. Not seen is what MKL and Python take for themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.data.copy import CopyRows
from trainer.distributed import World
from trainer.load import load
from trainer.trainer import Trainer


@dataclass(frozen=True)
class Counted:
    """Bytes of one rank: before the first update, and the most at once in the second."""

    states: int
    peak: int


def count(words: list[str]) -> Counted:
    """Two updates of a configuration on the ranks of the process group."""
    config = load(words)
    training = config.training
    rows = CopyRows(
        vocab_size=config.model.build().vocab_size,
        period=training.seq_len // 2,
        seq_len=training.seq_len,
        num_rows=training.global_batch_size * training.steps,
        seed=0,
    )
    world = World(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        trainer = Trainer(config, world, rows)
        reading = trainer.loader.updates(0)
        for update in range(2):
            batches = next(reading)
            trainer.step += 1
            with record_function(f"update {update}"):
                trainer.train_step(batches, 1e-3)
            del batches
        reading.close()
    return _counted(profiled)


def _counted(profiled: Any) -> Counted:
    results: Any = profiled.profiler.kineto_results
    changes: list[tuple[int, int, int]] = []
    spans: dict[str, tuple[int, int]] = {}
    for event, inside in _walk(results.experimental_event_tree()):
        if event.typed[0] == _EventType.Allocation:
            sent = any(name.startswith(("c10d::", "gloo:")) for name in inside)
            size = event.typed[1].alloc_size
            if size < 0 or not sent:
                changes.append((event.start_time_ns, event.typed[1].ptr, size))
        elif event.name.startswith("update "):
            spans[event.name] = (event.start_time_ns, event.end_time_ns)
    (first, _), (begin, end) = spans["update 0"], spans["update 1"]
    live: dict[int, int] = {}
    held = states = peak = 0
    for at, pointer, size in sorted(changes):
        if size > 0:
            live[pointer] = size
            held += size
        else:
            held -= live.pop(pointer, 0)
        if at < first:
            states = held
        if begin <= at <= end:
            peak = max(peak, held)
    return Counted(states, peak)


def _walk(events: Any, inside: tuple[str, ...] = ()) -> Iterator[tuple[Any, tuple[str, ...]]]:
    for event in events:
        yield event, inside
        yield from _walk(event.children, (*inside, event.name))
