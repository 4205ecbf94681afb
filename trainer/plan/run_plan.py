"""Plans all stages of a run, by formulas or by traces of their steps. Imports no torch but for a
trace that is not known.

run = plan_run(config, 32, load_device("h100-80gb"))
run.fits, run.memory_shortages, run.days, run.stages
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.job_config import Config
from trainer.hardware.device_specs import DeviceSpec
from trainer.plan.plan import TrainingPlan, plan_stage
from trainer.plan.traced_plan import traced
from trainer.plan.tracing import tracing_processes


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


def plan_run(
    config: Config, world_size: int, device: DeviceSpec, *, trace: bool = False
) -> RunPlan:
    """The plans of all stages.

    `trace`: by traces of the steps, seconds each until they are known, instead of by formulas.
    """
    plans = [
        plan_stage(stage.config, world_size, device, name=stage.name)
        for stage in config.training_stages
    ]
    if not trace:
        return RunPlan(tuple(plans))
    with tracing_processes() as trace_plans:
        traces = trace_plans(plans)
    # What no trace shows says why.
    return RunPlan(tuple(found or traced(plan) for found, plan in zip(traces, plans, strict=True)))
