"""The memory estimate against counted bytes of real steps of small models, on one and several
ranks.
"""

from __future__ import annotations

import pytest
from torch import distributed

from benchmarks import memory_grid
from benchmarks.counted import Counted, count
from tests.ranks import run_ranks
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.config.sections import OPTIMIZER_CHUNK_ELEMENTS
from trainer.plan.memory_advice import memory_savings, out_of_memory_advice
from trainer.plan.memory_estimate import (
    SAVED_ACTIVATIONS,
    TRANSIENT_ACTIVATIONS,
    MemoryEstimate,
    estimate_memory,
    estimate_memory_per_pp_rank,
    phase_estimates,
    rank_memory,
)

# Activations dominate, and every item is large enough to matter. The vocabulary is small because
# the CPU's bfloat16 matmuls allocate workspace for a large loss head.
MODEL = [
    "--data.corpus",
    "copy",
    "--model.vocab_size",
    "264",
    "--model.dim",
    "128",
    "--model.num_layers",
    "3",
    "--model.num_heads",
    "4",
    "--model.num_kv_heads",
    "2",
    "--model.head_dim",
    "32",
    "--model.ffn_dim",
    "384",
    "--memory.loss_chunk_mib",
    "1",
    "--training.seq_len",
    "1024",
    "--training.steps",
    "4",
    "--training.dtype",
    "float32",
    "--training.global_batch_size",
    "1",
    "--checkpoint.enabled",
    "false",
]
HALF = "training.dtype=bfloat16"
FULL = "memory.recompute=full"
KEEP = "memory.recompute=keep_attention"
FOUR = "parallelism.pp=2 model.num_layers=4 training.global_batch_size=4"
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


def configured(changes: str = "") -> Config:
    return load(
        [*MODEL, *(word for change in changes.split() for word in f"--{change}".split("=", 1))]
    )


def test_async_checkpoint_staging_is_on_the_host() -> None:
    without = estimate_memory(configured(), 1).host_bytes
    assert (
        estimate_memory(configured("checkpoint.enabled=true checkpoint.async=false"), 1).host_bytes
        == without
    )
    copied = estimate_memory(configured("checkpoint.enabled=true"), 1).host_bytes - without
    assert copied == 12 * configured().model.build().num_parameters


def counted(cases: tuple[str, ...]) -> list[Counted]:
    # Alone, nothing is released unseen.
    steps = 2 if distributed.get_world_size() == 1 else 3
    return [count(configured(changes), steps=steps) for changes in cases]


def compare(world_size: int, cases: tuple[str, ...]) -> None:
    """Peaks agree within 3 %, mostly 1 %, and within 7 % in bfloat16, where the CPU's matmuls
    allocate workspace.
    """
    by_rank = run_ranks(counted, world_size, cases, timeout=300)
    for case, *found in zip(cases, *by_rank, strict=True):
        stages = estimate_memory_per_pp_rank(configured(case), world_size, on_cpu=True)
        each = world_size // len(stages)
        for place, predicted in enumerate(stages):
            ranks = found[place * each : (place + 1) * each]
            items = predicted.item("parameters"), predicted.item("optimizer state")
            states = sum(item.device_bytes + item.host_bytes for item in items)
            # The optimizer also keeps a step count per parameter.
            assert 0 <= max(rank.states for rank in ranks) - states < 2048, case
            peak, _, _ = memory_grid.predicted(
                rank_memory(configured(case), world_size, place, on_cpu=True)
            )
            assert peak == pytest.approx(
                max(rank.peak for rank in ranks), rel=0.07 if HALF in case else 0.03
            ), case


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world_size", CASES)
def test_estimates_match_counted_peaks(world_size: int) -> None:
    compare(world_size, CASES[world_size])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world_size", MORE)
def test_estimates_match_counted_peaks_on_more_meshes(world_size: int) -> None:
    compare(world_size, MORE[world_size])


def test_optimizer_placement_moves_state_to_the_host() -> None:
    here, there = (
        estimate_memory(configured(f"memory.optimizer_placement={place}"), 1)
        for place in ("device", "host")
    )
    assert sum(item.device_bytes for item in there.items[:3]) == 0
    assert there.host_bytes - here.host_bytes == 16 * configured().model.build().num_parameters
    narrow = estimate_memory(configured(f"memory.optimizer_placement=host {NARROW}"), 1)
    assert narrow.host_bytes - here.host_bytes == 12 * configured().model.build().num_parameters
    assert there.device_bytes < here.device_bytes


def test_bfloat16_moments_take_half_and_are_upcast_in_chunks() -> None:
    wide, narrow = (
        estimate_memory(configured(f"{LARGE} memory.optimizer_dtype={kept}"), 1)
        for kept in ("float32", "bfloat16")
    )
    assert (
        narrow.item("optimizer state").device_bytes
        == wide.item("optimizer state").device_bytes / 2
    )
    assert narrow.phase == "in the optimizer step" != wide.phase
    assert narrow.item(TRANSIENT_ACTIVATIONS).device_bytes == 8 * 8192 * 128
    huge = estimate_memory(
        configured(f"{NARROW} training.seq_len=2 model.num_layers=1 model.ffn_dim=200000"), 1
    )
    assert huge.item(TRANSIENT_ACTIVATIONS).device_bytes == 8 * OPTIMIZER_CHUNK_ELEMENTS


def test_the_last_gradient_of_a_reduced_block_is_that_of_the_down_projection() -> None:
    """FSDP2 reduces in the order of the model; QK norms come before."""
    moments = phase_estimates(
        rank_memory(configured("model.qk_norm=true training.global_batch_size=2"), 2, 0)
    )
    after = [
        each for each in moments if each.phase.startswith("after the reduce-scatter of block")
    ]
    last = {
        each.shape
        for moment in after
        for each in moment.tensors
        if each.name == "gradient of the last weight"
    }
    assert last == {(128 * 384,)}


def test_the_first_pipeline_rank_has_the_highest_peak() -> None:
    config = configured(FOUR)
    first, last = estimate_memory_per_pp_rank(config, 2)
    assert first.device_bytes > last.device_bytes
    assert estimate_memory(config, 2) == first


def test_savings_are_differences_of_estimates() -> None:
    config = configured(
        "parallelism.tp=2 parallelism.sequence_parallel=false training.micro_batch_size=1"
    )
    changes = memory_savings(config, 2)
    assert [*changes.values()] == sorted(changes.values(), reverse=True)
    assert "parallelism.sequence_parallel = true" in changes
    assert "parallelism.loss_parallel = true" not in changes
    less = estimate_memory(
        configured(f"parallelism.tp=2 parallelism.sequence_parallel=false {FULL}"), 2
    )
    assert (
        changes['memory.recompute = "full"']
        == estimate_memory(config, 2).device_bytes - less.device_bytes
    )
    assert "parallelism.cp = 2 on 4 processes" in changes
    narrow = estimate_memory(
        configured(f"parallelism.tp=2 parallelism.sequence_parallel=false {NARROW}"), 2
    )
    assert (
        changes['memory.optimizer_dtype = "bfloat16"']
        == estimate_memory(config, 2).device_bytes - narrow.device_bytes
    )


def test_savings_are_valid_configurations() -> None:
    # One head cannot be split over tp, and a micro-batch has at least one sequence.
    changes = memory_savings(configured("model.num_heads=1 model.num_kv_heads=1"), 1)
    slow = memory_savings(configured("optimizer.betas=0.9,0.999"), 1)
    assert not any("optimizer_dtype" in change for change in slow)
    assert not any(
        "parallelism.tp" in change or "micro_batch_size" in change for change in changes
    )
    assert [told.count(" would free ") for told in out_of_memory_advice(configured(), 1)] == [
        0,
        1,
        1,
        1,
    ]


def test_a_larger_mesh_dimension_is_taken_from_dp() -> None:
    config = configured("parallelism.dp_shard=4 training.global_batch_size=4")
    assert "parallelism.cp = 2, parallelism.dp_shard = 2" in memory_savings(config, 4)


def test_each_recompute_policy_saves_fewer_activations() -> None:
    def kept(changes: str) -> MemoryEstimate:
        return estimate_memory(configured(changes), 1)

    none, some, full = (
        kept(changes).item(SAVED_ACTIVATIONS).device_bytes for changes in ("", KEEP, FULL)
    )
    assert none > some > full
