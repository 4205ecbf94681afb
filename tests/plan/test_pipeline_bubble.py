"""Bubble formulas against a simulation of the schedules."""

from __future__ import annotations

import pytest

from benchmarks.doc_tables import in_flight as bubbles_in_flight
from parallelisms.mesh.pipeline_plan import PipelinePlan, PipelineSchedule
from parallelisms.pipeline_schedules import Action, rank_actions
from tests.parallelisms.schedule_clock import idle_fraction, max_saved_blocks
from trainer.plan.pipeline_bubble import bubble_seconds

SCHEDULES: list[tuple[PipelineSchedule, int]] = [
    ("GPipe", 1),
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 4),
]
SECONDS = {"F": 1.0, "B": 2.5}
CHUNK_SECONDS = sum(SECONDS.values())


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


def simulated_bubble(plan: PipelinePlan, hop: float = 0) -> float:
    """Bubble seconds of the schedule."""
    share = idle_fraction(plan, scheduled(plan), SECONDS, hop=hop)
    return plan.num_chunks * CHUNK_SECONDS * share / (1 - share)


@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 16)])
def test_bubble_matches_simulated_schedules(
    schedule: PipelineSchedule, each: int, pp: int, micro_batches: int
) -> None:
    plan = made(schedule, each, pp, micro_batches)
    assert bubble_seconds(plan, CHUNK_SECONDS) == pytest.approx(simulated_bubble(plan))


@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 8), (4, 16)])
def test_exposed_sends_match_simulated_schedules(
    schedule: PipelineSchedule, each: int, pp: int, micro_batches: int
) -> None:
    plan = made(schedule, each, pp, micro_batches)
    hop = 0.1
    more = simulated_bubble(plan, hop) - simulated_bubble(plan)
    assert bubble_seconds(plan, 0, p2p_seconds=hop) == pytest.approx(more, rel=0.25)


def test_only_1f1b_exposes_sends_of_every_micro_batch() -> None:
    few, many = (bubble_seconds(made("1F1B", 1, 4, count), 0, p2p_seconds=1) for count in (8, 80))
    assert many > 5 * few
    few, many = (bubble_seconds(made("GPipe", 1, 4, count), 0, p2p_seconds=1) for count in (8, 80))
    assert many == few


def test_one_rank_has_no_bubble() -> None:
    assert bubble_seconds(made("1F1B", 1, 1, 4), CHUNK_SECONDS, p2p_seconds=1) == 0


@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
def test_the_bubble_fraction_is_that_of_the_schedule(
    schedule: PipelineSchedule, each: int
) -> None:
    # Fewer than ranks enlarge the bubble of interleaved stages.
    for micro_batches in (1, 2, 8):
        plan = made(schedule, each, 4, micro_batches)
        assert idle_fraction(plan, scheduled(plan), SECONDS) == pytest.approx(plan.bubble_fraction)


@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
def test_the_estimator_counts_the_micro_batches_that_the_schedule_keeps_in_flight(
    schedule: PipelineSchedule, each: int
) -> None:
    plan = made(schedule, each, pp=4, micro_batches=16)
    saved = max_saved_blocks(scheduled(plan), (1,) * plan.num_stages) / each
    assert bubbles_in_flight(schedule, each, pp=4) == saved
