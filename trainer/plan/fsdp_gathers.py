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
    stages_per_rank, num_chunks = plan.stages_per_rank, plan.stages_per_rank * plan.num_micro_batches
    has_split_backward = plan.schedule in SPLIT_BACKWARD_SCHEDULES
    round_size = plan.num_micro_batches // max(1, plan.num_micro_batches // plan.pp)
    in_flight = (stages_per_rank - 1) * round_size + (1 if has_split_backward else 2) * (plan.pp - 1 - rank)
    warmup = min(in_flight, num_chunks)
    local_stages = [step // round_size % stages_per_rank for step in range(num_chunks)]
    forward_stages = [stage * plan.pp + rank for stage in local_stages]
    backward_stages = [(stages_per_rank - 1 - stage) * plan.pp + rank for stage in local_stages]
    weight_grad_stages = [*backward_stages] if has_split_backward else []
    order = []
    for step in range(num_chunks + warmup):
        order += forward_stages[step : step + 1]
        if step >= warmup:
            order.append(backward_stages[step - warmup])
            if weight_grad_stages and step - warmup >= rank:
                order.append(weight_grad_stages.pop(0))
    return order + weight_grad_stages
