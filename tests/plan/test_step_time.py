"""Step time of traces: components, rates, and overlap of communication with compute."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from trainer.config import checks
from trainer.config.job_config import Config
from trainer.hardware.device_specs import (
    MATMUL_HALF_RATE_DIM,
    DeviceSpec,
    load_device,
)
from trainer.plan.interconnect import group_topologies
from trainer.plan.rank_clock import RankClock
from trainer.plan.step_time import (
    ASYNC_TP_OVERLAP,
    CONTENTION_FRACTION,
    OPTIMIZER_MEMORY_SHARE,
    STEP_OVERHEAD,
    RankStepTime,
    StepTime,
    step_time_of,
)
from trainer.trace.answers import traced_rank_steps
from trainer.trace.pieces import HOST
from trainer.trace.rank_step import RankStep

H100 = load_device("h100-80gb")
K = 1 << 10
LAYERS = 2
BLOCK = 218.1e6
"""Weights of a block of 8B."""
KEEP = {"recompute": "keep_attention"}


def configured(layers: int = LAYERS, **sections: Any) -> Config:
    """Few layers of 8B, not compiled: a trace of them takes little time."""
    given: dict[str, Any] = {
        "model": {"family": "llama3.1", "size": "8b", "num_layers": layers}
    } | sections
    given["training"] = {
        "seq_len": 32 * K,
        "global_batch_size": 1,
        "attention": "cudnn",
        "compile": False,
    } | given.get("training", {})
    return Config.model_validate(given)


@cache
def traced(config: str, world: int) -> list[RankStep]:
    return traced_rank_steps(Config.model_validate(json.loads(config)), world)


def timed(
    world: int = 1, device: DeviceSpec = H100, layers: int = LAYERS, **sections: Any
) -> StepTime:
    config = configured(layers, **sections)
    assert checks.layout_problems(config, world) == []
    return step_time_of(config, world, clocks(config, world, device))


def clocks(config: Config, world: int, device: DeviceSpec = H100) -> list[RankClock]:
    steps = traced(config.model_dump_json(exclude={"stage"}), world)
    groups = group_topologies(config, world, device)
    return [RankClock(config, step, device, groups) for step in steps]


def test_one_device_runs_its_flops_at_its_rates() -> None:
    (stage,) = timed(memory={"recompute": "none"}).ranks
    # K and V projections are 1024 wide: 8.4 of 218 million weights per block. All others are at
    # least 4096 wide.
    narrow = (
        209.7 * (1 + MATMUL_HALF_RATE_DIM / 4096) + 8.4 * (1 + MATMUL_HALF_RATE_DIM / 1024)
    ) / 218.1
    assert stage.compute["matmul"] == pytest.approx(
        3 * 2 * BLOCK * LAYERS * 32 * K * narrow / (H100.matmul_share * 794.5e12), rel=1e-3
    )
    # Long sequences are attended to at the rates of the table.
    pairs = 32 * K * (32 * K + 1) / 2
    assert stage.compute["attention"] == pytest.approx(
        LAYERS * 4096 * pairs * (4 / 640e12 + 10 / 500e12), rel=1e-3
    )
    # The gradient is read for its norm; then it, weight and two moments are read and written.
    numel = configured().model.build().num_parameters
    moved = 4 * numel * (1 + 2 * 4)
    bandwidth = OPTIMIZER_MEMORY_SHARE * H100.hbm_bandwidth
    assert stage.optimizer == pytest.approx(moved / bandwidth, rel=1e-3)
    assert stage.compute["recompute"] == stage.bubble == 0
    assert not stage.exposed


def test_an_optimizer_step_takes_as_long_as_its_weights_are_many() -> None:
    """Of layers that no trace records, too."""
    few, many = (timed(layers=layers).ranks[0].optimizer for layers in (8, 16))
    numel = [configured(layers).model.build().num_parameters for layers in (8, 16)]
    assert many / few == pytest.approx(numel[1] / numel[0], rel=1e-3)


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
            "memory": KEEP | {"head_groups": 2},
        },
    ),
    (32, {"parallelism": {"cp": 8, "tp": 4, "cp_method": "hybrid", "cp_ulysses": 2}}),
    (
        8,
        {
            "parallelism": {"pp": 4, "dp_shard": 2},
            "training": {"global_batch_size": 16},
            "layers": 4,
        },
    ),
    (8, {"memory": {"optimizer_placement": "host"}, "training": {"global_batch_size": 16}}),
    (
        8,
        {"parallelism": {"dp_replicate": 2, "dp_shard": 4}, "training": {"global_batch_size": 16}},
    ),
]


@pytest.mark.parametrize(
    ("world", "sections"),
    [
        pytest.param(*mesh, marks=[pytest.mark.slow] * (index in (2, 3, 4)))
        for index, mesh in enumerate(MESHES)
    ],
)
def test_components_add_up_to_the_step_time_on_every_rank(
    world: int, sections: dict[str, Any]
) -> None:
    found = timed(world, **sections)
    for stage in found.ranks:
        assert sum(stage.breakdown().values()) == pytest.approx(found.seconds)
        assert min(stage.breakdown().values()) > 0
    assert found.busiest.bubble == min(stage.bubble for stage in found.ranks)


FASTER: dict[str, dict[str, Any]] = {
    figure: {figure: 2 * getattr(H100, figure)}
    for figure in (
        "matmul_flops",
        "hbm_bandwidth",
        "link_bandwidth",
        "network_bandwidth",
        "host_link_bandwidth",
        "host_bandwidth",
    )
} | {"attention_flops": {"attention_flops": {"cudnn": {128: (2e15, 2e15)}}}}


@pytest.mark.parametrize(
    ("world", "sections"),
    [
        pytest.param(*mesh, marks=[pytest.mark.slow] * (index in (2, 3, 4)))
        for index, mesh in enumerate(MESHES)
    ],
)
def test_a_faster_device_is_never_slower(world: int, sections: dict[str, Any]) -> None:
    before = timed(world, **sections)
    for better in FASTER.values():
        after = timed(world, replace(H100, **better), **sections)
        assert after.seconds <= before.seconds * (1 + 1e-9), better


@pytest.mark.slow
def test_time_per_token_grows_with_sequence_length_and_shrinks_with_micro_batch_size() -> None:
    lengths = [
        timed(training={"seq_len": length}).seconds / length for length in (32 * K, 256 * K)
    ]
    assert lengths == sorted(lengths)
    short = {"seq_len": 4 * K, "global_batch_size": 8}
    apart, together = (
        timed(training=short | {"micro_batch_size": size}).seconds for size in (1, 8)
    )
    assert together < apart


@pytest.mark.slow
def test_recomputation_costs_its_flops() -> None:
    none, keep, full = (
        timed(memory={"recompute": policy}).ranks[0].compute
        for policy in ("none", "keep_attention", "full")
    )
    assert none["recompute"] == 0
    # All matmuls but the last, 159.4 of 218.1 million weights.
    assert keep["recompute"] == pytest.approx(none["matmul"] / 3 * 159.4 / 218.1, rel=0.01)
    # The attention forward, and the QKV projections, 25.2 million weights, once more.
    again = full["attention"] * (4 / 640) / (4 / 640 + 10 / 500)
    more = none["matmul"] / 3 * 25.2 / 218.1
    assert full["recompute"] - keep["recompute"] == pytest.approx(again + more, rel=0.02)
    assert keep["matmul"] == pytest.approx(none["matmul"], rel=0.01)
    # Recomputation reads and writes, too.
    assert none["memory-bound"] < keep["memory-bound"] < full["memory-bound"]


def test_the_attention_kernel_sets_the_rate() -> None:
    slow, fast = (timed(training={"attention": kernel}).ranks[0] for kernel in ("flash", "fa3"))
    assert slow.compute["attention"] / fast.compute["attention"] == pytest.approx(
        (4 / 350 + 10 / 308) / (4 / 680 + 10 / 585)
    )
    assert slow.compute["matmul"] == fast.compute["matmul"]


def test_fsdp_overlaps_with_long_sequences_only() -> None:
    # docs/parallelism.md: overlap needs about 1,400 tokens per GPU between nodes, with margin a
    # few times that.
    def waits(tokens: int) -> float:
        found = timed(
            32,
            layers=8,
            parallelism={"dp_shard": 32},
            training={"seq_len": tokens, "global_batch_size": 32},
        )
        return found.ranks[0].exposed["fsdp"] / found.ranks[0].busy

    assert waits(512) > 0.2
    assert waits(16 * K) < 0.05


def exposed_share(stage: RankStepTime) -> float:
    """Share of the seconds of messages of context parallelism."""
    exposed = stage.exposed.get("cp", 0.0)
    return exposed / (exposed + stage.overlapped.get("cp", 0.0))


def test_a_ring_overlaps_from_its_critical_length_on() -> None:
    # A hop has 2 x 2 x 1024 bytes per token and 2 x 4096 FLOPs per token and key: 6.7K tokens at
    # 45 GB/s and 607 TFLOP/s.
    def waits(tokens: int) -> float:
        ring = {"cp": 16, "cp_method": "ring", "cp_reduce_dtype": "bfloat16"}
        found = timed(16, parallelism=ring, training={"seq_len": 16 * tokens})
        return exposed_share(found.ranks[0])

    assert waits(512) > 0.5
    assert waits(4 * K) < 1 - 4 / 6.7
    assert waits(32 * K) == pytest.approx(1 / 45, rel=0.15)  # The last gradient hop of 45.


@pytest.mark.slow
def test_ring_attention_runs_smaller_kernels() -> None:
    def takes(method: str) -> float:
        mesh = {"cp": 8, "cp_method": method}
        return (
            timed(8, parallelism=mesh, training={"seq_len": 16 * K}).ranks[0].compute["attention"]
        )

    assert takes("ring") > 1.1 * takes("ulysses")


@pytest.mark.slow
def test_kv_all_gather_overlaps_with_local_attention_and_reduce_scatter_does_not() -> None:
    def stage(tokens: int) -> RankStepTime:
        mesh = {"cp": 16, "cp_method": "allgather", "cp_reduce_dtype": "bfloat16"}
        return timed(16, parallelism=mesh, training={"seq_len": tokens}).ranks[0]

    # One all-gather per direction, and the reduce-scatter, which takes as long.
    assert exposed_share(stage(2 * K * K)) == pytest.approx(1 / 3, rel=0.01)
    assert exposed_share(stage(48 * K)) > 1 / 2


def test_overlapped_communication_causes_contention() -> None:
    stage = timed(8, layers=8, parallelism={"dp_shard": 8}, training={"global_batch_size": 8})
    (rank,) = stage.ranks
    assert rank.contention == pytest.approx(CONTENTION_FRACTION * sum(rank.overlapped.values()))
    assert rank.contention > 0
    alone = timed(memory={"recompute": "full", "offload": "inputs"}).ranks[0]
    assert alone.overlapped[HOST] > 0  # Copies need no SMs.
    assert alone.contention == 0


@pytest.mark.slow
def test_recomputed_inputs_gather_weights_once_more() -> None:
    def takes(every: int) -> float:
        found = timed(
            16,
            layers=8,
            parallelism={"dp_shard": 16},
            memory=KEEP | {"blocks_per_checkpoint": every},
            training={"global_batch_size": 16},
        ).ranks[0]
        return found.exposed["fsdp"] + found.overlapped["fsdp"]

    # Three of four blocks: 6 of 8, 436 MB each, 15/16 of it remote.
    assert takes(4) - takes(1) == pytest.approx(
        6 * 2 * BLOCK * 15 / 16 / min(360e9, 8 * 45e9), rel=0.15
    )


def test_host_optimizer_copies_weights_and_gradients() -> None:
    device = replace(H100, host_link_bandwidth=1e9)
    stage = timed(device=device, memory={"optimizer_placement": "host"}).ranks[0]
    copied = stage.exposed[HOST] + stage.overlapped[HOST]
    # Four bytes per weight: all weights forward, resharded weights backward, all gradients back.
    numel = configured().model.build().num_parameters
    assert copied == pytest.approx(4 * (2 * numel + LAYERS * BLOCK) / 1e9, rel=0.02)


@pytest.mark.slow
def test_a_pipeline_exposes_the_reduction_of_its_last_gradients() -> None:
    mesh = {"pp": 4, "dp_shard": 8}
    found = timed(32, layers=16, parallelism=mesh, training={"global_batch_size": 64}).ranks[1]
    # Of one block in float32, over 8 ranks; those before it run beside backward passes.
    block = 4 * BLOCK * 7 / 8 / (8 * 45e9)
    assert block < found.exposed["fsdp"] < 2 * block


def test_head_groups_overlap_the_ulysses_exchange() -> None:
    def waits(groups: int) -> tuple[float, float]:
        mesh = {"cp": 4, "cp_method": "ulysses"}
        stage = timed(4, parallelism=mesh, memory=KEEP | {"head_groups": groups}).ranks[0]
        return stage.exposed["cp"], stage.overlapped.get("cp", 0)

    # 8 KV heads divide among 4 ranks either way.
    alone = waits(1)
    in_groups = waits(2)
    assert in_groups[1] > 2 * alone[1]
    assert in_groups[0] < alone[0]


def test_tp_is_exposed_without_async_tp() -> None:
    config = configured(parallelism={"tp": 8})
    (plain,) = clocks(config, 8)
    parallelism = config.parallelism.model_copy(update={"async_tp": True})
    hidden = RankClock(
        config.model_copy(update={"parallelism": parallelism}),
        plain.step,
        H100,
        group_topologies(config, 8, H100),
    )
    assert "tp" not in plain.step_time.overlapped
    # Messages that follow each other at once wait for the link.
    shown = hidden.step_time.exposed["tp"] / plain.step_time.exposed["tp"]
    assert 1 - ASYNC_TP_OVERLAP <= shown < 0.9


def test_offload_overlaps_with_long_sequences_unless_the_link_is_slow() -> None:
    long: dict[str, Any] = {
        "memory": KEEP | {"offload": "inputs_and_attention"},
        "training": {"seq_len": 128 * K},
        "layers": 6,
    }
    fast = timed(**long).ranks[0]
    # The last block's input comes back at once.
    assert fast.exposed[HOST] < fast.overlapped[HOST] / 8
    slow = timed(device=replace(H100, host_link_bandwidth=2e9), **long).ranks[0]
    assert slow.exposed[HOST] > sum(slow.compute.values()) / 4


@pytest.mark.slow
def test_the_host_optimizer_overlaps_with_forward() -> None:
    def waits(tokens: int) -> float:
        training = {"seq_len": tokens, "global_batch_size": 8}
        return (
            timed(8, training=training, memory={"optimizer_placement": "host"}).ranks[0].optimizer
        )

    assert waits(512 * K) == 0
    assert waits(2 * K) > 0.05


@pytest.mark.slow
def test_bubble_is_smallest_on_the_busiest_rank() -> None:
    few, many = (
        timed(8, layers=16, parallelism={"pp": 8}, training={"global_batch_size": count})
        for count in (8, 64)
    )
    # The head makes the last rank the busiest.
    for found, idle in ((few, 7 / 15), (many, 7 / 71)):
        assert 0.75 * idle < found.busiest.bubble / found.seconds < idle
    assert few.busiest.bubble < max(stage.bubble for stage in few.ranks)


def test_short_sequences_are_launch_bound_and_less_so_when_compiled() -> None:
    def stage(*, is_compiled: bool) -> RankStepTime:
        training = {"seq_len": 512, "attention": "cudnn", "compile": is_compiled}
        return timed(model={"family": "llama3", "size": "debug"}, training=training).ranks[0]

    eager = stage(is_compiled=False).compute
    compiled = stage(is_compiled=True).compute
    assert eager["launch overhead"] > compiled["launch overhead"] > 0
    assert eager["launch overhead"] > sum(eager.values()) / 2


def test_float32_is_far_slower() -> None:
    narrow, wide = (
        timed(training={"dtype": dtype, "attention": kernel}).seconds
        for dtype, kernel in (("bfloat16", "cudnn"), ("float32", "efficient"))
    )
    assert wide > 8 * narrow


def test_every_step_has_a_fixed_overhead() -> None:
    assert timed().ranks[0].breakdown()["step overhead"] == STEP_OVERHEAD
