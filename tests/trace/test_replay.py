"""Compiled graphs that repeat what they noted once, against graphs that run every time."""

from __future__ import annotations

from itertools import groupby
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.trace.small_steps import configured
from trainer.config.parse import load
from trainer.trace.compiled import SHARED_GRAPHS, FusedKernels, compiler_for
from trainer.trace.operators import OpCounterMode, StorageTracker
from trainer.trace.pieces import Allocation, Piece
from trainer.trace.record import TracedStep, trace_step

COMMON = "training.dtype=bfloat16 training.seq_len=4096 training.global_batch_size=2"


def traced(options: str) -> TracedStep:
    return trace_step(configured(f"{COMMON} {options}"), 2, kernel="cudnn+flash", compiled=True)


def in_order(piece: Piece) -> list[list[str]]:
    """What happens in a piece. Of tensors that are freed together, either may be first."""
    runs = groupby(piece.events, lambda event: isinstance(event, Allocation))
    return [
        [*map(repr, events)] if allocates else sorted(map(repr, events))
        for allocates, events in runs
    ]


@pytest.mark.parametrize(
    "options",
    [
        "memory.recompute=keep_attention memory.head_groups=2 memory.mlp_tile_mib=1",
        "memory.recompute=none parallelism.tp=2 parallelism.dp_shard=1",
        "model.family=qwen3_moe parallelism.ep=2 memory.recompute=keep_attention",
    ],
    ids=["tiles", "whole blocks", "experts"],
)
def test_a_replay_counts_and_allocates_as_a_run(options: str) -> None:
    replayed = traced(options)
    with patch.object(FusedKernels, "replayed", FusedKernels.interpreted):
        ran = traced(options)
    assert replayed.whole.work == ran.whole.work
    assert replayed.whole.peak.size == ran.whole.peak.size
    for ours, theirs in zip(replayed.trace.pieces, ran.trace.pieces, strict=True):
        assert in_order(ours) == in_order(theirs)


def test_a_trace_is_the_same_whatever_was_compiled_before() -> None:
    SHARED_GRAPHS.clear()
    first = traced("memory.recompute=keep_attention")
    known = set(SHARED_GRAPHS)
    again = traced("memory.recompute=keep_attention")
    assert known
    assert set(SHARED_GRAPHS) == known
    assert first.whole.work == again.whole.work
    for ours, theirs in zip(first.trace.pieces, again.trace.pieces, strict=True):
        assert ours.timeline == theirs.timeline
        assert in_order(ours) == in_order(theirs)


class Log(StorageTracker):
    """Sizes as they are allocated and, negative, as they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = list[int]()
        self._allocated = dict[int, int]()

    def on_allocation(self, key: int, allocation: Allocation) -> None:
        self._allocated[key] = allocation.size
        self.sizes.append(allocation.size)

    def on_free(self, key: int) -> None:
        self.sizes.append(-self._allocated.pop(key))


def three_products(x: Tensor, y: Tensor) -> Tensor:
    """Results of the first one are freed before the last one begins."""
    first = (x @ y).exp()
    return ((first @ y.T).exp() @ y) * 2


def sizes_of_second_run() -> list[int]:
    counter = OpCounterMode(log := Log())
    with counter.enable():
        x, y = (torch.empty(size, requires_grad=True) for size in ((64, 32), (32, 16)))
        run = compiler_for(counter)(three_products)
        for _ in range(2):
            log.sizes.clear()
            run(x, y).sum().backward()
            x.grad = y.grad = None
    return log.sizes


def test_a_replay_frees_what_it_no_longer_needs() -> None:
    replayed = sizes_of_second_run()
    with patch.object(FusedKernels, "replayed", FusedKernels.interpreted):
        assert replayed == sizes_of_second_run()


def test_compiled_layers_attend_to_as_many_pairs_as_eager_ones() -> None:
    """Layers with a window and without are alike in all but their attention."""
    options = "--memory.recompute=none --model.num_layers=7"
    config = load(["--config", "gemma3_4b_128k", *options.split()])

    def attention(*, compiled: bool) -> dict[str, int]:
        step = trace_step(config, 8, kernel="cudnn+flash", compiled=compiled)
        return dict(step.whole.work.attention_flops)

    assert attention(compiled=True) == attention(compiled=False)
