"""Whole steps that follow from short ones, beside dry runs of the whole step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from benchmarks.dry_run import dry_run
from models.config import ModelConfig
from models.layers import LayerKind
from tests.models.other_kinds import other_kinds
from tests.trace.small_steps import configured
from trainer.config import model as model_section
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.trace.compose import compose
from trainer.trace.pieces import Arrival, Departure, Trace
from trainer.trace.record import record, trace_pp_ranks, trace_step
from trainer.trace.shorten import ShortStep

DEEP = "model.num_layers=9 training.global_batch_size=4"
KEEP = "memory.recompute=keep_attention"
CASES = {
    "saved inputs of every third block": f"{DEEP} {KEEP} memory.blocks_per_checkpoint=3",
    "a budget of the host": f"{DEEP} {KEEP} memory.offload=inputs_and_attention memory.host_budget_gib=0.004",
    "a pipeline": f"model.num_layers=14 training.global_batch_size=8 {KEEP} parallelism.pp=2 parallelism.dp_shard=2",
    "an interleaved pipeline": f"model.num_layers=24 {KEEP} training.global_batch_size=8 parallelism.pp=2 "
    "parallelism.pp_schedule=Interleaved1F1B memory.offload=inputs",
    "no recomputation": f"{DEEP} memory.recompute=none parallelism.dp_shard=2 parallelism.tp=2",
}
QUICK = {"a pipeline", "a budget of the host"}


def require_equal(config: Config, world_size: int, rank: int = 0, **options: object) -> None:
    """Peaks to a thousandth, because scalars live for other times; FLOPs and messages exactly."""
    found = trace_step(config, world_size, rank, **options).whole  # type: ignore[arg-type]
    whole = dry_run(config, world_size, rank=rank, **options)  # type: ignore[arg-type]
    assert found.is_closed
    assert found.peak.size == pytest.approx(whole.peak_bytes, rel=1e-3)
    assert found.host_bytes == whole.peak_host_bytes
    assert dict(found.work.matmul_flops) == whole.matmul_flops
    assert dict(found.work.attention_flops) == whole.attention_flops
    assert {
        (each.channel, each.kind, each.phase): (each.bytes, each.calls) for each in whole.messages
    } == {key: (found.work.sent_bytes[key], calls) for key, calls in found.work.calls.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES]
)
def test_a_whole_step_follows_from_a_short_one(name: str) -> None:
    config = configured(CASES[name])
    world_size = prod(config.parallelism.degrees(1).values())
    require_equal(config, world_size, rank=world_size - 1)


def test_what_a_later_micro_batch_leaves_to_the_next_takes_one_more() -> None:
    """FSDP keeps the gradients of experts from the second micro-batch on, until the next one."""
    config = load(
        [
            "--config",
            "debug_moe",
            "--model.num_layers",
            "4",
            "--training.dtype",
            "bfloat16",
            "--memory.recompute",
            "none",
            "--training.micro_batch_size",
            "1",
            "--training.global_batch_size",
            "24",
            "--parallelism.dp_shard",
            "4",
            "--parallelism.pp",
            "2",
            "--parallelism.ep",
            "2",
        ]
    )
    options: dict[str, Any] = {"kernel": "cudnn+flash", "compiled": True}
    found = trace_step(config, 8, **options)
    assert found.short.micro_batches == 4
    whole = dry_run(config, 8, rank=0, **options)
    assert found.whole.peak.size == pytest.approx(whole.peak_bytes, rel=1e-3)


@pytest.mark.parametrize(
    "schedule", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.slow)]
)
def test_ranks_of_a_pipeline_share_recorded_steps(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(
        f"model.num_layers=28 training.global_batch_size=8 {KEEP} parallelism.pp=5 parallelism.pp_schedule={schedule}"
    )
    alone = [trace_step(config, 5, rank).whole for rank in range(5)]
    recorded = list[ShortStep]()

    def noted(step: ShortStep, **_: object) -> Trace:
        recorded.append(step)
        return record(step)

    monkeypatch.setattr("trainer.trace.record.record", noted)
    for found, expected in zip(trace_pp_ranks(config, 5), alone, strict=True):
        assert found.whole.is_closed
        assert found.whole.peak.size == expected.peak.size
        assert found.whole.host_bytes == expected.host_bytes
        for counts in ("products", "attention", "calls", "sent_bytes"):
            assert getattr(found.whole.work, counts) == getattr(expected.work, counts)
    assert len(recorded) <= 3


def test_a_shared_step_respects_the_budget_of_the_host() -> None:
    config = configured(f"{KEEP} memory.offload=inputs_and_attention memory.host_budget_gib=0.002")
    (shared,) = trace_pp_ranks(config, 1)
    assert shared.whole.host_bytes == trace_step(config, 1).whole.host_bytes


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["keep_attention", "none"])
def test_a_compiled_step_as_on_a_gpu_follows_from_a_short_one(recompute: str) -> None:
    config = configured(f"{DEEP} training.dtype=bfloat16 memory.recompute={recompute}")
    require_equal(config, 1, kernel="cudnn+flash", compiled=True)


@pytest.mark.parametrize(
    "parts",
    ["parallelism.tp=2 parallelism.dp_shard=1", "model.family=qwen3_moe parallelism.ep=2"],
    ids=["sharded weights", "experts"],
)
def test_compiled_blocks_run_the_products_of_eager_ones(parts: str) -> None:
    config = configured(f"{parts} memory.recompute=none training.dtype=bfloat16")
    eager, compiled = (
        trace_step(config, 2, kernel="cudnn+flash", compiled=compiled).whole.work
        for compiled in (False, True)
    )
    assert eager.matmul_flops.total() == compiled.matmul_flops.total() > 0
    assert eager.sent_bytes == compiled.sent_bytes


def test_a_trace_that_is_too_short_says_so() -> None:
    """Without neighbours of its own, the middle block frees what only the last one's neighbours
    allocate.
    """
    config = configured(f"{DEEP} {KEEP} parallelism.dp_shard=2")
    step = ShortStep(config, 2)
    trace = record(step)
    like = replace(step.correspondence, blocks={0: (0, *[0] * 7, 4)})
    assert compose(trace, [*step.order()], step.correspondence).is_closed
    assert not compose(trace, [*step.order()], like).is_closed


# ---- a mixer that the planner has never heard of


@contextmanager
def model_with(*kinds: LayerKind) -> Iterator[None]:
    build = model_section._build_model_config.__wrapped__

    def patterned(section: model_section.ModelSection) -> ModelConfig:
        return replace(build(section), layers=kinds)

    with other_kinds(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(model_section, "_build_model_config", patterned)
        yield


def test_a_strange_mixer_needs_no_line_here() -> None:
    strange = LayerKind(mixer="shift", feed_forward="squared"), LayerKind(feed_forward="squared")
    with model_with(*strange):
        require_equal(configured(f"{DEEP} {KEEP}"), 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_on_the_host_are_copied_for_each_gather_and_gradients_back(ranks: int) -> None:
    options = f"{KEEP} memory.optimizer_placement=host training.dtype=bfloat16"
    mesh = f"parallelism.dp_shard={ranks} training.global_batch_size={2 * ranks}"
    config = configured(f"{options} {mesh}")
    trace = trace_step(config, ranks, kernel="cudnn+flash").trace
    moments = [each for piece in trace.pieces for each in piece.timeline]
    messages = [each for each in moments if isinstance(each, Departure)]
    sent = Counter[tuple[str, str]]()
    for each in messages:
        sent[each.key[:2]] += int(each.size)
    size = 4 * config.model.build().num_parameters // ranks
    # Two micro-batches, each of which reduces once.
    assert sent["host", "gradients"] == pytest.approx(2 * size, rel=0.01)
    if ranks == 1:
        # Embedding and head are there for both directions.
        assert 1.2 * 2 * size < sent["host", "copy"] < 2 * 2 * size
        assert sent["host", "weights"] == 0
        # It waits for each of them at once.
        awaited = {each.number for each in moments if isinstance(each, Arrival)}
        copies = {each.number for each in messages if each.key[:2] == ("host", "copy")}
        assert copies <= awaited
    else:
        # Float32 there, bfloat16 between two ranks, but for what is too small to count.
        assert sent["host", "weights"] == pytest.approx(2 * sent["fsdp", "all_gather"], rel=0.01)


def test_an_optimizer_on_the_host_moves_as_much_as_on_the_device() -> None:
    """It waits for the next step's forward pass, which is no part of a trace."""

    def moved(placement: str) -> int:
        config = configured(f"{KEEP} memory.optimizer_placement={placement}")
        return (
            trace_step(config, 1, kernel="cudnn+flash").trace.pieces[-1].work.moved_bytes.total()
        )

    assert moved("host") == pytest.approx(moved("device"), rel=0.1)
