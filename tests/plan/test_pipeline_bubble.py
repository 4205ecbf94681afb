"""What ranks of a pipeline wait, by formula: held to torch's schedules, run on a clock."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.mesh_arithmetic import Action, actions, idle
from parallelisms.pipeline_plan import PipelinePlan, PipelineSchedule
from trainer.plan.pipeline_bubble import ChunkTime, bubble_seconds

SCHEDULES: list[tuple[PipelineSchedule, int]] = [
    ("GPipe", 1),
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 4),
    ("InterleavedZeroBubble", 2),
    ("InterleavedZeroBubble", 3),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
]
CHUNKS = [
    ChunkTime(forward=1, input_grad=inputs, weight_grad=weights)
    for inputs, weights in ((1, 1), (1.6, 0.6), (2.4, 0.05), (2.5, 1))
]


def made(schedule: PipelineSchedule, each: int, pp: int, micro_batches: int) -> PipelinePlan:
    stages = pp * each
    return PipelinePlan(
        pp=pp,
        schedule=schedule,
        num_layers=stages,
        pp_layers=(1,) * stages,
        pp_stages_per_rank=each,
        num_micro_batches=micro_batches,
    )


@cache
def scheduled(plan: PipelinePlan) -> list[list[Action]]:
    return actions(plan)


def on_a_clock(plan: PipelinePlan, chunk: ChunkTime, hop: float = 0) -> float:
    """Seconds that ranks wait in torch's schedule."""
    takes = {
        "F": chunk.forward,
        "I": chunk.input_grad,
        "W": chunk.weight_grad,
        "B": chunk.input_grad + chunk.weight_grad,
    }
    share = idle(plan, scheduled(plan), takes, hop=hop) / 100
    return plan.num_micro_batches * plan.stages_per_rank * chunk.total * share / (1 - share)


@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 16)])
def test_ranks_wait_as_long_as_in_torchs_schedule(
    schedule: PipelineSchedule, each: int, pp: int, micro_batches: int
) -> None:
    plan = made(schedule, each, pp, micro_batches)
    for chunk in CHUNKS:
        assert bubble_seconds(plan, chunk) == pytest.approx(on_a_clock(plan, chunk), rel=0.08)


@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 8), (4, 16)])
def test_what_is_on_its_way_is_waited_for_as_in_torchs_schedule(
    schedule: PipelineSchedule, each: int, pp: int, micro_batches: int
) -> None:
    plan, chunk, hop = made(schedule, each, pp, micro_batches), CHUNKS[1], 0.1
    more = on_a_clock(plan, chunk, hop) - on_a_clock(plan, chunk)
    assert bubble_seconds(plan, chunk, p2p_seconds=hop) - bubble_seconds(plan, chunk) == pytest.approx(
        more, rel=0.25 if schedule in ("1F1B", "GPipe", "Interleaved1F1B") else 0.5
    )


def test_only_under_1f1b_every_micro_batch_waits_for_it() -> None:
    few, many = (made("1F1B", 1, 4, count) for count in (8, 80))
    assert bubble_seconds(many, CHUNKS[0], p2p_seconds=1) > 5 * bubble_seconds(
        few, CHUNKS[0], p2p_seconds=1
    ) - 5 * bubble_seconds(few, CHUNKS[0])
    few, many = (made("GPipe", 1, 4, count) for count in (8, 80))
    assert bubble_seconds(many, CHUNKS[0], p2p_seconds=1) == bubble_seconds(few, CHUNKS[0], p2p_seconds=1)


def test_a_rank_alone_waits_for_none() -> None:
    assert bubble_seconds(made("1F1B", 1, 1, 4), CHUNKS[0], p2p_seconds=1) == 0


def test_with_fewer_micro_batches_than_ranks_every_lap_begins_with_a_wait() -> None:
    plan = made("Interleaved1F1B", 2, 4, 2)
    share = bubble_seconds(plan, CHUNKS[0]) / (bubble_seconds(plan, CHUNKS[0]) + 4 * CHUNKS[0].total)
    assert share == pytest.approx(plan.bubble_fraction)
