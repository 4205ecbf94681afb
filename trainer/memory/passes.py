"""The forward and backward passes of a rank, and what it holds for others meanwhile. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from parallelisms.pipeline_plan import PipelinePlan
from parallelisms.pipeline_schedules import StreamKey, ticks
from trainer.memory.rank import RankMemory


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of a stage, as far as it decides what else the rank holds."""

    kind: str
    stage: int
    waiting: tuple[tuple[int, int], ...]
    """Micro-batches whose backward pass is due, without this one: (stage, how many)."""
    left: tuple[tuple[int, int], ...]
    """Micro-batches whose weight gradients are left for later: (stage, how many)."""
    is_first: bool
    """Whether the stage has no gradients yet."""
    is_last: bool
    """Whether it is the stage's last of the step."""
    gathers: bool
    """Whether it is the stage's first forward pass, which gathers the weights."""
    whole: tuple[int, ...]
    """Other stages with gradients that are not reduced yet."""
    reduced: tuple[int, ...]
    """Other stages that have finished the step."""
    num_messages: int
    """Residual streams, and gradients of such, that are received and not used, or being sent."""


@cache
def steady(plan: PipelinePlan) -> PipelinePlan:
    """The plan with as few micro-batches as hold as much at once."""
    enough = 4 * plan.pp
    is_long = plan.num_micro_batches > enough and plan.num_micro_batches % plan.pp == 0
    return replace(plan, num_micro_batches=enough) if is_long else plan


def passes(rank: RankMemory) -> Iterator[Pass]:
    """Those of a step, in order; of a step that repeats itself, not all."""
    plan = steady(rank.pipeline)
    if plan.pp == 1:  # Every micro-batch but the first is like the second.
        common: dict[str, Any] = {
            "stage": 0,
            "waiting": (),
            "left": (),
            "whole": (),
            "reduced": (),
            "num_messages": 0,
        }
        is_first = plan.num_micro_batches == 1
        yield from (Pass(kind=kind, is_first=is_first, is_last=True, gathers=False, **common) for kind in "FB")
        return
    saved, left, finished = Counter[int](), Counter[int](), Counter[int]()
    held, sending = set[StreamKey](), set[int]()
    for tick in ticks(plan):
        action = tick.actions[rank.pp_rank]
        if action is not None:
            kind, stage, number = action
            held.discard(("F" if kind == "F" else "B", stage, number))
            saved[stage] -= kind in "BI"
            left[stage] -= kind == "W"
            others = [other for other in rank.blocks_by_stage if other != stage]
            yield Pass(
                kind=kind,
                stage=stage,
                waiting=tuple(sorted((+saved).items())),
                left=tuple(sorted((+left).items())),
                is_first=finished[stage] == 0,
                is_last=finished[stage] == plan.num_micro_batches - 1,
                gathers=kind == "F" and number == 0,
                whole=tuple(other for other in others if 0 < finished[other] < plan.num_micro_batches),
                reduced=tuple(other for other in others if finished[other] == plan.num_micro_batches),
                num_messages=len(held) + len(sending),
            )
            saved[stage] += kind == "F"
            left[stage] += kind == "I"
            finished[stage] += kind in "BW"
            neighbour = stage + (1 if kind == "F" else -1)
            if kind != "W" and neighbour in rank.blocks_by_stage:
                held.add(("F" if kind == "F" else "B", neighbour, number))
        for message in tick.messages:
            if message.source == rank.pp_rank:
                sending.add(message.target)
            elif message.target == rank.pp_rank:
                held.add(message.key)
