"""Schedules: the orders of torch's, and messages that every rank can follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from parallelisms.mesh.pipeline_plan import SINGLE_STAGE_SCHEDULES, PipelinePlan, PipelineSchedule
from parallelisms.pipeline_schedules import rank_actions, ticks

Call = tuple[str, int, int]
"""Kind, stage, micro-batch."""


def plans() -> Iterator[PipelinePlan]:
    schedules: list[tuple[PipelineSchedule, tuple[int | None, ...]]] = [
        ("GPipe", (None,)),
        ("1F1B", (None,)),
        ("Interleaved1F1B", (2, 3)),
    ]
    for schedule, stages in schedules:
        for each, pp, micro_batches in product(
            stages, (2, 3, 4, 5, 8), (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 17, 32)
        ):
            plan = PipelinePlan(
                pp=pp,
                schedule=schedule,
                num_layers=pp * (each or 2),
                pp_stages_per_rank=each,
                num_micro_batches=micro_batches,
            )
            if not plan.problems():
                yield plan


PLANS = [*plans()]


class RecordingStage:
    """A pipeline stage that records what a schedule calls."""

    def __init__(self, plan: PipelinePlan, stage: int, record: list[Call]) -> None:
        self.stage_index = stage
        self.num_stages = plan.num_stages
        self.group_rank = plan.stage_ranks[stage]
        self.group_size = plan.pp
        self.is_first = stage == 0
        self.is_last = stage == plan.num_stages - 1
        self.submod = None
        self._record = record

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self._record.append(("F", self.stage_index, number))

    def backward_one_chunk(self, number: int, **_: Any) -> None:
        self._record.append(("B", self.stage_index, number))

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: []  # Nothing to send or receive.


def torchs_actions(plan: PipelinePlan) -> list[list[Call]]:
    """The actions of each rank in one step, in order."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    records: list[list[Call]] = [[] for _ in range(plan.pp)]
    schedule: Any = None
    for rank, record in enumerate(records):
        stages: Any = [RecordingStage(plan, stage, record) for stage in plan.stages_of(rank)]
        if plan.schedule in SINGLE_STAGE_SCHEDULES:
            schedule = get_schedule_class(plan.schedule)(
                stages[0], plan.num_micro_batches, loss_fn=lambda *_: None
            )
        elif rank == 0:
            schedule = get_schedule_class(plan.schedule)(
                stages, plan.num_micro_batches, loss_fn=lambda *_: None
            )
        # Private to torch: without tensors nothing needs initialization, and one schedule has the
        # lists of all ranks.
        schedule._initialize_stage = schedule._initialize_stages = lambda *_: None
        schedule.rank = rank
        schedule._stages = stages
        schedule._step_microbatches(
            target_mbs=[None] * plan.num_micro_batches, return_outputs=False
        )
    return records


def test_the_plans_cover_every_schedule() -> None:
    counts = Counter(plan.schedule for plan in PLANS)
    assert len(counts) == 3
    assert min(counts.values()) >= 20


@pytest.mark.parametrize("schedule", sorted({plan.schedule for plan in PLANS}))
def test_orders_are_those_of_torch(schedule: PipelineSchedule) -> None:
    for plan in (plan for plan in PLANS if plan.schedule == schedule):
        assert [[*rank_actions(plan, rank)] for rank in range(plan.pp)] == torchs_actions(plan), (
            plan
        )


def test_every_micro_batch_passes_every_stage_forward_and_backward() -> None:
    for plan in PLANS:
        found = Counter(action for rank in range(plan.pp) for action in rank_actions(plan, rank))
        assert set(found.values()) == {1}
        assert found.keys() == {
            *product("FB", range(plan.num_stages), range(plan.num_micro_batches))
        }, plan


def test_ticks_hold_the_actions_of_each_rank_in_order() -> None:
    for plan in PLANS:
        for rank in range(plan.pp):
            assert tuple(
                tick.actions[rank] for tick in ticks(plan) if tick.actions[rank]
            ) == rank_actions(plan, rank)


def test_messages_arrive_before_they_are_needed_and_none_is_left() -> None:
    for plan in PLANS:
        here: set[tuple[int, tuple[str, int, int]]] = set()
        """(rank, what it has received)."""
        for tick in ticks(plan):
            for rank, action in enumerate(tick.actions):
                if action is not None and action.stage != (
                    0 if action.kind == "F" else plan.num_stages - 1
                ):
                    here.remove((rank, action))
            for message in tick.messages:
                assert message.source != message.target == plan.stage_ranks[message.key[1]]
                here.add((message.target, message.key))
        assert not here, plan


def test_orders_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PipelinePlan(pp=2, num_layers=2, num_micro_batches=2)
    backwards = {rank: rank_actions(plan, rank)[::-1] for rank in range(2)}
    monkeypatch.setattr(
        "parallelisms.pipeline_schedules.rank_actions", lambda _, rank: backwards[rank]
    )
    with pytest.raises(ValueError, match="1F1B: ranks wait for each other"):
        ticks.__wrapped__(plan)
