"""The order in which pipeline ranks compute. Imports no torch.

A schedule is written as the symbols of one rank: F forward, B backward, or I input gradients and W weight gradients,
followed by which of the rank's stages; a symbol's n-th occurrence computes micro-batch n. Rank 0 of two, with four
micro-batches and one stage each, under 1F1B: `F0 F0 B0 F0 B0 F0 B0 B0`.

GPipe (Huang et al., 2019), 1F1B and interleaved 1F1B (Narayanan et al., 2021), zero bubble (Qi et al., 2023; ZB-V: Qi et
al., 2024) and DualPipeV (DeepSeek-V3, 2024). The orders are those of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple

from parallelisms.pipeline_plan import SINGLE_STAGE_SCHEDULES, PipelinePlan

ActionKind = Literal["F", "B", "I", "W"]
"""Forward; backward; gradients of the input alone; gradients of the weights alone."""


class Action(NamedTuple):
    kind: ActionKind
    stage: int
    micro_batch: int


StreamKey = tuple[Literal["F", "B"], int, int]
"""The residual stream that enters a stage (F), or the gradient of its output (B): (kind, stage, micro-batch)."""


class Message(NamedTuple):
    key: StreamKey
    source: int
    target: int
    """Ranks."""


class Tick(NamedTuple):
    actions: tuple[Action | None, ...]
    """Of each rank; None while it waits."""
    messages: tuple[Message, ...]
    """What the actions produce for other ranks."""


@lru_cache(maxsize=64)
def ticks(plan: PipelinePlan) -> tuple[Tick, ...]:
    """The step, as if every action took one tick: a rank computes once its input was produced in an earlier tick.

    Messages between two ranks that all ranks exchange in this order cannot deadlock. Raises ValueError if the orders of
    the ranks contradict each other.
    """
    waiting = [deque(rank_actions(plan, rank)) for rank in range(plan.pp)]
    produced: set[StreamKey] = set()
    found = []
    while any(waiting):
        ready = tuple(queue[0] if queue and _needs(plan, queue[0]) <= produced else None for queue in waiting)
        if not any(ready):
            raise ValueError(f"{plan.schedule}: ranks wait for each other: {[queue[0] for queue in waiting if queue]}")
        for action, queue in zip(ready, waiting, strict=True):
            if action is not None:
                queue.popleft()
                produced.add(("F" if action.kind == "F" else "B", action.stage, action.micro_batch))
        found.append(Tick(ready, tuple(message for action in ready if action for message in _messages(plan, action))))
    return tuple(found)


def _needs(plan: PipelinePlan, action: Action) -> set[StreamKey]:
    """What must have been produced before."""
    kind, stage, micro_batch = action
    if kind == "F":
        return {("F", stage - 1, micro_batch)} if stage else set()
    if kind == "W" or stage == plan.num_stages - 1:
        return {("B" if kind == "W" else "F", stage, micro_batch)}
    return {("B", stage + 1, micro_batch)}


def _messages(plan: PipelinePlan, action: Action) -> Iterator[Message]:
    kind, stage, micro_batch = action
    other = stage + 1 if kind == "F" else stage - 1
    if kind == "W" or not 0 <= other < plan.num_stages:
        return
    source, target = plan.stage_ranks[stage], plan.stage_ranks[other]
    if source != target:
        yield Message(("F" if kind == "F" else "B", other, micro_batch), source, target)


@lru_cache(maxsize=1024)
def rank_actions(plan: PipelinePlan, rank: int) -> tuple[Action, ...]:
    """What a rank computes in a step, in order."""
    symbols = {"ZBVZeroBubble": _zbv, "DualPipeV": _dual_pipe_v}.get(plan.schedule, _one_forward_one_backward)
    return tuple(_numbered(plan, rank, symbols(plan, rank)))


def _numbered(plan: PipelinePlan, rank: int, symbols: Iterable[str]) -> Iterator[Action]:
    """W without a stage computes the weight gradients that have waited longest, if any do."""
    stages, counts, waiting = plan.stages_of(rank), Counter[str](), deque[tuple[str, int]]()
    for symbol in symbols:
        kind, local = symbol[0], symbol[1:]
        if kind == "W" and not local:
            if waiting:
                local, number = waiting.popleft()
                yield Action("W", stages[int(local)], number)
            continue
        # B and I count together: either is a micro-batch's backward.
        number = counts[key := kind.replace("B", "I") + local]
        counts[key] += 1
        if kind == "I":
            waiting.append((local, number))
        if number < plan.num_micro_batches:
            yield Action(kind, stages[int(local)], number)  # type: ignore[arg-type]


def _one_forward_one_backward(plan: PipelinePlan, rank: int) -> Iterator[str]:
    """GPipe, 1F1B and the interleaved schedules: forwards until the first gradient is due, then in turn with backwards."""
    local_stages, pp = plan.stages_per_rank, plan.pp
    round_size = plan.num_micro_batches // max(1, plan.num_micro_batches // pp)
    split = plan.schedule == "InterleavedZeroBubble"
    num_chunks = local_stages * plan.num_micro_batches
    stages = [step // round_size % local_stages for step in range(num_chunks)]
    if plan.schedule == "GPipe":
        in_flight = num_chunks
    elif plan.schedule in SINGLE_STAGE_SCHEDULES:
        in_flight = pp - rank
    else:
        in_flight = (local_stages - 1) * round_size + (1 if split else 2) * (pp - 1 - rank) + 1
    yield from (f"F{stage}" for stage in stages[:in_flight])
    for step, (stage, forward) in enumerate(zip_longest(stages, stages[in_flight:])):
        yield f"{'I' if split else 'B'}{local_stages - 1 - stage}"
        # The last ranks wait least for gradients, so they need least weight gradients to fill the end of the step.
        if split and step >= rank:
            yield "W"
        if forward is not None:
            yield f"F{forward}"
    yield from ["W"] * (rank * split)


def _zbv(plan: PipelinePlan, rank: int) -> list[str]:
    pp, later = plan.pp, plan.pp - rank
    steady = max(2 * pp - 1, plan.num_micro_batches) - 2 * pp + rank + 1
    return (
        ["F0"] * (2 * later - 1)
        + ["F1", "F0"] * rank
        + ["F1", "I1", "W1"] * later
        + ["F0", "I0", "W0", "F1", "I1", "W1"] * steady
        + ["I0", "W0", "F1", "I1", "W1"] * (later - 1)
        + ["I0", "I1"] * rank
        + ["I0", "W0"] * later
        + ["W1"] * rank
        + ["W0"] * rank
    )


def _dual_pipe_v(plan: PipelinePlan, rank: int) -> list[str]:
    later, end, half = plan.pp - 1 - rank, rank + 1, (rank + 1) // 2
    whole = ["B1", "B0"] * half + ["B1", "I0"] * (rank % 2 == 0)
    return (
        ["F0"] * (2 * later)
        + ["F0", "F1"] * end
        + ["I1", "W", "F1"] * later
        + ["F0", "B1", "F1", "B0"] * (plan.num_micro_batches - 2 * plan.pp + rank + 1)
        + ["B1", "F1", "B0"] * later
        + (whole + ["I1", "I0"] * end)[: 2 * end]
        + ["W", "I0"] * later
        + ["W"] * end
    )
