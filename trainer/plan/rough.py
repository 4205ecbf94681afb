"""A coarse estimate of memory and step time in a fraction of a millisecond, which ranks the layouts
of a search. Nobody reads its numbers: what a search shows is traced. Imports no torch.

Widths and counts below were fitted to traces (`python -m benchmarks.rough_plans`).
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from models.kernel_choice import kernel_for
from models.layers import LayerKind
from models.score_pairs import causal_pairs
from parallelisms.mesh.message_bytes import sent_bytes
from trainer.config.job_config import Config
from trainer.hardware.device_specs import (
    GROUPED_MATMUL_SHARE,
    MATMUL_HALF_RATE_DIM,
    DeviceSpec,
    attention_slowdown,
    matmul_slowdown,
)
from trainer.hardware.host import GIB
from trainer.plan.interconnect import GroupTopology, bandwidth, group_topologies, latency
from trainer.plan.pipeline_bubble import bubble_seconds
from trainer.plan.reserves import (
    HOST_BYTES_PER_PROCESS,
    usable_device_bytes,
    usable_host_bytes,
)
from trainer.plan.rough_memory import RoughMemory, kinds_by_rank
from trainer.plan.step_time import (
    ASYNC_TP_OVERLAP,
    CONTENTION_FRACTION,
    DTYPE_RATE_FACTOR,
    HOST_MEMORY_EFFICIENCY,
    OPTIMIZER_MEMORY_SHARE,
    STEP_OVERHEAD,
)
from trainer.trace.tensors import DTYPE_BYTES


class Passes(NamedTuple):
    """Times that the memory-bound operations of a block read or write a tensor, forward and
    backward, as far as traces tell.
    """

    streams: float
    """The residual stream."""
    heads: float
    """Queries and keys."""
    normed_heads: float
    """Queries and keys, as far as norms of heads go."""
    gates: float
    rows: float
    """Rows on their way to experts and back."""
    ring_queries: float
    """Queries, for each rank of a ring."""
    ring_kv: float
    """KV of each rank of a ring."""
    exchanged: float
    """Heads that ranks exchange."""
    gathered: float
    """Weights that FSDP gathers."""


PASSES = {
    False: Passes(30, 17, 208, 15, 110, 18, 22, 9, 1.75),
    True: Passes(29, 12, 70, 11, 41, 12, 26, 1.5, 6.6),
}
"""Passes of eager blocks and of compiled ones."""
TILE_PASSES = 20
"""Bytes moved for each element of a feed-forward's weights, in every tile but the first."""
RECOMPUTED_PASSES = 0.3
"""Share of the passes of a block that its recomputation takes."""
KERNELS = {False: 110, True: 45}
"""Launches of a block, forward and backward."""
LOGIT_PASSES = {False: 7.5, True: 3}
"""Passes over the float32 logits, in both directions."""


class RoughPlan:
    """Memory and step time of a layout, whose `training.attention` is resolved."""

    def __init__(self, config: Config, world_size: int, device: DeviceSpec) -> None:
        self.config = config
        self.world_size = world_size
        self.device = device
        self.pipeline = config.pipeline_plan(world_size)

    @cached_property
    def groups(self) -> dict[str, GroupTopology]:
        """Placement of each channel's group."""
        return group_topologies(self.config, self.world_size, self.device)

    @cached_property
    def rank_at(self) -> list[RoughRank]:
        """The rank that stands for each pipeline rank: of those with the same layers the first,
        which saves most.
        """
        distinct: dict[object, RoughRank] = {}
        found = []
        # Only the first rank has the embedding, and only the last one the head.
        ends = 0, self.pipeline.pp - 1
        for pp_rank, kinds in enumerate(kinds_by_rank(self.config.model.build(), self.pipeline)):
            key = frozenset(kinds.items()), pp_rank if pp_rank in ends else None
            if key not in distinct:
                distinct[key] = RoughRank(self, pp_rank)
            found.append(distinct[key])
        return found

    @cached_property
    def ranks(self) -> list[RoughRank]:
        """Pipeline ranks that differ."""
        return [*dict.fromkeys(self.rank_at)]

    @cached_property
    def device_bytes(self) -> float:
        return max(rank.device_bytes for rank in self.ranks)

    @cached_property
    def host_bytes(self) -> float:
        """Bytes of a node, without its processes."""
        ranks = min(self.world_size, self.device.devices_per_node)
        return ranks * max(rank.host_bytes for rank in self.ranks)

    @property
    def device_share(self) -> float:
        """Memory of a device, relative to what is usable."""
        return self.device_bytes / usable_device_bytes(self.device)

    @property
    def host_share(self) -> float:
        """Memory of a node, relative to what is usable."""
        processes = HOST_BYTES_PER_PROCESS * min(self.world_size, self.device.devices_per_node)
        return (self.host_bytes + processes) / usable_host_bytes(self.device)

    @property
    def exceeds_host_budget(self) -> bool:
        """Whether micro-batches of a pipeline share too small a host budget, which no trace shows."""
        budget = self.config.memory.host_budget_gib
        if budget is None or self.pipeline.pp == 1:
            return False
        ranks = min(self.world_size, self.config.parallelism.ranks_per_node)
        return any(ranks * rank.in_flight * rank.saved[1] > budget * GIB for rank in self.ranks)

    @cached_property
    def step_seconds(self) -> float:
        seconds = max(rank.busy for rank in self.ranks)
        seconds += max(rank.optimizer_seconds for rank in self.ranks) + STEP_OVERHEAD
        if self.pipeline.pp == 1:
            return seconds
        chunk = sum(rank.busy for rank in self.rank_at) / self.pipeline.pp
        return seconds + bubble_seconds(
            self.pipeline,
            chunk / self.pipeline.num_chunks,
            p2p_seconds=self.ranks[0].send_seconds,
        )

    @cached_property
    def exposed_attention_seconds(self) -> float:
        """Communication of attention that head groups might hide."""
        return max(rank.exposed_attention for rank in self.ranks)


class RoughRank(RoughMemory):
    """Memory and seconds of one pipeline rank."""

    def __init__(self, plan: RoughPlan, pp_rank: int) -> None:
        super().__init__(plan.config, plan.world_size, plan.pipeline, pp_rank)
        self.plan = plan
        self.device = plan.device

    # ---- kernels

    @cached_property
    def matmul_rate(self) -> float:
        """FLOP/s of products without narrow dimensions."""
        factor = DTYPE_RATE_FACTOR[self.training.dtype]
        return factor * self.device.matmul_share * self.device.matmul_flops

    def matmul_seconds(self, kind: LayerKind, weights: float) -> float:
        rows = self.tokens / self.tiles
        rate = self.matmul_rate
        if kind.feed_forward == "moe":
            rows *= self.model.top_k / max(1, self.model.num_experts // self.ep)
            rate *= GROUPED_MATMUL_SHARE
        slowdown = self.weights(kind).slowdown + MATMUL_HALF_RATE_DIM / max(1, rows)
        return 2 * self.tokens * weights * slowdown / rate

    @property
    def recomputes_attention(self) -> bool:
        return self.memory.recompute == "full"

    @cached_property
    def pairs_by_window(self) -> dict[int | None, float]:
        """(query, key) pairs of this rank, by window."""
        share = self.training.micro_batch_size / self.cp
        length = self.training.seq_len
        windows = {kind.window for kind in self.kinds}
        return {window: share * causal_pairs(length, window) for window in windows}

    def attention_seconds(self, kind: LayerKind) -> tuple[float, float]:
        """(forward, backward) seconds of a block."""
        ring = self.context.ring_degree
        is_ring = ring > 1 and self.context.rotate_method != "allgather"
        length = self.training.seq_len / (ring * 2 if is_ring else 1)
        # Ranks of a ring have a head and a tail of the sequence, each a call.
        queries = self.training.seq_len / (ring * 2 if ring > 1 else 1)
        kernel = "flash"
        if self.is_mixed:
            kernel = kernel_for(self.training.attention, tokens=queries, window=kind.window)
        forward_rate, backward_rate = self.device.attention_rates(kernel, self.model.head_dim)
        keys = min(length, kind.window or length)
        factor = DTYPE_RATE_FACTOR[self.training.dtype] / attention_slowdown(keys)
        pairs = self.pairs_by_window[kind.window]
        flops = self.model.attention_flops([kind], pairs) / self.tp
        forward = flops / (factor * forward_rate)
        backward = 2.5 * flops / (factor * backward_rate)
        return forward, backward

    def block_traffic(self, kind: LayerKind) -> float:
        """Bytes that memory-bound operations of a block move, forward and backward."""
        passes = PASSES[self.compiled]
        streams = passes.streams
        if kind.norms == "sandwich":
            streams *= 1.5
        heads = passes.heads
        if kind.qk_norm:
            heads += passes.normed_heads
        wide = self.master_bytes / self.compute_bytes / 2
        moved = streams * self.residual
        moved += heads * wide * (self.queries + self.kv / 2)
        moved += passes.gates * self.compute_bytes * self.ffn_numel(kind, self.tokens)
        rows = self.compute_bytes * self.dispatched(kind, self.tokens)
        return moved + passes.rows * rows / self.sequence_shards

    def exchange_traffic(self, kind: LayerKind) -> float:
        """Bytes that copies and sums move for the exchanges of attention, and for tiles."""
        passes = PASSES[self.compiled]
        moved = float(TILE_PASSES * (self.tiles - 1) * self.ffn_weights(kind))
        ring = self.context.ring_degree
        if ring > 1:
            seq_len = self.training.seq_len
            window = kind.window or seq_len
            share = min(1, window * self.cp / seq_len)
            moved += passes.ring_kv * share * ring * self.kv
            is_gathered = self.context.rotate_method == "allgather"
            hops = 1 if is_gathered else ring
            moved += passes.ring_queries * self.queries * hops
        if self.context.ulysses_degree > 1:
            moved += passes.exchanged * (2 * self.queries + self.kv)
        return moved

    @cached_property
    def kernels(self) -> tuple[float, float]:
        """(forward, backward with recomputation) seconds of all blocks of a step."""
        forward = backward = 0.0
        launch = KERNELS[self.compiled] * self.device.launch_latency
        launch *= self.tiles + self.memory.head_groups - 1
        for kind, count in self.kinds.items():
            weights = self.weights(kind)
            product = self.matmul_seconds(kind, weights.products)
            attention, attention_backward = self.attention_seconds(kind)
            moved = self.block_traffic(kind) / self.device.hbm_bandwidth
            exchanged = self.exchange_traffic(kind) / self.device.hbm_bandwidth
            third = (moved + exchanged) / 3
            run = product + attention + third
            back = 2 * product + attention_backward + 2 * third
            if self.recomputes:
                passes = RECOMPUTED_PASSES * moved
                back += self.matmul_seconds(kind, weights.again)
                back += passes
                if self.recomputes_attention:
                    back += attention
                    back += self.matmul_seconds(kind, weights.attention_inputs)
                rest = self.matmul_seconds(kind, weights.products - weights.again)
                back += self.repeated * (rest + passes)
            forward += count * max(run, launch / 3)
            backward += count * max(back, launch * (1 if self.recomputes else 2 / 3))
        return self.micro_batches * forward, self.micro_batches * backward

    @cached_property
    def head_seconds(self) -> float:
        if not self.has_head:
            return 0
        tokens = self.tokens
        if self.sequence_shards > 1 and not self.parallelism.loss_parallel:
            tokens //= self.tp
        row_bytes = self.master_bytes * self.head_rows
        rows = self.memory.loss_chunk_bytes / row_bytes
        narrow = min(rows, tokens, self.model.dim)
        product = 6 * tokens * self.head_rows * self.model.dim * matmul_slowdown(narrow)
        moved = LOGIT_PASSES[self.compiled] * tokens * row_bytes
        moved += 12 * self.residual
        # Each chunk reads and writes the weight's gradient.
        moved += 2 * max(1, tokens / rows) * row_bytes * self.model.dim
        seconds = product / self.matmul_rate + moved / self.device.hbm_bandwidth
        return self.micro_batches * seconds

    # ---- messages

    def send(self, channel: str, kind: str, size: float, calls: float = 1) -> float:
        """Seconds of calls in which a rank of the channel's group has `size` bytes, as in
        `sent_bytes`.
        """
        group = self.plan.groups[channel]
        if group.ranks == 1 or not size:
            return 0
        sent = calls * sent_bytes(kind, size, group.ranks)
        seconds = sent / bandwidth(kind, group, self.device)
        return seconds + calls * latency(kind, group, self.device)

    @property
    def num_exchanges(self) -> tuple[float, float]:
        """(gathers, reductions) of a block in a step."""
        if self.pipeline.pp > 1:
            return 1, self.micro_batches if self.pipeline.reduces_per_micro_batch else 1
        gathers = 2 + self.repeated if self.is_gathered_again else 1
        return self.micro_batches * gathers, self.micro_batches

    @cached_property
    def fsdp_seconds(self) -> float:
        """Gathers and reductions of a step."""
        gathers, reductions = self.num_exchanges
        seconds = 0.0
        for kind, count in self.kinds.items():
            weights = self.weights(kind)
            units = [("fsdp", weights.dense + (weights.experts if self.ep == 1 else 0))]
            units += [("efsdp", weights.experts)] if self.ep > 1 and weights.experts else []
            for channel, numel in units:
                shard = numel / self.plan.groups[channel].ranks
                gather = self.send(channel, "all_gather", self.compute_bytes * shard)
                seconds += count * gathers * gather
                reduced = self.reduce_bytes * shard
                reduction = self.send(channel, "reduce_scatter", reduced)
                reduction += self.send("dp_replicate", "all_reduce", reduced)
                seconds += count * reductions * reduction
        return seconds

    @cached_property
    def tp_seconds(self) -> float:
        """Exchanges of hidden states in blocks."""
        if self.tp == 1:
            return 0
        dense = sum(count for kind, count in self.kinds.items() if kind.feed_forward != "moe")
        whole = self.sequence_shards > 1
        kinds = ("all_gather", "reduce_scatter") if whole else ("all_reduce",)
        sublayers = self.num_blocks + dense
        runs = (2.75 if self.recomputes else 2) + 1.2 * self.repeated
        seconds = sum(self.send("tp", kind, self.residual) for kind in kinds)
        experts = self.num_blocks - dense
        seconds *= sublayers * runs
        rows = self.residual * self.model.top_k * self.tp if experts else 0
        seconds += 5 * experts * self.send("tp", "all_to_all", rows)
        shown = 1 - ASYNC_TP_OVERLAP if self.parallelism.async_tp else 1
        return self.micro_batches * shown * seconds

    @cached_property
    def ep_seconds(self) -> float:
        experts = sum(count for kind, count in self.kinds.items() if kind.feed_forward == "moe")
        if self.ep == 1 or not experts:
            return 0
        rows = self.residual * self.model.top_k
        runs = 5 if self.recomputes else 4
        return self.micro_batches * experts * runs * self.send("ep", "all_to_all", rows)

    @cached_property
    def exposed_attention(self) -> float:
        """Seconds in which attention waits for queries, keys and values of other ranks."""
        if self.cp == 1:
            return 0
        runs = 2 if self.recomputes_attention else 1
        groups = self.memory.head_groups
        is_hybrid = self.context.resolved_method == "hybrid"
        heads_channel, kv_channel = ("exchange", "rotate") if is_hybrid else ("cp", "cp")
        exposed = 0.0
        for kind, count in self.kinds.items():
            if self.context.ulysses_degree > 1:
                size = (2 * self.queries + self.kv) / groups
                exchange = groups * self.send(heads_channel, "all_to_all", size)
                times = 2.5 + 0.5 * runs if self.recomputes else 2
                if groups > 1:
                    exchange *= 0.6
                exposed += count * exchange * times
            if self.context.ring_degree > 1:
                exposed += count * self._ring_wait(kind, kv_channel, runs)
        return self.micro_batches * exposed

    def _ring_wait(self, kind: LayerKind, channel: str, runs: float) -> float:
        """Seconds in which attention waits for the KV of other ranks."""
        ring = self.context.ring_degree
        kv = self.kv
        reduced = self.parallelism.cp_reduce_dtype if self.is_mixed else self.training.dtype
        grads = kv * DTYPE_BYTES[reduced] / self.compute_bytes
        forward, backward = self.attention_seconds(kind)
        if kind.window is not None and self.training.seq_len // ring > 2 * kind.window:
            halo = 2 * kind.window * ring / self.training.seq_len
            sent = self.send(channel, "all_to_all", halo * (2 * kv + grads))
            return max(0.0, sent - (forward + backward) / ring) + sent / 3
        if self.context.rotate_method == "allgather":
            gather = self.send(channel, "all_gather", kv)
            groups = self.memory.head_groups
            hidden = 1 / ring / groups if groups == 1 else (groups - 1) / groups
            first = max(0.0, gather - forward * hidden)
            last = max(0.0, gather - backward * hidden)
            return runs * first + last + self.send(channel, "reduce_scatter", grads)
        hops = ring - 1
        there = hops * self.send(channel, "send", kv)
        back = hops * self.send(channel, "send", kv + grads)
        hidden = hops / ring
        last_hop = self.send(channel, "send", grads)
        first = max(0.0, there - forward * hidden)
        last = max(0.0, back - last_hop - backward * hidden)
        return runs * first + last + last_hop

    # ---- the step

    @cached_property
    def busy(self) -> float:
        """Seconds of all forward and backward passes."""
        forward, backward = self.kernels
        computed = forward + backward + self.head_seconds + self.fsdp_copies
        fsdp = self.fsdp_seconds
        # Nothing runs beside the first gathers and the last reductions.
        edge = 2 / (self.num_blocks + 2)
        exposed = max(fsdp * (edge if self.pipeline.pp == 1 else 0.5), fsdp - computed)
        copied = 2 * self.micro_batches * self.saved[1] / self.device.host_link_bandwidth
        waits = max(self.copy_waits, copied - computed)
        if self.on_host:
            gathers, reductions = (each * self.state_copy_seconds for each in self.num_exchanges)
            # A single rank copies when it needs the weights.
            waits += gathers if self.shards == 1 else max(0.0, gathers - computed)
            waits += max(0.0, reductions - computed)
        contention = CONTENTION_FRACTION * (fsdp - exposed)
        sent = self.tp_seconds + self.ep_seconds + self.exposed_attention
        return computed + exposed + waits + contention + sent

    @property
    def copy_waits(self) -> float:
        """Seconds in which blocks wait for activations from the host."""
        copied = self.micro_batches * self.saved[1] / self.device.host_link_bandwidth
        return copied * (0.25 if self.memory.head_groups == 1 else 1 + 2 * self.repeated)

    @property
    def state_copy_seconds(self) -> float:
        """Seconds to copy this rank's weights or gradients between host and device."""
        return self.master_bytes * self.local_numel / self.device.host_link_bandwidth

    @property
    def fsdp_copies(self) -> float:
        """Seconds of copies beside gathers and reductions."""
        gathers, _ = self.num_exchanges
        moved = PASSES[self.compiled].gathered * self.compute_bytes * self.numel * gathers
        return moved / self.device.hbm_bandwidth

    @property
    def send_seconds(self) -> float:
        """Seconds to send the residual stream to the next stage."""
        return self.send("pp", "send", self.residual)

    @cached_property
    def optimizer_seconds(self) -> float:
        moment = 2 if self.memory.optimizer_dtype == "bfloat16" else self.master_bytes
        width = 5 * self.master_bytes + 4 * moment
        moved = self.local_numel * width
        if not self.on_host:
            return moved / (OPTIMIZER_MEMORY_SHARE * self.device.hbm_bandwidth)
        ranks = min(self.world_size, self.device.devices_per_node)
        bandwidth = HOST_MEMORY_EFFICIENCY * self.device.host_bandwidth
        seconds = ranks * moved / bandwidth
        if self.pipeline.pp > 1:
            return seconds
        forward, _ = self.kernels
        return max(0.0, seconds - forward / self.micro_batches)
