"""What ranks of a pipeline wait for each other in an update. Without torch.

A chunk is a micro-batch's way through a stage: F seconds forward, I for the gradient of its input, W for those of its
weights. A schedule that finds the last two together fills and drains in (pp - 1)(F + I + W). The formulas of the others
were read off torch's own schedules, run on a clock, and are compared with these in `tests/plan/test_pipeline_bubble.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from parallelisms.pipeline_plan import PipelinePlan


@dataclass(frozen=True, kw_only=True)
class ChunkTime:
    """Seconds of the passes of a micro-batch through a stage."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def total(self) -> float:
        return self.forward + self.input_grad + self.weight_grad


def bubble_seconds(plan: PipelinePlan, chunk: ChunkTime, *, p2p_seconds: float = 0) -> float:
    """Seconds of an update in which a rank has nothing to do, where all chunks are alike; a send takes `hop` seconds."""
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
        # With fewer micro-batches than ranks, the first is awaited at the start of every lap.
        bubble = (
            max(stages_per_rank * micro_batches + other_ranks, stages_per_rank * plan.pp + micro_batches - 1)
            - stages_per_rank * micro_batches
        ) * chunk.total
    return bubble + p2p_seconds * _exposed_sends(plan)


def _exposed_sends(plan: PipelinePlan) -> float:
    """Sends that are waited for: through all stages and back. Under 1F1B a rank holds just as many micro-batches as it
    takes to wait for none, so what is on its way is waited for in every further one too.
    """
    sends_per_round_trip = 2.0 * sum(one != other for one, other in pairwise(plan.stage_ranks))
    return sends_per_round_trip + (
        sends_per_round_trip / plan.pp * (plan.num_micro_batches - 1) if plan.schedule == "1F1B" else 0
    )
