"""How long an update takes on all ranks, from what each of them does and waits for. Without torch.

an update = the passes of the busiest rank + the pipeline's bubble + the optimizer + what lies around it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parallelisms.pipeline_plan import PipelinePlan
from trainer.config.job_config import Config
from trainer.hardware.device_specs import Device
from trainer.plan import interconnect
from trainer.plan.pipeline_bubble import Chunk, waited
from trainer.plan.step_time import UPDATE, Passes, Seconds


@dataclass(frozen=True)
class Times:
    """An update on all ranks."""

    stages: tuple[Seconds, ...]
    """Of a rank at each place of the pipeline."""
    update: float
    tokens: float
    """Of the global batch, as `pairs`."""
    pairs: float
    executed: float
    """FLOPs of all ranks, with those that are computed again."""

    @cached_property
    def busiest(self) -> Seconds:
        return max(self.stages, key=lambda stage: stage.busy)


def times(config: Config, world_size: int, device: Device) -> Times:
    """The configuration must have no problems, and no `auto` in `memory`."""
    groups, plan = interconnect.groups_of(config, world_size, device), config.pipeline_plan(world_size)
    found: dict[tuple[object, ...], Passes] = {}
    places = []
    for place in range(config.parallelism.pp):
        key = _alike(plan, place, budget=config.memory.host_budget_gib is not None)
        if key not in found:
            found[key] = Passes(config, world_size, place, device, groups)
        places.append(found[key])
    total, waits = _through(places)
    # An update of the optimizer waits for all stages: gradients are clipped by the norm of all.
    update = total + max(stage.optimizer for stage in places) + UPDATE
    stages = tuple(
        replace(stage.seconds, place=place, bubble=wait, optimizer=update - UPDATE - stage.seconds.busy - wait)
        for place, (stage, wait) in enumerate(zip(places, waits, strict=True))
    )
    each = world_size // config.parallelism.pp
    work_of_all = places[0].work
    return Times(stages, update, work_of_all.tokens, work_of_all.pairs, each * sum(stage.executed for stage in places))


def _alike(plan: PipelinePlan, place: int, *, budget: bool) -> tuple[object, ...]:
    """Ranks with as many blocks and ends do the same. With a budget of host memory, those in front keep less there."""
    stages = plan.stages_of(place)
    ends = 0 in stages, plan.num_stages - 1 in stages
    return tuple(plan.blocks[stage] for stage in stages), *ends, place if budget else None


def _through(places: Sequence[Passes]) -> tuple[float, list[float]]:
    """Seconds from the first to the last pass of an update, and how long each rank waits in them."""
    plan = places[0].rank.pipeline
    if plan.pp == 1:
        return places[0].seconds.busy, [0.0]
    chunks = [stage.chunk for stage in places]
    mean = Chunk(
        forward=sum(chunk.forward for chunk in chunks) / plan.pp,
        inputs=sum(chunk.inputs for chunk in chunks) / plan.pp,
        weights=sum(chunk.weights for chunk in chunks) / plan.pp,
    )
    busy = [stage.seconds.busy for stage in places]
    total = max(busy) + waited(plan, mean, hop=max(stage.hop for stage in places))
    return total, [total - each for each in busy]
