"""Peaks of traces against counted bytes of real steps of small models, on one and several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import distributed

from benchmarks.counted import Counted, count
from models.layers import LayerKind
from tests.ranks import run_ranks
from tests.trace.small_steps import FOUR, FULL, HALF, KEEP, configured
from tests.trace.test_record import model_with
from trainer.trace.record import TracedStep, trace_pp_ranks

HEAVY = "training.seq_len=128 model.ffn_dim=512"  # weights
LARGE = "training.seq_len=16 model.num_layers=1 model.ffn_dim=8192"  # peak in the optimizer step
HEADS = "model.qk_norm=true model.num_heads=16 model.ffn_dim=64"  # peak in attention and its norms
NARROW = "memory.optimizer_dtype=bfloat16"
CASES = {
    1: (
        "",
        f"{HALF} {FULL}",
        f"memory.offload=inputs_and_attention memory.blocks_per_checkpoint=2 memory.head_groups=2 memory.mlp_tile_mib=1 {KEEP}",
    ),
    2: (
        f"{HALF} training.global_batch_size=2",
        f"{HALF} training.global_batch_size=2 {FULL} {HEAVY}",
        f"parallelism.tp=2 {HALF} {KEEP}",
        f"parallelism.cp=2 parallelism.cp_method=ring {FULL}",
        f"parallelism.cp=2 parallelism.cp_method=ulysses {HALF}",
        f"{FOUR}",
        f"{HEADS} parallelism.tp=2",
        f"{NARROW} {HALF} training.global_batch_size=2 {HEAVY}",
    ),
}
# Slow.
MORE = {
    1: (
        f"training.global_batch_size=2 training.micro_batch_size=2 {FULL}",
        "training.global_batch_size=2 memory.optimizer_placement=host",
        f"memory.mlp_tile_mib=1 memory.head_groups=2 {FULL}",
        f"{HEADS} memory.mlp_tile_mib=1 memory.head_groups=2 {FULL}",
        f"{NARROW} {LARGE}",
        "training.global_batch_size=2",
        f"model.tie_embeddings=true {FULL}",
        f"memory.offload=inputs {FULL}",
        f"memory.blocks_per_checkpoint=3 memory.mlp_tile_mib=1 {HALF} {KEEP}",
        HEADS,
        f"{NARROW} memory.optimizer_placement=host {LARGE}",
        FULL,
        KEEP,
        f"memory.mlp_tile_mib=1 {KEEP}",
        f"memory.offload=inputs_and_attention {KEEP}",
        f"{HEADS} {FULL}",
        NARROW,
    ),
    2: (
        f"{HALF} training.global_batch_size=2 model.tie_embeddings=true",
        f"{HALF} training.global_batch_size=2 parallelism.reshard_after_forward=false {FULL} {HEAVY}",
        f"{HALF} training.global_batch_size=4 training.reduce_dtype=bfloat16 {FULL} {HEAVY}",
        "parallelism.tp=2",
        "parallelism.tp=2 parallelism.sequence_parallel=false",
        "parallelism.tp=2 parallelism.loss_parallel=false",
        f"parallelism.cp=2 parallelism.cp_method=allgather {FULL}",
        f"parallelism.cp=2 parallelism.cp_method=alltoall {KEEP}",
        f"{HEADS} parallelism.tp=2 parallelism.sequence_parallel=false memory.mlp_tile_mib=1 {FULL}",
        "model.qk_norm=true parallelism.cp=2 parallelism.cp_method=ulysses",
        f"{HEADS} parallelism.cp=2 parallelism.cp_method=ring",
        f"{FOUR} {FULL}",
        f"{FOUR} {HALF}",
        f"{FOUR} parallelism.pp_schedule=GPipe",
        f"{FOUR} parallelism.pp_schedule=Interleaved1F1B",
    ),
    4: (
        f"parallelism.tp=2 {HALF} training.global_batch_size=2",
        f"parallelism.tp=2 parallelism.cp=2 {HALF} {KEEP}",
        f"parallelism.dp_replicate=2 {HALF} training.global_batch_size=4 {FULL}",
        "parallelism.cp=4 parallelism.cp_method=ring training.seq_len=2048",
        "parallelism.cp=4 parallelism.cp_method=hybrid parallelism.cp_ulysses=2 training.seq_len=2048",
        f"parallelism.cp=4 parallelism.cp_method=allgather training.seq_len=4096 {FULL} model.num_kv_heads=4 "
        "model.ffn_dim=128",
        f"{FOUR} training.global_batch_size=8 {HALF} {FULL}",
    ),
}


def counted(cases: tuple[str, ...]) -> list[Counted]:
    # Alone, nothing is released unseen.
    steps = 2 if distributed.get_world_size() == 1 else 3
    return [count(configured(changes), steps=steps) for changes in cases]


def compare(world_size: int, cases: tuple[str, ...]) -> None:
    by_rank = run_ranks(counted, world_size, cases, timeout=300)
    for case, *found in zip(cases, *by_rank, strict=True):
        steps = trace_pp_ranks(configured(case), world_size)
        each = world_size // len(steps)
        for place, step in enumerate(steps):
            compare_rank(case, step, found[place * each : (place + 1) * each])


def compare_rank(case: str, traced: TracedStep, ranks: Sequence[Counted]) -> None:
    """Peaks agree within 1 % on one rank; within 7 % in bfloat16, where the CPU's matmuls allocate
    workspace, and within 5 % of ranks whose messages end when they arrive, which differs from run
    to run.
    """
    states = sum(state.size * count for state, count in traced.whole.states.items())
    # The optimizer also keeps a step count per parameter, and groups of ranks a few numbers.
    assert 0 <= max(rank.states for rank in ranks) - states < 4096, case
    assert traced.whole.peak.size == pytest.approx(
        max(rank.peak for rank in ranks),
        rel=0.07 if HALF in case else 0.05 if len(ranks) > 1 else 0.01,
    ), case


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world_size", CASES)
def test_traced_peaks_are_counted_ones(world_size: int) -> None:
    compare(world_size, CASES[world_size])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world_size", MORE)
def test_traced_peaks_are_counted_ones_on_more_meshes(world_size: int) -> None:
    compare(world_size, MORE[world_size])


# ---- layers of several kinds

PATTERNS = {
    "squared": (LayerKind(feed_forward="squared"), LayerKind(qkv_bias=True)),
    "shift": (
        LayerKind(),
        LayerKind(mixer="shift", feed_forward="squared"),
        LayerKind(qk_norm=True),
    ),
}
SIZES = "model.dim=64 model.num_layers=6 model.num_heads=4 model.num_kv_heads=2 model.head_dim=16 model.ffn_dim=192"


def counted_kinds(name: str, changes: str) -> Counted:
    with model_with(*PATTERNS[name]):
        return count(configured(changes), steps=2)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", PATTERNS)
def test_traced_peaks_of_layers_of_several_kinds_are_counted_ones(
    name: str, recompute: str
) -> None:
    changes = (
        f"{SIZES} training.seq_len=2048 training.global_batch_size=2 memory.recompute={recompute}"
    )
    with model_with(*PATTERNS[name]):
        (traced,) = trace_pp_ranks(configured(changes), 1)
    compare_rank(changes, traced, run_ranks(counted_kinds, 1, name, changes))
