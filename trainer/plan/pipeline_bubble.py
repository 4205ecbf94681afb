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
class Chunk:
    """Seconds of the passes of a micro-batch through a stage."""

    forward: float
    inputs: float
    weights: float

    @property
    def all(self) -> float:
        return self.forward + self.inputs + self.weights


def waited(plan: PipelinePlan, chunk: Chunk, *, hop: float = 0) -> float:
    """Seconds of an update in which a rank has nothing to do, where all chunks are alike; a send takes `hop` seconds."""
    if plan.pp == 1:
        return 0
    others, forward, inputs, weights = plan.pp - 1, chunk.forward, chunk.inputs, chunk.weights
    if plan.schedule == "InterleavedZeroBubble":
        found = others * (forward + inputs - weights)
    elif plan.schedule == "ZBVZeroBubble":
        found = others * max(forward, inputs, 2 * (inputs - weights))
    elif plan.schedule == "DualPipeV":
        found = max(others * (forward + inputs - weights), others * (2 * inputs - weights) - forward)
    else:
        laps, batches = plan.stages_per_rank, plan.micro_batches
        # With fewer micro-batches than ranks, the first is awaited at the start of every lap.
        found = (max(laps * batches + others, laps * plan.pp + batches - 1) - laps * batches) * chunk.all
    return found + hop * _hops(plan)


def _hops(plan: PipelinePlan) -> float:
    """Sends that are waited for: through all stages and back. Under 1F1B a rank holds just as many micro-batches as it
    takes to wait for none, so what is on its way is waited for in every further one too.
    """
    through = 2.0 * sum(one != other for one, other in pairwise(plan.ranks))
    return through + (through / plan.pp * (plan.micro_batches - 1) if plan.schedule == "1F1B" else 0)
