"""How often the schedule of a pipeline gathers weights: torch's, followed step by step, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from parallelisms.pipeline_plan import SPLIT, PipelinePlan

HELD = 3
"""Stages of a rank whose weights torch's schedules have gathered at a time."""


@lru_cache(maxsize=64)
def times_gathered(plan: PipelinePlan, rank: int) -> Mapping[int, int]:
    """How often FSDP gathers the weights of each stage of a rank in an update.

    Schedules of several stages have those of the next three that will run, and free the others'.
    """
    mine = plan.stages_of(rank)
    if len(mine) <= HELD:
        return dict.fromkeys(mine, 1)
    wanted: list[int] = []
    ahead = []
    for stage in reversed(_turns(plan, rank)):
        wanted = [stage, *(other for other in wanted if other != stage)][:HELD]
        ahead.append(wanted)
    found, held = dict.fromkeys(mine, 0), set[int]()
    for wanted in reversed(ahead):
        for stage in wanted:
            found[stage] += stage not in held
        held = {*wanted}
    return found


def _turns(plan: PipelinePlan, rank: int) -> list[int]:
    """The stages that a rank runs, one after the other, where it has them in turn: forward, backward, weights apart."""
    laps, batches = plan.stages_per_rank, plan.micro_batches
    has_weights_apart = plan.schedule in SPLIT
    each = batches // max(1, batches // plan.pp)  # Of a round.
    first = min((laps - 1) * each + (1 if has_weights_apart else 2) * (plan.pp - 1 - rank), laps * batches)
    back = [(laps - 1 - step // each % laps) * plan.pp + rank for step in range(laps * batches)]
    weights = [*back] if has_weights_apart else []
    found = []
    for step in range(laps * batches + first):
        if step < laps * batches:
            found.append(step // each % laps * plan.pp + rank)
        if step >= first:
            found.append(back[step - first])
            if weights and step - first >= rank:
                found.append(weights.pop(0))
    return found + weights
