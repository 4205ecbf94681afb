"""`memory.recompute = "auto"` and `memory.loss_chunk_mib = "auto"`: the fastest memory options that
fit. Coarse estimates rank them; the answer is traced. Imports no torch but for a trace that is not
known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from trainer.config.job_config import Config
from trainer.config.overrides import with_overrides
from trainer.config.sections import MIN_LOSS_CHUNK_MIB
from trainer.config.toml_format import toml_value
from trainer.errors import ConfigError
from trainer.hardware.attention_choice import with_attention_choice
from trainer.hardware.device_specs import DeviceSpec
from trainer.hardware.host import GIB
from trainer.plan.plan import TrainingPlan
from trainer.plan.reserves import DEVICE_FRACTION, HOST_FRACTION
from trainer.plan.traced_forms import MAX_ROUNDS, NEAR_TIE, TIE_FACTOR, Form, Traces, form_of
from trainer.plan.tracing import Trace, traced_plans

MEMORY_OPTIONS: dict[str, tuple[Any, ...]] = {
    "recompute": ("none", "keep_attention", "full"),
    "offload": ("none", "inputs", "inputs_and_attention"),
    "mlp_tile_mib": (None, 1024, 256),
    "head_groups": (1, 2, 4, 8, 16),
    "blocks_per_checkpoint": (1, 2, 4, 8),
}
"""Values by key, the first of them the simplest."""
LOSS_CHUNKS_MIB = (MIN_LOSS_CHUNK_MIB, 512, 1024, 2048, 4096)
"""With a vocabulary of 201,088, a chunk of 1024 MiB is 1,334 rows; one four times as large takes 4 %
off a step of gpt-oss-20b on an H200 (benchmarks/measured/2026-11-27-h200.jsonl).
"""


class NothingFitsError(ConfigError):
    """`closest` is the plan that needs least."""

    def __init__(self, problems: list[str], closest: TrainingPlan) -> None:
        super().__init__(problems)
        self.closest = closest


@dataclass(frozen=True)
class Choice:
    """The plan that a run with "auto" takes."""

    plan: TrainingPlan
    description: str = ""
    """The chosen options as TOML assignments, and what a better option lacks; empty if nothing was
    "auto".
    """

    @property
    def config(self) -> Config:
        """The configuration of a run, whose ranks may pin as much of their host as was planned."""
        memory = self.plan.config.memory
        if memory.offload == "none" or memory.host_budget_gib is not None:
            return self.plan.config
        return with_overrides(
            self.plan.config, {"memory.host_budget_gib": self.plan.usable_host_memory / GIB}
        )


def choose_memory_options(
    config: Config, world_size: int, device: DeviceSpec, *, trace: Trace = traced_plans
) -> Choice:
    """Resolves `memory.recompute` and `memory.loss_chunk_mib` if they are "auto"; keys of `memory`
    that the user set are kept.

    Raises NothingFitsError, or ConfigError if every candidate breaks a rule.
    """
    search = _OptionSearch(config, world_size, device)
    return search.choice(trace) if search.is_needed else Choice(search.stated_plan())


def first_guess(config: Config, world_size: int, device: DeviceSpec) -> TrainingPlan:
    """The plan that `choose_memory_options` traces first.

    Raises ConfigError if every candidate breaks a rule.
    """
    search = _OptionSearch(config, world_size, device)
    return (
        search.plan(search.best() or search.leanest())
        if search.is_needed
        else search.stated_plan()
    )


def with_stated_memory(config: Config, device: DeviceSpec) -> tuple[Config, DeviceSpec]:
    """The configuration and the device after `memory.device_gib` has become the device's memory."""
    stated = config.memory.device_gib
    if stated is None:
        return config, device
    unstated = with_overrides(config, {"memory.device_gib": None})
    return unstated, replace(device, memory=stated * GIB)


class _OptionSearch:
    """Memory options of one layout, and their traces."""

    def __init__(self, config: Config, world_size: int, device: DeviceSpec) -> None:
        memory = config.memory
        config, device = with_stated_memory(config, device)
        self.config = with_attention_choice(config, device)
        self.world_size = world_size
        self.device = device
        self.traces = Traces()
        self.problems: list[str] = []
        self.is_open = memory.recompute == "auto"
        """Whether more than the chunk of logits can be chosen."""
        self.is_needed = self.is_open or memory.loss_chunk_mib == "auto"
        """Whether anything is left to choose."""

    @cached_property
    def forms(self) -> list[Form]:
        """All choices, with the smallest chunk of logits. Raises ConfigError if there is none."""
        forms = [*filter(None, map(self.form, _candidates(self.config)))]
        if not forms:
            raise ConfigError(self.problems)
        return forms

    def stated_plan(self) -> TrainingPlan:
        """The plan if nothing is left to choose."""
        return TrainingPlan(self.config, self.world_size, self.device)

    def plan(self, form: Form) -> TrainingPlan:
        """Raises UntraceableError once it is asked what no trace shows."""
        return self.traces.plan_of(form) or TrainingPlan(form.config, self.world_size, self.device)

    def form(self, options: dict[str, Any]) -> Form | None:
        """None if the options break a rule."""
        config = with_overrides(self.config, options)
        try:
            return form_of(config, frozenset(options.items()), self.world_size, self.device)
        except ConfigError as error:
            self.problems = self.problems or error.problems
            return None

    def choice(self, trace: Trace) -> Choice:
        best = self.traced_best(trace)
        found = best or self.leanest()
        plan = self.plan(found)
        if best is None and self.is_open:
            raise self.refusal(plan, trace)
        return Choice(plan, self.description(found))

    def traced_best(self, trace: Trace) -> Form | None:
        """The fastest form that fits. None if not even the leanest does."""
        for _ in range(MAX_ROUNDS):
            best = self.best()
            wanted = [best, self.nearest_better(best)] if best else [self.leanest()]
            unknown = [form for form in wanted if form is not None and form not in self.traces]
            if not unknown:
                return best
            self.traces.add(unknown, trace)
        # Estimates are so far off that only what was traced counts, the leanest form included.
        for _ in range(MAX_ROUNDS):
            leanest = self.leanest()
            if leanest in self.traces:
                break
            self.traces.add([leanest], trace)
        return self._fastest(filter(self.traces.fits, self.traces.forms), key=_complexity)

    def best(self) -> Form | None:
        """The fastest form that fits, as far as is known."""
        fitting = filter(self.traces.fits, self.forms)
        chosen = self._fastest(fitting, key=_complexity)
        if chosen is None or self.config.memory.loss_chunk_mib != "auto":
            return chosen
        chunks = ({"memory.loss_chunk_mib": size} for size in LOSS_CHUNKS_MIB)
        forms = filter(None, (self.form(dict(chosen.key) | chunk) for chunk in chunks))
        return self._fastest(filter(self.traces.fits, forms), key=_chunk_bytes) or chosen

    def _fastest(self, forms: Iterable[Form], *, key: Any) -> Form | None:
        """The first by its key of those that are as fast as the fastest."""
        found = [*forms]
        seconds = self.traces.seconds
        limit = TIE_FACTOR * min(map(seconds, found), default=0)
        return min((form for form in found if seconds(form) <= limit), key=key, default=None)

    def leanest(self) -> Form:
        """The form that needs least; of equal ones the one with most options, since no estimate is
        exact.
        """
        return min(sorted(self.forms, key=_complexity, reverse=True), key=self.traces.memory_share)

    def nearest_better(self, best: Form) -> Form | None:
        """The form that differs least of those that are faster, or as fast and simpler. Once it is
        traced it does not fit; otherwise it may be the best.
        """
        seconds = self.traces.seconds
        limit = seconds(best)

        def is_better(form: Form) -> bool:
            may_be_best = form not in self.traces and self.traces.fits(form)
            tie = NEAR_TIE if may_be_best else TIE_FACTOR
            is_simpler = _complexity(form) < _complexity(best)
            is_as_fast = seconds(form) <= tie * limit
            is_faster = TIE_FACTOR * seconds(form) < limit
            return is_faster or (is_simpler and is_as_fast)

        def distance(form: Form) -> tuple[int, float]:
            # Of equally similar ones the slowest, which would gain least.
            return len(_differences(form.config, best.config)), -seconds(form)

        better = filter(is_better, self.forms if self.is_open else ())
        return min(better, key=distance, default=None)

    def limit(self, best: Form) -> str:
        """The memory that the nearest better form lacks."""
        nearest = self.nearest_better(best)
        plan = self.traces.plan_of(nearest) if nearest else None
        if nearest is None or plan is None:
            return ""
        others = ", ".join(_differences(nearest.config, best.config))
        return f"{others} {_shortage(plan)}"

    def refusal(self, leanest: TrainingPlan, trace: Trace) -> NothingFitsError:
        """Error that names what binds: the device, the node's host memory, or both."""
        problem = (
            'memory.recompute = "auto" finds no options that fit: at least, '
            f"{describe_memory_options(leanest.config)} {_shortage(leanest)}"
        )
        on_device = (form for form in self.forms if self.traces.device_share(form) <= 1)
        other = min(on_device, key=self.traces.memory_share, default=None)
        if other is not None and leanest.device_utilization > 1:
            self.traces.add([other], trace)
            plan = self.traces.plan_of(other)
            if plan is not None and plan.device_utilization <= 1:
                options = describe_memory_options(plan.config)
                problem += f"; {options} would fit the device, but {_shortage(plan)}"
        return NothingFitsError([problem], leanest)

    def description(self, chosen: Form) -> str:
        choices = []
        if self.is_open:
            choices.append(describe_memory_options(chosen.config))
        if self.config.memory.loss_chunk_mib == "auto":
            choices.append(_assignment("loss_chunk_mib", chosen.config.memory.loss_chunk_mib))
        return ": ".join(filter(None, (", ".join(choices), self.limit(chosen))))


def _candidates(config: Config) -> Iterator[dict[str, Any]]:
    """All combinations of what is open, with the smallest chunk of logits."""
    memory = config.memory
    chunk = (
        {"memory.loss_chunk_mib": MIN_LOSS_CHUNK_MIB} if memory.loss_chunk_mib == "auto" else {}
    )
    if memory.recompute != "auto":
        yield chunk
        return
    # Keys that the user set are constraints. `recompute` itself says "auto".
    stated = memory.model_fields_set - {"recompute"}
    open_keys = [key for key in MEMORY_OPTIONS if key not in stated]
    for values in product(*(MEMORY_OPTIONS[key] for key in open_keys)):
        options = zip(open_keys, values, strict=True)
        yield {f"memory.{key}": value for key, value in options} | chunk


def _shortage(plan: TrainingPlan) -> str:
    """The memory that a plan lacks."""
    limits = (
        (
            plan.peak_memory.device_bytes,
            plan.usable_device_memory,
            f"usable on a device ({DEVICE_FRACTION:.0%} of it)",
        ),
        (
            plan.host_memory_needed,
            plan.usable_host_memory,
            f"of host memory usable on a node ({HOST_FRACTION:.0%} of it)",
        ),
    )
    return " and ".join(
        f"needs {needed / GIB:.1f} of the {usable / GIB:.1f} GiB {of_what}"
        for needed, usable, of_what in limits
        if needed > usable
    )


def _differences(config: Config, chosen: Config) -> list[str]:
    """The memory options of a configuration that are not the chosen ones; of `recompute`, the
    value alone.
    """
    values = {key: getattr(config.memory, key) for key in MEMORY_OPTIONS}
    other = {key: value for key, value in values.items() if value != getattr(chosen.memory, key)}
    return [
        toml_value(value)
        if key == "recompute"
        else f"no memory.{key}"
        if value is None
        else _assignment(key, value)
        for key, value in other.items()
    ]


def describe_memory_options(config: Config) -> str:
    """The options that are not the simplest, and `recompute`, as TOML assignments."""
    return ", ".join(_assignment(key, value) for key, value in _stated_options(config))


def _stated_options(config: Config) -> list[tuple[str, Any]]:
    values = [(key, getattr(config.memory, key)) for key in MEMORY_OPTIONS]
    return [
        (key, value)
        for key, value in values
        if key == "recompute" or value != MEMORY_OPTIONS[key][0]
    ]


def _complexity(form: Form) -> tuple[int, int]:
    """The number of options that are not the simplest, and how far they are from it."""
    memory = form.config.memory
    places = [
        values.index(value)
        for key, values in MEMORY_OPTIONS.items()
        if (value := getattr(memory, key)) in values
    ]
    return sum(map(bool, places)), sum(places)


def _chunk_bytes(form: Form) -> int:
    return form.config.memory.loss_chunk_bytes


def _assignment(key: str, value: Any) -> str:
    return f"memory.{key} = {toml_value(value)}"
