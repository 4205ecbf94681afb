"""What torch's pipeline schedules cost: idle time, and all-gathers of weights. Imports no torch.

A chunk is one micro-batch in one stage: F seconds forward, I for the input gradient, W for the weight gradients. Schedules
that compute I and W together fill and drain in (pp - 1)(F + I + W). The other formulas are fitted to torch's schedules
and checked against a simulation of them in `tests/plan/test_pipeline_bubble.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from parallelisms.pipeline_plan import SPLIT_BACKWARD_SCHEDULES, PipelinePlan


@dataclass(frozen=True, kw_only=True)
class ChunkTime:
    """Seconds of one micro-batch in one stage."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def total(self) -> float:
        return self.forward + self.input_grad + self.weight_grad


def bubble_seconds(plan: PipelinePlan, chunk: ChunkTime, *, p2p_seconds: float = 0) -> float:
    """Idle seconds of a rank in one step, with identical chunks; a send takes `p2p_seconds`."""
    if plan.pp == 1:
        return 0
    other_ranks, forward, input_grad, weight_grad = plan.pp - 1, chunk.forward, chunk.input_grad, chunk.weight_grad
    if plan.schedule == "InterleavedZeroBubble":
        bubble = other_ranks * (forward + input_grad - weight_grad)
    elif plan.schedule == "ZBVZeroBubble":
        bubble = other_ranks * max(forward, input_grad, 2 * (input_grad - weight_grad))
    elif plan.schedule == "DualPipeV":
        bubble = max(
            other_ranks * (forward + input_grad - weight_grad), other_ranks * (2 * input_grad - weight_grad) - forward
        )
    else:
        stages_per_rank, micro_batches = plan.stages_per_rank, plan.num_micro_batches
        # With fewer micro-batches than ranks, every further stage of a rank waits for the first micro-batch.
        bubble = (
            max(stages_per_rank * micro_batches + other_ranks, stages_per_rank * plan.pp + micro_batches - 1)
            - stages_per_rank * micro_batches
        ) * chunk.total
    return bubble + p2p_seconds * _exposed_sends(plan)


def _exposed_sends(plan: PipelinePlan) -> float:
    """Sends on the critical path: through all stages and back. 1F1B keeps just enough micro-batches in flight to hide no
    send, so every further micro-batch exposes its own.
    """
    sends_per_round_trip = 2.0 * sum(one != other for one, other in pairwise(plan.stage_ranks))
    return sends_per_round_trip + (
        sends_per_round_trip / plan.pp * (plan.num_micro_batches - 1) if plan.schedule == "1F1B" else 0
    )


# ---- all-gathers

MAX_GATHERED_STAGES = 3
"""Stages per rank whose weights torch's schedules keep gathered."""


@lru_cache(maxsize=64)
def weight_gathers_per_stage(plan: PipelinePlan, rank: int) -> Mapping[int, int]:
    """All-gathers of each stage of a rank in one step, by replaying the order of stages.

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
