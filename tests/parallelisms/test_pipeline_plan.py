"""Pipeline plans: stages and blocks of every rank, and the rules of every schedule."""

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

from models.presets import FAMILIES
from parallelisms.mesh.pipeline_plan import SINGLE_STAGE_SCHEDULES, PipelinePlan, PipelineSchedule
from tests.test_house import ROOT

SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
PLAN = PipelinePlan(pp=4, num_layers=32, num_micro_batches=8)


def test_pipeline_plan_imports_no_torch() -> None:
    code = "import sys, parallelisms.mesh.pipeline_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


# ---- stages of a rank


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_has_exactly_one_rank(schedule: PipelineSchedule) -> None:
    plan = replace(PLAN, schedule=schedule)
    assert plan.stages_per_rank == (1 if schedule in SINGLE_STAGE_SCHEDULES else 2)
    stages_by_rank = [plan.stages_of(rank) for rank in range(plan.pp)]
    assert {len(stages) for stages in stages_by_rank} == {plan.stages_per_rank}
    assert sorted(itertools.chain(*stages_by_rank)) == list(range(plan.num_stages))
    assert plan.num_stages - 1 in stages_by_rank[plan.stage_ranks[-1]]


def test_stages_are_interleaved() -> None:
    interleaved = replace(PLAN, schedule="Interleaved1F1B")
    assert interleaved.stage_ranks == (0, 1, 2, 3, 0, 1, 2, 3)
    assert replace(interleaved, pp_stages_per_rank=3).stages_of(1) == (1, 5, 9)


def test_without_pipeline_other_fields_are_ignored() -> None:
    for schedule in SCHEDULES:
        plan = replace(
            PLAN,
            pp=1,
            schedule=schedule,
            pp_stages_per_rank=2,
            pp_layers=(3, 5),
            tie_embeddings=True,
        )
        assert (
            plan.num_stages,
            plan.stages_of(0),
            plan.stage_ranks[-1],
            plan.bubble_fraction,
        ) == (1, (0,), 0, 0)
        assert plan.blocks_per_stage == (32,)
        assert plan.problems() == []
        part = plan.stage_module(0)
        assert (part.layers, part.has_embedding, part.has_head) == (range(32), True, True)


# ---- blocks of a stage


def test_embedding_and_head_count_as_blocks() -> None:
    assert PLAN.blocks_per_stage == (8, 8, 8, 8)
    assert replace(PLAN, embed_cost=2.0, head_cost=2.0).blocks_per_stage == (7, 9, 9, 7)
    assert replace(PLAN, num_layers=126, embed_cost=1, head_cost=1).blocks_per_stage == (
        31,
        32,
        32,
        31,
    )
    assert replace(PLAN, num_layers=2, head_cost=5.0).blocks_per_stage == (0, 1, 1, 0)
    assert replace(PLAN, num_layers=6, head_cost=5.0).blocks_per_stage == (2, 2, 2, 0)


def test_later_stages_get_the_remainder() -> None:
    assert replace(PLAN, num_layers=33).blocks_per_stage == (8, 8, 8, 9)
    assert replace(PLAN, num_layers=34, schedule="Interleaved1F1B").blocks_per_stage == (
        4,
        4,
        4,
        4,
        4,
        4,
        5,
        5,
    )


def test_pp_layers_overrides_the_balance() -> None:
    assert replace(PLAN, pp_layers=(0, 12, 12, 8), head_cost=3.0).blocks_per_stage == (
        0,
        12,
        12,
        8,
    )


def max_costs(plan: PipelinePlan, blocks: tuple[int, ...]) -> tuple[float, float]:
    """The cost of the busiest rank and of the largest stage."""
    costs = [float(count) for count in blocks]
    costs[0] += plan.embed_cost
    costs[-1] += plan.head_cost
    return max(
        sum(costs[stage] for stage in plan.stages_of(rank)) for rank in range(plan.pp)
    ), max(costs)


def all_partitions(plan: PipelinePlan) -> Iterator[tuple[int, ...]]:
    for blocks in itertools.product(range(plan.num_layers + 1), repeat=plan.num_stages):
        if sum(blocks) == plan.num_layers and all(blocks[1:-1]):
            yield blocks


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize("ends", [(0.0, 0.0), (0.5, 2.5), (3.0, 0.0), (1.3, 1.3)])
def test_partition_minimizes_the_busiest_rank_then_the_largest_stage(
    schedule: PipelineSchedule, ends: tuple[float, float]
) -> None:
    embed, head = ends
    for pp, layers in ((2, 4), (2, 7), (4 if schedule == "1F1B" else 2, 6)):
        plan = replace(
            PLAN, pp=pp, schedule=schedule, num_layers=layers, embed_cost=embed, head_cost=head
        )
        assert sum(plan.blocks_per_stage) == layers
        assert max_costs(plan, plan.blocks_per_stage) == pytest.approx(
            min(max_costs(plan, blocks) for blocks in all_partitions(plan))
        )


def test_stages_are_the_model_in_order() -> None:
    parts = [replace(PLAN, pp_layers=(7, 9, 0, 16)).stage_module(stage) for stage in range(4)]
    assert [part.layers for part in parts] == [
        range(7),
        range(7, 16),
        range(16, 16),
        range(16, 32),
    ]
    assert [part.has_embedding for part in parts] == [True, False, False, False]
    assert [part.has_head for part in parts] == [False, False, False, True]


# ---- problems

COUNTS = "training.global_batch_size and training.micro_batch_size give each dp rank"
PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "too few layers": (
        {"num_layers": 1},
        "model.num_layers = 1 must be at least 2 for 4 stages (parallelism.pp = 4 x 1 per rank): every stage but the "
        "first and the last needs a block",
    ),
    "too few layers for two stages per rank": (
        {"num_layers": 5, "schedule": "Interleaved1F1B"},
        "model.num_layers = 5 must be at least 6 for 8 stages (parallelism.pp = 4 x 2 per rank): every stage but the "
        "first and the last needs a block",
    ),
    "pp_layers too short": (
        {"pp_layers": (16, 16)},
        "parallelism.pp_layers has 2 entries, but there are 4 stages (parallelism.pp = 4 x 1 per rank)",
    ),
    "pp_layers sums too low": (
        {"pp_layers": (8, 8, 8, 7)},
        "parallelism.pp_layers sums to 31, which must be model.num_layers = 32",
    ),
    "an empty stage": (
        {"pp_layers": (16, 0, 0, 16)},
        "parallelism.pp_layers has no block for stage 1, 2; only the first and the last stage may be empty",
    ),
    "two stages per rank in 1F1B": (
        {"pp_stages_per_rank": 2},
        'parallelism.pp_stages_per_rank = 2 must be 1 for parallelism.pp_schedule = "1F1B"',
    ),
    "too few micro-batches for 1F1B": (
        {"num_micro_batches": 3},
        f'{COUNTS} 3 micro-batches per step; parallelism.pp_schedule = "1F1B" needs at least 4, the number of stages (parallelism.pp = 4)',
    ),
    "uneven rounds": (
        {"num_micro_batches": 11, "schedule": "Interleaved1F1B"},
        f'{COUNTS} 11 micro-batches per step; parallelism.pp_schedule = "Interleaved1F1B" needs a multiple of 2, its '
        "rounds (micro-batches // parallelism.pp = 4)",
    ),
    "tied embeddings": (
        {"tie_embeddings": True},
        "model.tie_embeddings needs parallelism.pp = 1, not 4: the first stage has the embedding, the last the head",
    ),
}


@pytest.mark.parametrize(("changes", "message"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_problem_names_value_and_rule(changes: dict[str, Any], message: str) -> None:
    assert replace(PLAN, **changes).problems() == [message]


def test_all_problems_are_reported_at_once() -> None:
    plan = PipelinePlan(
        pp=2,
        num_layers=9,
        pp_stages_per_rank=2,
        pp_layers=(1, 0, 2),
        num_micro_batches=1,
        tie_embeddings=True,
    )
    assert len(plan.problems()) == 6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_valid_plan_has_no_problems(schedule: PipelineSchedule) -> None:
    assert replace(PLAN, schedule=schedule).problems() == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batch_rules_match_torch(schedule: PipelineSchedule) -> None:
    for pp, per_rank, count in itertools.product((2, 3, 4), (1, 2, 3), range(1, 14)):
        plan = PipelinePlan(
            pp=pp,
            schedule=schedule,
            num_layers=12,
            pp_stages_per_rank=per_rank,
            num_micro_batches=count,
        )
        if schedule in SINGLE_STAGE_SCHEDULES and per_rank != 1:
            continue
        stages = [
            SimpleNamespace(
                stage_index=stage,
                num_stages=plan.num_stages,
                group_size=pp,
                group_rank=0,
                is_last=False,
                submod=None,
            )
            for stage in plan.stages_of(0)
        ]
        try:
            get_schedule_class(schedule)(
                stages[0] if schedule in SINGLE_STAGE_SCHEDULES else stages, count
            )
            refused = False
        except ValueError:
            refused = True
        assert bool(plan.problems()) == refused, plan


# ---- summary


def test_bubble_fraction_follows_narayanan() -> None:
    assert PLAN.bubble_fraction == pytest.approx(3 / 11)
    assert replace(PLAN, schedule="GPipe").bubble_fraction == PLAN.bubble_fraction
    assert replace(PLAN, schedule="Interleaved1F1B").bubble_fraction == pytest.approx(3 / 19)
    # Two chunks of one micro-batch on four ranks.
    assert replace(
        PLAN, schedule="Interleaved1F1B", num_micro_batches=1
    ).bubble_fraction == pytest.approx(6 / 8)


def test_summary_is_one_line() -> None:
    assert (
        PLAN.summary()
        == "1F1B: 4 stages on 4 ranks, blocks 8 8 8 8; 8 micro-batches, pipeline bubble at least 27%"
    )


def test_the_page_of_limits_names_the_families_that_refuse_pipelines() -> None:
    (row,) = [
        line
        for line in (ROOT / "docs/status.md").read_text().splitlines()
        if line.startswith("| Pipelines |")
    ]
    names = {
        "llama3.2": "Llama 3.2",
        "qwen2.5": "Qwen 2.5 (to 3B)",
        "qwen3": "Qwen 3 (to 4B)",
        "smollm3": "SmolLM3",
        "gemma3": "Gemma 3",
    }
    tied = {
        family: [size for size, model in sizes.items() if model.tie_embeddings]
        for family, sizes in FAMILIES.items()
    }
    assert {family for family, sizes in tied.items() if sizes} == names.keys()
    assert all(name in row for name in names.values())
    assert (tied["qwen2.5"][-1], tied["qwen3"][-1]) == ("3b", "4b")
    assert all(
        len(tied[family]) == len(FAMILIES[family]) for family in ("llama3.2", "smollm3", "gemma3")
    )
