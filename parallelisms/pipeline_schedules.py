"""The order in which pipeline ranks compute. Imports no torch.

Rank 0 of two, with four micro-batches, under 1F1B (F forward, B backward): `F0 F1 B0 F2 B1 F3 B2
B3`.

GPipe (Huang et al., 2019), 1F1B and interleaved 1F1B (Narayanan et al., 2021). The orders are
those of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple

from parallelisms.mesh.pipeline_plan import SINGLE_STAGE_SCHEDULES, PipelinePlan

ActionKind = Literal["F", "B"]


class Action(NamedTuple):
    kind: ActionKind
    stage: int
    micro_batch: int


StreamKey = tuple[ActionKind, int, int]
"""The residual stream that enters a stage (F), or the gradient of its output (B): (kind, stage,
micro-batch).
"""


class Message(NamedTuple):
    key: StreamKey
    source: int
    target: int
    """Ranks that send and receive."""


class Tick(NamedTuple):
    actions: tuple[Action | None, ...]
    """Action of each rank; None while it waits."""
    messages: tuple[Message, ...]
    """Results of the actions for other ranks."""


@lru_cache(maxsize=64)
def ticks(plan: PipelinePlan) -> tuple[Tick, ...]:
    """The step, as if every action took one tick: a rank computes once its input was produced in
    an earlier tick.

    Messages between two ranks that all ranks exchange in this order cannot deadlock. Raises
    ValueError if the orders of the ranks contradict each other.
    """
    waiting = [deque(rank_actions(plan, rank)) for rank in range(plan.pp)]
    done: set[Action] = set()
    found = []
    while any(waiting):
        ready = tuple(
            queue[0] if queue and _needs(plan, queue[0]) <= done else None for queue in waiting
        )
        if not any(ready):
            raise ValueError(
                f"{plan.schedule}: ranks wait for each other: {[queue[0] for queue in waiting if queue]}"
            )
        for action, queue in zip(ready, waiting, strict=True):
            if action is not None:
                done.add(queue.popleft())
        found.append(Tick(ready, tuple(_messages(plan, filter(None, ready)))))
    return tuple(found)


def _needs(plan: PipelinePlan, action: Action) -> set[Action]:
    """Actions whose results this one needs."""
    kind, stage, micro_batch = action
    if kind == "F":
        return {Action("F", stage - 1, micro_batch)} if stage else set()
    is_last = stage == plan.num_stages - 1
    return {Action("F", stage, micro_batch) if is_last else Action("B", stage + 1, micro_batch)}


def _messages(plan: PipelinePlan, actions: Iterable[Action]) -> Iterator[Message]:
    for kind, stage, micro_batch in actions:
        other = stage + 1 if kind == "F" else stage - 1
        if 0 <= other < plan.num_stages:
            yield Message(
                (kind, other, micro_batch), plan.stage_ranks[stage], plan.stage_ranks[other]
            )


@lru_cache(maxsize=1024)
def rank_actions(plan: PipelinePlan, rank: int) -> tuple[Action, ...]:
    """Actions of a rank in a step: forwards until the first gradient is due, then backwards and
    forwards in turn.
    """
    stages = plan.stages_of(rank)
    micro_batches = plan.num_micro_batches
    # Rounds of about pp micro-batches: when a rank turns to its next stage, the first of them has
    # been through all other ranks.
    round_size = micro_batches // max(1, micro_batches // plan.pp)
    order = [
        (chunk, number)
        for first in range(0, micro_batches, round_size)
        for chunk in range(len(stages))
        for number in range(first, min(first + round_size, micro_batches))
    ]
    forwards = [Action("F", stages[chunk], number) for chunk, number in order]
    backwards = [Action("B", stages[-1 - chunk], number) for chunk, number in order]
    if plan.schedule == "GPipe":
        in_flight = len(forwards)
    elif plan.schedule in SINGLE_STAGE_SCHEDULES:
        in_flight = plan.pp - rank
    else:
        # The warm-up of Narayanan et al., 2021, and the forward that the first backward is paired
        # with.
        in_flight = (len(stages) - 1) * round_size + 2 * (plan.pp - 1 - rank) + 1
    in_turn = zip_longest(backwards, forwards[in_flight:])
    return (
        *forwards[:in_flight],
        *(action for pair in in_turn for action in pair if action is not None),
    )
