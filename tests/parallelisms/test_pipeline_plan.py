"""The plan of a pipeline: who has which blocks, and what is refused before anything runs."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from parallelisms.pipeline_plan import (
    INTERLEAVED_SCHEDULES,
    SINGLE_STAGE_SCHEDULES,
    V_SCHEDULES,
    PipelinePlan,
    PipelineSchedule,
)
from tests.test_house import ROOT

SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
PLAN = PipelinePlan(pp=4, num_layers=32, num_micro_batches=8)


def test_a_plan_is_made_without_torch() -> None:
    code = "import sys, parallelisms.pipeline_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


# ---- who has which stages


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_has_one_rank(schedule: PipelineSchedule) -> None:
    plan = replace(PLAN, schedule=schedule)
    assert plan.stages_per_rank == (1 if schedule in SINGLE_STAGE_SCHEDULES else 2)
    owned = [plan.stages_of(rank) for rank in range(plan.pp)]
    assert {len(stages) for stages in owned} == {plan.stages_per_rank}
    assert sorted(itertools.chain(*owned)) == list(range(plan.num_stages))
    assert plan.num_stages - 1 in owned[plan.last_rank]


def test_stages_are_taken_in_turn_or_as_the_arms_of_a_v() -> None:
    in_turn, folded = (replace(PLAN, schedule=schedule) for schedule in ("Interleaved1F1B", "ZBVZeroBubble"))
    assert [in_turn.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [folded.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert (PLAN.last_rank, in_turn.last_rank, folded.last_rank) == (3, 3, 0)
    assert replace(in_turn, pp_stages_per_rank=3).stages_of(1) == (1, 5, 9)


def test_one_rank_has_one_stage_whatever_the_rest_says() -> None:
    for schedule in SCHEDULES:
        plan = replace(
            PLAN, pp=1, schedule=schedule, pp_stages_per_rank=2, pp_layers=(3, 5), tie_embeddings=True, compiled=True
        )
        assert (plan.num_stages, plan.stages_of(0), plan.last_rank, plan.bubble_fraction) == (1, (0,), 0, 0)
        assert plan.blocks_per_stage == (32,)
        assert plan.problems() == []
        part = plan.stage_module(0)
        assert (part.layers, part.has_embedding, part.has_head) == (range(32), True, True)


# ---- who has which blocks


def test_ends_count_as_the_blocks_they_cost() -> None:
    assert PLAN.blocks_per_stage == (8, 8, 8, 8)
    assert replace(PLAN, embed_cost=2.0, head_cost=2.0).blocks_per_stage == (7, 9, 9, 7)
    assert replace(PLAN, num_layers=126, embed_cost=1, head_cost=1).blocks_per_stage == (31, 32, 32, 31)
    assert replace(PLAN, num_layers=2, head_cost=5.0).blocks_per_stage == (0, 1, 1, 0)
    assert replace(PLAN, num_layers=6, head_cost=5.0).blocks_per_stage == (2, 2, 2, 0)
    # Both ends are on the first rank of a V.
    assert replace(PLAN, schedule="DualPipeV", embed_cost=2.0, head_cost=2.0).blocks_per_stage == (
        2,
        4,
        4,
        4,
        5,
        5,
        5,
        3,
    )


def test_the_later_stage_gets_what_does_not_divide() -> None:
    assert replace(PLAN, num_layers=33).blocks_per_stage == (8, 8, 8, 9)
    assert replace(PLAN, num_layers=34, schedule="Interleaved1F1B").blocks_per_stage == (4, 4, 4, 4, 4, 4, 5, 5)


def test_stated_blocks_are_taken_as_they_are() -> None:
    assert replace(PLAN, pp_layers=(0, 12, 12, 8), head_cost=3.0).blocks_per_stage == (0, 12, 12, 8)


def loads(plan: PipelinePlan, blocks: tuple[int, ...]) -> tuple[float, float]:
    """The cost of the busiest rank, and of the largest stage."""
    costs = [float(count) for count in blocks]
    costs[0] += plan.embed_cost
    costs[-1] += plan.head_cost
    return max(sum(costs[stage] for stage in plan.stages_of(rank)) for rank in range(plan.pp)), max(costs)


def all_cuts(plan: PipelinePlan) -> Iterator[tuple[int, ...]]:
    for blocks in itertools.product(range(plan.num_layers + 1), repeat=plan.num_stages):
        if sum(blocks) == plan.num_layers and all(blocks[1:-1]):
            yield blocks


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("ends", [(0.0, 0.0), (0.5, 2.5), (3.0, 0.0), (1.3, 1.3)])
def test_no_cut_has_a_busier_rank_or_then_a_larger_stage(schedule: PipelineSchedule, ends: tuple[float, float]) -> None:
    embed, head = ends
    for pp, layers in ((2, 4), (2, 7), (4 if schedule == "1F1B" else 2, 6)):
        plan = replace(PLAN, pp=pp, schedule=schedule, num_layers=layers, embed_cost=embed, head_cost=head)
        assert sum(plan.blocks_per_stage) == layers
        assert loads(plan, plan.blocks_per_stage) == pytest.approx(
            min(loads(plan, blocks) for blocks in all_cuts(plan))
        )


def test_parts_are_the_model_in_order() -> None:
    parts = [replace(PLAN, pp_layers=(7, 9, 0, 16)).stage_module(stage) for stage in range(4)]
    assert [part.layers for part in parts] == [range(7), range(7, 16), range(16, 16), range(16, 32)]
    assert [part.has_embedding for part in parts] == [True, False, False, False]
    assert [part.has_head for part in parts] == [False, False, False, True]


# ---- what is refused

COUNTS = "training.global_batch_size and training.micro_batch_size give each data rank"
TWICE = "goes back through a stage twice, for its input and its weights"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too few layers": (
        {"num_layers": 1},
        "model.num_layers = 1 is too few for 4 stages (parallelism.pp = 4, 1 each): all but the first and the "
        "last, which have embedding and head, need a block",
    ),
    "too few layers for two stages each": (
        {"num_layers": 5, "schedule": "Interleaved1F1B"},
        "model.num_layers = 5 is too few for 8 stages (parallelism.pp = 4, 2 each): all but the first and the "
        "last, which have embedding and head, need a block",
    ),
    "a list too short": (
        {"layers": (16, 16)},
        "parallelism.pp_layers names 2 stages; there are 4 stages (parallelism.pp = 4, 1 each)",
    ),
    "a list too small": (
        {"layers": (8, 8, 8, 7)},
        "parallelism.pp_layers adds up to 31; model.num_layers = 32",
    ),
    "an empty stage": (
        {"layers": (16, 0, 0, 16)},
        "parallelism.pp_layers leaves stage 1, 2 without a block; only the first and the last, which have embedding "
        "and head, may have none",
    ),
    "two stages each in 1F1B": (
        {"per_rank": 2},
        'parallelism.pp_stages_per_rank = 2 does not fit parallelism.pp_schedule "1F1B", which has 1 on each rank',
    ),
    "three stages each in a V": (
        {"per_rank": 3, "schedule": "DualPipeV"},
        'parallelism.pp_stages_per_rank = 3 does not fit parallelism.pp_schedule "DualPipeV", which has 2 on each rank',
    ),
    "too few batches for 1F1B": (
        {"micro_batches": 3},
        f'{COUNTS} 3 micro-batches per update; parallelism.pp_schedule "1F1B" needs at least as many as stages, 4',
    ),
    "too few batches for DualPipeV": (
        {"micro_batches": 7, "schedule": "DualPipeV"},
        f'{COUNTS} 7 micro-batches per update; parallelism.pp_schedule "DualPipeV" needs at least as many as stages, 8',
    ),
    "uneven rounds": (
        {"micro_batches": 11, "schedule": "Interleaved1F1B"},
        f'{COUNTS} 11 micro-batches per update; parallelism.pp_schedule "Interleaved1F1B" runs them in 2 rounds '
        "(11 // parallelism.pp = 4), all of the same number",
    ),
    "tied embeddings": (
        {"tied": True},
        "model.tie_embeddings needs parallelism.pp = 1, not 4: the embedding is in the first stage, the head in the "
        "last",
    ),
    "compiled, and split": (
        {"compiled": True, "schedule": "ZBVZeroBubble"},
        f'parallelism.pp_schedule "ZBVZeroBubble" {TWICE}; training.compile must be false: compiled blocks overwrite '
        "the first time what they need the second, if torch has them from its cache, and gradients would be wrong",
    ),
    "recomputed, and split": (
        {"recompute": "full", "schedule": "InterleavedZeroBubble"},
        f'parallelism.pp_schedule "InterleavedZeroBubble" {TWICE}; memory.recompute must be "none", not "full": what '
        "is computed again serves one way back, and each weight would have its own",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_broken_rule_is_named(changes: dict[str, Any], message: str) -> None:
    assert replace(PLAN, **changes).problems() == [message]


def test_all_broken_rules_are_named_at_once() -> None:
    plan = PipelinePlan(
        pp=2,
        schedule="DualPipeV",
        num_layers=9,
        pp_layers=(1, 0, 2),
        num_micro_batches=3,
        tie_embeddings=True,
        compiled=True,
        recompute="keep_attention",
    )
    assert len(plan.problems()) == 7


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_has_no_problem_runs(schedule: PipelineSchedule) -> None:
    assert replace(PLAN, schedule=schedule).problems() == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_as_many_micro_batches_are_refused_as_torch_refuses(schedule: PipelineSchedule) -> None:
    for pp, per_rank, count in itertools.product((2, 3, 4), (1, 2, 3), range(1, 14)):
        plan = PipelinePlan(
            pp=pp, schedule=schedule, num_layers=12, pp_stages_per_rank=per_rank, num_micro_batches=count
        )
        if (schedule in SINGLE_STAGE_SCHEDULES and per_rank != 1) or (schedule in V_SCHEDULES and per_rank != 2):
            continue
        stages = [
            SimpleNamespace(
                stage_index=stage, num_stages=plan.num_stages, group_size=pp, group_rank=0, is_last=False, submod=None
            )
            for stage in plan.stages_of(0)
        ]
        try:
            get_schedule_class(schedule)(stages[0] if schedule in SINGLE_STAGE_SCHEDULES else stages, count)
            refused = False
        except ValueError:
            refused = True
        assert bool(plan.problems()) == refused, plan


# ---- what is said


def test_the_share_of_waiting_is_the_textbooks() -> None:
    assert PLAN.bubble_fraction == pytest.approx(3 / 11)
    assert replace(PLAN, schedule="GPipe").bubble_fraction == PLAN.bubble_fraction
    assert replace(PLAN, schedule="Interleaved1F1B").bubble_fraction == pytest.approx(3 / 19)
    # Two laps of one micro-batch through four ranks.
    assert replace(PLAN, schedule="Interleaved1F1B", num_micro_batches=1).bubble_fraction == pytest.approx(6 / 8)
    assert [
        replace(PLAN, schedule=schedule).bubble_fraction for schedule in (*INTERLEAVED_SCHEDULES[1:], *V_SCHEDULES)
    ] == [None] * 3


def test_a_plan_says_what_it_is_in_one_line() -> None:
    assert PLAN.summary() == "1F1B: 4 stages on 4 ranks, blocks 8 8 8 8; 8 micro-batches, 27% idle at best"
    folded = replace(PLAN, schedule="ZBVZeroBubble", num_layers=9, pp=2)
    assert folded.summary() == "ZBVZeroBubble: 4 stages on 2 ranks, blocks 2 2 2 3; 8 micro-batches"
