"""The forward and backward passes of a rank, and what it holds for others meanwhile.

Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from parallelisms.mesh.pipeline_plan import PipelinePlan
from parallelisms.pipeline_schedules import StreamKey, ticks


@dataclass(frozen=True)
class Pass:
    """Forward or backward pass of a stage, as far as it decides what else the rank holds."""

    kind: str
    stage: int
    waiting: tuple[tuple[int, int], ...]
    """Micro-batches whose backward pass is due, without this one: (stage, how many)."""
    is_first: bool
    """Whether the stage has no gradients yet."""
    is_last: bool
    """Whether it is the stage's last of the step."""
    gathers: bool
    """Whether it is the first forward pass of the rank's last stage, which gathers its weights
    beside all others.
    """
    whole: tuple[int, ...]
    """Other stages with gradients that are not reduced yet."""
    reduced: tuple[int, ...]
    """Other stages that have finished the step."""
    num_messages: int
    """Residual streams, and gradients of such, that are received and not used, or being sent."""


Amounts = Counter[tuple[object, ...]]
"""Counts of what a rank holds for other passes, by kind of stage."""
AlikePasses = dict[tuple[object, ...], list[tuple[Pass, Amounts]]]


def fullest_passes(plan: PipelinePlan, pp_rank: int) -> Iterator[Pass]:
    """Passes of a step during which a rank can hold most: of those that are alike, none that holds
    less of everything.
    """
    return (found for alike in _fullest(_normalized(plan), pp_rank).values() for found, _ in alike)


def fullest_ranks(plan: PipelinePlan) -> tuple[int, ...]:
    """Ranks that can hold most: none of whose passes all hold less of everything than another
    rank's.
    """
    return _fullest_ranks(_normalized(plan))


@lru_cache(maxsize=4096)
def _fullest_ranks(plan: PipelinePlan) -> tuple[int, ...]:
    kept: list[int] = []
    for rank in range(plan.pp):
        if not any(_holds_less(plan, rank, other) for other in kept):
            kept = [other for other in kept if not _holds_less(plan, other, rank)] + [rank]
    return tuple(kept)


def _holds_less(plan: PipelinePlan, rank: int, other: int) -> bool:
    """Whether every pass of `rank` holds at most as much as some pass of `other` that is alike."""
    if sorted(_stage_kinds(plan, rank).values()) != sorted(_stage_kinds(plan, other).values()):
        return False
    others = _fullest(plan, other)
    return all(
        any(amounts <= more for _, more in others.get(alike, ()))
        for alike, passes in _fullest(plan, rank).items()
        for _, amounts in passes
    )


def _stage_kinds(plan: PipelinePlan, pp_rank: int) -> dict[int, tuple[bool, bool, int]]:
    """Kind of each stage of a rank: (first, last, blocks). Stages of one kind hold equally much."""
    last = plan.num_stages - 1
    return {
        stage: (stage == 0, stage == last, plan.blocks_per_stage[stage])
        for stage in plan.stages_of(pp_rank)
    }


@lru_cache(maxsize=4096)
def _fullest(plan: PipelinePlan, pp_rank: int) -> AlikePasses:
    kinds = _stage_kinds(plan, pp_rank)
    fullest = AlikePasses()
    for found in _passes(plan, pp_rank):
        amounts = Amounts({("messages",): found.num_messages})
        for stage, count in found.waiting:
            amounts["waiting", kinds[stage]] += count
        amounts.update(("whole", kinds[stage]) for stage in found.whole)
        reduced = tuple(sorted(kinds[stage] for stage in found.reduced))
        alike = (
            found.kind,
            kinds[found.stage],
            found.is_first,
            found.is_last,
            found.gathers,
            reduced,
        )
        others = fullest.setdefault(alike, [])
        # A Pareto front: a pass is dropped only if another one that is alike holds at least as
        # much of everything. `<=` compares counters item by item.
        if not any(amounts <= other for _, other in others):
            fullest[alike] = [(each, other) for each, other in others if not other <= amounts] + [
                (found, amounts)
            ]
    return fullest


def _normalized(plan: PipelinePlan) -> PipelinePlan:
    """The plan with as few micro-batches as reach the same maximum in flight. Long steps repeat a
    steady state, so `4 * pp` micro-batches show every combination.
    """
    enough = 4 * plan.pp
    # Interleaved schedules work in rounds of `pp` micro-batches; any other remainder must be kept.
    is_long = plan.num_micro_batches > enough and plan.num_micro_batches % plan.pp == 0
    return PipelinePlan(
        pp=plan.pp,
        schedule=plan.schedule,
        num_layers=plan.num_layers,
        pp_stages_per_rank=plan.pp_stages_per_rank,
        pp_layers=plan.blocks_per_stage,
        num_micro_batches=enough if is_long else plan.num_micro_batches,
    )


def _passes(plan: PipelinePlan, pp_rank: int) -> Iterator[Pass]:
    """Passes of a step, in order."""
    # Without a pipeline every micro-batch but the first is like the second, so one pass of each
    # direction stands for all.
    if plan.pp == 1:
        common: dict[str, Any] = {
            "stage": 0,
            "waiting": (),
            "whole": (),
            "reduced": (),
            "num_messages": 0,
        }
        is_first = plan.num_micro_batches == 1
        yield from (
            Pass(kind=kind, is_first=is_first, is_last=True, gathers=False, **common)
            for kind in "FB"
        )
        return
    stages = plan.stages_of(pp_rank)
    saved = Counter[int]()
    finished = Counter[int]()
    held = set[StreamKey]()
    sending = set[int]()
    for tick in ticks(plan):
        action = tick.actions[pp_rank]
        if action is not None:
            kind, stage, number = action
            # The message that an action used is freed, and its saved activations count with the
            # pass itself.
            held.discard(action)
            if kind == "B":
                saved[stage] -= 1
            others = [other for other in stages if other != stage]
            yield Pass(
                kind=kind,
                stage=stage,
                waiting=tuple(sorted((+saved).items())),
                is_first=finished[stage] == 0,
                is_last=finished[stage] == plan.num_micro_batches - 1,
                gathers=kind == "F" and number == 0 and stage == max(stages),
                whole=tuple(
                    other for other in others if 0 < finished[other] < plan.num_micro_batches
                ),
                reduced=tuple(
                    other for other in others if finished[other] == plan.num_micro_batches
                ),
                num_messages=len(held) + len(sending),
            )
            if kind == "F":
                saved[stage] += 1
            else:
                finished[stage] += 1
        for message in tick.messages:
            # A sent tensor is kept until the next message to the same rank: see `StreamExchange`.
            if message.source == pp_rank:
                sending.add(message.target)
            elif message.target == pp_rank:
                held.add(message.key)
