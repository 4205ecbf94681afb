"""Plans all stages of a run, by formulas or by traces of their steps. Imports no torch but for a
trace that is not known.

run = plan_run(config, 32, load_device("h100-80gb"))
run.fits, run.memory_shortages, run.days, run.stages
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf
from typing import Any

from trainer.config.job_config import Config
from trainer.hardware.device_specs import DeviceSpec
from trainer.plan.critical_path import StepTime, step_time_of
from trainer.plan.interconnect import group_topologies
from trainer.plan.memory_estimate import MemoryEstimate
from trainer.plan.plan import Suggestion, TrainingPlan, WindowShare, plan_stage
from trainer.plan.rank_clock import RankClock
from trainer.plan.search import SearchResult, ranked
from trainer.trace.answers import traced_rank_steps
from trainer.trace.errors import UntraceableError
from trainer.trace.rank_step import RankStep

MAX_SEARCHES = 3
ATTENTION_CHANNELS = ("cp", "rotate", "exchange")
"""Channels over which context parallelism sends queries, keys and values."""

PARTS_BY_FORMULAS = (
    "planned from a trace of the step; savings of changes and curves over lengths by formulas"
)


@dataclass(frozen=True)
class TracedPlan(TrainingPlan):
    """A plan whose memory and time come from a trace of the step, instead of from formulas."""

    rank_steps: tuple[RankStep, ...] = ()
    """The traced step of every pp rank."""

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

    @property
    def attention_by_window(self) -> dict[int | None, WindowShare]:
        """Attention of the busiest rank."""
        step = self.rank_steps[self.step_time.busiest.pp_rank]
        micro_batches = self.config.micro_batches(self.world_size)[1]
        shares = defaultdict[int | None, WindowShare](WindowShare)
        for index, count in Counter(step.order).items():
            place = step.pieces[index].place
            work = step.pieces[index].work
            if isinstance(place.unit, int):
                share = shares[step.windows[place.stage, place.unit]]
                sent = (
                    size for key, size in work.sent_bytes.items() if key[0] in ATTENTION_CHANNELS
                )
                share.flops += count * work.attention_flops.total()
                share.sent_bytes += count * sum(sent)
                if place.action == "forward":
                    share.layers += count
        # A layer runs forward once per micro-batch.
        for share in shares.values():
            share.layers //= micro_batches
        return shares

    @cached_property
    def suggestions(self) -> list[Suggestion]:
        """Differences between plans by formulas, unless those differ on whether this plan fits:
        then between traces.
        """
        by_formulas = estimated(self)
        ranked = by_formulas.suggestions
        # Formulas rank changes in milliseconds. Their differences hold while both agree on what
        # fits.
        if by_formulas.fits == self.fits:
            return ranked
        found = [self.compare(suggestion.text, traced(suggestion.plan)) for suggestion in ranked]
        return sorted(filter(None, found), key=lambda suggestion: -suggestion.benefit)


def traced(plan: TrainingPlan) -> TrainingPlan:
    """The plan by traces, or as it is with a note if there are none."""
    try:
        steps = traced_rank_steps(plan.config, plan.world_size)
    except UntraceableError as error:
        return replace(plan, notes=(f"by formulas: {error}",))
    return TracedPlan(
        **_values(replace(plan, notes=(PARTS_BY_FORMULAS,))), rank_steps=tuple(steps)
    )


def search_by_traces(
    find: Callable[[DeviceSpec], SearchResult], device: DeviceSpec
) -> SearchResult:
    """The layouts that a search finds on the device, by their traces.

    Formulas find them. A layout that needs more by its trace is looked for again, by formulas that
    have less memory, since a leaner form of its mesh may fit.
    """
    found: list[SearchResult] = []
    fitting: list[TrainingPlan] = []
    ratio = 1.0
    for _ in range(MAX_SEARCHES):
        memory = device.memory / ratio
        host_memory = device.host_memory / ratio
        found.append(find(replace(device, memory=memory, host_memory=host_memory)))
        plans = [replace(plan, device=device) for plan in found[-1].best]
        traces = [*map(traced, plans)]
        fitting += [trace for trace in traces if trace.fits]
        excess = [
            trace.memory_utilization / plan.memory_utilization
            for plan, trace in zip(plans, traces, strict=True)
            if not trace.fits
        ]
        if not excess:
            break
        ratio = max(ratio, *excess)
    faster = [*map(traced, found[0].not_fitting)]
    best = ranked([*fitting, *(plan for plan in faster if plan.fits)])
    seconds = min((plan.step_seconds for plan in best), default=inf)
    return replace(
        found[-1],
        best=best[: max(1, len(found[0].best))],
        not_fitting=[plan for plan in faster if not plan.fits and plan.step_seconds < seconds],
        num_plans=sum(each.num_plans for each in found),
    )


def estimated(plan: TrainingPlan) -> TrainingPlan:
    """The plan by formulas alone, in milliseconds."""
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


def plan_run(
    config: Config, world_size: int, device: DeviceSpec, *, trace: bool = False
) -> RunPlan:
    """The plans of all stages.

    `trace`: by traces of the steps, seconds each until they are known, instead of by formulas.
    """
    stages = config.training_stages
    plans = (plan_stage(stage.config, world_size, device, name=stage.name) for stage in stages)
    return RunPlan(tuple(map(traced, plans) if trace else plans))
