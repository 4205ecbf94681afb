"""Models the forward and backward time of one rank: compute, exposed communication, and contention. Imports no torch.

All times are seconds per step, over all micro-batches. The constants below are the empirical assumptions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from trainer.config.job_config import Config
from trainer.hardware.device_specs import DeviceSpec
from trainer.memory.estimator import RankMemory
from trainer.plan import interconnect
from trainer.plan.comm_volume import CommVolume, rank_comm_volumes
from trainer.plan.flops import RankWorkload, workload_of
from trainer.plan.interconnect import GroupTopology
from trainer.plan.pipeline_bubble import ChunkTime

MATMUL_EFFICIENCY = 0.88
"""Of the best measured matmul rate: clocks drop under sustained load on random data. Chosen so that an 8B model reaches
650 TFLOP/s on H100, which explains published step times of several systems."""
MATMUL_HALF_RATE_DIM = 256
"""Matrix dimension at which a matmul runs at half its rate, because of tile (128 or 256) and wave quantization."""
ATTENTION_HALF_RATE_TOKENS = 700
"""Tokens at which an attention kernel reaches half its rate: 250 to 400 without a mask in the FlashAttention-3 paper's
charts. Estimated at twice that for a causal mask, which wastes half of each diagonal tile."""
DTYPE_RATE_FACTOR = {"bfloat16": 1.0, "float32": 1 / 16, "float64": 1 / 16}
"""Relative to bfloat16: A100 and H100 have 1/16 to 1/15 of its rate in float32 and float64."""
HBM_EFFICIENCY = 0.8
"""Share of the memory bandwidth that elementwise and norm kernels reach."""
KERNELS_PER_BLOCK = {"forward": 28, "backward": 60, "recompute": 24}
"""Eager kernel launches per block, micro-batch, tile and head group, estimated from the operations."""
COMPILED_KERNEL_FRACTION = 0.4
"""Share of the launches left after torch.compile has fused the operations between matmuls."""
EXPOSED_FSDP_UNITS = 2
"""FSDP units whose communication is exposed: the first all-gathers (embedding, first block) and last reduce-scatters."""
ASYNC_TP_OVERLAP = 0.3
"""Share of tp communication that `async_tp` hides: explains torchtitan's 876 instead of 829 tokens/s for 70B on 256 H100."""
CONTENTION_FRACTION = 0.1
"""Cost of overlapped communication: its kernels take SMs and bandwidth from compute."""
HOST_MEMORY_EFFICIENCY = 0.7
"""Share of the host memory bandwidth that AdamW reaches on all cores."""
STEP_OVERHEAD = 0.01
"""Seconds per step in which the device waits for Python: batch, gradient norm, learning-rate schedule."""

HOST = "host"
"""Channel of copies between device and host."""

CHANNEL_LABELS = {
    "pp": "stages (pp)",
    "dp_replicate": "gradients (dp_replicate)",
    "fsdp": "weights (fsdp)",
    "tp": "activations (tp)",
    "cp": "attention (cp)",
    "rotate": "KV (cp)",
    "exchange": "head exchange (cp)",
    HOST: "host copies",
}


@dataclass(frozen=True, kw_only=True)
class RankStepTime:
    """Seconds of one step on one rank. All fields but `overlapped` add up to the step time."""

    pp_rank: int
    matmul: float = 0
    """Excludes recomputation."""
    attention: float = 0
    recompute: float = 0
    memory_bound: float = 0
    """Norms, rotary embedding, residual additions."""
    loss_head: float = 0
    launch_overhead: float = 0
    """Gaps because kernels finish before the next launch."""
    exposed: Mapping[str, float] = field(default_factory=dict)
    """Exposed communication by channel, including `host`."""
    contention: float = 0
    """Slowdown of compute by overlapped communication."""
    optimizer: float = 0
    bubble: float = 0
    step_overhead: float = STEP_OVERHEAD
    overlapped: Mapping[str, float] = field(default_factory=dict)

    @property
    def compute(self) -> float:
        return self.matmul + self.attention + self.recompute + self.memory_bound + self.loss_head + self.launch_overhead

    @property
    def busy(self) -> float:
        """Forward and backward."""
        return self.compute + sum(self.exposed.values()) + self.contention

    @property
    def total(self) -> float:
        return self.busy + self.optimizer + self.bubble + self.step_overhead

    def breakdown(self) -> dict[str, float]:
        """Nonzero components by name; they add up to `total`."""
        seconds_by_kind = {
            "matmul": self.matmul,
            "attention": self.attention,
            "recompute": self.recompute,
            "memory-bound": self.memory_bound,
            "loss head": self.loss_head,
            "launch overhead": self.launch_overhead,
            **{f"exposed {CHANNEL_LABELS.get(channel, channel)}": exposed for channel, exposed in self.exposed.items()},
            "contention": self.contention,
            "optimizer": self.optimizer,
            "pipeline bubble": self.bubble,
            "step overhead": self.step_overhead,
        }
        return {name: seconds for name, seconds in seconds_by_kind.items() if seconds > 0}


SecondsByChannel = defaultdict[str, float]
PHASES_BY_DIRECTION = {"forward": ("forward",), "backward": ("backward", "recompute")}


@dataclass(frozen=True)
class CommCost:
    """Seconds of one kind of communication; `overlaps_with` is "attention" or "compute"."""

    channel: str
    exposed: float
    overlappable: float = 0
    overlaps_with: str = "compute"


class RankTimeModel:
    def __init__(
        self, config: Config, world_size: int, pp_rank: int, device: DeviceSpec, groups: Mapping[str, GroupTopology]
    ) -> None:
        self.config, self.device, self.groups = config, device, groups
        self.rank = RankMemory(config, world_size, pp_rank)
        self.workload: RankWorkload = workload_of(self.rank)
        self.context_plan = self.rank.block_memory.context_plan
        self._messages = rank_comm_volumes(self.rank)
        self._ranks_per_node = min(world_size, device.devices_per_node)
        self._dtype_factor = DTYPE_RATE_FACTOR[config.training.dtype]

    # ---- compute

    @property
    def executed_flops(self) -> float:
        return sum(self.workload.matmul_flops.values()) + sum(self.workload.attention_flops.values())

    @cached_property
    def matmul_rate(self) -> float:
        """FLOP/s of a block's matmuls."""
        tokens = self.rank.block_memory.tiles()[1] if self.config.memory.recompute != "none" else self.rank.tokens
        shapes = self.rank.block_shapes()[:7]
        flops = sum(rows * columns for rows, columns in shapes)
        effective_flops = sum(
            rows * columns * (1 + MATMUL_HALF_RATE_DIM / min(rows, columns, tokens)) for rows, columns in shapes
        )
        return self._dtype_factor * MATMUL_EFFICIENCY * self.device.matmul_flops * flops / effective_flops

    @cached_property
    def head_rate(self) -> float:
        rows, columns = self.rank.head_shapes()[0]
        chunk = (self.config.memory.loss_chunk_mib << 20) // (self.rank.master_bytes * rows)
        slowdown = 1 + MATMUL_HALF_RATE_DIM / max(1, min(rows, columns, chunk, self.rank.tokens))
        return self._dtype_factor * MATMUL_EFFICIENCY * self.device.matmul_flops / slowdown

    @cached_property
    def attention_rates(self) -> dict[str, float]:
        """FLOP/s by phase."""
        forward, backward = self.device.attention_rates(self.config.training.attention, self.rank.model.head_dim)
        ring = 1 if self.context_plan is None else self.context_plan.ring_degree
        tokens = self.rank.tokens * (1 if self.context_plan is None else self.context_plan.ulysses_degree)
        micro_batch_size = self.config.training.micro_batch_size
        # In a ring, each kernel covers one rank's KV, on average half of it.
        kernel_tokens = tokens / micro_batch_size / (2 if ring > 1 and self._uses_ring_hops else 1)
        efficiency = self._dtype_factor * kernel_tokens / (kernel_tokens + ATTENTION_HALF_RATE_TOKENS)
        return {"forward": forward * efficiency, "recompute": forward * efficiency, "backward": backward * efficiency}

    @property
    def _uses_ring_hops(self) -> bool:
        return self.context_plan is not None and self.context_plan.rotate_method in ("ring", "alltoall")

    def attention_seconds(self, phase: str) -> float:
        return self.workload.attention_flops.get(phase, 0) / self.attention_rates[phase]

    def matmul_seconds(self, phase: str) -> float:
        return self.workload.matmul_flops.get(phase, 0) / (self.head_rate if phase == "head" else self.matmul_rate)

    def memory_seconds(self, phase: str) -> float:
        return self.workload.memory_traffic.get(phase, 0) / (HBM_EFFICIENCY * self.device.hbm_bandwidth)

    def compute_seconds(self, phase: str) -> float:
        if phase == "head":
            return self.matmul_seconds(phase) + self.memory_seconds(phase)
        return (
            self.matmul_seconds(phase)
            + self.memory_seconds(phase)
            + self.attention_seconds(phase)
            + self.launch_seconds(phase)
        )

    @cached_property
    def _total_launch_seconds(self) -> dict[str, float]:
        """Minimum seconds of each phase given its number of kernel launches."""
        tiles = self.rank.block_memory.tiles()[0] if self.config.memory.recompute != "none" else 1
        recomputes = self.config.memory.recompute != "none"
        block_runs = self.rank.num_blocks * self.rank.num_micro_batches * (tiles + self.config.memory.head_groups - 1)
        kernel_fraction = COMPILED_KERNEL_FRACTION if self.config.training.compile else 1
        launch_seconds = block_runs * kernel_fraction * self.device.launch_latency
        return {
            phase: launch_seconds * count * (recomputes or phase != "recompute")
            for phase, count in KERNELS_PER_BLOCK.items()
        }

    def launch_seconds(self, phase: str) -> float:
        busy_seconds = self.matmul_seconds(phase) + self.memory_seconds(phase) + self.attention_seconds(phase)
        return max(0.0, self._total_launch_seconds[phase] - busy_seconds)

    # ---- communication

    def communication(self, direction: str) -> Iterator[CommCost]:
        """Communication of "forward", or of "backward" including recomputation."""
        for message in self._messages:
            if message.phase in PHASES_BY_DIRECTION[direction] and message.channel != "pp":
                yield self._comm_cost(message, interconnect.message_seconds(message, self.groups, self.device))
        copy_seconds = self.workload.offloaded_bytes / self.device.host_link_bandwidth
        exposed_fraction = self._exposed_offload_fraction() if direction == "backward" else 0
        yield CommCost(HOST, copy_seconds * exposed_fraction, copy_seconds * (1 - exposed_fraction))
        yield CommCost(HOST, 0, self._state_offload_seconds(direction))

    def _comm_cost(self, message: CommVolume, seconds: float) -> CommCost:
        if message.channel == "tp":
            tp_overlap = ASYNC_TP_OVERLAP if self.config.parallelism.async_tp else 0
            return CommCost("tp", seconds * (1 - tp_overlap), seconds * tp_overlap)
        if message.channel in ("cp", "rotate", "exchange"):
            attention_overlap = self._attention_overlap_fraction(message)
            return CommCost(
                message.channel,
                seconds * (1 - attention_overlap),
                seconds * attention_overlap,
                overlaps_with="attention",
            )
        if message.phase == "recompute":  # Recomputation needs it immediately.
            return CommCost(message.channel, seconds)
        exposed_fraction = min(1.0, EXPOSED_FSDP_UNITS / (self.rank.num_blocks + EXPOSED_FSDP_UNITS)) * (
            not message.what.endswith("loss head")
        )
        return CommCost(message.channel, seconds * exposed_fraction, seconds * (1 - exposed_fraction))

    def _attention_overlap_fraction(self, message: CommVolume) -> float:
        """Share of a message that attention in the same direction may hide."""
        groups = self.config.memory.head_groups
        if message.channel == "exchange" or self.context_plan is None or self.context_plan.rotate_method is None:
            # Inputs of the next head group overlap; outputs and gradients do not.
            fraction = 0.0 if message.phase == "backward" else 1 if message.what == "KV" else 0.5
            return fraction * (groups - 1) / groups
        ring = self.context_plan.ring_degree
        if not message.what.startswith("gradients"):
            return 1
        # The last gradient hop, and a reduce-scatter, follow all compute.
        return (ring - 2) / (ring - 1) if self._uses_ring_hops else 0

    def _attention_overlap_seconds(self, phase: str) -> float:
        """Seconds of attention that can overlap with receiving remote KV."""
        if self.context_plan is None:
            return 0
        groups, ring = self.config.memory.head_groups, self.context_plan.ring_degree
        # An all-gather overlaps with attention to local KV and, with head groups, with the whole preceding group.
        fraction = (ring - 1) / ring if self._uses_ring_hops else 1 / ring / groups
        return self.attention_seconds(phase) * max(fraction, (groups - 1 + fraction) / groups if groups > 1 else 0)

    def _exposed_offload_fraction(self) -> float:
        """Exposed share of copies from the host: those of attention outputs, with head groups."""
        memory, block = self.config.memory, self.rank.block_memory
        if memory.head_groups == 1 or memory.offload != "inputs_and_attention":
            return 0
        return block.attention_output_bytes / (
            block.attention_output_bytes + block.residual_bytes / memory.blocks_per_checkpoint
        )

    def _state_offload_seconds(self, direction: str) -> float:
        """With the optimizer on the host: weights to the device in both directions, gradients back."""
        returned_bytes = self.workload.returned_bytes * (direction == "backward")
        return (self.workload.fetched_bytes / 2 + returned_bytes) / self.device.host_link_bandwidth

    # ---- overlap

    @cached_property
    def step_time(self) -> RankStepTime:
        parts = [
            *self._comm_by_direction.values(),
            *([self._pipeline_weight_comm()] if self.rank.pipeline.pp > 1 else []),
        ]
        exposed, overlapped = SecondsByChannel(float), SecondsByChannel(float)
        for part_exposed, part_overlapped in parts:
            _accumulate(exposed, part_exposed)
            _accumulate(overlapped, part_overlapped)
        directions, phases = ("forward", "backward"), ("forward", "backward", "recompute")
        return RankStepTime(
            pp_rank=self.rank.pp_rank,
            matmul=sum(map(self.matmul_seconds, directions)),
            attention=sum(map(self.attention_seconds, directions)),
            recompute=self.matmul_seconds("recompute")
            + self.attention_seconds("recompute")
            + self.memory_seconds("recompute"),
            memory_bound=sum(map(self.memory_seconds, directions)),
            loss_head=self.compute_seconds("head"),
            launch_overhead=sum(map(self.launch_seconds, phases)),
            exposed={name: seconds for name, seconds in exposed.items() if seconds > 0},
            overlapped={name: seconds for name, seconds in overlapped.items() if seconds > 0},
            contention=CONTENTION_FRACTION * sum(seconds for name, seconds in overlapped.items() if name != HOST),
        )

    @cached_property
    def _comm_by_direction(self) -> dict[str, tuple[SecondsByChannel, SecondsByChannel]]:
        return {direction: self._overlap_communication(direction) for direction in ("forward", "backward")}

    def _overlap_communication(self, direction: str) -> tuple[SecondsByChannel, SecondsByChannel]:
        """(exposed, overlapped) seconds by channel."""
        pieces = [*self.communication(direction)]
        exposed, overlapped = SecondsByChannel(float), SecondsByChannel(float)
        for piece in pieces:
            exposed[piece.channel] += piece.exposed
        available = sum(map(self._attention_overlap_seconds, PHASES_BY_DIRECTION[direction]))
        for piece in (piece for piece in pieces if piece.overlaps_with == "attention"):
            covered_seconds = min(available, piece.overlappable)
            available -= covered_seconds
            overlapped[piece.channel] += covered_seconds
            exposed[piece.channel] += piece.overlappable - covered_seconds
        compute = sum(map(self.compute_seconds, PHASES_BY_DIRECTION[direction]))
        for piece in (piece for piece in pieces if piece.overlaps_with == "compute"):
            link = self._link_kind(piece.channel)
            # A link is idle while other links are exposed, and busy with what already overlaps on it.
            available = compute + sum(seconds for name, seconds in exposed.items() if self._link_kind(name) != link)
            available -= sum(seconds for name, seconds in overlapped.items() if self._link_kind(name) == link)
            covered_seconds = min(max(0.0, available), piece.overlappable)
            overlapped[piece.channel] += covered_seconds
            exposed[piece.channel] += piece.overlappable - covered_seconds
        return exposed, overlapped

    def _link_kind(self, channel: str) -> str:
        return HOST if channel == HOST else "network" if self.groups[channel].crosses_domains else "link"

    def _pipeline_weight_comm(self) -> tuple[SecondsByChannel, SecondsByChannel]:
        """(exposed, overlapped) seconds of a pipeline's FSDP communication: all-gathers overlap with the first micro-batch,
        gradient reductions follow the last.
        """
        exposed, overlapped = SecondsByChannel(float), SecondsByChannel(float)
        available = self.compute_seconds("forward") / self.rank.num_micro_batches
        for message in self._messages:
            if message.phase != "step":
                continue
            seconds = interconnect.message_seconds(message, self.groups, self.device)
            covered_seconds = min(available, seconds) if message.kind == "all_gather" else 0
            available -= covered_seconds
            overlapped[message.channel] += covered_seconds
            exposed[message.channel] += seconds - covered_seconds
        return exposed, overlapped

    @cached_property
    def mean_chunk(self) -> ChunkTime:
        count = self.rank.num_micro_batches * self.rank.pipeline.stages_per_rank
        weight_grad = self.matmul_seconds("backward") / 2
        forward, backward = (
            sum(map(self.compute_seconds, PHASES_BY_DIRECTION[direction]))
            + sum(exposed.values())
            + self.compute_seconds("head") / 2
            for direction, (exposed, _) in self._comm_by_direction.items()
        )
        return ChunkTime(
            forward=forward / count,
            input_grad=(backward - weight_grad) / count,
            weight_grad=weight_grad / count,
        )

    @property
    def p2p_seconds(self) -> float:
        """Seconds to send the residual stream to the next stage."""
        group = self.groups["pp"]
        send_seconds = self.rank.block_memory.residual_bytes / interconnect.bandwidth("send", group, self.device)
        return send_seconds + interconnect.latency("send", group, self.device)

    @cached_property
    def optimizer_seconds(self) -> float:
        if not self.workload.optimizer_on_host:
            return self.workload.optimizer_bytes / (HBM_EFFICIENCY * self.device.hbm_bandwidth)
        host_seconds = (
            self.workload.optimizer_bytes * self._ranks_per_node / (HOST_MEMORY_EFFICIENCY * self.device.host_bandwidth)
        )
        # Without a pipeline, the host optimizer overlaps with the next step's first forward pass, block by block.
        overlapped_seconds = (
            self.compute_seconds("forward") / self.rank.num_micro_batches if self.rank.pipeline.pp == 1 else 0
        )
        return max(0.0, host_seconds - overlapped_seconds)


def _accumulate(totals: SecondsByChannel, seconds_by_channel: SecondsByChannel) -> None:
    for channel, seconds in seconds_by_channel.items():
        totals[channel] += seconds
