"""Peak memory of a step of a configuration, by closed formulas, for every pipeline rank. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from trainer.config.job_config import Config
from trainer.hardware.attention_choice import with_attention_choice
from trainer.memory.passes import fullest_ranks
from trainer.memory.rank import RankMemory, RankSettings
from trainer.memory.step import StepMemory
from trainer.trace.tensors import (
    SAVED_ACTIVATIONS,
    TRANSIENT_ACTIVATIONS,
    MemoryEstimate,
    MemoryItem,
)

__all__ = [
    "SAVED_ACTIVATIONS",
    "TRANSIENT_ACTIVATIONS",
    "MemoryEstimate",
    "MemoryItem",
    "estimate_memory",
    "estimate_memory_per_pp_rank",
    "fullest_estimates",
    "phase_estimates",
    "rank_memory",
]


def rank_memory(
    config: Config, world_size: int, pp_rank: int, *, on_cpu: bool = False
) -> RankMemory:
    """Sizes of one pipeline rank. `on_cpu`: with the attention kernel of the CPU."""
    attention = "cpu" if on_cpu else with_attention_choice(config).training.attention
    return RankMemory(
        RankSettings(
            model=config.model.build(),
            training=config.training,
            parallelism=config.parallelism,
            memory=config.memory,
            checkpoint=config.checkpoint,
            degrees=config.parallelism.degrees(world_size),
            pipeline=config.pipeline_plan(world_size),
            context_plan=config.context_plan(),
            pp_rank=pp_rank,
            num_micro_batches=config.micro_batches(world_size)[1],
            num_workers=config.data.workers,
            attention=attention,
            is_compiled=config.compiles_on_gpu and (not on_cpu or config.training.compile is True),
        )
    )


def estimate_memory(config: Config, world_size: int, *, on_cpu: bool = False) -> MemoryEstimate:
    """Memory estimate of the rank with the highest peak.

    The configuration must be valid. `on_cpu`: with the attention kernel of the CPU.
    """
    return max(
        fullest_estimates(config, world_size, on_cpu=on_cpu),
        key=lambda estimate: estimate.device_bytes,
    )


def fullest_estimates(
    config: Config, world_size: int, *, on_cpu: bool = False
) -> list[MemoryEstimate]:
    """The peak of each pipeline rank that can have the highest."""
    return _estimates(config, world_size, _fullest_ranks(config, world_size), on_cpu=on_cpu)


def estimate_memory_per_pp_rank(
    config: Config, world_size: int, *, on_cpu: bool = False
) -> list[MemoryEstimate]:
    """The peak of each pipeline rank."""
    return _estimates(config, world_size, range(config.parallelism.pp), on_cpu=on_cpu)


def _fullest_ranks(config: Config, world_size: int) -> Iterable[int]:
    """Pipeline ranks that can have the highest peak. Stages with equally many layers are alike
    only if all layers are.
    """
    is_mixed = len({*config.model.build().unrotated_layers}) > 1
    return (
        range(config.parallelism.pp)
        if is_mixed
        else fullest_ranks(config.pipeline_plan(world_size))
    )


def _estimates(
    config: Config, world_size: int, pp_ranks: Iterable[int], *, on_cpu: bool
) -> list[MemoryEstimate]:
    ranks = (rank_memory(config, world_size, pp_rank, on_cpu=on_cpu) for pp_rank in pp_ranks)
    return [_peak([*phase_estimates(rank)]) for rank in ranks]


def _peak(estimates: list[MemoryEstimate]) -> MemoryEstimate:
    """The moment of the device's peak. Its host tensors are those of the moment that needs most of
    the host.
    """
    peak = max(estimates, key=lambda estimate: estimate.device_bytes)
    fullest = max(estimates, key=lambda estimate: estimate.host_bytes)
    # Host and device may peak at different moments, and either must suffice by itself.
    on_device = tuple(each for each in peak.tensors if not each.on_host)
    return replace(
        peak, tensors=on_device + tuple(each for each in fullest.tensors if each.on_host)
    )


def phase_estimates(rank: RankMemory) -> Iterator[MemoryEstimate]:
    """The moments of a step that can be the peak."""
    return StepMemory(rank).moments()
