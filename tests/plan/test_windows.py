"""Layers with windows in the planner: pairs, bytes and the choice of a context-parallel method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import memory_grid
from models.score_pairs import causal_pairs
from parallelisms.mesh.context_plan import LAYOUTS_BY_ROTATE_METHOD, ContextPlan, RotateMethod
from parallelisms.mesh.shard_layout import SeqLayout
from tests.plan.test_counted_steps import MODEL
from trainer.config.job_config import Config
from trainer.hardware.device_specs import load_device
from trainer.plan.comm_volume import comm_volumes
from trainer.plan.memory_estimate import rank_memory
from trainer.plan.plan import plan_stage
from trainer.plan.rank_workload import attention_pairs, rank_workload

PATTERNS = {
    "5:1": '[{"window":40,"repeat":5},{}]',
    "1:1": '[{"window":100,"sink":true},{"sink":true}]',
    "3:1": '[{"window":7,"repeat":3},{}]',
    "windows": '[{"window":40},{"window":100}]',
}
T = 512
Q = 4 * 32
K = 2 * 32
LAYERS = 12
LAYOUTS: list[tuple[RotateMethod, str]] = [
    (method, layout) for method, layouts in LAYOUTS_BY_ROTATE_METHOD.items() for layout in layouts
]


def configured(pattern: str, **changes: object) -> Config:
    values: Mapping[str, object] = MODEL | {"model.num_layers": LAYERS, "training.seq_len": T}
    return memory_grid.configured({**values, "model.layers": PATTERNS[pattern], **changes})


def test_a_halo_has_a_window_without_its_query_before_each_piece() -> None:
    assert SeqLayout("contiguous", 4, (0, 64)).halo_tokens(5) == [
        [0, 0, 0, 0],
        [4, 0, 0, 0],
        [0, 4, 0, 0],
        [0, 0, 4, 0],
    ]
    # Rank 0 has the chunks 0 and 7, rank 3 has 3 and 4.
    received = [sum(sent) for sent in SeqLayout("headtail", 4, (0, 64)).halo_tokens(5)]
    assert received == [4, 8, 8, 4]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_model_flops_count_pairs_of_each_layer(pattern: str) -> None:
    model = configured(pattern).model.build()
    attended = sum(causal_pairs(T, kind.window) for kind in model.layer_kinds)
    of_attention = model.flops(tokens=0, pairs=model.mean_pairs(T))
    assert of_attention == pytest.approx(12 * Q * attended, rel=1e-14)
    assert model.hardware_flops(
        tokens=0, pairs=model.mean_pairs(T), recompute="full"
    ) == pytest.approx((14 + 4) * Q * attended, rel=1e-14)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("method", "layout"), LAYOUTS)
def test_ranks_attend_to_the_pairs_of_the_busiest(pattern: str, method: str, layout: str) -> None:
    config = configured(
        pattern,
        **{"parallelism.cp": 4, "parallelism.cp_method": method, "parallelism.cp_layout": layout},
    )
    rank = rank_memory(config, 4, 0)
    for kind in rank.kinds:
        pairs = SeqLayout(config.context_plan().resolved_layout, 4, (0, T)).pairs_per_rank(
            kind.window
        )
        assert attention_pairs(rank, kind.window) == max(pairs)
        assert sum(pairs) == causal_pairs(T, kind.window)
    by_window = rank_workload(rank).attention_by_window
    assert {*by_window} == {kind.window for kind in rank.kinds}
    for window, flops in by_window.items():
        layers = sum(count for kind, count in rank.kinds.items() if kind.window == window)
        assert flops["forward"] == 4 * 4 * layers * Q * attention_pairs(rank, window)


@pytest.mark.parametrize("method", ["allgather", "ring", "alltoall"])
def test_layers_with_a_window_send_a_halo_and_the_others_all_kv(method: str) -> None:
    config = configured(
        "5:1",
        **{
            "parallelism.cp": 4,
            "parallelism.cp_method": method,
            "parallelism.cp_layout": "contiguous",
        },
    )
    sent: dict[tuple[str, str], Any] = {
        (each.what, each.phase): (each.bytes, each.calls, each.kind)
        for each in comm_volumes(rank_memory(config, 4, 0))
        if each.channel == "cp"
    }
    # Ten layers, four sequences, K and V of 39 tokens.
    halo: float = 10 * 4 * 2 * 39 * K * 4
    for key in (
        ("the halo", "forward"),
        ("the halo", "backward"),
        ("gradients of the halo", "backward"),
    ):
        assert sent[key][0] == pytest.approx(halo)
        assert sent[key][1:] == (40, "all_to_all")
    full = 2 * 4 * 2 * (T / 4) * K * 4 * 3
    assert sent["KV", "forward"][0] == sent["gradients of KV", "backward"][0] == full


def test_a_ring_rotates_kv_where_the_halo_of_a_window_does_not_fit() -> None:
    options = {
        "parallelism.cp": 4,
        "parallelism.cp_layout": "contiguous",
        "parallelism.cp_method": "ring",
    }
    for tokens, fits in ((2 * T // 4 + 1, True), (2 * T // 4 + 2, False)):
        config = configured("5:1", **options, **{"model.layers": f'[{{"window":{tokens}}}]'})
        rank = rank_memory(config, 4, 0)
        (kind,) = rank.kinds
        assert (rank.blocks[kind].halo is not None) == fits
        assert any(each.what == "the halo" for each in comm_volumes(rank)) == fits


def plan_of(*windows: int | None, **changes: object) -> ContextPlan:
    plan = ContextPlan(
        cp=8, heads=8, kv_heads=8, seq_len=1 << 20, packs_documents=False, windows=windows
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def test_auto_exchanges_heads_unless_every_halo_is_small() -> None:
    assert plan_of(None).resolved_method == plan_of(None, 1024).resolved_method == "ulysses"
    assert plan_of(1024).resolved_method == plan_of(1024, 4096).resolved_method == "allgather"
    assert (
        plan_of(1024, 4096).reason
        == "auto: every layer has a window: ranks send at most 8,190 tokens of KV"
    )
    assert plan_of(None, 1024).reason.endswith("; the layers without a window decide")
    # A halo as wide as half of what a rank holds is as much as its heads.
    assert plan_of(1 << 18).resolved_method == "ulysses"
    assert plan_of(1024, ranks_per_node=4).resolved_method == "allgather"
    assert plan_of(None, 1024, ranks_per_node=4).resolved_method == "hybrid"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_plan_takes_less_time_and_memory_than_without_windows(pattern: str) -> None:
    options = {
        "parallelism.cp": 4,
        "parallelism.cp_method": "allgather",
        "training.seq_len": 1 << 16,
        "training.dtype": "bfloat16",
    }
    device = load_device("h100-80gb")
    mixed = plan_stage(configured(pattern, **options), 4, device)
    full = plan_stage(configured(pattern, **options, **{"model.layers": "[{}]"}), 4, device)
    assert mixed.step_seconds < full.step_seconds
    assert mixed.model_flops < full.model_flops
    assert mixed.peak_memory.device_bytes <= 1.001 * full.peak_memory.device_bytes
