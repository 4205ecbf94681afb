"""The idle time of pipeline schedules. Imports no torch.

A chunk is one micro-batch in one stage: F seconds forward, I for the input gradient, W for the weight gradients. Schedules
that compute I and W together fill and drain in (pp - 1)(F + I + W). The other formulas are fitted to the schedules, and
checked against a simulation of them in `tests/plan/test_pipeline_bubble.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from parallelisms.pipeline_plan import PipelinePlan


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
