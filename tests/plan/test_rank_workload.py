"""FLOPs and memory traffic against manual counts; test_counted_steps.py compares them with real
steps.
"""

from __future__ import annotations

import pytest

from tests.plan.test_counted_steps import configured
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.plan.memory_estimate import rank_memory
from trainer.plan.rank_workload import RankWorkload, attention_pairs, rank_workload

E = 128
G = 384
T = 256
V = 264
Q = 4 * 32
K = 2 * 32
PROJECTED = E * (Q + 2 * K)
OUT = E * Q
INNER = E * G
ROWS = 4
PAIRS = T * (T + 1) // 2
FULL = "memory.recompute=full"
KEEP = "memory.recompute=keep_attention"
SHIPPED = {
    "llama2_7b_32k": 8,
    "llama3_8b_128k": 8,
    "llama3_8b_1m": 32,
    "llama3_8b_1m_8gpu": 8,
    "llama3_70b_128k": 64,
    "llama3_405b_128k": 4096,
}


def total(found: RankWorkload) -> float:
    return sum(found.matmul_flops.values()) + sum(found.attention_flops.values())


def executed(config: Config) -> float:
    """Of one rank, by the model's own formula."""
    memory = config.memory
    training = config.training
    rows = config.training.global_batch_size
    length = config.context_plan().padded_length(training.seq_len)
    return config.model.build().hardware_flops(
        tokens=rows * length,
        pairs=rows
        * (
            training.seq_len * (training.seq_len + 1)
            + (length - training.seq_len) * (length - training.seq_len + 1)
        )
        / 2,
        recompute=memory.recompute,
        blocks_per_checkpoint=memory.blocks_per_checkpoint,
    )


def of_all_ranks(config: Config, world_size: int) -> float:
    pp_ranks = range(config.parallelism.pp)
    return (
        sum(total(rank_workload(rank_memory(config, world_size, pp_rank))) for pp_rank in pp_ranks)
        * world_size
        / config.parallelism.pp
    )


def test_flops_match_a_manual_count() -> None:
    found = rank_workload(rank_memory(configured(), 1, 0))
    block = PROJECTED + OUT + 3 * INNER
    assert found.matmul_flops == {
        "forward": 2 * ROWS * T * 3 * block,
        "backward": 4 * ROWS * T * 3 * block,
        "recompute": 0,
        "head": 6 * ROWS * T * V * E,
    }
    # Two matmuls forward and five backward, in three layers.
    assert found.attention_flops == {
        "forward": 4 * 3 * Q * ROWS * PAIRS,
        "backward": 10 * 3 * Q * ROWS * PAIRS,
        "recompute": 0,
    }


@pytest.mark.parametrize(
    ("changes", "again", "attention_runs"),
    [
        (FULL, 3 * (2 * PROJECTED + OUT + 2 * INNER), 1),
        (KEEP, 3 * (PROJECTED + OUT + 2 * INNER), 0),
        (
            f"{KEEP} memory.blocks_per_checkpoint=2",
            3 * (PROJECTED + OUT + 2 * INNER) + OUT + 3 * INNER,
            0,
        ),
        (f"{KEEP} model.qk_norm=true", 3 * (PROJECTED + OUT + 2 * INNER + E * (Q + K)), 0),
    ],
)
def test_recomputation_covers_what_gradients_need(
    changes: str, again: int, attention_runs: int
) -> None:
    found = rank_workload(rank_memory(configured(changes), 1, 0))
    assert found.matmul_flops["recompute"] == 2 * ROWS * T * again
    assert found.attention_flops["recompute"] == attention_runs * found.attention_flops["forward"]
    assert total(found) == executed(configured(changes))


@pytest.mark.parametrize("name", SHIPPED)
def test_all_ranks_together_compute_the_flops_of_one(name: str) -> None:
    config = load(["--config", name])
    assert checks.layout_problems(config, SHIPPED[name]) == []
    assert of_all_ranks(config, SHIPPED[name]) == pytest.approx(executed(config), rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        "parallelism.tp=4 model.num_kv_heads=4",
        "parallelism.tp=2 parallelism.cp=2 parallelism.cp_method=ring",
        "parallelism.tp=2 parallelism.loss_parallel=false",
        "parallelism.cp=4 parallelism.cp_method=ulysses model.num_kv_heads=1",
        "parallelism.pp=2 model.num_layers=5",
        f"parallelism.cp=4 training.seq_len=250 {FULL}",
    ],
)
def test_meshes_without_redundant_compute(changes: str) -> None:
    assert of_all_ranks(configured(changes), 4) == pytest.approx(
        executed(configured(changes)), rel=1e-12
    )


def test_redundant_compute_counts_on_every_rank() -> None:
    # Two KV heads on four ranks: each is computed twice.
    config = configured("parallelism.tp=4")
    more = 6 * ROWS * T * 3 * E * 2 * 2 * 32
    assert of_all_ranks(config, 4) == executed(config) + more
    config = configured(
        "parallelism.tp=2 parallelism.sequence_parallel=false parallelism.loss_parallel=false"
    )
    assert of_all_ranks(config, 2) == executed(config) + 6 * ROWS * T * V * E
    # Three sequences on two ranks: one of four micro-batches is empty.
    config = configured("training.global_batch_size=3")
    assert of_all_ranks(config, 2) == executed(configured())


def test_contiguous_layout_is_bound_by_its_last_rank() -> None:
    ring = "parallelism.cp=4 parallelism.cp_method=ring"
    even, uneven = (
        attention_pairs(rank_memory(configured(f"{ring} parallelism.cp_layout={layout}"), 4, 0))
        for layout in ("headtail", "contiguous")
    )
    assert even == PAIRS / 4
    assert uneven == sum(range(T - T // 4 + 1, T + 1))


def test_activations_are_offloaded_for_each_micro_batch() -> None:
    stream = 4 * E * T
    assert (
        rank_workload(
            rank_memory(configured(f"{FULL} memory.offload=inputs"), 1, 0)
        ).offloaded_bytes
        == ROWS * 3 * stream
    )
    attention = rank_workload(
        rank_memory(
            configured(
                f"{KEEP} memory.offload=inputs_and_attention memory.blocks_per_checkpoint=2"
            ),
            1,
            0,
        )
    ).offloaded_bytes
    assert attention == ROWS * (2 * stream + 3 * 4 * (Q + 4) * T)
    assert rank_workload(rank_memory(configured(FULL), 1, 0)).offloaded_bytes == 0


def test_host_optimizer_transfers_weights_per_gather_and_gradients_per_scatter() -> None:
    here, there = (
        rank_workload(rank_memory(configured(f"memory.optimizer_placement={pp_rank}"), 2, 0))
        for pp_rank in ("device", "host")
    )
    blocks = 3 * (PROJECTED + OUT + 3 * INNER + 2 * E)
    ends = 2 * V * E + E
    # Two micro-batches per rank; blocks are gathered twice.
    assert (there.fetched_bytes, there.returned_bytes) == (
        4 * 2 * (2 * blocks + ends) / 2,
        4 * 2 * (blocks + ends) / 2,
    )
    assert (here.fetched_bytes, here.returned_bytes) == (0, 0)


def test_optimizer_traffic_covers_weights_gradients_and_moments() -> None:
    parameters = configured().model.build().num_parameters
    wide = rank_workload(rank_memory(configured(), 1, 0)).optimizer_bytes
    # Gradient: read for the norm, then read and written clipped with the weight and each moment:
    # two accesses each.
    assert wide == 4 * parameters * (1 + 2 + 2 + 4)
    assert (
        rank_workload(
            rank_memory(configured("memory.optimizer_dtype=bfloat16"), 1, 0)
        ).optimizer_bytes
        > wide
    )


def test_compilation_and_saved_activations_reduce_memory_traffic() -> None:
    plain, compiled, again = (
        rank_workload(rank_memory(configured(changes), 1, 0)).memory_traffic
        for changes in ("", "training.compile=true", FULL)
    )
    assert all(compiled[phase] < plain[phase] for phase in ("forward", "backward"))
    assert compiled["head"] < plain["head"]
    assert plain["recompute"] == 0 < again["recompute"]
    half = rank_workload(rank_memory(configured("training.seq_len=128"), 1, 0)).memory_traffic
    assert plain["forward"] > 1.9 * half["forward"]


def test_memory_traffic_matches_a_manual_count() -> None:
    config = configured(
        "training.dtype=bfloat16 training.compile=true training.global_batch_size=1"
    )
    stream = E * T
    heads = (Q + K) * T
    inner = G * T
    # Per block two norms, two additions, rotary embedding, and the SwiGLU gate. Plus the
    # embedding, and angles in float32.
    forward = (
        3 * 2 * 2 * 16 * T * 4
        + 3 * 2 * (2 * 2 * stream + 2 * 3 * stream + 2 * heads + 3 * inner)
        + 2 * 2 * stream
    )
    # The FSDP cast reads float32 and writes bfloat16.
    narrowed = config.model.build().num_parameters * (4 + 2)
    assert rank_workload(rank_memory(config, 1, 0)).memory_traffic["forward"] == forward + narrowed


def test_ring_memory_traffic_grows_with_its_size() -> None:
    alone, two, four = (
        rank_workload(
            rank_memory(
                configured(
                    f"parallelism.cp={ranks} parallelism.cp_method=ring training.seq_len={ranks * T}"
                ),
                ranks,
                0,
            )
        ).memory_traffic
        for ranks in (1, 2, 4)
    )
    assert alone["forward"] < two["forward"] < four["forward"]
    assert alone["backward"] < two["backward"] < four["backward"]
