"""Count the bytes that a run holds: every allocation and release that torch's CPU allocator
reports.

torch.profiler sees them all: inside operators and kernels, in storages that are resized, in the
backward pass. Left out are what blocks keep in host memory, and what only a CPU run has: copies
that gloo makes of what it sends, casts of what is added to a wider sum, and the scratch of the
CPU's attention. Not seen is what MKL and Python take for themselves, and what gloo's threads
release; `Live` finds that out later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from models.batch import Batch
from parallelisms.activation_offload import OFFLOAD_RANGE
from trainer.config.job_config import Config
from trainer.data.copy_task import CopyDataset
from trainer.data.sequences import BlendedDataset
from trainer.step.process_group import World
from trainer.step.trainer import Trainer

HEAD = "the head begins"
CAST = ("aten::add_", "aten::to", "aten::_to_copy")
SCRATCH = ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "aten::empty")


@dataclass(frozen=True)
class Counted:
    """Bytes of one rank: before the first step, and the peak of later steps."""

    states: int
    peak: int
    """Without offloaded activations."""
    kept: int = 0
    """Saved activations on the device when the head begins,"""
    on_host: int = 0
    """and in host memory."""


def count(
    config: Config, *, steps: int, documents: int | None = None, rows: Any = None
) -> Counted:
    """Run some steps of a configuration on the ranks of the process group; the lowest peak of all
    but the first step.

    Sequences are random unless given. With `documents` they are split into documents of that many
    tokens: attention then takes little time, and as much memory. Threads of gloo release memory
    unseen. What they release late makes a step look fuller than it is.
    """
    training = config.training
    copied = CopyDataset(
        vocab_size=config.model.build().vocab_size,
        period=training.seq_len // 2,
        seq_len=training.seq_len,
        num_sequences=training.global_batch_size * training.steps,
        seed=0,
    )
    rows = rows or BlendedDataset([copied], seq_len=training.seq_len)
    world = World(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        trainer = Trainer(config, world, rows)
        for part in trainer.stage_modules.values():
            if part.head is not None:
                part.head.register_forward_pre_hook(_begins)
        reading = trainer.loader.steps(0)
        for step in range(steps):
            batches = next(reading)
            trainer.step += 1
            with record_function(f"step {step}"):
                trainer.train_step([_cut(batch, documents) for batch in batches], 1e-3)
            del batches
        reading.close()
    return _counted(profiled)


def _begins(*_: Any) -> None:
    with record_function(HEAD):
        pass


def _cut(batch: Batch, length: int | None) -> Batch:
    if length is None:
        return batch
    rows, tokens = batch.tokens.shape
    starts = torch.arange(0, tokens + 1, length, dtype=torch.int32).repeat(rows, 1)
    return replace(batch, boundaries=starts)


Change = tuple[int, int, int, bool]
"""When, where, how many bytes more or less, and whether in host memory."""
Spans = dict[str, tuple[int, int]]


def _read(profiled: Any) -> tuple[list[Change], Spans]:
    results: Any = profiled.profiler.kineto_results
    changes: list[Change] = []
    spans: Spans = {}
    for event, inside in _walk(results.experimental_event_tree()):
        if event.typed[0] == _EventType.Allocation:
            size = event.typed[1].alloc_size
            sent = any(name.startswith(("c10d::", "gloo:")) for name in inside)
            if size < 0 or not (sent or inside[-2:] == SCRATCH or inside[-4:-1] == CAST):
                changes.append(
                    (event.start_time_ns, event.typed[1].ptr, size, OFFLOAD_RANGE in inside)
                )
        elif event.name.startswith("step ") or event.name == HEAD:
            spans[event.name] = (event.start_time_ns, event.end_time_ns)
    return sorted(changes), spans


def _counted(profiled: Any) -> Counted:
    changes, spans = _read(profiled)
    last, _ = spans.pop(HEAD, (0, 0))  # The last one of them.
    live = Live()
    hosted = Live()
    states = 0
    kept = 0
    on_host = 0
    peaks = dict.fromkeys(spans, 0)
    before = dict.fromkeys(spans, 0)
    for at, pointer, size, is_hosted in changes:
        for those in (live, hosted) if size < 0 else (hosted if is_hosted else live,):
            those.take(pointer, size)
        if at < spans["step 0"][0]:
            states = live.held
        if at < last:
            kept = live.held
            on_host = hosted.held
        for name, (begin, end) in spans.items():
            if at < begin:
                before[name] = live.held
            elif at <= end:
                peaks[name] = max(peaks[name], live.held)
    # Between steps the same tensors live; anything more was released unseen.
    between = min(held for name, held in before.items() if name != "step 0")
    least = min(peaks[name] - before[name] + between for name in spans if name != "step 0")
    return Counted(states, least, kept - between, on_host)


class Live:
    """What is allocated; what was released unseen counts until its place is taken again."""

    def __init__(self) -> None:
        self.held = 0
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def take(self, start: int, size: int) -> None:
        """Takes `size` bytes from `start` on, or gives back what begins there where the size is
        negative.
        """
        at = bisect_left(self._starts, start)
        if size < 0:
            if start in self._sizes:
                self._drop(at)
            return
        if at and self._starts[at - 1] + self._sizes[self._starts[at - 1]] > start:
            at -= 1
        while at < len(self._starts) and self._starts[at] < start + size:
            self._drop(at)
        self._starts.insert(at, start)
        self._sizes[start] = size
        self.held += size

    def _drop(self, at: int) -> None:
        self.held -= self._sizes.pop(self._starts.pop(at))


def _walk(events: Any, inside: tuple[str, ...] = ()) -> Iterator[tuple[Any, tuple[str, ...]]]:
    for event in events:
        yield event, inside
        yield from _walk(event.children, (*inside, event.name))
