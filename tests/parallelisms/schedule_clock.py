"""Run torch's pipeline schedules without tensors: record each rank's actions, then time them on a simulated clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from parallelisms.pipeline_plan import SINGLE_STAGE_SCHEDULES, PipelinePlan

Action = tuple[str, int, int]
"""Kind, stage, micro-batch. F is forward, B backward, or split into I (input gradient) and W (weight gradient); "gather" is
FSDP's all-gather of a stage."""


class RecordingStage:
    """A pipeline stage that records what a schedule calls."""

    def __init__(self, plan: PipelinePlan, stage: int, record: list[Action]) -> None:
        self.stage_index, self.num_stages = stage, plan.num_stages
        self.group_rank, self.group_size = plan.stage_ranks[stage], plan.pp
        self.is_first, self.is_last = stage == 0, stage == plan.num_stages - 1
        self.submod, self._record = None, record

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self._record.append(("F", self.stage_index, number))

    def backward_one_chunk(self, number: int, *, full_backward: bool = True, **_: Any) -> None:
        self._record.append(("B" if full_backward else "I", self.stage_index, number))

    def backward_weight_one_chunk(self, number: int, **_: Any) -> None:
        self._record.append(("W", self.stage_index, number))

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: []  # Nothing to send or receive.


def record_actions(plan: PipelinePlan) -> list[list[Action]]:
    """The actions of each rank in one step, in order."""
    from torch.distributed.pipelining.schedules import _ComputationType, get_schedule_class

    records: list[list[Action]] = [[] for _ in range(plan.pp)]
    schedule: Any = None
    for rank, record in enumerate(records):
        stages: Any = [RecordingStage(plan, stage, record) for stage in plan.stages_of(rank)]
        if plan.schedule in SINGLE_STAGE_SCHEDULES:
            schedule = get_schedule_class(plan.schedule)(stages[0], plan.num_micro_batches, loss_fn=lambda *_: None)
            record.append(("gather", rank, 0))
        elif rank == 0:
            schedule = get_schedule_class(plan.schedule)(stages, plan.num_micro_batches, loss_fn=lambda *_: None)
            schedule.register_custom_function(
                _ComputationType.UNSHARD,
                lambda action, run: records[run.schedule_ref.rank].append(("gather", action.stage_index, 0)),
            )
        # Private to torch: without tensors nothing needs initialization, and one schedule has the lists of all ranks.
        schedule._initialize_stage = schedule._initialize_stages = lambda *_: None
        schedule.rank, schedule._stages = rank, stages
        schedule._step_microbatches(target_mbs=[None] * plan.num_micro_batches, return_outputs=False)
    return records


def idle_fraction(
    plan: PipelinePlan, actions: Sequence[Sequence[Action]], seconds: Mapping[str, float], *, hop: float = 0
) -> float:
    """Share of a step that ranks idle, with equal stages; a tensor reaches another rank after `hop` seconds."""
    queues = [deque(action for action in rank if action[0] in seconds) for rank in actions]
    busy = sum(seconds[kind] for queue in queues for kind, *_ in queue) / len(queues)
    clocks = [0.0] * len(queues)
    # When the output of a stage (F), or the gradient of its input (I), is ready.
    ends = (("F", -1), ("I", plan.num_stages))
    ready = {(kind, stage, number): 0.0 for kind, stage in ends for number in range(plan.num_micro_batches)}
    while remaining := sum(map(len, queues)):
        for rank, queue in enumerate(queues):
            while queue:
                kind, stage, number = queue[0]
                needed = ("F", stage - 1, number) if kind == "F" else ("I", stage + (kind != "W"), number)
                if needed not in ready:
                    break
                source = needed[1] if 0 <= needed[1] < plan.num_stages else stage
                delay = hop * (plan.stage_ranks[source] != rank)
                clocks[rank] = max(clocks[rank], ready[needed] + delay) + seconds[kind]
                ready.setdefault(("F" if kind == "F" else "I", stage, number), clocks[rank])
                queue.popleft()
        if remaining == sum(map(len, queues)):
            raise RuntimeError(f"{plan.schedule} deadlocks at {[queue[0] for queue in queues if queue]}")
    return 1 - busy / max(clocks)


def max_saved_blocks(actions: Sequence[Sequence[Action]], blocks_per_stage: Sequence[int]) -> int:
    """The most blocks whose activations of a micro-batch one rank holds at once."""
    change = {"F": 1, "B": -1, "W": -1}
    return max(
        max(accumulate(change.get(kind, 0) * blocks_per_stage[stage] for kind, stage, _ in rank)) for rank in actions
    )
