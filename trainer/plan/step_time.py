"""The time of a step, from the times of its pipeline ranks. Imports no torch.

step = forward and backward of the busiest rank + pipeline bubble + optimizer + fixed overhead

All times are seconds per step, over all micro-batches. The constants below are the empirical
assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from parallelisms.mesh.pipeline_plan import PipelinePlan
from trainer.config.job_config import Config
from trainer.data.deal import Cost
from trainer.plan.pipeline_bubble import bubble_seconds
from trainer.trace.pieces import HOST

DTYPE_RATE_FACTOR = {"bfloat16": 1.0, "float32": 1 / 16, "float64": 1 / 16}
"""Relative to bfloat16: A100 and H100 have 1/16 to 1/15 of its rate in float32 and float64."""
ASYNC_TP_OVERLAP = 0.33
"""Share of tp communication that `async_tp` hides: explains torchtitan's 876 instead of 829
tokens/s for 70B on 256 H100.
"""
CONTENTION_FRACTION = 0.1
"""Cost of overlapped communication: its kernels take SMs and bandwidth from compute."""
OPTIMIZER_MEMORY_SHARE = 0.85
"""Memory bandwidth of AdamW and the gradient norm, over that of other kernels: 0.89 for 1.24B
parameters and 0.80 for 3.1B, in 13.0 and 36.5 ms on an H200 (`benchmarks.gpu`, 2026-11-27).
"""
HOST_MEMORY_EFFICIENCY = 0.7
"""Share of the host memory bandwidth that AdamW reaches on all cores."""
STEP_OVERHEAD = 0.01
"""Seconds per step in which the device waits for Python: batch, gradient norm, learning-rate
schedule.
"""

CHANNEL_LABELS = {
    "pp": "stages (pp)",
    "dp_replicate": "gradients (dp_replicate)",
    "fsdp": "weights (fsdp)",
    "efsdp": "weights of experts (efsdp)",
    "tp": "activations (tp)",
    "ep": "tokens (ep)",
    "cp": "attention (cp)",
    "rotate": "KV (cp)",
    "exchange": "head exchange (cp)",
    HOST: "host copies",
}


@dataclass(frozen=True, kw_only=True)
class RankStepTime:
    """Seconds of one step on one rank."""

    pp_rank: int
    compute: Mapping[str, float]
    """Seconds by kind. "matmul" excludes recomputation; "launch overhead" is the gaps where
    kernels finish before the next launch.
    """
    exposed: Mapping[str, float]
    """Exposed communication by channel, including `host`."""
    overlapped: Mapping[str, float]
    """Overlapped communication by channel, which is no part of the step time."""
    optimizer: float = 0
    bubble: float = 0

    @property
    def contention(self) -> float:
        """Slowdown of compute by overlapped communication."""
        return CONTENTION_FRACTION * sum(
            seconds for name, seconds in self.overlapped.items() if name != HOST
        )

    @property
    def busy(self) -> float:
        """Seconds of forward and backward."""
        return sum(self.compute.values()) + sum(self.exposed.values()) + self.contention

    def breakdown(self) -> dict[str, float]:
        """Nonzero components of the step time by name."""
        components = {
            **self.compute,
            **{
                f"exposed {CHANNEL_LABELS.get(channel, channel)}": exposed
                for channel, exposed in self.exposed.items()
            },
            "contention": self.contention,
            "optimizer": self.optimizer,
            "pipeline bubble": self.bubble,
            "step overhead": STEP_OVERHEAD,
        }
        return {name: seconds for name, seconds in components.items() if seconds > 0}


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
