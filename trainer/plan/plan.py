"""Plans a stage by formulas: memory and time on a number of devices, bottlenecks, and changes that
would help.

    plan = plan_stage(config, 32, load_device("h100-80gb"))
    plan.fits, plan.memory_shortages, plan.mfu, plan.days, plan.bottlenecks, plan.suggestions

Imports no torch. A plan takes milliseconds, since a search makes thousands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from models.kernel_choice import kernel_for, kernels_of
from trainer.config.job_config import Config
from trainer.errors import ConfigError
from trainer.hardware.attention_choice import attention_problems, with_attention_choice
from trainer.hardware.device_specs import DeviceSpec
from trainer.hardware.host import GIB
from trainer.plan import memory_options
from trainer.plan.comm_volume import attention_bytes
from trainer.plan.critical_path import StepTime, predict_step_time
from trainer.plan.document import format_gib
from trainer.plan.interconnect import first_groups_of, used_domain_size
from trainer.plan.memory_advice import Change
from trainer.plan.memory_estimate import (
    SAVED_ACTIVATIONS,
    MemoryEstimate,
    estimate_memory_per_pp_rank,
    fullest_estimates,
    rank_memory,
)
from trainer.plan.rank_workload import rank_workload
from trainer.plan.reserves import (
    HOST_BYTES_PER_PROCESS,
    PINNED_OVERHEAD,
    usable_device_bytes,
    usable_host_bytes,
)
from trainer.plan.suggestions import competition_key, memory_saving_changes, speedup_changes
from trainer.trace.tensors import DTYPE_BYTES

SECONDS_PER_DAY = 86_400
BOTTLENECK_THRESHOLD = 0.05
"""Share of the step time from which a component is reported as a bottleneck."""
MIN_TIME_SAVING = 0.005
"""Share of the step time that a suggestion must save."""


@dataclass(frozen=True)
class Suggestion:
    """A change of one key, or of two mesh degrees."""

    text: str
    plan: TrainingPlan
    benefit: float
    """Sort key among suggestions."""
    freed_bytes: float
    """Per device."""
    saved_seconds: float = 0
    """Per step."""


@dataclass
class WindowShare:
    """Attention of a step in layers with the same window."""

    layers: int = 0
    flops: float = 0
    sent_bytes: float = 0


@dataclass(frozen=True)
class TrainingPlan:
    """Plan of one training stage."""

    config: Config
    """With `training.attention = "auto"` and `memory.recompute = "auto"` resolved for this
    device.
    """
    world_size: int
    device: DeviceSpec
    name: str = ""
    """Name of the stage."""
    auto_problems: tuple[str, ...] = ()
    """Why `memory.recompute = "auto"` found nothing that fits."""
    notes: tuple[str, ...] = ()
    """Notes on how it was planned."""
    auto_choice: str = ""
    """The options that `memory.recompute = "auto"` chose, and the limit that binds."""

    @property
    def mesh(self) -> dict[str, int]:
        return self.config.parallelism.degrees(self.world_size)

    # ---- memory

    @cached_property
    def memory_by_pp_rank(self) -> list[MemoryEstimate]:
        return estimate_memory_per_pp_rank(self.config, self.world_size)

    @cached_property
    def fullest_memory(self) -> list[MemoryEstimate]:
        """Memory of the pipeline ranks that can be the fullest."""
        return fullest_estimates(self.config, self.world_size)

    @cached_property
    def peak_memory(self) -> MemoryEstimate:
        return max(self.fullest_memory, key=lambda estimate: estimate.device_bytes)

    @property
    def usable_device_memory(self) -> float:
        """Bytes per device, without the reserve."""
        return usable_device_bytes(self.device)

    @property
    def device_reserve(self) -> float:
        return self.device.memory - self.usable_device_memory

    @property
    def ranks_per_node(self) -> int:
        return min(self.world_size, self.device.devices_per_node)

    @cached_property
    def peak_host_memory(self) -> MemoryEstimate:
        """Memory of the pipeline rank that needs most of its host."""
        return max(self.fullest_memory, key=lambda estimate: estimate.host_bytes)

    @cached_property
    def host_memory(self) -> dict[str, float]:
        """Bytes by item on the node that needs most."""
        estimate = self.peak_host_memory
        kinds = {item.name: item.host_bytes for item in estimate.items if item.host_bytes}
        if SAVED_ACTIVATIONS in kinds:
            # The allocator of pinned memory rounds buffers up, so more is pinned than stored.
            kinds[SAVED_ACTIVATIONS] *= PINNED_OVERHEAD
        kinds["processes"] = HOST_BYTES_PER_PROCESS
        # Every rank of a node counts like the one that needs most.
        return {kind: self.ranks_per_node * size for kind, size in kinds.items()}

    @property
    def host_memory_needed(self) -> float:
        return sum(self.host_memory.values())

    @property
    def usable_host_memory(self) -> float:
        return usable_host_bytes(self.device)

    @cached_property
    def memory_shortages(self) -> list[str]:
        """One sentence for each of device and host memory that does not suffice."""
        shortages = [*self.auto_problems]
        peak = self.peak_memory
        if peak.device_bytes > self.usable_device_memory:
            where = f", pp rank {peak.pp_rank}" if peak.pp > 1 else ""
            largest = _list_gib((item.name, item.device_bytes) for item in peak.largest_items)
            shortages.append(
                f"a device needs {format_gib(peak.device_bytes)} GiB ({peak.phase}{where}); usable are "
                f"{format_gib(self.usable_device_memory)} of {format_gib(self.device.memory)} GiB: {largest}"
            )
        if self.host_memory_needed > self.usable_host_memory:
            largest = _list_gib(sorted(self.host_memory.items(), key=lambda item: -item[1])[:3])
            shortages.append(
                f"a node of {self.ranks_per_node} ranks needs {format_gib(self.host_memory_needed)} GiB of host memory; "
                f"usable are {format_gib(self.usable_host_memory)} of {format_gib(self.device.host_memory)} GiB: {largest}"
            )
        return shortages

    @property
    def fits(self) -> bool:
        return not self.memory_shortages

    @property
    def memory_utilization(self) -> float:
        """Required over usable memory, of device or host, whichever is higher."""
        return max(self.device_utilization, self.host_utilization)

    @property
    def device_utilization(self) -> float:
        return self.peak_memory.device_bytes / self.usable_device_memory

    @property
    def host_utilization(self) -> float:
        return self.host_memory_needed / self.usable_host_memory

    @property
    def checkpoint_bytes(self) -> float:
        """Size on disk: weights and both moments."""
        # bfloat16 runs store their float32 master weights.
        stored = max(4, DTYPE_BYTES[self.config.training.dtype])
        moment = 2 if self.config.memory.optimizer_dtype == "bfloat16" else stored
        return (stored + 2 * moment) * self.config.model.build().num_parameters

    # ---- time

    @cached_property
    def step_time(self) -> StepTime:
        return predict_step_time(self.config, self.world_size, self.device)

    @property
    def attention_by_window(self) -> dict[int | None, WindowShare]:
        """Attention of the busiest rank."""
        rank = rank_memory(self.config, self.world_size, self.step_time.busiest.pp_rank)
        layers = Counter(kind.window for kind in rank.kinds.elements())
        sent = attention_bytes(rank)
        return {
            window: WindowShare(layers[window], sum(flops.values()), sent[window])
            for window, flops in rank_workload(rank).attention_by_window.items()
        }

    @property
    def step_seconds(self) -> float:
        return self.step_time.seconds

    @property
    def model_flops(self) -> float:
        """Per step, without recomputation; one document per sequence."""
        training = self.config.training
        model = self.config.model.build()
        pairs = training.global_batch_size * model.mean_pairs(training.seq_len)
        return model.flops(tokens=self.config.training.tokens_per_step, pairs=pairs)

    @property
    def mfu(self) -> float:
        """Model FLOPs, without recomputation, over the dense bfloat16 peak of all devices."""
        return self.model_flops / (self.step_seconds * self.world_size * self.device.peak_flops)

    @property
    def hfu(self) -> float:
        """Executed FLOPs, with recomputation, over the dense bfloat16 peak of all devices."""
        return self.step_time.executed_flops / (
            self.step_seconds * self.world_size * self.device.peak_flops
        )

    @property
    def tokens_per_second(self) -> float:
        return self.config.training.tokens_per_step / self.step_seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.world_size

    @property
    def total_tokens(self) -> float:
        return self.config.training.tokens_per_step * self.config.training.steps

    @property
    def days(self) -> float:
        """Days of all steps, without evaluation, synchronous checkpoints and failures."""
        return self.step_seconds * self.config.training.steps / SECONDS_PER_DAY

    @property
    def device_hours(self) -> float:
        return self.days * 24 * self.world_size

    # ---- bottlenecks and suggestions

    @cached_property
    def bottlenecks(self) -> list[str]:
        """Memory shortages, then the largest components of the step time."""
        breakdown = self.step_time.busiest.breakdown()
        fractions = sorted(
            ((seconds / self.step_seconds, name) for name, seconds in breakdown.items()),
            reverse=True,
        )
        return self.memory_shortages + [
            f"{fraction:.0%} of the step time: {name}{self._attention_rates() if name == 'attention' else ''}"
            for fraction, name in fractions
            if fraction >= BOTTLENECK_THRESHOLD
        ]

    @property
    def assumptions(self) -> list[str]:
        notes = [*self.notes]
        training = self.config.training
        if self.config.context_plan().packs_documents:
            notes.append(
                "assumes one document per sequence: packed documents attend to fewer tokens and take less time"
            )
        notes += [
            f'the device table has no rates for attention kernel "{kernel}": uses those of {rated}'
            for kernel in kernels_of(training.attention)
            if (rated := self.device.rated_kernel(kernel)) != kernel
        ]
        if self.auto_choice:
            notes.append(f'memory options that are "auto": {self.auto_choice}')
        notes += self._domain_note()
        if training.dtype != "bfloat16":
            notes.append(f"assumes one sixteenth of the bfloat16 rates for {training.dtype}")
        return notes

    def _domain_note(self) -> list[str]:
        """How much of a link domain the job uses, unless that is all of it."""
        first_groups = first_groups_of(self.config, self.world_size)
        domain_size = self.device.link_domain_size
        used = used_domain_size([*first_groups.values()], self.world_size, self.device)
        reason = (
            "as [link] used states"
            if self.device.link_domain_used
            else "so that no process group straddles one"
        )
        note = f"uses {used} of the {domain_size} GPUs of each NVLink domain, {reason}"
        return [note] if used < domain_size else []

    def _attention_rates(self) -> str:
        """Rates of the device table for the kernels of this run; empty unless in bfloat16, for
        which they are.
        """
        if self.config.training.dtype != "bfloat16":
            return ""
        choice = self.config.training.attention
        model = self.config.model.build()
        used = {
            kernel_for(choice, tokens=self.config.training.seq_len, window=window)
            for window in model.layers_by_window
        }
        return "".join(map(self._rates_of, sorted(used)))

    def _rates_of(self, kernel: str) -> str:
        rates = self.device.attention_rates(kernel, self.config.model.build().head_dim)
        forward, backward = (rate / 1e12 for rate in rates)
        return f", {self.device.rated_kernel(kernel)} at {forward:.0f} TFLOP/s forward and {backward:.0f} backward"

    @cached_property
    def suggestions(self) -> list[Suggestion]:
        """The three best changes: those that reduce memory most if the plan does not fit, else
        those that save most time.
        """
        if self.memory_shortages:
            changes = memory_saving_changes(self.config, self.world_size)
        else:
            changes = speedup_changes(self.config, self.world_size, self.device)
        # Values of one key exclude each other, so only the best of them is worth a line.
        best_by_key: dict[str, Suggestion] = {}
        for change in changes:
            suggestion = self._evaluate(change)
            best = best_by_key.get(key := competition_key(change))
            if suggestion is not None and (best is None or suggestion.benefit > best.benefit):
                best_by_key[key] = suggestion
        return sorted(best_by_key.values(), key=lambda suggestion: -suggestion.benefit)[:3]

    def _evaluate(self, change: Change) -> Suggestion | None:
        """Suggestion for a change; None if it does not help."""
        plan = TrainingPlan(
            with_attention_choice(change.config, self.device), change.world_size, self.device
        )
        return self.compare(change.text, plan)

    def compare(self, text: str, plan: TrainingPlan) -> Suggestion | None:
        """Suggestion that changes to `plan`; None if it does not help."""
        saved_seconds = 0.0
        if self.memory_shortages:
            benefit = self.memory_utilization - plan.memory_utilization
            helps = benefit > 0
        else:
            # Time first: it takes less than a look at the memory of every pass of a pipeline.
            benefit = saved_seconds = self.step_seconds - plan.step_seconds
            helps = benefit >= MIN_TIME_SAVING * self.step_seconds and plan.fits
        if not helps:
            return None
        freed_bytes = self.peak_memory.device_bytes - plan.peak_memory.device_bytes
        return Suggestion(text, plan, benefit, freed_bytes, saved_seconds)


def plan_stage(
    config: Config, world_size: int, device: DeviceSpec, *, name: str = ""
) -> TrainingPlan:
    """Plan of one stage, whose configuration must be valid. If `memory.recompute = "auto"` finds
    nothing that fits, plans the options that need least.

    Raises ConfigError if the device cannot run the attention kernel that the configuration names.
    """
    if unable := attention_problems(config, device):
        raise ConfigError(unable)
    config = with_attention_choice(config, device)
    device_gib = config.memory.device_gib
    try:
        choice = memory_options.choose_memory_options(
            config,
            world_size,
            ranks_per_node=min(world_size, device.devices_per_node),
            device_bytes=device.memory if device_gib is None else device_gib * GIB,
            host_bytes=device.host_memory,
        )
    except memory_options.NothingFitsError as error:
        return TrainingPlan(error.closest, world_size, device, name, tuple(error.problems))
    described = (
        memory_options.describe_choice(config, choice) if config.memory.recompute == "auto" else ""
    )
    return TrainingPlan(choice.config, world_size, device, name, auto_choice=described)


def _list_gib(sizes: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {format_gib(size)}" for name, size in sizes)
