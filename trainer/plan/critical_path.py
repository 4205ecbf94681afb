"""Predicts the time of one step over all ranks. Imports no torch.

step = forward and backward of the busiest rank + pipeline bubble + optimizer + fixed overhead
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from parallelisms.mesh.pipeline_plan import PipelinePlan
from trainer.config.job_config import Config
from trainer.data.deal import Cost
from trainer.hardware.device_specs import DeviceSpec
from trainer.plan import interconnect
from trainer.plan.pipeline_bubble import bubble_seconds
from trainer.plan.step_time import STEP_OVERHEAD, RankStepTime, RankTimeModel


@dataclass(frozen=True)
class StepTime:
    ranks: tuple[RankStepTime, ...]
    """Times of the pipeline ranks, by pp rank."""
    seconds: float
    executed_flops: float
    """FLOPs that all ranks execute, including recomputation."""

    @cached_property
    def attention_seconds(self) -> float:
        """Seconds of the busiest rank in attention kernels: the part that grows with the (query,
        key) pairs of sequences.
        """
        return self.busiest.compute.get("attention", 0)

    @cached_property
    def busiest(self) -> RankStepTime:
        return max(self.ranks, key=lambda stage: stage.busy)


class TimedRank(Protocol):
    """Times of one pipeline rank from which the time of a step follows."""

    @property
    def step_time(self) -> RankStepTime: ...

    @property
    def chunk_seconds(self) -> float:
        """Forward and backward of one micro-batch in one stage, on average."""

    @property
    def p2p_seconds(self) -> float:
        """Seconds to send the residual stream to the next stage."""

    @property
    def optimizer_seconds(self) -> float: ...

    @property
    def executed_flops(self) -> float: ...


def predict_step_time(config: Config, world_size: int, device: DeviceSpec) -> StepTime:
    """Step time by formulas. The configuration must be valid, with `memory.recompute` resolved."""
    groups = interconnect.group_topologies(config, world_size, device)
    plan = config.pipeline_plan(world_size)
    distinct: dict[tuple[object, ...], RankTimeModel] = {}
    ranks = []
    for pp_rank in range(config.parallelism.pp):
        stages = plan.stages_of(pp_rank)
        # Ranks with equal keys do equal work. Under a host budget, earlier ranks offload a smaller
        # share.
        own_budget = None if config.memory.host_budget_gib is None else pp_rank
        blocks = tuple(plan.blocks_per_stage[stage] for stage in stages)
        key = blocks, 0 in stages, plan.num_stages - 1 in stages, own_budget
        if key not in distinct:
            distinct[key] = RankTimeModel(config, world_size, pp_rank, device, groups)
        ranks.append(distinct[key])
    return step_time_of(config, world_size, ranks)


def step_time_of(config: Config, world_size: int, ranks: Sequence[TimedRank]) -> StepTime:
    """Time of a step from those of its pipeline ranks, by pp rank."""
    pipeline_seconds, bubbles = _pipeline_time(config.pipeline_plan(world_size), ranks)
    # Gradient clipping needs the norm over all stages, so the slowest optimizer step counts for
    # all.
    step_seconds = (
        pipeline_seconds + max(stage.optimizer_seconds for stage in ranks) + STEP_OVERHEAD
    )
    step_times = []
    for pp_rank, (stage, bubble) in enumerate(zip(ranks, bubbles, strict=True)):
        # The remainder is the wait for the slowest optimizer step, so that all bars are equally
        # long.
        optimizer = step_seconds - STEP_OVERHEAD - stage.step_time.busy - bubble
        step_times.append(
            replace(stage.step_time, pp_rank=pp_rank, bubble=bubble, optimizer=optimizer)
        )
    # Each entry stands for all ranks of its pipeline rank.
    executed_flops = (
        world_size // config.parallelism.pp * sum(stage.executed_flops for stage in ranks)
    )
    return StepTime(tuple(step_times), step_seconds, executed_flops)


def sequence_cost(config: Config, world_size: int, step: StepTime) -> Cost:
    """Seconds of a data-parallel rank per token, and per (query, key) pair of a layer, of its
    sequences.
    """
    training = config.training
    degrees = config.parallelism.degrees(world_size)
    sequences = training.global_batch_size / (degrees["dp_replicate"] * degrees["dp_shard"])
    pairs = config.model.build().mean_pairs(training.seq_len)
    rest = step.busiest.busy - step.attention_seconds
    return Cost(
        rest / (sequences * training.seq_len), step.attention_seconds / (sequences * pairs)
    )


def _pipeline_time(plan: PipelinePlan, ranks: Sequence[TimedRank]) -> tuple[float, list[float]]:
    """(seconds of all forward and backward passes, idle seconds by rank)."""
    if plan.pp == 1:
        return ranks[0].step_time.busy, [0.0]
    chunk_seconds = sum(stage.chunk_seconds for stage in ranks) / plan.pp
    # The busiest rank sets the pace: beside its own work it waits only for the pipeline to fill
    # and drain.
    busy = [stage.step_time.busy for stage in ranks]
    total = max(busy) + bubble_seconds(
        plan, chunk_seconds, p2p_seconds=max(stage.p2p_seconds for stage in ranks)
    )
    return total, [total - each for each in busy]
