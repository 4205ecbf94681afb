"""Estimates of layouts, corrected by the traces of some. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from trainer.config import checks
from trainer.config.job_config import Config
from trainer.errors import ConfigError
from trainer.hardware.device_specs import DeviceSpec
from trainer.plan.plan import TrainingPlan
from trainer.plan.rough import RoughPlan
from trainer.plan.tracing import Trace

TIE_FACTOR = 1.005
"""Forms within this factor of the fastest count as equal, since plans are not exact to 0.5 %."""
NEAR_TIE = 1.02
"""Forms within this factor of each other are in no order until both are traced."""
NEAR_FIT = 1.05
"""Share of the usable memory with which a form may still fit, until it is traced."""
MAX_ROUNDS = 8
"""Rounds of traces until the best is known."""


@dataclass(frozen=True, eq=False)
class Form:
    """A layout with memory options."""

    config: Config
    key: frozenset[tuple[str, Any]]
    """Its changes to the configuration of the search."""
    estimate: RoughPlan

    @property
    def kind(self) -> tuple[int, str]:
        """Pipeline ranks and recomputation: estimates that differ in them are off by other factors."""
        return self.config.parallelism.pp, self.config.memory.recompute

    @cached_property
    def mesh(self) -> tuple[int, ...]:
        return tuple(self.config.parallelism.degrees(self.estimate.world_size).values())


def form_of(
    config: Config, key: frozenset[tuple[str, Any]], world_size: int, device: DeviceSpec
) -> Form:
    """Raises ConfigError if the configuration breaks a rule, or if no trace shows its step."""
    if problems := [*checks.placed_problems(config, world_size)]:
        raise ConfigError(problems)
    estimate = RoughPlan(config, world_size, device)
    if estimate.exceeds_host_budget:
        budget = f"memory.host_budget_gib = {config.memory.host_budget_gib:g}"
        raise ConfigError([f"{budget}: which micro-batches of a pipeline share it is not planned"])
    return Form(config, key, estimate)


@dataclass(frozen=True)
class Ratios:
    """A trace relative to its estimate."""

    seconds: float = 1
    device: float = 1
    host: float = 1


class Traces:
    """The forms that are traced, and what they tell about others: each is corrected like the traced
    one that is most alike, of its own mesh if there is one, else of its kind.
    """

    def __init__(self, memory_ratio: float = 1) -> None:
        self._default = Ratios(device=memory_ratio)
        self._plans: dict[frozenset[tuple[str, Any]], TrainingPlan | None] = {}
        self._by_mesh: dict[tuple[int, ...], list[tuple[Form, Ratios]]] = {}
        self._latest: list[tuple[Form, Ratios]] = []
        self._nearest: dict[frozenset[tuple[str, Any]], Ratios] = {}

    def __contains__(self, form: Form) -> bool:
        return form.key in self._plans

    @property
    def plans(self) -> list[TrainingPlan]:
        return [plan for plan in self._plans.values() if plan is not None]

    @property
    def forms(self) -> list[Form]:
        return [form for form, _ in self._latest]

    def plan_of(self, form: Form) -> TrainingPlan | None:
        return self._plans.get(form.key)

    def add(self, forms: Sequence[Form], trace: Trace) -> None:
        plans = trace(
            [
                TrainingPlan(form.config, form.estimate.world_size, form.estimate.device)
                for form in forms
            ]
        )
        for form, plan in zip(forms, plans, strict=True):
            self._plans[form.key] = plan
            if plan is not None:
                found = form, _ratios(plan, form.estimate)
                self._by_mesh.setdefault(form.mesh, []).append(found)
                self._latest.append(found)
        self._nearest.clear()

    @property
    def memory_ratio(self) -> float:
        ratios = [each.device for _, each in self._latest]
        return median(ratios) if ratios else self._default.device

    def ratios(self, form: Form) -> Ratios:
        if form.key not in self._nearest:
            traced = self._by_mesh.get(form.mesh) or [
                each for each in self._latest if each[0].kind == form.kind
            ]
            likeness = [len(form.key & other.key) for other, _ in traced]
            self._nearest[form.key] = (
                traced[likeness.index(max(likeness))][1] if traced else self._default
            )
        return self._nearest[form.key]

    def seconds(self, form: Form) -> float:
        return self.ratios(form).seconds * form.estimate.step_seconds

    def device_share(self, form: Form) -> float:
        """Memory of a device, relative to what is usable."""
        return self.ratios(form).device * form.estimate.device_share

    def memory_share(self, form: Form) -> float:
        """Memory of device or host, relative to what is usable: whichever is fuller."""
        return max(self.device_share(form), self.ratios(form).host * form.estimate.host_share)

    def fits(self, form: Form) -> bool:
        is_untraceable = form in self and self._plans[form.key] is None
        return not is_untraceable and self.memory_share(form) <= 1

    def may_fit(self, form: Form) -> bool:
        """Whether a form fits that is not traced, as far as estimates tell."""
        return form not in self and self.memory_share(form) <= NEAR_FIT


def _ratios(plan: TrainingPlan, estimate: RoughPlan) -> Ratios:
    return Ratios(
        plan.step_seconds / estimate.step_seconds,
        plan.device_utilization / estimate.device_share,
        plan.host_utilization / estimate.host_share,
    )
