"""Times the actions of pipeline ranks on a simulated clock, without tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate

from parallelisms.mesh.pipeline_plan import PipelinePlan
from parallelisms.pipeline_schedules import Action


def idle_fraction(
    plan: PipelinePlan,
    actions: Sequence[Sequence[Action]],
    seconds: Mapping[str, float],
    *,
    hop: float = 0,
) -> float:
    """Share of a step that ranks idle, with equal stages; a tensor reaches another rank after
    `hop` seconds.
    """
    queues = [deque(rank) for rank in actions]
    busy = sum(seconds[kind] for queue in queues for kind, *_ in queue) / len(queues)
    clocks = [0.0] * len(queues)
    # When the output of a stage (F), or the gradient of its input (B), is ready.
    ends = (("F", -1), ("B", plan.num_stages))
    ready = {
        (kind, stage, number): 0.0
        for kind, stage in ends
        for number in range(plan.num_micro_batches)
    }
    while remaining := sum(map(len, queues)):
        for rank, queue in enumerate(queues):
            while queue:
                kind, stage, number = queue[0]
                other = stage - 1 if kind == "F" else stage + 1
                if (kind, other, number) not in ready:
                    break
                delay = hop * (0 <= other < plan.num_stages)
                clocks[rank] = (
                    max(clocks[rank], ready[kind, other, number] + delay) + seconds[kind]
                )
                ready[kind, stage, number] = clocks[rank]
                queue.popleft()
        if remaining == sum(map(len, queues)):
            raise RuntimeError(
                f"{plan.schedule} deadlocks at {[queue[0] for queue in queues if queue]}"
            )
    return 1 - busy / max(clocks)


def max_saved_blocks(actions: Sequence[Sequence[Action]], blocks_per_stage: Sequence[int]) -> int:
    """The most blocks whose activations of a micro-batch one rank holds at once."""
    change = {"F": 1, "B": -1}
    return max(
        max(accumulate(change[kind] * blocks_per_stage[stage] for kind, stage, _ in rank))
        for rank in actions
    )
