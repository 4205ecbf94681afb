"""Whether in-memory checkpoints fit the host of a node. Imports no torch."""

from __future__ import annotations

from trainer.config.job_config import Config
from trainer.config.overrides import with_overrides
from trainer.hardware.device_specs import DEFAULT_DEVICE, load_device
from trainer.hardware.host import GIB
from trainer.plan.reserves import HOST_FRACTION
from trainer.plan.rough import RoughPlan


def in_memory_checkpoint_problems(
    config: Config, world_size: int, *, ranks_per_node: int, host_bytes: float
) -> list[str]:
    """`host_bytes`: the memory of a node."""
    interval = config.checkpoint.memory_interval
    if interval is None:
        return []
    config = with_overrides(config, {"parallelism.ranks_per_node": ranks_per_node})
    # Weights and optimizer state are arithmetic, which needs no trace.
    plan = RoughPlan(config, world_size, load_device(DEFAULT_DEVICE))
    rank = max(plan.ranks, key=lambda each: each.host_bytes)
    ranks = min(world_size, ranks_per_node)
    needed = ranks * rank.host_bytes
    copies = ranks * rank.checkpoint_copy_bytes
    usable = HOST_FRACTION * host_bytes
    if needed <= usable:
        return []
    return [
        f"checkpoint.memory_interval = {interval}: a node needs about {needed / GIB:.1f} GiB of host memory, "
        f"{copies / GIB:.1f} GiB of it for in-memory checkpoints, and {usable / GIB:.1f} GiB are usable ({HOST_FRACTION:.0%} of it)"
    ]
