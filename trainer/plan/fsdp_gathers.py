"""Counts the weight all-gathers of torch's pipeline schedules by replaying their stage order. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from parallelisms.pipeline_plan import SPLIT_BACKWARD_SCHEDULES, PipelinePlan

MAX_GATHERED_STAGES = 3
"""Stages per rank whose weights torch's schedules keep gathered."""


@lru_cache(maxsize=64)
def weight_gathers_per_stage(plan: PipelinePlan, rank: int) -> Mapping[int, int]:
    """All-gathers of each stage of a rank in one step.

    Multi-stage schedules keep the next three stages gathered and reshard the others.
    """
    local_stages = plan.stages_of(rank)
    if len(local_stages) <= MAX_GATHERED_STAGES:
        return dict.fromkeys(local_stages, 1)
    prefetched: list[int] = []
    lookahead = []
    for stage in reversed(_stage_order(plan, rank)):
        prefetched = [stage, *(other for other in prefetched if other != stage)][:MAX_GATHERED_STAGES]
        lookahead.append(prefetched)
    num_gathers, gathered = dict.fromkeys(local_stages, 0), set[int]()
    for prefetched in reversed(lookahead):
        for stage in prefetched:
            num_gathers[stage] += stage not in gathered
        gathered = {*prefetched}
    return num_gathers


def _stage_order(plan: PipelinePlan, rank: int) -> list[int]:
    """The stage of each action of a rank: forwards, backwards and, if split, weight gradients."""
    stages_per_rank, micro_batches = plan.stages_per_rank, plan.num_micro_batches
    has_split_backward = plan.schedule in SPLIT_BACKWARD_SCHEDULES
    round_size = micro_batches // max(1, micro_batches // plan.pp)
    warmup = min(
        (stages_per_rank - 1) * round_size + (1 if has_split_backward else 2) * (plan.pp - 1 - rank),
        stages_per_rank * micro_batches,
    )
    backward_stages = [
        (stages_per_rank - 1 - step // round_size % stages_per_rank) * plan.pp + rank
        for step in range(stages_per_rank * micro_batches)
    ]
    weight_grad_stages = [*backward_stages] if has_split_backward else []
    order = []
    for step in range(stages_per_rank * micro_batches + warmup):
        if step < stages_per_rank * micro_batches:
            order.append(step // round_size % stages_per_rank * plan.pp + rank)
        if step >= warmup:
            order.append(backward_stages[step - warmup])
            if weight_grad_stages and step - warmup >= rank:
                order.append(weight_grad_stages.pop(0))
    return order + weight_grad_stages
