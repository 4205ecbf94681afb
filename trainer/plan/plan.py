"""The plan of a stage, from a trace of its step: memory and time on a number of devices, and
bottlenecks. Imports no torch but for a trace that is not known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from models.kernel_choice import kernel_for, kernels_of
from trainer.config.job_config import Config
from trainer.hardware.device_specs import DeviceSpec
from trainer.plan.document import format_gib
from trainer.plan.interconnect import first_groups_of, group_topologies, used_domain_size
from trainer.plan.rank_clock import rank_clocks
from trainer.plan.reserves import (
    HOST_BYTES_PER_PROCESS,
    PINNED_OVERHEAD,
    usable_device_bytes,
    usable_host_bytes,
)
from trainer.plan.step_time import StepTime, step_time_of
from trainer.trace.answers import traced_rank_steps
from trainer.trace.rank_step import RankStep
from trainer.trace.tensors import DTYPE_BYTES, SAVED_ACTIVATIONS, MemoryEstimate

SECONDS_PER_DAY = 86_400
BOTTLENECK_THRESHOLD = 0.05
"""Share of the step time from which a component is reported as a bottleneck."""
ATTENTION_CHANNELS = ("cp", "rotate", "exchange")
"""Channels over which context parallelism sends queries, keys and values."""


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
    auto_problems: Sequence[str] = ()
    """Why `memory.recompute = "auto"` found nothing that fits."""
    auto_choice: str = ""
    """The options that `memory.recompute = "auto"` chose, and the limit that binds."""

    @cached_property
    def rank_steps(self) -> Sequence[RankStep]:
        """The traced step of every pipeline rank. Raises UntraceableError."""
        return traced_rank_steps(self.config, self.world_size)

    @property
    def mesh(self) -> dict[str, int]:
        return self.config.parallelism.degrees(self.world_size)

    # ---- memory

    @property
    def memory_by_pp_rank(self) -> list[MemoryEstimate]:
        return [step.memory for step in self.rank_steps]

    @cached_property
    def peak_memory(self) -> MemoryEstimate:
        return max(self.memory_by_pp_rank, key=attrgetter("device_bytes"))

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
        return max(self.memory_by_pp_rank, key=attrgetter("host_bytes"))

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
        groups = group_topologies(self.config, self.world_size, self.device)
        ranks = rank_clocks(self.config, self.rank_steps, self.device, groups)
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

    # ---- bottlenecks

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
        notes = list[str]()
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
        if self.config.distributed.through_host:
            notes.append(
                "distributed.through_host = true is not planned: assumes NCCL, and a GPU for each rank"
            )
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


def _list_gib(sizes: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {format_gib(size)}" for name, size in sizes)
