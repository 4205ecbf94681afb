"""Plans by traces of their steps. Imports no torch but for a trace that is not known."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from trainer.plan.critical_path import StepTime, step_time_of
from trainer.plan.interconnect import group_topologies
from trainer.plan.memory_estimate import MemoryEstimate
from trainer.plan.plan import Suggestion, TrainingPlan, WindowShare
from trainer.plan.rank_clock import RankClock
from trainer.trace.answers import traced_rank_steps
from trainer.trace.errors import UntraceableError
from trainer.trace.rank_step import RankStep

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


Trace = Callable[[Sequence[TrainingPlan]], Sequence[TrainingPlan | None]]
"""Plans by traces; None for what no trace can show."""


def traced(plan: TrainingPlan) -> TrainingPlan:
    """The plan by traces, or as it is with a note if there are none."""
    try:
        steps = traced_rank_steps(plan.config, plan.world_size)
    except UntraceableError as error:
        return replace(plan, notes=(f"by formulas: {error}",))
    return TracedPlan(
        **_values(replace(plan, notes=(PARTS_BY_FORMULAS,))), rank_steps=tuple(steps)
    )


def traced_plans(plans: Sequence[TrainingPlan]) -> list[TrainingPlan | None]:
    """The plans by traces; None for those that no trace shows."""
    found = map(traced, plans)
    return [plan if isinstance(plan, TracedPlan) else None for plan in found]


def estimated(plan: TrainingPlan) -> TrainingPlan:
    """The plan by formulas alone, in milliseconds."""
    return TrainingPlan(**_values(plan))


def _values(plan: TrainingPlan) -> dict[str, Any]:
    return {each.name: getattr(plan, each.name) for each in fields(TrainingPlan)}
