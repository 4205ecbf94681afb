"""Bubble formulas against a simulation of the schedules."""

from __future__ import annotations

import pytest

from benchmarks.doc_tables import in_flight as bubbles_in_flight
from parallelisms.pipeline_plan import PipelinePlan, PipelineSchedule
from parallelisms.pipeline_schedules import Action, rank_actions
from tests.parallelisms.schedule_clock import idle_fraction, max_saved_blocks
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


def scheduled(plan: PipelinePlan) -> list[tuple[Action, ...]]:
    return [rank_actions(plan, rank) for rank in range(plan.pp)]


def simulated_bubble(plan: PipelinePlan, chunk: ChunkTime, hop: float = 0) -> float:
    """Bubble seconds of the schedule."""
    takes = {
        "F": chunk.forward,
        "I": chunk.input_grad,
        "W": chunk.weight_grad,
        "B": chunk.input_grad + chunk.weight_grad,
    }
    share = idle_fraction(plan, scheduled(plan), takes, hop=hop)
    return plan.num_micro_batches * plan.stages_per_rank * chunk.total * share / (1 - share)


@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 16)])
def test_bubble_matches_simulated_schedules(schedule: PipelineSchedule, each: int, pp: int, micro_batches: int) -> None:
    plan = made(schedule, each, pp, micro_batches)
    for chunk in CHUNKS:
        assert bubble_seconds(plan, chunk) == pytest.approx(simulated_bubble(plan, chunk), rel=0.08)


@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 8), (4, 16)])
def test_exposed_sends_match_simulated_schedules(
    schedule: PipelineSchedule, each: int, pp: int, micro_batches: int
) -> None:
    plan, chunk, hop = made(schedule, each, pp, micro_batches), CHUNKS[1], 0.1
    more = simulated_bubble(plan, chunk, hop) - simulated_bubble(plan, chunk)
    assert bubble_seconds(plan, chunk, p2p_seconds=hop) - bubble_seconds(plan, chunk) == pytest.approx(
        more, rel=0.25 if schedule in ("1F1B", "GPipe", "Interleaved1F1B") else 0.5
    )


def test_only_1f1b_exposes_sends_of_every_micro_batch() -> None:
    few, many = (made("1F1B", 1, 4, count) for count in (8, 80))
    assert bubble_seconds(many, CHUNKS[0], p2p_seconds=1) > 5 * bubble_seconds(
        few, CHUNKS[0], p2p_seconds=1
    ) - 5 * bubble_seconds(few, CHUNKS[0])
    few, many = (made("GPipe", 1, 4, count) for count in (8, 80))
    assert bubble_seconds(many, CHUNKS[0], p2p_seconds=1) == bubble_seconds(few, CHUNKS[0], p2p_seconds=1)


def test_one_rank_has_no_bubble() -> None:
    assert bubble_seconds(made("1F1B", 1, 1, 4), CHUNKS[0], p2p_seconds=1) == 0


def test_fewer_micro_batches_than_ranks_enlarge_the_bubble() -> None:
    plan = made("Interleaved1F1B", 2, 4, 2)
    share = bubble_seconds(plan, CHUNKS[0]) / (bubble_seconds(plan, CHUNKS[0]) + 4 * CHUNKS[0].total)
    assert share == pytest.approx(plan.bubble_fraction)


@pytest.mark.parametrize(("schedule", "each"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 3)])
def test_the_bubble_fraction_is_that_of_the_schedule(schedule: PipelineSchedule, each: int) -> None:
    plan = PipelinePlan(pp=4, schedule=schedule, num_layers=12, pp_stages_per_rank=each, num_micro_batches=8)
    assert plan.bubble_fraction is not None
    assert idle_fraction(plan, scheduled(plan), {"F": 1.0, "B": 2.5}) == pytest.approx(plan.bubble_fraction)


@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
def test_the_estimator_counts_the_micro_batches_that_the_schedule_keeps_in_flight(
    schedule: PipelineSchedule, each: int
) -> None:
    plan = made(schedule, each, pp=4, micro_batches=16)
    saved = max_saved_blocks(scheduled(plan), (1,) * plan.num_stages) / each
    assert bubbles_in_flight(schedule, each, pp=4) == saved
