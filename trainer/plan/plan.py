"""A plan: what a configuration needs and how long it takes on so many devices, what limits it, and what would help.

    plan = plan_of(config, 32, load_device("h100-80gb"))
    plan.fits, plan.misfits, plan.mfu, plan.days, plan.limits, plan.changes

Without torch, and in some milliseconds; a search makes thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from trainer.config.job_config import Config
from trainer.errors import ConfigError
from trainer.hardware.device_specs import DeviceSpec
from trainer.memory import auto
from trainer.memory.estimator import DTYPE_BYTES, GIB, SAVED_ACTIVATIONS, MemoryEstimate, estimate_memory_per_pp_rank
from trainer.plan.critical_path import StepTime, predict_step_time
from trainer.plan.suggestions import Candidate, memory_saving_candidates, speedup_candidates

DEVICE_RESERVE_FRACTION = 1 - auto.DEVICE_FRACTION
"""Of a device's memory, for what the ledger does not count: holes in the allocator, workspaces of kernels and of NCCL, the
driver's own. The same that `memory.recompute = "auto"` leaves."""
HOST_RESERVE_FRACTION = 0.1
"""Of a node's memory, for the operating system and what it caches of the data."""
HOST_BYTES_PER_PROCESS = 5 * GIB
"""Host memory of a rank beside the ledger's: torch, CUDA's context, buffers of NCCL, workers that read data."""
SECONDS_PER_DAY = 86_400
BOTTLENECK_THRESHOLD = 0.05
"""Of the time of an update, from which on its cause is a limit worth telling."""

MIN_TIME_SAVING = 0.005
"""Of the time of an update, which a change must save to be told."""


@dataclass(frozen=True)
class Suggestion:
    """A change of a key or, of degrees, of two that belong together."""

    text: str
    plan: TrainingPlan
    freed_bytes: float
    """Bytes of a device."""
    saved_seconds: float
    """Seconds of an update."""
    benefit: float
    """By which it is compared with others."""


@dataclass(frozen=True)
class TrainingPlan:
    """Of a run, or of one of its stages."""

    config: Config
    """With `memory.recompute = "auto"` made into what it takes on this device."""
    world_size: int
    device: DeviceSpec
    name: str = ""
    """The stage's."""
    notes: tuple[str, ...] = field(default=())

    # ---- memory

    @cached_property
    def memory_by_pp_rank(self) -> list[MemoryEstimate]:
        """Of a rank at each place of the pipeline, by kind."""
        return estimate_memory_per_pp_rank(self.config, self.world_size)

    @cached_property
    def peak_memory(self) -> MemoryEstimate:
        return max(self.memory_by_pp_rank, key=lambda ledger: ledger.device_bytes)

    @property
    def usable_device_memory(self) -> float:
        """Bytes of a device that may be filled."""
        return self.device.memory * (1 - DEVICE_RESERVE_FRACTION)

    @property
    def device_reserve(self) -> float:
        """Bytes of a device that are left to what nobody counts."""
        return self.device.memory - self.usable_device_memory

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a host."""
        return min(self.world_size, self.device.devices_per_node)

    @cached_property
    def host_memory(self) -> dict[str, float]:
        """Bytes of a node's memory, by kind, where most is needed."""
        ledger = max(self.memory_by_pp_rank, key=lambda found: found.host_bytes)
        kinds = {line.name: line.host_bytes for line in ledger.items if line.host_bytes}
        if SAVED_ACTIVATIONS in kinds:
            kinds[SAVED_ACTIVATIONS] *= auto.PINNED_OVERHEAD
        kinds["processes"] = HOST_BYTES_PER_PROCESS
        return {kind: self.ranks_per_node * size for kind, size in kinds.items()}

    @property
    def host_memory_needed(self) -> float:
        return sum(self.host_memory.values())

    @property
    def usable_host_memory(self) -> float:
        return self.device.host_memory * (1 - HOST_RESERVE_FRACTION)

    @cached_property
    def memory_shortages(self) -> list[str]:
        """What does not suffice, in words."""
        shortages = [*self.notes]
        if self.peak_memory.device_bytes > self.usable_device_memory:
            where = f", rank {self.peak_memory.pp_rank} of the pipeline" if self.peak_memory.pp > 1 else ""
            shortages.append(
                f"a device needs {_gib(self.peak_memory.device_bytes)} GiB {self.peak_memory.phase}{where}, and has "
                f"{_gib(self.usable_device_memory)} of {_gib(self.device.memory)} to fill: {_largest_lines(self.peak_memory)}"
            )
        if self.host_memory_needed > self.usable_host_memory:
            kinds = sorted(self.host_memory.items(), key=lambda item: -item[1])[:3]
            breakdown = ", ".join(f"{kind} {_gib(size)}" for kind, size in kinds)
            shortages.append(
                f"a node of {self.ranks_per_node} ranks needs {_gib(self.host_memory_needed)} GiB of host memory, and has "
                f"{_gib(self.usable_host_memory)} of {_gib(self.device.host_memory)} to fill: {breakdown}"
            )
        return shortages

    @property
    def fits(self) -> bool:
        return not self.memory_shortages

    @property
    def memory_utilization(self) -> float:
        """What is needed over what there is, of devices or of nodes, whichever is worse."""
        return max(
            self.peak_memory.device_bytes / self.usable_device_memory, self.host_memory_needed / self.usable_host_memory
        )

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of a checkpoint on disk: weights and both moments."""
        stored = max(4, DTYPE_BYTES[self.config.training.dtype])
        moment = 2 if self.config.memory.optimizer_dtype == "bfloat16" else stored
        return (stored + 2 * moment) * self.config.model.build().num_parameters

    # ---- time

    @cached_property
    def step_time(self) -> StepTime:
        return predict_step_time(self.config, self.world_size, self.device)

    @property
    def step_seconds(self) -> float:
        """Of an update."""
        return self.step_time.seconds

    @property
    def model_flops(self) -> float:
        """Of an update."""
        return self.config.model.build().flops(tokens=self.step_time.tokens, pairs=self.step_time.pairs)

    @property
    def mfu(self) -> float:
        """Model FLOPs over what all devices could do at their dense bfloat16 peak; nothing that is computed again counts."""
        return self.model_flops / (self.step_seconds * self.world_size * self.device.peak_flops)

    @property
    def hfu(self) -> float:
        """The same of FLOPs that are carried out."""
        return self.step_time.executed_flops / (self.step_seconds * self.world_size * self.device.peak_flops)

    @property
    def tokens_per_second(self) -> float:
        return self.step_time.tokens / self.step_seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.world_size

    @property
    def total_tokens(self) -> float:
        """Of all updates."""
        return self.step_time.tokens * self.config.training.steps

    @property
    def days(self) -> float:
        """Of all updates; evaluation, checkpoints that are not written beside them and failures come on top."""
        return self.step_seconds * self.config.training.steps / SECONDS_PER_DAY

    @property
    def device_hours(self) -> float:
        return self.days * 24 * self.world_size

    # ---- what limits it

    @cached_property
    def bottlenecks(self) -> list[str]:
        """What bounds it, in words: memory that does not suffice, then what takes most of an update's time."""
        busiest = self.step_time.busiest
        fractions = sorted(
            ((seconds / self.step_seconds, name) for name, seconds in busiest.breakdown().items()), reverse=True
        )
        bottlenecks = [*self.memory_shortages]
        for fraction, name in fractions:
            if fraction >= BOTTLENECK_THRESHOLD:
                bottlenecks.append(f"{fraction:.0%} of the time: {name}{self._attention_rate_note(name)}")
        return bottlenecks

    @property
    def assumptions(self) -> list[str]:
        """What these figures take for granted, in words."""
        notes, training = [], self.config.training
        if self.config.context_plan().packs_documents:
            notes.append("each row is one document: packed rows attend to less, and take less time")
        if training.attention != "auto" and self.device.attention_kernel(training.attention) != training.attention:
            notes.append(f'no rates of training.attention = "{training.attention}" are known here: counted as flash')
        if training.dtype != "bfloat16":
            notes.append(f"rates are those of bfloat16, a sixteenth for {training.dtype}: a rough guess")
        return notes

    def _attention_rate_note(self, name: str) -> str:
        if name != "attention":
            return ""
        kernel, width = self.config.training.attention, self.config.model.build().head_dim
        forward, backward = self.device.attention_rates(kernel, width)
        return f", {self.device.attention_kernel(kernel)} at {forward / 1e12:.0f} TFLOP/s forward and {backward / 1e12:.0f} backward"

    @cached_property
    def suggestions(self) -> list[Suggestion]:
        """The three keys whose change helps most: frees most where it does not fit, else saves most time and still fits."""
        best_by_key: dict[str, Suggestion] = {}
        candidates = memory_saving_candidates if self.memory_shortages else speedup_candidates
        for candidate in candidates(self.config, self.world_size, self.device):
            suggestion = self._evaluate(candidate)
            best = best_by_key.get(candidate.key)
            if suggestion is not None and (best is None or suggestion.benefit > best.benefit):
                best_by_key[candidate.key] = suggestion
        return sorted(best_by_key.values(), key=lambda change: -change.benefit)[:3]

    def _evaluate(self, candidate: Candidate) -> Suggestion | None:
        """None where it does not help."""
        candidate_plan = TrainingPlan(candidate.config, candidate.world_size, self.device)
        freed_bytes = self.peak_memory.device_bytes - candidate_plan.peak_memory.device_bytes
        if self.memory_shortages:
            reduction = self.memory_utilization - candidate_plan.memory_utilization
            return Suggestion(candidate.text, candidate_plan, freed_bytes, 0, reduction) if reduction > 0 else None
        if (
            not candidate_plan.fits
            or self.step_seconds - candidate_plan.step_seconds < MIN_TIME_SAVING * self.step_seconds
        ):
            return None
        saved_seconds = self.step_seconds - candidate_plan.step_seconds
        return Suggestion(candidate.text, candidate_plan, freed_bytes, saved_seconds, saved_seconds)


@dataclass(frozen=True)
class RunPlan:
    """Of all stages of a run, one after the other."""

    stages: tuple[TrainingPlan, ...]

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def memory_shortages(self) -> list[str]:
        return [f"{_stage_prefix(stage)}{shortage}" for stage in self.stages for shortage in stage.memory_shortages]

    @property
    def days(self) -> float:
        return sum(stage.days for stage in self.stages)

    @property
    def device_hours(self) -> float:
        return sum(stage.device_hours for stage in self.stages)

    @property
    def total_tokens(self) -> float:
        return sum(stage.total_tokens for stage in self.stages)


def plan_stage(config: Config, world_size: int, device: DeviceSpec, *, name: str = "") -> TrainingPlan:
    """Of a single stage. The configuration must have no problems."""
    notes: tuple[str, ...] = ()
    try:
        config = auto.fit_memory_options(
            config, world_size, ranks_per_node=min(world_size, device.devices_per_node), **_memory_limits(device)
        )
    except ConfigError as error:
        notes = tuple(error.problems)
        memory_overrides = {"recompute": "full", "device_gib": None}
        config = config.model_copy(update={"memory": config.memory.model_copy(update=memory_overrides)})
    return TrainingPlan(config, world_size, device, name, notes)


def plan_run(config: Config, world_size: int, device: DeviceSpec) -> RunPlan:
    """Of a configuration with all its stages."""
    return RunPlan(
        tuple(plan_stage(stage.config, world_size, device, name=stage.name) for stage in config.training_stages)
    )


def _memory_limits(device: DeviceSpec) -> dict[str, float]:
    return {"device": device.memory, "host": device.host_memory}


def _largest_lines(ledger: MemoryEstimate) -> str:
    lines: Sequence[tuple[str, float]] = sorted(
        ((line.name, line.device_bytes) for line in ledger.items), key=lambda x: -x[1]
    )
    return ", ".join(f"{name} {_gib(size)}" for name, size in lines[:3])


def _stage_prefix(plan: TrainingPlan) -> str:
    return f'stage "{plan.name}": ' if plan.name else ""


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size < 100 * GIB else f"{size / GIB:,.0f}"
