"""Plans all stages of a run, by formulas or by traces of their steps. Imports no torch but for a trace that is not known.

run = plan_run(config, 32, load_device("h100-80gb"))
run.fits, run.memory_shortages, run.days, run.stages
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from trainer.config.job_config import Config
from trainer.hardware.device_specs import DeviceSpec
from trainer.memory.estimator import MemoryEstimate
from trainer.plan.critical_path import StepTime, step_time_of
from trainer.plan.interconnect import group_topologies
from trainer.plan.plan import Suggestion, TrainingPlan, plan_stage
from trainer.plan.rank_clock import RankClock
from trainer.trace.answers import traced_rank_steps
from trainer.trace.errors import UntraceableError
from trainer.trace.rank_step import RankStep


@dataclass(frozen=True)
class TracedPlan(TrainingPlan):
    """A plan whose memory and time come from a trace of the step, instead of from formulas."""

    rank_steps: tuple[RankStep, ...] = ()
    """By pp rank."""

    @cached_property
    def memory_by_pp_rank(self) -> list[MemoryEstimate]:
        return [step.memory for step in self.rank_steps]

    @property
    def fullest_memory(self) -> list[MemoryEstimate]:
        return self.memory_by_pp_rank

    @property
    def exceeds_device(self) -> bool:
        return self.peak_memory.device_bytes > self.usable_device_memory

    @cached_property
    def step_time(self) -> StepTime:
        groups = group_topologies(self.config, self.world_size, self.device)
        ranks = [RankClock(self.config, step, self.device, groups) for step in self.rank_steps]
        return step_time_of(self.config, self.world_size, ranks)

    @cached_property
    def suggestions(self) -> list[Suggestion]:
        """Those of the formulas that help by their traces, too."""
        ranked = estimated(self).suggestions
        found = [self.compare(suggestion.text, traced(suggestion.plan)) for suggestion in ranked]
        return sorted(filter(None, found), key=lambda suggestion: -suggestion.benefit)


def traced(plan: TrainingPlan) -> TrainingPlan:
    """The plan by traces, or as it is with a note if there are none."""
    try:
        steps = traced_rank_steps(plan.config, plan.world_size)
    except UntraceableError as error:
        return replace(plan, notes=(f"by formulas: {error}",))
    return TracedPlan(**_values(plan), rank_steps=tuple(steps))


def estimated(plan: TrainingPlan) -> TrainingPlan:
    """By the formulas alone, in milliseconds."""
    return TrainingPlan(**_values(plan))


def _values(plan: TrainingPlan) -> dict[str, Any]:
    return {each.name: getattr(plan, each.name) for each in fields(TrainingPlan)}


@dataclass(frozen=True)
class RunPlan:
    """Plans of all stages of a run, in order."""

    stages: tuple[TrainingPlan, ...]

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def memory_shortages(self) -> list[str]:
        return [
            f'stage "{stage.name}": {shortage}' if stage.name else shortage
            for stage in self.stages
            for shortage in stage.memory_shortages
        ]

    @property
    def days(self) -> float:
        return sum(stage.days for stage in self.stages)

    @property
    def device_hours(self) -> float:
        return sum(stage.device_hours for stage in self.stages)

    @property
    def total_tokens(self) -> float:
        return sum(stage.total_tokens for stage in self.stages)


def plan_run(config: Config, world_size: int, device: DeviceSpec, *, trace: bool = False) -> RunPlan:
    """`trace`: memory and time from traces of the steps, which take seconds each, instead of from formulas."""
    stages = config.training_stages
    plans = (plan_stage(stage.config, world_size, device, name=stage.name) for stage in stages)
    return RunPlan(tuple(map(traced, plans) if trace else plans))
