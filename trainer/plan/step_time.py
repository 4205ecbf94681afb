"""Models the forward and backward time of one rank: compute, exposed communication, and
contention. Imports no torch.

All times are seconds per step, over all micro-batches. The constants below are the empirical
assumptions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from models.kernel_choice import kernel_for
from trainer.config.job_config import Config
from trainer.hardware.attention_choice import with_attention_choice
from trainer.hardware.device_specs import (
    ATTENTION_HALF_RATE_TOKENS,
    MATMUL_HALF_RATE_DIM,
    DeviceSpec,
)
from trainer.plan import interconnect
from trainer.plan.comm_volume import HALO, CommVolume, comm_volumes
from trainer.plan.interconnect import GroupTopology
from trainer.plan.memory_estimate import rank_memory
from trainer.plan.rank_workload import rank_workload
from trainer.trace.pieces import HOST

DTYPE_RATE_FACTOR = {"bfloat16": 1.0, "float32": 1 / 16, "float64": 1 / 16}
"""Relative to bfloat16: A100 and H100 have 1/16 to 1/15 of its rate in float32 and float64."""
KERNELS_PER_BLOCK = {"forward": 28, "backward": 60, "recompute": 24}
"""Eager kernel launches per block, micro-batch, tile and head group, estimated from the
operations.
"""
COMPILED_KERNEL_FRACTION = 0.4
"""Share of the launches left after torch.compile has fused the operations between matmuls."""
EXPOSED_FSDP_UNITS = 2
"""FSDP units whose communication is exposed: the first all-gathers (embedding, first block) and
last reduce-scatters.
"""
ASYNC_TP_OVERLAP = 0.3
"""Share of tp communication that `async_tp` hides: explains torchtitan's 876 instead of 829
tokens/s for 70B on 256 H100.
"""
CONTENTION_FRACTION = 0.1
"""Cost of overlapped communication: its kernels take SMs and bandwidth from compute."""
HOST_MEMORY_EFFICIENCY = 0.7
"""Share of the host memory bandwidth that AdamW reaches on all cores."""
STEP_OVERHEAD = 0.01
"""Seconds per step in which the device waits for Python: batch, gradient norm, learning-rate
schedule.
"""

CHANNEL_LABELS = {
    "pp": "stages (pp)",
    "dp_replicate": "gradients (dp_replicate)",
    "fsdp": "weights (fsdp)",
    "efsdp": "weights of experts (efsdp)",
    "tp": "activations (tp)",
    "ep": "tokens (ep)",
    "cp": "attention (cp)",
    "rotate": "KV (cp)",
    "exchange": "head exchange (cp)",
    HOST: "host copies",
}


@dataclass(frozen=True, kw_only=True)
class RankStepTime:
    """Seconds of one step on one rank."""

    pp_rank: int
    compute: Mapping[str, float]
    """Seconds by kind. "matmul" excludes recomputation; "launch overhead" is the gaps where
    kernels finish before the next launch.
    """
    exposed: Mapping[str, float]
    """Exposed communication by channel, including `host`."""
    overlapped: Mapping[str, float]
    """Overlapped communication by channel, which is no part of the step time."""
    optimizer: float = 0
    bubble: float = 0

    @property
    def contention(self) -> float:
        """Slowdown of compute by overlapped communication."""
        return CONTENTION_FRACTION * sum(
            seconds for name, seconds in self.overlapped.items() if name != HOST
        )

    @property
    def busy(self) -> float:
        """Seconds of forward and backward."""
        return sum(self.compute.values()) + sum(self.exposed.values()) + self.contention

    def breakdown(self) -> dict[str, float]:
        """Nonzero components of the step time by name."""
        components = {
            **self.compute,
            **{
                f"exposed {CHANNEL_LABELS.get(channel, channel)}": exposed
                for channel, exposed in self.exposed.items()
            },
            "contention": self.contention,
            "optimizer": self.optimizer,
            "pipeline bubble": self.bubble,
            "step overhead": STEP_OVERHEAD,
        }
        return {name: seconds for name, seconds in components.items() if seconds > 0}


CommSeconds = tuple[Mapping[str, float], Mapping[str, float]]
"""(exposed, overlapped) seconds by channel."""
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
        self,
        config: Config,
        world_size: int,
        pp_rank: int,
        device: DeviceSpec,
        groups: Mapping[str, GroupTopology],
    ) -> None:
        config = with_attention_choice(config, device)
        self.config = config
        self.device = device
        self.groups = groups
        self.rank = rank_memory(config, world_size, pp_rank)
        self.block, self.workload, self._messages = (
            self.rank.block,
            rank_workload(self.rank),
            comm_volumes(self.rank),
        )
        self._ranks_per_node = min(world_size, device.devices_per_node)
        self._dtype_factor = DTYPE_RATE_FACTOR[config.training.dtype]
        self._uses_ring_hops = self.block.ring_degree > 1 and not self.block.gathers_kv

    # ---- compute

    @property
    def executed_flops(self) -> float:
        return sum(self.workload.matmul_flops.values()) + sum(
            self.workload.attention_flops.values()
        )

    @cached_property
    def matmul_rate(self) -> float:
        """FLOP/s of a block's matmuls."""
        tokens = self.block.tile_tokens if self.rank.recomputes else self.rank.tokens
        shapes = [shape for shape in self.rank.block_shapes if shape[1] > 1]
        flops = sum(rows * columns for rows, columns, *_ in shapes)
        # A product whose smallest dimension is d runs at the rate d / (d + MATMUL_HALF_RATE_DIM).
        effective_flops = sum(
            rows * columns * (1 + MATMUL_HALF_RATE_DIM / min(rows, columns, tokens))
            for rows, columns, *_ in shapes
        )
        return (
            self._dtype_factor
            * self.device.matmul_share
            * self.device.matmul_flops
            * flops
            / effective_flops
        )

    @cached_property
    def head_rate(self) -> float:
        smallest_dim = min(
            *self.rank.head_shapes[0], self.rank.loss_chunk_tokens, self.rank.tokens
        )
        slowdown = 1 + MATMUL_HALF_RATE_DIM / smallest_dim
        return self._dtype_factor * self.device.matmul_share * self.device.matmul_flops / slowdown

    def attention_rates(self, window: int | None) -> dict[str, float]:
        """FLOP/s by phase; a window has as few keys as a short document."""
        # In a ring, each kernel covers one rank's KV, on average half of it.
        tokens = self.block.sequence_tokens / (2 if self._uses_ring_hops else 1)
        kernel = kernel_for(self.config.training.attention, tokens=tokens, window=window)
        if self.config.training.dtype != "bfloat16":
            # DTYPE_RATE_FACTOR is relative to it: the tables have rates for bfloat16.
            kernel = "flash"
        forward, backward = self.device.attention_rates(kernel, self.rank.model.head_dim)
        tokens = min(tokens, window or tokens)
        # Kernels reach half of their rate at ATTENTION_HALF_RATE_TOKENS tokens.
        efficiency = self._dtype_factor * tokens / (tokens + ATTENTION_HALF_RATE_TOKENS)
        return {
            "forward": forward * efficiency,
            "recompute": forward * efficiency,
            "backward": backward * efficiency,
        }

    def attention_seconds(self, phase: str) -> float:
        by_window = self.workload.attention_by_window
        return sum(
            flops[phase] / self.attention_rates(window)[phase]
            for window, flops in by_window.items()
        )

    def matmul_seconds(self, phase: str) -> float:
        return self.workload.matmul_flops.get(phase, 0) / (
            self.head_rate if phase == "head" else self.matmul_rate
        )

    def memory_seconds(self, phase: str) -> float:
        return self.workload.memory_traffic.get(phase, 0) / self.device.hbm_bandwidth

    @cached_property
    def head_seconds(self) -> float:
        return (
            self.matmul_seconds("head") + self.memory_seconds("head") + self._exposed_accumulation
        )

    @property
    def _exposed_accumulation(self) -> float:
        """Seconds in which the product of the head's weight gradient waits for the sum that it
        reads and writes in every chunk of tokens.
        """
        rank = self.rank
        rows, dim = rank.head_shapes[0]
        if not rank.has_last_stage:
            return 0.0
        chunks = rank.num_micro_batches * -(-rank.head_tokens // rank.loss_chunk_tokens)
        # Each chunk reads and writes the float32 sum, in one of the head's three products.
        moved = chunks * 2 * rank.master_bytes * rows * dim
        return max(0.0, moved / self.device.hbm_bandwidth - self.matmul_seconds("head") / 3)

    def kernel_seconds(self, phase: str) -> float:
        return (
            self.matmul_seconds(phase) + self.memory_seconds(phase) + self.attention_seconds(phase)
        )

    def launch_seconds(self, phase: str) -> float:
        """Seconds that launching the kernels takes beyond running them."""
        if phase == "recompute" and not self.rank.recomputes:
            return 0
        tiles = self.block.num_tiles() if self.rank.recomputes else 1
        block_runs = (
            self.rank.num_blocks
            * self.rank.num_micro_batches
            * (tiles + self.config.memory.head_groups - 1)
        )
        kernel_fraction = COMPILED_KERNEL_FRACTION if self.config.compiles_on_gpu else 1
        seconds = (
            block_runs * kernel_fraction * self.device.launch_latency * KERNELS_PER_BLOCK[phase]
        )
        return max(0.0, seconds - self.kernel_seconds(phase))

    def compute_seconds(self, direction: str) -> float:
        """Seconds of blocks; `backward` includes recomputation."""
        return sum(
            self.kernel_seconds(phase) + self.launch_seconds(phase)
            for phase in PHASES_BY_DIRECTION[direction]
        )

    # ---- communication

    def communication(self, direction: str) -> Iterator[CommCost]:
        """Communication of "forward", or of "backward" including recomputation."""
        for message in self._messages:
            if message.phase in PHASES_BY_DIRECTION[direction] and message.channel != "pp":
                yield self._comm_cost(
                    message, interconnect.message_seconds(message, self.groups, self.device)
                )
        copy_seconds = self.workload.offloaded_bytes / self.device.host_link_bandwidth
        exposed_fraction = self._exposed_offload_fraction() if direction == "backward" else 0
        yield CommCost(
            HOST, copy_seconds * exposed_fraction, copy_seconds * (1 - exposed_fraction)
        )
        # With the optimizer on the host: weights to the device in both directions, gradients back.
        state_bytes = self.workload.fetched_bytes / 2
        if direction == "backward":
            state_bytes += self.workload.returned_bytes
        yield CommCost(HOST, 0, state_bytes / self.device.host_link_bandwidth)

    def _comm_cost(self, message: CommVolume, seconds: float) -> CommCost:
        overlaps_with = "compute"
        if message.channel == "tp":
            overlap = ASYNC_TP_OVERLAP if self.config.parallelism.async_tp else 0
        elif message.channel in ("cp", "rotate", "exchange"):
            overlap = self._attention_overlap_fraction(message)
            overlaps_with = "attention"
        elif message.channel == "ep" or message.phase == "recompute":
            # Experts and recomputation need it immediately.
            return CommCost(message.channel, seconds)
        else:
            # FSDP prefetches unit by unit; the first gathers and the last reductions have no
            # compute beside them.
            exposed = min(1.0, EXPOSED_FSDP_UNITS / (self.rank.num_blocks + EXPOSED_FSDP_UNITS))
            # Blocks run before the head's gather and after its reduction, so they hide both.
            if message.what.endswith("loss head"):
                exposed = 0
            return CommCost(message.channel, seconds * exposed, seconds * (1 - exposed))
        return CommCost(message.channel, seconds * (1 - overlap), seconds * overlap, overlaps_with)

    def _attention_overlap_fraction(self, message: CommVolume) -> float:
        """Share of a message that attention in the same direction may hide."""
        groups = self.config.memory.head_groups
        ring = self.block.ring_degree
        if message.channel == "exchange" or ring == 1:
            # Inputs of the next head group overlap; outputs and gradients do not.
            fraction = 0.0 if message.phase == "backward" else 1 if message.what == "KV" else 0.5
            return fraction * (groups - 1) / groups
        if not message.what.startswith("gradients"):
            return 1
        # The last gradient hop, a reduce-scatter and a halo follow all compute.
        return (
            (ring - 2) / (ring - 1)
            if self._uses_ring_hops and not message.what.endswith(HALO)
            else 0
        )

    def _attention_overlap_seconds(self, phase: str) -> float:
        """Seconds of attention that can overlap with receiving remote KV."""
        groups = self.config.memory.head_groups
        ring = self.block.ring_degree
        # An all-gather overlaps with attention to local KV and, with head groups, with the whole
        # preceding group.
        fraction = (ring - 1) / ring if self._uses_ring_hops else 1 / ring / groups
        return self.attention_seconds(phase) * max(
            fraction, (groups - 1 + fraction) / groups if groups > 1 else 0
        )

    def _exposed_offload_fraction(self) -> float:
        """Exposed share of copies from the host: those of attention outputs, with head groups."""
        memory = self.config.memory
        output_bytes = self.block.attention_output_bytes
        if memory.head_groups == 1 or memory.offload != "inputs_and_attention":
            return 0
        return output_bytes / (
            output_bytes + self.block.residual_bytes / memory.blocks_per_checkpoint
        )

    # ---- overlap

    @cached_property
    def step_time(self) -> RankStepTime:
        parts = [*self._comm_by_direction.values()]
        if self.rank.pipeline.pp > 1:
            parts.append(self._pipeline_weight_comm())
        exposed, overlapped = map(_sum_by_channel, zip(*parts, strict=True))
        directions = ("forward", "backward")
        compute = {
            "matmul": sum(map(self.matmul_seconds, directions)),
            "attention": sum(map(self.attention_seconds, directions)),
            "recompute": self.matmul_seconds("recompute")
            + self.attention_seconds("recompute")
            + self.memory_seconds("recompute"),
            "memory-bound": sum(map(self.memory_seconds, directions)),
            "loss head": self.head_seconds,
            "launch overhead": sum(map(self.launch_seconds, KERNELS_PER_BLOCK)),
        }
        return RankStepTime(
            pp_rank=self.rank.pp_rank, compute=compute, exposed=exposed, overlapped=overlapped
        )

    @cached_property
    def _comm_by_direction(self) -> dict[str, CommSeconds]:
        return {
            direction: self._overlap_communication(direction) for direction in PHASES_BY_DIRECTION
        }

    def _overlap_communication(self, direction: str) -> CommSeconds:
        pieces = [*self.communication(direction)]
        exposed = defaultdict[str, float](float)
        overlapped = defaultdict[str, float](float)
        for piece in pieces:
            exposed[piece.channel] += piece.exposed

        def cover(piece: CommCost, available: float) -> float:
            covered = min(max(0.0, available), piece.overlappable)
            overlapped[piece.channel] += covered
            exposed[piece.channel] += piece.overlappable - covered
            return covered

        # Attention hides messages first: only its kernels run while queries, keys and values
        # travel.
        available = sum(map(self._attention_overlap_seconds, PHASES_BY_DIRECTION[direction]))
        for piece in (piece for piece in pieces if piece.overlaps_with == "attention"):
            available -= cover(piece, available)
        compute = self.compute_seconds(direction)
        for piece in (piece for piece in pieces if piece.overlaps_with == "compute"):
            link = self._link_kind(piece.channel)
            # A link is idle while other links are exposed, and busy with what already overlaps on
            # it.
            idle = compute + sum(
                seconds for name, seconds in exposed.items() if self._link_kind(name) != link
            )
            cover(
                piece,
                idle
                - sum(
                    seconds
                    for name, seconds in overlapped.items()
                    if self._link_kind(name) == link
                ),
            )
        return exposed, overlapped

    def _link_kind(self, channel: str) -> str:
        return (
            HOST
            if channel == HOST
            else "network"
            if self.groups[channel].crosses_domains
            else "link"
        )

    def _pipeline_weight_comm(self) -> CommSeconds:
        """A pipeline's FSDP communication: all-gathers overlap with the first micro-batch,
        gradient reductions follow the last.
        """
        exposed = defaultdict[str, float](float)
        overlapped = defaultdict[str, float](float)
        available = self.compute_seconds("forward") / self.rank.num_micro_batches
        for message in (message for message in self._messages if message.phase == "step"):
            seconds = interconnect.message_seconds(message, self.groups, self.device)
            covered = min(available, seconds) if message.kind == "all_gather" else 0
            available -= covered
            overlapped[message.channel] += covered
            exposed[message.channel] += seconds - covered
        return exposed, overlapped

    @cached_property
    def chunk_seconds(self) -> float:
        """Forward and backward of one micro-batch in one stage, on average."""
        blocks = (
            self.compute_seconds(direction) + sum(exposed.values())
            for direction, (exposed, _) in self._comm_by_direction.items()
        )
        return (sum(blocks) + self.head_seconds) / self.rank.pipeline.num_chunks

    @property
    def p2p_seconds(self) -> float:
        """Seconds to send the residual stream to the next stage."""
        group = self.groups["pp"]
        send_seconds = self.block.residual_bytes / interconnect.bandwidth(
            "send", group, self.device
        )
        return send_seconds + interconnect.latency("send", group, self.device)

    @cached_property
    def optimizer_seconds(self) -> float:
        if not self.rank.optimizer_on_host:
            return self.workload.optimizer_bytes / self.device.hbm_bandwidth
        node_bytes = self.workload.optimizer_bytes * self._ranks_per_node
        seconds = node_bytes / (HOST_MEMORY_EFFICIENCY * self.device.host_bandwidth)
        # Without a pipeline, the host optimizer overlaps with the next step's first forward pass,
        # block by block.
        first_forward = self.compute_seconds("forward") / self.rank.num_micro_batches
        return max(0.0, seconds - (first_forward if self.rank.pipeline.pp == 1 else 0))


def _sum_by_channel(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum over the parts by channel, without channels of 0 seconds."""
    totals = {
        channel: sum(part.get(channel, 0) for part in parts) for part in parts for channel in part
    }
    return {channel: seconds for channel, seconds in totals.items() if seconds > 0}
