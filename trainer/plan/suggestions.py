"""Single changes of a plan that help most: coarse estimates rank them, traces say what they give.

Imports no torch but for traces that are not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from trainer.errors import ConfigError
from trainer.hardware.attention_choice import with_attention_choice
from trainer.hardware.device_specs import DeviceSpec
from trainer.plan.changes import (
    Change,
    competition_key,
    memory_saving_changes,
    speedup_changes,
)
from trainer.plan.document import format_gib, format_seconds
from trainer.plan.plan import TrainingPlan
from trainer.plan.rough import RoughPlan
from trainer.plan.traced_forms import Form, Traces, form_of
from trainer.plan.tracing import Trace, traced_plans

Goal = Literal["time", "memory", "device memory"]
"""The purpose of changes; "memory" is that of device or host, whichever is fuller."""
MAX_SUGGESTIONS = 3
MIN_TIME_SAVING = 0.005
"""Share of the step time that a suggestion must save."""


@dataclass(frozen=True)
class Suggestion:
    """A change of one key, or of two mesh degrees."""

    change: Change
    plan: TrainingPlan
    freed_bytes: float
    """Per device."""
    saved_seconds: float
    """Per step."""

    def __str__(self) -> str:
        gains = []
        if self.freed_bytes > 0:
            gains.append(f"frees {format_gib(self.freed_bytes)} GiB")
        if self.saved_seconds > 0:
            gains.append(f"saves {format_seconds(self.saved_seconds)} per step")
        but = "" if self.plan.fits else "; the plan still does not fit"
        return f"{self.change.text}: {' and '.join(gains) or 'uses less'}{but}"


def suggestions(
    plan: TrainingPlan, trace: Trace = traced_plans, *, goal: Goal | None = None
) -> list[Suggestion]:
    """The best changes.

    `goal` left out: less time, or less memory if the plan does not fit.
    """
    goal = goal or ("time" if plan.fits else "memory")
    estimate = RoughPlan(plan.config, plan.world_size, plan.device)
    form = Form(plan.config, frozenset(), estimate)
    # Estimates of changes are off as much as that of the plan.
    traces = Traces()
    traces.add([form], lambda _: [plan])
    changes = likely_changes(form, traces, goal)
    found = []
    for change, changed in zip(
        changes, trace([_changed(plan, each) for each in changes]), strict=True
    ):
        if changed is None:
            continue
        benefit = _benefit(plan, changed, goal)
        if benefit > 0:
            freed = plan.peak_memory.device_bytes - changed.peak_memory.device_bytes
            saved = plan.step_seconds - changed.step_seconds if goal == "time" else 0
            found.append((benefit, Suggestion(change, changed, freed, saved)))
    return [suggestion for _, suggestion in sorted(found, key=lambda each: -each[0])]


def likely_changes(form: Form, traces: Traces, goal: Goal) -> list[Change]:
    """The changes that help most by their estimates, the best first."""
    config = form.config
    world_size = form.estimate.world_size
    device = form.estimate.device

    def benefit(changed: Form) -> float:
        if goal == "device memory":
            return traces.device_share(form) - traces.device_share(changed)
        if goal == "memory":
            return traces.memory_share(form) - traces.memory_share(changed)
        saved = traces.seconds(form) - traces.seconds(changed)
        helps = saved >= MIN_TIME_SAVING * traces.seconds(form) and traces.fits(changed)
        return saved if helps else 0

    changes = (
        speedup_changes(config, world_size, device)
        if goal == "time"
        else memory_saving_changes(config, world_size)
    )
    # Values of one key exclude each other, so only the best of them is worth a line.
    best: dict[str, tuple[float, Change]] = {}
    for change, changed in _valid_forms(changes, device):
        key = competition_key(change)
        if (gain := benefit(changed)) > best.get(key, (0, change))[0]:
            best[key] = gain, change
    ranked = sorted(best.values(), key=lambda each: -each[0])
    return [change for _, change in ranked[:MAX_SUGGESTIONS]]


def _valid_forms(changes: Iterable[Change], device: DeviceSpec) -> Iterator[tuple[Change, Form]]:
    for change in changes:
        config = with_attention_choice(change.config, device)
        # A change that breaks a rule of the mesh is none.
        with suppress(ConfigError):
            key = frozenset({("change", change.text)})
            yield change, form_of(config, key, change.world_size, device)


def _changed(plan: TrainingPlan, change: Change) -> TrainingPlan:
    config = with_attention_choice(change.config, plan.device)
    return TrainingPlan(config, change.world_size, plan.device)


def _benefit(plan: TrainingPlan, changed: TrainingPlan, goal: Goal) -> float:
    """The gain of a change, by traces; 0 if it does not help."""
    if goal == "device memory":
        return plan.device_utilization - changed.device_utilization
    if goal == "memory":
        return plan.memory_utilization - changed.memory_utilization
    saved = plan.step_seconds - changed.step_seconds
    return saved if changed.fits and saved >= MIN_TIME_SAVING * plan.step_seconds else 0
