"""Step time: components, rates, and overlap of communication with compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer.config import checks
from trainer.config.job_config import Config
from trainer.hardware.device_specs import (
    ATTENTION_HALF_RATE_TOKENS,
    MATMUL_HALF_RATE_DIM,
    MEMORY_SHARE,
    DeviceSpec,
    load_device,
)
from trainer.plan.critical_path import StepTime, predict_step_time
from trainer.plan.memory_estimate import rank_memory
from trainer.plan.rank_workload import rank_workload
from trainer.plan.step_time import (
    ASYNC_TP_OVERLAP,
    CONTENTION_FRACTION,
    KERNELS_PER_BLOCK,
    STEP_OVERHEAD,
    RankStepTime,
)
from trainer.trace.pieces import HOST

H100 = load_device("h100-80gb")
K = 1 << 10
M = 1 << 20


def timed(
    world: int = 1, device: DeviceSpec = H100, size: str = "8b", **sections: Any
) -> StepTime:
    config = configured(size=size, **sections)
    assert checks.layout_problems(config, world) == []
    return predict_step_time(config, world, device)


def configured(size: str = "8b", **sections: Any) -> Config:
    given: dict[str, Any] = {"model": {"family": "llama3.1", "size": size}} | sections
    given["training"] = {
        "seq_len": 32 * K,
        "global_batch_size": 1,
        "attention": "cudnn",
    } | given.get("training", {})
    return Config.model_validate(given)


def test_one_device_runs_its_flops_at_its_rates() -> None:
    found = timed(memory={"recompute": "none"})
    (stage,) = found.ranks
    done = rank_workload(rank_memory(configured(memory={"recompute": "none"}), 1, 0))
    # K and V projections are 1024 wide: 8.4 of 218 million weights per block. All others are at
    # least 4096 wide.
    narrow = (
        209.7 * (1 + MATMUL_HALF_RATE_DIM / 4096) + 8.4 * (1 + MATMUL_HALF_RATE_DIM / 1024)
    ) / 218.1
    assert stage.compute["matmul"] == pytest.approx(
        3 * 2 * 218.1e6 * 32 * 32 * K * narrow / (H100.matmul_share * 794.5e12), rel=1e-3
    )
    slow = (32 * K + ATTENTION_HALF_RATE_TOKENS) / (32 * K)
    pairs = 32 * K * (32 * K + 1) / 2
    assert stage.compute["attention"] == pytest.approx(
        32 * 4096 * pairs * (4 / 640e12 + 10 / 500e12) * slow, rel=1e-3
    )
    assert stage.compute["memory-bound"] == pytest.approx(
        (done.memory_traffic["forward"] + done.memory_traffic["backward"])
        / (MEMORY_SHARE * 3350e9)
    )
    assert stage.optimizer == pytest.approx(done.optimizer_bytes / (MEMORY_SHARE * 3350e9))
    assert stage.compute["recompute"] == stage.bubble == stage.compute["launch overhead"] == 0
    assert not stage.exposed
    assert found.executed_flops == sum(done.matmul_flops.values()) + sum(
        done.attention_flops.values()
    )


MESHES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (
        8,
        {
            "parallelism": {"cp": 8, "cp_method": "ulysses"},
            "memory": {"recompute": "full", "offload": "inputs"},
        },
    ),
    (16, {"parallelism": {"cp": 16, "cp_method": "ring"}}),
    (
        16,
        {
            "parallelism": {"cp": 8, "tp": 2, "cp_method": "allgather"},
            "memory": {"head_groups": 2},
        },
    ),
    (32, {"parallelism": {"cp": 8, "tp": 4, "cp_method": "hybrid", "cp_ulysses": 2}}),
    (8, {"parallelism": {"pp": 4, "dp_shard": 2}, "training": {"global_batch_size": 16}}),
    (8, {"memory": {"optimizer_placement": "host"}, "training": {"global_batch_size": 16}}),
    (
        8,
        {"parallelism": {"dp_replicate": 2, "dp_shard": 4}, "training": {"global_batch_size": 16}},
    ),
]


@pytest.mark.parametrize(("world", "sections"), MESHES)
def test_components_add_up_to_the_step_time_on_every_rank(
    world: int, sections: dict[str, Any]
) -> None:
    found = timed(world, **sections)
    for stage in found.ranks:
        assert sum(stage.breakdown().values()) == pytest.approx(found.seconds)
        assert min(stage.breakdown().values()) > 0
    assert found.busiest.bubble == min(stage.bubble for stage in found.ranks)


@pytest.mark.parametrize(("world", "sections"), MESHES)
@pytest.mark.parametrize(
    "figure",
    [
        "matmul_flops",
        "hbm_bandwidth",
        "link_bandwidth",
        "network_bandwidth",
        "host_link_bandwidth",
        "host_bandwidth",
        "attention_flops",
    ],
)
def test_a_faster_device_is_never_slower(
    world: int, sections: dict[str, Any], figure: str
) -> None:
    better: dict[str, Any] = {
        figure: None if figure == "attention_flops" else 2 * getattr(H100, figure)
    }
    if figure == "attention_flops":
        better = {"attention_flops": {"cudnn": {128: (2e15, 2e15)}}}
    before = timed(world, **sections)
    after = timed(world, replace(H100, **better), **sections)
    assert after.seconds <= before.seconds * (1 + 1e-9)


def test_time_per_token_grows_with_sequence_length_and_shrinks_with_micro_batch_size() -> None:
    lengths = [
        timed(training={"seq_len": length}).seconds / length
        for length in (8 * K, 32 * K, 128 * K, 512 * K)
    ]
    assert lengths == sorted(lengths)
    apart = timed(training={"seq_len": 4 * K, "global_batch_size": 8}).seconds
    together = timed(
        training={"seq_len": 4 * K, "global_batch_size": 8, "micro_batch_size": 8}
    ).seconds
    assert together < apart


def test_recomputation_costs_its_flops_and_traffic() -> None:
    none, keep, full = (
        timed(memory={"recompute": policy}).ranks[0]
        for policy in ("none", "keep_attention", "full")
    )
    assert none.compute["recompute"] == 0
    # All matmuls but the last, 159.4 of 218.1 million weights, and their memory traffic.
    few, many = (
        rank_workload(rank_memory(configured(memory={"recompute": policy}), 1, 0))
        for policy in ("keep_attention", "full")
    )
    moved = few.memory_traffic["recompute"] / (MEMORY_SHARE * 3350e9)
    assert keep.compute["recompute"] == pytest.approx(
        keep.compute["matmul"] / 3 * 159.4 / 218.1 + moved, rel=0.01
    )
    # The attention forward, and the QKV projections, 25.2 million weights, once more.
    more = (many.memory_traffic["recompute"] - few.memory_traffic["recompute"]) / (
        MEMORY_SHARE * 3350e9
    ) + keep.compute["matmul"] / 3 * 25.2 / 218.1
    again = full.compute["attention"] * (4 / 640) / (4 / 640 + 10 / 500)
    assert full.compute["recompute"] - keep.compute["recompute"] == pytest.approx(
        again + more, rel=0.01
    )
    assert keep.compute["matmul"] == none.compute["matmul"] == full.compute["matmul"]


def test_the_attention_kernel_sets_the_rate() -> None:
    slow, fast = (timed(training={"attention": kernel}).ranks[0] for kernel in ("flash", "fa3"))
    assert slow.compute["attention"] / fast.compute["attention"] == pytest.approx(
        (4 / 350 + 10 / 308) / (4 / 680 + 10 / 585)
    )
    assert slow.compute["matmul"] == fast.compute["matmul"]


def test_fsdp_overlaps_with_long_sequences_only() -> None:
    # docs/parallelism.md: overlap needs about 1,400 tokens per GPU between nodes, with margin a
    # few times that.
    mesh = {"dp_shard": 32}

    def waits(tokens: int) -> float:
        found = timed(32, parallelism=mesh, training={"seq_len": tokens, "global_batch_size": 32})
        return found.ranks[0].exposed["fsdp"] / found.seconds

    assert waits(512) > 0.25
    assert waits(16 * K) < 0.02


def test_a_ring_overlaps_from_its_critical_length_on() -> None:
    # A hop has 2 x 2 x 1024 bytes per token and 2 x 4096 FLOPs per token and key: 6.7K tokens at
    # 45 GB/s and 607 TFLOP/s.
    def waits(tokens: int) -> float:
        ring = {"cp": 16, "cp_method": "ring", "cp_reduce_dtype": "bfloat16"}
        found = timed(16, parallelism=ring, training={"seq_len": 16 * tokens})
        return found.ranks[0].exposed["cp"] / found.ranks[0].overlapped["cp"]

    assert waits(512) > 1
    assert waits(4 * K) < 0.5
    assert waits(32 * K) == pytest.approx(1 / 44, rel=0.15)  # The last gradient hop of 45.


def test_ring_attention_runs_smaller_kernels() -> None:
    def takes(method: str) -> float:
        mesh = {"cp": 8, "cp_method": method}
        return (
            timed(8, parallelism=mesh, training={"seq_len": 16 * K}).ranks[0].compute["attention"]
        )

    # 2K tokens per rank: kernels of 2K, or of 1K on average in the ring.
    assert takes("ring") / takes("allgather") == pytest.approx(
        (1 + ATTENTION_HALF_RATE_TOKENS / (1 * K)) / (1 + ATTENTION_HALF_RATE_TOKENS / (2 * K))
    )


def test_kv_all_gather_overlaps_with_local_attention_and_reduce_scatter_does_not() -> None:
    def stage(tokens: int) -> RankStepTime:
        mesh = {"cp": 16, "cp_method": "allgather", "cp_reduce_dtype": "bfloat16"}
        return timed(16, parallelism=mesh, training={"seq_len": tokens}).ranks[0]

    long = stage(2 * M)
    short = stage(48 * K)
    # One all-gather per direction, and the reduce-scatter, which takes as long.
    assert long.exposed["cp"] == pytest.approx(long.overlapped["cp"] / 2, rel=0.01)
    assert short.exposed["cp"] > short.overlapped["cp"]
    # Attention to local KV is 1/16 of the time.
    assert short.overlapped["cp"] == pytest.approx(short.compute["attention"] / 16, rel=0.05)


def test_overlapped_communication_causes_contention() -> None:
    stage = timed(8, parallelism={"dp_shard": 8}, training={"global_batch_size": 8}).ranks[0]
    assert stage.contention == pytest.approx(CONTENTION_FRACTION * sum(stage.overlapped.values()))
    assert stage.contention > 0
    alone = timed(memory={"recompute": "full", "offload": "inputs"}).ranks[0]
    assert alone.overlapped[HOST] > 0  # Copies need no SMs.
    assert alone.contention == 0


def test_recomputed_inputs_expose_weight_gathers() -> None:
    def waits(every: int) -> float:
        memory = {"recompute": "keep_attention", "blocks_per_checkpoint": every}
        mesh = {"dp_shard": 16}
        return (
            timed(16, parallelism=mesh, memory=memory, training={"global_batch_size": 16})
            .ranks[0]
            .exposed["fsdp"]
        )

    assert waits(4) > waits(1)
    # Three of four blocks are gathered once more: 24 of 32, 436 MB each, 15/16 of it remote.
    assert waits(4) - waits(1) == pytest.approx(
        24 * 2 * 218.1e6 * 15 / 16 / min(360e9, 8 * 45e9), rel=0.15
    )


def test_host_optimizer_copies_weights_and_gradients() -> None:
    device = replace(H100, host_link_bandwidth=1e9)
    stage = timed(device=device, memory={"optimizer_placement": "host"}).ranks[0]
    copied = stage.exposed[HOST] + stage.overlapped[HOST]
    # Four bytes per weight: all weights forward, resharded weights backward, all gradients back.
    assert copied == pytest.approx((4 * 8.03e9 + 4 * 6.98e9 + 4 * 8.03e9) / 1e9, rel=0.02)


def test_a_pipeline_exposes_gradient_reduction() -> None:
    mesh = {"pp": 4, "dp_shard": 8}
    stage = timed(32, size="70b", parallelism=mesh, training={"global_batch_size": 64}).ranks[1]
    # 20 blocks of 856 million weights in float32, over 8 ranks.
    summed = 20 * 4 * 855.6e6 * 7 / 8
    assert stage.exposed["fsdp"] == pytest.approx(summed / (8 * 45e9), rel=0.05)


def test_a_host_budget_makes_early_pipeline_ranks_recompute_more() -> None:
    memory = {
        "recompute": "keep_attention",
        "offload": "inputs_and_attention",
        "host_budget_gib": 80.0,
    }
    mesh = {"pp": 4, "pp_layers": (8, 8, 8, 8)}
    found = timed(4, parallelism=mesh, memory=memory, training={"global_batch_size": 16})
    assert found.ranks[1].compute["recompute"] > 1.05 * found.ranks[2].compute["recompute"]


def test_head_groups_overlap_the_ulysses_exchange() -> None:
    def waits(groups: int) -> tuple[float, float]:
        mesh = {"cp": 4, "cp_method": "ulysses"}
        stage = timed(4, parallelism=mesh, memory={"head_groups": groups}).ranks[0]
        return stage.exposed["cp"], stage.overlapped.get("cp", 0)

    # 8 KV heads divide among 4 ranks either way.
    alone = waits(1)
    in_groups = waits(2)
    assert alone[1] == 0
    assert in_groups[1] > 0
    assert in_groups[0] < alone[0]


def test_tp_is_exposed_without_async_tp() -> None:
    def waits(*, hidden: bool) -> tuple[float, float]:
        mesh = {"tp": 8, "async_tp": hidden}
        stage = timed(8, parallelism=mesh, training={"compile": True}).ranks[0]
        return stage.exposed["tp"], stage.overlapped.get("tp", 0)

    assert waits(hidden=False)[1] == 0
    assert waits(hidden=True)[0] == pytest.approx((1 - ASYNC_TP_OVERLAP) * waits(hidden=False)[0])


def test_offload_overlaps_with_long_sequences_unless_the_link_is_slow() -> None:
    memory = {"recompute": "keep_attention", "offload": "inputs_and_attention"}
    long = timed(training={"seq_len": 128 * K}, memory=memory).ranks[0]
    assert long.exposed.get(HOST, 0) == 0
    assert long.overlapped[HOST] > 0
    slow = timed(
        device=replace(H100, host_link_bandwidth=2e9), training={"seq_len": 128 * K}, memory=memory
    ).ranks[0]
    assert slow.exposed[HOST] > sum(slow.compute.values()) / 4
    in_groups = timed(training={"seq_len": 128 * K}, memory=memory | {"head_groups": 4}).ranks[0]
    assert in_groups.exposed[HOST] > 0


def test_the_host_optimizer_overlaps_with_forward() -> None:
    def waits(tokens: int) -> float:
        return (
            timed(8, training={"seq_len": tokens, "global_batch_size": 8}, memory=host)
            .ranks[0]
            .optimizer
        )

    host = {"optimizer_placement": "host"}
    assert waits(512 * K) == 0
    # 36 bytes per parameter, 8 billion of them, at 280 GB/s.
    assert 0.5 < waits(2 * K) < 2


def test_bubble_is_smallest_on_the_busiest_rank() -> None:
    mesh = {"pp": 8}
    few, many = (
        timed(8, size="70b", parallelism=mesh, training={"global_batch_size": count})
        for count in (8, 64)
    )
    assert few.busiest.bubble / few.seconds == pytest.approx(7 / 15, rel=0.1)
    assert many.busiest.bubble / many.seconds == pytest.approx(7 / 71, rel=0.15)
    assert few.busiest.bubble < max(stage.bubble for stage in few.ranks)


def test_short_sequences_are_launch_bound_and_less_so_when_compiled() -> None:
    def stage(*, is_compiled: bool) -> RankStepTime:
        training = {"seq_len": 512, "global_batch_size": 1, "compile": is_compiled}
        config = Config.model_validate(
            {"model": {"family": "llama3", "size": "debug"}, "training": training}
        )
        return predict_step_time(config, 1, H100).ranks[0]

    eager = stage(is_compiled=False)
    compiled = stage(is_compiled=True)
    assert eager.compute["launch overhead"] > compiled.compute["launch overhead"] > 0
    blocks = (
        Config.model_validate({"model": {"family": "llama3", "size": "debug"}})
        .model.build()
        .num_layers
    )
    least = blocks * sum(KERNELS_PER_BLOCK.values()) * H100.launch_latency
    assert sum(eager.compute.values()) - eager.compute["loss head"] == pytest.approx(
        least, rel=0.01
    )


def test_float32_is_far_slower() -> None:
    narrow, wide = (
        timed(training={"dtype": dtype, "attention": "auto"}).seconds
        for dtype in ("bfloat16", "float32")
    )
    assert wide > 8 * narrow


def test_every_step_has_a_fixed_overhead() -> None:
    assert timed().ranks[0].breakdown()["step overhead"] == STEP_OVERHEAD
