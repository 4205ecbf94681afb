"""Layers with windows in the planner: pairs, bytes and the choice of a context-parallel method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks import memory_grid
from benchmarks.context_parallel import halo_tokens
from models.score_pairs import causal_pairs
from parallelisms.mesh.context_plan import LAYOUTS_BY_ROTATE_METHOD, ContextPlan, RotateMethod
from parallelisms.mesh.shard_layout import SeqLayout
from tests.trace.small_steps import MODEL
from trainer.config.job_config import Config
from trainer.hardware.device_specs import load_device
from trainer.plan.plan import TrainingPlan
from trainer.trace.record import trace_step

PATTERNS = {
    "5:1": '[{"window":40,"repeat":5},{}]',
    "1:1": '[{"window":100,"sink":true},{"sink":true}]',
    "3:1": '[{"window":7,"repeat":3},{}]',
    "windows": '[{"window":40},{"window":100}]',
}
T = 512
Q = 4 * 32
LAYERS = 12
LAYOUTS: list[tuple[RotateMethod, str]] = [
    (method, layout) for method, layouts in LAYOUTS_BY_ROTATE_METHOD.items() for layout in layouts
]


def configured(pattern: str, **changes: object) -> Config:
    values: Mapping[str, object] = MODEL | {
        "model.num_layers": LAYERS,
        "training.seq_len": T,
        "training.global_batch_size": 4,
    }
    return memory_grid.configured({**values, "model.layers": PATTERNS[pattern], **changes})


def test_a_halo_has_a_window_without_its_query_before_each_piece() -> None:
    assert halo_tokens("contiguous", 4, (0, 64), 5) == [
        [0, 0, 0, 0],
        [4, 0, 0, 0],
        [0, 4, 0, 0],
        [0, 0, 4, 0],
    ]
    # Rank 0 has the chunks 0 and 7, rank 3 has 3 and 4.
    received = [sum(sent) for sent in halo_tokens("headtail", 4, (0, 64), 5)]
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
def test_layouts_split_the_pairs_of_every_window(pattern: str, method: str, layout: str) -> None:
    config = configured(
        pattern,
        **{"parallelism.cp": 4, "parallelism.cp_method": method, "parallelism.cp_layout": layout},
    )
    for kind in {*config.model.build().layer_kinds}:
        pairs = SeqLayout(config.context_plan().resolved_layout, 4, (0, T)).pairs_per_rank(
            kind.window
        )
        assert sum(pairs) == causal_pairs(T, kind.window)


@pytest.mark.parametrize(
    "method",
    ["ulysses", *(pytest.param(each, marks=pytest.mark.slow) for each in ("allgather", "ring"))],
)
def test_layers_attend_within_their_own_window(method: str) -> None:
    """Of all ranks together, in blocks with a window and without."""
    options = {"parallelism.cp": 2, "parallelism.cp_method": method, "model.num_layers": 4}
    config = configured("3:1", **options)
    steps = [trace_step(config, 2, rank) for rank in range(2)]
    short = steps[0].short
    kinds = config.model.build().layer_kinds
    windows = {block: kinds[layer].window for block, layer in enumerate(short.stages[0].kept)}
    attended = Counter[int | None]()
    for piece in (piece for step in steps for piece in step.trace.pieces):
        if piece.place.action == "forward" and isinstance(piece.place.unit, int):
            attended[windows[piece.place.unit]] += piece.work.attention_flops["forward"]
    assert attended == {
        window: short.micro_batches * count * 4 * Q * causal_pairs(T, window)
        for window, count in Counter(windows.values()).items()
    }


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


def test_a_plan_takes_less_time_and_memory_than_without_windows() -> None:
    options = {
        "parallelism.cp": 4,
        "parallelism.cp_method": "allgather",
        "training.seq_len": 1 << 16,
        "training.dtype": "bfloat16",
        "training.attention": "cudnn+flash",
        "training.compile": "false",
        "model.num_layers": 4,
    }
    device = load_device("h100-80gb")
    mixed, full = (
        TrainingPlan(configured("3:1", **options, **changes), 4, device)
        for changes in ({}, {"model.layers": "[{}]"})
    )
    assert mixed.step_seconds < full.step_seconds
    assert mixed.model_flops < full.model_flops
    assert mixed.peak_memory.device_bytes <= 1.001 * full.peak_memory.device_bytes
