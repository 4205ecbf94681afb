"""Plans all stages of a run. Imports no torch but for traces that are not known.

run = plan_run(config, 32, load_device("h100-80gb"))
run.fits, run.memory_shortages, run.days, run.stages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.config.job_config import Config
from trainer.errors import ConfigError
from trainer.hardware.attention_choice import attention_problems
from trainer.hardware.device_specs import DeviceSpec
from trainer.plan.memory_options import NothingFitsError, choose_memory_options, first_guess
from trainer.plan.plan import TrainingPlan
from trainer.plan.tracing import Trace, traced_plans


@dataclass(frozen=True)
class RunPlan:
    """Plans of all stages of a run, in order."""

    stages: Sequence[TrainingPlan]

    @property
    def fullest_stage(self) -> TrainingPlan:
        """The stage to explain: one that does not fit, or else the fullest."""
        return max(self.stages, key=lambda stage: (not stage.fits, stage.memory_utilization))

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
    config: Config, world_size: int, device: DeviceSpec, *, trace: Trace = traced_plans
) -> RunPlan:
    """The plans of all stages. Raises as `plan_stage`."""
    if len(config.training_stages) > 1:
        # Several at once. Each stage asks for its own again, whose answer is known then.
        trace([first_guess(stage.config, world_size, device) for stage in config.training_stages])
    return RunPlan(
        [
            plan_stage(stage.config, world_size, device, name=stage.name, trace=trace)
            for stage in config.training_stages
        ]
    )


def plan_stage(
    config: Config,
    world_size: int,
    device: DeviceSpec,
    *,
    name: str = "",
    trace: Trace = traced_plans,
) -> TrainingPlan:
    """Plan of one stage, whose configuration must be valid. If `memory.recompute = "auto"` finds
    nothing that fits, plans the options that need least.

    Raises ConfigError if the device cannot run the attention kernel that the configuration names.
    """
    if unable := attention_problems(config, device):
        raise ConfigError(unable)
    try:
        choice = choose_memory_options(config, world_size, device, trace=trace)
    except NothingFitsError as error:
        return replace(error.closest, name=name, auto_problems=error.problems)
    said = choice.description if config.memory.recompute == "auto" else ""
    return replace(choice.plan, name=name, auto_choice=said)
