"""Traces that nobody recorded: the estimate of a layout, off by factors of its own. For tests of
what compares many plans, where a real trace takes seconds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest

from trainer.config.job_config import Config
from trainer.hardware.device_specs import DeviceSpec, load_device
from trainer.plan.pipeline_bubble import bubble_seconds
from trainer.plan.plan import TrainingPlan
from trainer.plan.rough import RoughPlan
from trainer.plan.step_time import OPTIMIZER_MEMORY_SHARE
from trainer.plan.tracing import Trace
from trainer.trace.pieces import OPTIMIZER, Piece, Place, Work
from trainer.trace.rank_step import RankStep
from trainer.trace.tensors import MemoryEstimate, MemoryTensor

DEVICE = load_device("h100-80gb")
MEMORY_SPREAD = 0.15
SECONDS_SPREAD = 0.05


def made_up_rank_steps(
    config: Config,
    world_size: int,
    *,
    device: DeviceSpec = DEVICE,
    memory: float = 1,
    seconds: float = 1,
    on_gpu: bool = True,
) -> list[RankStep]:
    """A step of one piece, which takes as long as the estimate says, times a factor."""
    del on_gpu
    estimate = RoughPlan(config, world_size, device)
    pp = config.parallelism.pp
    ranks_per_node = min(world_size, device.devices_per_node)
    sizes = (memory * estimate.device_bytes, memory * estimate.host_bytes / ranks_per_node)
    tensors = tuple(
        MemoryTensor("all", (round(size),), "uint8", line="parameters", on_host=is_on_host)
        for is_on_host, size in zip((False, True), sizes, strict=True)
    )
    after_passes = max(rank.optimizer_seconds for rank in estimate.ranks)
    after_passes += exposed_send_seconds(estimate)
    if config.memory.optimizer_placement == "device":
        after_passes *= OPTIMIZER_MEMORY_SHARE

    def piece(place: Place, time: float) -> Piece:
        moved = round(seconds * device.hbm_bandwidth * time)
        return Piece(place, [], [Work(moved_bytes=Counter({"forward": moved}))])

    return [
        RankStep(
            world_size,
            MemoryEstimate("a moment", pp_rank, pp, tensors),
            (piece(Place("forward"), rank.busy), piece(OPTIMIZER, after_passes)),
            (0, 1),
            {},
            1.0,
        )
        for pp_rank, rank in enumerate(estimate.rank_at)
    ]


def exposed_send_seconds(estimate: RoughPlan) -> float:
    """The part of a step for which a pipeline waits for messages between its stages."""
    if estimate.pipeline.pp == 1:
        return 0
    return bubble_seconds(estimate.pipeline, 0, p2p_seconds=estimate.ranks[0].send_seconds)


@dataclass(frozen=True)
class MadeUpPlan(TrainingPlan):
    steps: tuple[RankStep, ...] = ()

    @property
    def rank_steps(self) -> Sequence[RankStep]:
        return self.steps


def made_up_plan(
    plan: TrainingPlan, *, spread: float = 0, memory: float = 1, seconds: float = 1
) -> MadeUpPlan:
    """`spread`: shares of MEMORY_SPREAD and SECONDS_SPREAD by which estimates of a mesh are off.
    Ways to recompute differ half as much from each other in memory.
    """
    options = plan.config.memory
    of_mesh = random.Random(f"{plan.mesh}")
    of_form = random.Random(f"{plan.mesh} {options.recompute} {options.optimizer_placement}")
    memory *= 1 + spread * MEMORY_SPREAD * of_mesh.uniform(-1, 1)
    memory *= 1 + spread * MEMORY_SPREAD / 2 * of_form.uniform(-1, 1)
    seconds *= 1 + spread * SECONDS_SPREAD * of_mesh.uniform(-1, 1)
    steps = made_up_rank_steps(
        plan.config, plan.world_size, device=plan.device, memory=memory, seconds=seconds
    )
    return MadeUpPlan(plan.config, plan.world_size, plan.device, plan.name, steps=tuple(steps))


def made_up_traces(*, spread: float = 0, memory: float = 1) -> Trace:
    make = partial(made_up_plan, spread=spread, memory=memory)

    def trace(plans: Sequence[TrainingPlan]) -> list[TrainingPlan | None]:
        return [*map(make, plans)]

    return trace


def traces_of_slow_head_groups(plans: Sequence[TrainingPlan]) -> list[TrainingPlan | None]:
    return [
        made_up_plan(plan, seconds=1.02 if plan.config.memory.head_groups > 1 else 1)
        for plan in plans
    ]


def make_up_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trace of this process is made up."""
    monkeypatch.setattr("trainer.plan.plan.traced_rank_steps", made_up_rank_steps)
    monkeypatch.setattr("trainer.plan.tracing.is_known", lambda *_: True)
