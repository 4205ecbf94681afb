"""Traces that run few parts of long loops, beside traces that run every part."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

from tests.trace.small_steps import configured
from trainer.config.job_config import Config
from trainer.trace import record as recording
from trainer.trace.compose import ComposedStep, compose
from trainer.trace.inputs import micro_batches
from trainer.trace.loops import FIRST_PARTS, LAST_PARTS, shortened
from trainer.trace.pieces import Trace
from trainer.trace.record import record
from trainer.trace.shorten import ShortStep

TILES = "training.seq_len=8192 memory.mlp_tile_mib=1 memory.loss_chunk_mib=1 memory.recompute=keep_attention"
EXPERTS = "model.feed_forward=moe model.num_experts=4 model.top_k=2 model.expert_dim=64"
CASES = {
    "tiles and chunks": (TILES, "cudnn", None),
    "tiles of ranks that share tokens": (f"{TILES} parallelism.tp=2", "cudnn", None),
    "norms of heads": (f"{TILES} model.qk_norm=true memory.head_groups=2", "cudnn", None),
    "tiles of experts": (
        f"{TILES} {EXPERTS} training.balance_loss=0.01 training.balance_over=sequence",
        "cudnn",
        None,
    ),
    "hops": (f"{TILES} parallelism.cp=16 parallelism.cp_method=ring", "cudnn+flash", None),
    "windows": (f"{TILES} model.window=256", "cudnn", None),
    "packed documents": (
        f"{TILES} parallelism.cp=4 parallelism.cp_method=ring",
        "cudnn",
        [1024] * 8,
    ),
    "documents of many lengths": (
        TILES,
        "cudnn",
        [100 * length for length in range(1, 13)] + [392],
    ),
}
RARE = {"norms of heads", "documents of many lengths"}
"""Cases that are slow, and whose loops are like those of others."""


def num_events(trace: Trace) -> int:
    return sum(len(piece.events) for piece in trace.pieces)


def composed(step: ShortStep, trace: Trace) -> ComposedStep:
    return compose(trace, [*step.order()], step.correspondence, step.target)


def traced(config: Config, kernel: str, lengths: list[int] | None) -> tuple[ComposedStep, int]:
    """The step, and what was recorded of it."""
    step = ShortStep(config, config.parallelism.cp * config.parallelism.tp)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(recording, "micro_batches", partial(micro_batches, lengths=lengths))
        trace = record(step, kernel=kernel)
    return composed(step, trace), num_events(trace)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in RARE)) for name in CASES]
)
def test_few_parts_of_a_loop_stand_for_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, kernel, lengths = CASES[name]
    config = configured(f"model.num_layers=2 {options}")
    traced(config, kernel, lengths)  # Plans of attention are remembered.
    short, recorded = traced(config, kernel, lengths)
    monkeypatch.setattr(recording, "shortened_loops", nullcontext)
    whole, recorded_of_whole = traced(config, kernel, lengths)
    assert recorded < recorded_of_whole
    assert short.peak.size == pytest.approx(whole.peak.size, rel=5e-4)
    assert short.host_bytes == whole.host_bytes
    # The counts of experts of all tiles are read once where they are one tensor.
    assert short.work.moved_bytes == pytest.approx(whole.work.moved_bytes, rel=1e-5)
    assert replace(short.work, moved_bytes=Counter()) == replace(whole.work, moved_bytes=Counter())
    assert short.is_closed


def test_a_trace_does_not_grow_with_the_number_of_tiles() -> None:
    found = {}
    for length in (8192, 16384):
        config = configured(f"model.num_layers=2 {TILES} {EXPERTS} training.seq_len={length}")
        _, found[length] = traced(config, "cudnn", None)
    assert found[8192] == found[16384]


@pytest.mark.parametrize("seed", range(10))
def test_every_part_is_counted_by_one_of_its_kind(seed: int) -> None:
    rng = random.Random(seed)
    kinds = rng.choices("abc", k=rng.randint(1, 30))
    found = shortened(kinds)
    counted = Counter[str]()
    for part, times in found:
        counted[kinds[part]] += times
    assert counted == Counter(kinds)
    ends = {*range(len(kinds))[:FIRST_PARTS], *range(len(kinds))[-LAST_PARTS:]}
    assert ends <= {part for part, times in found if times == 1}
