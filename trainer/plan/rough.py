"""A coarse estimate of memory and step time in a fraction of a millisecond, which ranks the layouts
of a search. Nobody reads its numbers: what a search shows is traced. Imports no torch.

Factors without a name say how often a tensor is moved, sent or held. They were fitted to traces
(`python -m benchmarks.rough_plans`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from models.config import BlockProducts, ModelConfig
from models.kernel_choice import kernel_for
from models.layers import LayerKind
from models.score_pairs import causal_pairs
from parallelisms.mesh.message_bytes import sent_bytes
from parallelisms.mesh.pipeline_plan import PipelinePlan
from trainer.config.job_config import Config
from trainer.hardware.device_specs import (
    GROUPED_MATMUL_SHARE,
    DeviceSpec,
    attention_slowdown,
    matmul_slowdown,
)
from trainer.hardware.host import GIB
from trainer.plan.interconnect import GroupTopology, bandwidth, group_topologies, latency
from trainer.plan.pipeline_bubble import bubble_seconds
from trainer.plan.reserves import (
    HOST_BYTES_PER_PROCESS,
    PINNED_OVERHEAD,
    usable_device_bytes,
    usable_host_bytes,
)
from trainer.plan.step_time import (
    ASYNC_TP_OVERLAP,
    DTYPE_RATE_FACTOR,
    HOST_MEMORY_EFFICIENCY,
    OPTIMIZER_MEMORY_SHARE,
    STEP_OVERHEAD,
)
from trainer.trace.checkpoint_copies import checkpoint_copies
from trainer.trace.tensors import CUBLAS_HANDLES, CUBLAS_WORKSPACE, DTYPE_BYTES


class BlockWeights(NamedTuple):
    """Elements of a block's weights on one rank."""

    dense: int
    """Each ep rank has them."""
    experts: int
    """Each ep rank has its own."""
    products: BlockProducts


@lru_cache(maxsize=4096)
def block_weights(model: ModelConfig, kind: LayerKind, tp: int, ep: int) -> BlockWeights:
    sizes = {
        name: prod(each.local_shape(model.sizes, tp, ep)) for name, each in kind.parameters.items()
    }
    experts = sum(sizes[name] for name, each in kind.parameters.items() if each.per_expert)
    return BlockWeights(sum(sizes.values()) - experts, experts, model.products_of(kind, tp))


@lru_cache(maxsize=1024)
def kinds_by_rank(model: ModelConfig, pipeline: PipelinePlan) -> tuple[Counter[LayerKind], ...]:
    """How many layers of each kind a pipeline rank has."""
    kinds = model.unrotated_layers
    return tuple(
        Counter(
            kinds[layer]
            for stage in pipeline.stages_of(rank)
            for layer in pipeline.stage_module(stage).layers
        )
        for rank in range(pipeline.pp)
    )


class RoughPlan:
    """Memory and step time of a layout, whose `training.attention` is resolved."""

    def __init__(self, config: Config, world_size: int, device: DeviceSpec) -> None:
        self.config = config
        self.world_size = world_size
        self.device = device
        self.pipeline = config.pipeline_plan(world_size)
        self.ranks_per_node = min(world_size, device.devices_per_node)

    @cached_property
    def groups(self) -> dict[str, GroupTopology]:
        """Placement of each channel's group."""
        return group_topologies(self.config, self.world_size, self.device)

    @cached_property
    def rank_at(self) -> list[RoughRank]:
        """The rank that stands for each pipeline rank: of those with the same layers the first,
        which saves most.
        """
        kinds = kinds_by_rank(self.config.model.build(), self.pipeline)
        # Only the first rank has the embedding, and only the last one the head.
        ends = 0, self.pipeline.pp - 1
        keys = [
            (frozenset(each.items()), rank if rank in ends else None)
            for rank, each in enumerate(kinds)
        ]
        ranks = {key: RoughRank(self, keys.index(key)) for key in keys}
        return [ranks[key] for key in keys]

    @cached_property
    def ranks(self) -> list[RoughRank]:
        """Pipeline ranks that differ."""
        return [*dict.fromkeys(self.rank_at)]

    @cached_property
    def device_bytes(self) -> float:
        return max(rank.device_bytes for rank in self.ranks)

    @property
    def device_share(self) -> float:
        """Memory of a device, relative to what is usable."""
        return self.device_bytes / usable_device_bytes(self.device)

    @cached_property
    def host_bytes(self) -> float:
        """Bytes of a node, without its processes."""
        return self.ranks_per_node * max(rank.host_bytes for rank in self.ranks)

    @property
    def host_share(self) -> float:
        """Memory of a node, relative to what is usable."""
        processes = HOST_BYTES_PER_PROCESS * self.ranks_per_node
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
        ranks = self.rank_at
        chunk = sum(rank.busy for rank in ranks) / len(ranks) / self.pipeline.num_chunks
        return seconds + bubble_seconds(self.pipeline, chunk, p2p_seconds=ranks[0].send_seconds)

    @cached_property
    def exposed_attention_seconds(self) -> float:
        """Communication of attention that head groups might hide."""
        return max(rank.exposed_attention for rank in self.ranks)


class RoughRank:
    """Memory and seconds of one pipeline rank."""

    def __init__(self, plan: RoughPlan, pp_rank: int) -> None:
        config = plan.config
        self.plan = plan
        self.device = plan.device
        self.pipeline = plan.pipeline
        self.training = config.training
        self.memory = config.memory
        self.parallelism = config.parallelism
        self.model = config.model.build()
        self.context = config.context_plan()
        self.ring = self.context.ring_degree
        degrees = self.parallelism.degrees(plan.world_size)
        self.tp, self.cp, self.ep = degrees["tp"], degrees["cp"], self.parallelism.ep
        self.shards = degrees["dp_shard"] * self.cp
        self.is_compiled = config.compiles_on_gpu
        self.micro_batches = config.micro_batches(plan.world_size)[1]
        self.width = DTYPE_BYTES[self.training.dtype]
        self.master_width = max(4, self.width)
        self.is_mixed = self.width < self.master_width
        # Of lower precision only where weights are.
        reduce_width = DTYPE_BYTES[self.training.reduce_dtype]
        self.reduce_width = reduce_width if self.is_mixed else self.master_width
        self.recomputes = self.memory.recompute != "none"
        self.on_host = self.memory.optimizer_placement == "host"
        stages = self.pipeline.stages_of(pp_rank)
        self.blocks_by_stage = [self.pipeline.blocks_per_stage[stage] for stage in stages]
        self.num_blocks = sum(self.blocks_by_stage)
        self.kinds = kinds_by_rank(self.model, self.pipeline)[pp_rank]
        self.in_flight = self.pipeline.in_flight(pp_rank)
        self.has_embedding = 0 in stages
        self.has_head = self.pipeline.num_stages - 1 in stages
        padded = self.context.padded_length(self.training.seq_len)
        self.tokens = self.training.micro_batch_size * padded // self.cp
        self.sequence_shards = self.tp if self.parallelism.sequence_parallel else 1
        # Ranks of a ring have a head and a tail of the sequence, each a call.
        self.length = self.training.seq_len // (2 * self.ring if self.ring > 1 else 1)
        row = self.width * self.tokens
        # Bytes of all hidden states, of this rank's part of them, of queries, of keys and values.
        self.hidden = row * self.model.dim
        self.residual = self.hidden / self.sequence_shards
        self.queries = row * self.model.sizes["Q"] / self.tp
        self.kv = 2 * row * max(self.model.num_kv_heads / self.tp, 1) * self.model.head_dim
        self.head_rows = self.model.vocab_size // self.tp
        # Whether the backward pass gathers weights once more.
        self.gathers_again = self.pipeline.pp == 1 and self.parallelism.reshard_after_forward
        self.dtype_rate = DTYPE_RATE_FACTOR[self.training.dtype]
        self.matmul_rate = self.dtype_rate * self.device.matmul_share * self.device.matmul_flops

    def of_blocks(self, size: Callable[[LayerKind], float]) -> float:
        """Sum over all blocks."""
        return sum(count * size(kind) for kind, count in self.kinds.items())

    def of_largest(self, size: Callable[[LayerKind], float]) -> float:
        return max(map(size, self.kinds), default=0)

    def weights(self, kind: LayerKind) -> BlockWeights:
        return block_weights(self.model, kind, self.tp, self.ep)

    def block_numel(self, kind: LayerKind) -> int:
        return sum(self.weights(kind)[:2])

    @cached_property
    def end_numel(self) -> int:
        """Elements of embedding and loss head."""
        ends = 1 if self.model.tie_embeddings else self.has_embedding + self.has_head
        return ends * self.head_rows * self.model.dim

    @cached_property
    def numel(self) -> float:
        """Elements of this rank's weights before they are sharded."""
        return self.of_blocks(self.block_numel) + self.end_numel

    @cached_property
    def local_numel(self) -> float:
        """Elements of this rank's shards."""
        others = (self.ep - 1) * self.of_blocks(lambda kind: self.weights(kind).experts)
        return (self.numel + others) / self.shards

    def gate(self, kind: LayerKind) -> float:
        """Bytes of the gate of a feed-forward."""
        dim = self.model.ffn_dim
        if kind.feed_forward == "moe":
            shared = self.model.sizes["Z"] if kind.shared_expert else 0
            dim = self.model.top_k * self.model.expert_dim + shared
        return self.width * self.tokens * dim / self.tp

    def dispatched(self, kind: LayerKind) -> float:
        """Bytes of the rows that go to experts."""
        return self.hidden * self.model.top_k if kind.feed_forward == "moe" else 0

    @cached_property
    def tiles(self) -> int:
        """Pieces in which a feed-forward runs."""
        if not self.recomputes or self.memory.mlp_tile_mib is None:
            return 1
        held = 3 * self.of_largest(self.gate) + self.hidden
        return max(1, round(held / (self.memory.mlp_tile_mib << 20)))

    def attended_keys(self, kind: LayerKind) -> int:
        """Keys that a query meets in a call of attention."""
        return min(self.length, kind.window or self.length)

    # ---- memory

    @cached_property
    def num_inputs(self) -> int:
        """Saved block inputs of a micro-batch."""
        every = self.memory.blocks_per_checkpoint
        return sum(-(-blocks // every) for blocks in self.blocks_by_stage)

    @cached_property
    def repeated(self) -> float:
        """Share of blocks whose output is recomputed, as it is the input of the next."""
        return 1 - self.num_inputs / max(1, self.num_blocks) if self.recomputes else 0

    @cached_property
    def attention_output(self) -> float:
        """Bytes of attention's output and its log-sum-exp."""
        return self.queries + self.master_width * self.tokens * self.model.num_heads / self.tp

    @cached_property
    def saved(self) -> tuple[float, float]:
        """(device, host) bytes that a micro-batch saves between forward and backward."""
        if not self.recomputes:
            return self.of_blocks(self.all_saved), 0
        inputs = self.num_inputs * self.residual
        keeps = self.memory.recompute == "keep_attention"
        outputs = self.num_blocks * self.attention_output if keeps else 0
        if self.memory.offload == "none":
            return inputs + outputs, 0
        return (outputs, inputs) if self.memory.offload == "inputs" else (0, inputs + outputs)

    def all_saved(self, kind: LayerKind) -> float:
        """Bytes that autograd saves of a block that is not recomputed."""
        streams = (3.5 + self.sequence_shards) * self.residual
        gates = (3 if self.is_compiled else 2) * self.gate(kind) + self.dispatched(kind)
        return self.queries + self.kv + self.attention_output + streams + gates

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of weights and optimizer state."""
        moment = 2 if self.memory.optimizer_dtype == "bfloat16" else self.master_width
        return self.local_numel * (self.master_width + 2 * moment)

    @cached_property
    def gathered(self) -> float:
        """Bytes of gathered weights while a block runs backward."""
        if not self.gathers_again:
            return self.width * self.numel
        blocks = 2 if self.shards > 1 else 1
        return self.width * blocks * self.of_largest(self.block_numel)

    @cached_property
    def attention_transients(self) -> float:
        """Bytes of attention's backward pass, of one head group."""
        own = 4.5 * self.queries + 2.5 * self.kv
        if self.context.ulysses_degree > 1:
            own += 3.5 * self.queries + 2 * self.kv
        if self.ring > 1:
            copies = 7 * self.ring if self.context.rotate_method == "allgather" else 8
            own += copies * self.kv
        if self.memory.head_groups > 1:
            own *= 1.3 / self.memory.head_groups
        return own + self.queries + self.scores

    @property
    def scores(self) -> float:
        """Bytes of scores and their gradients, which the plain kernel alone holds."""
        if self.training.attention != "plain":
            return 0
        block = self.of_largest(self.attended_keys)
        heads = self.model.num_heads / (self.tp * self.context.ulysses_degree)
        return 5 * self.master_width * heads / self.memory.head_groups * block**2

    def ffn_transients(self, kind: LayerKind) -> float:
        """Bytes of a feed-forward's backward pass, of one tile."""
        return (5 * self.gate(kind) + 3.5 * self.dispatched(kind)) / self.tiles + self.residual

    @cached_property
    def transients(self) -> float:
        """Bytes of the largest moment of a block's backward pass, with its weights' gradients."""
        gradient = self.width * self.of_largest(self.block_numel)
        kept = 2 * self.residual + self.attention_output if self.recomputes else 0
        if self.sequence_shards > 1:
            kept += 2 * self.tp * self.residual
        ffn = self.of_largest(self.ffn_transients)
        return kept + gradient + max(self.attention_transients, ffn)

    @cached_property
    def head_bytes(self) -> float:
        """Bytes of the loss head, forward and backward, beside the saved blocks."""
        if not self.has_head:
            return 0
        logits = self.master_width * self.tokens * self.head_rows
        held = 1.5 * min(self.memory.loss_chunk_bytes, logits) + 3 * self.hidden
        return held + (self.master_width + 2 * self.width) * self.head_rows * self.model.dim

    @cached_property
    def gradients(self) -> tuple[float, float]:
        """(before, after) bytes of gradients at the begin and the end of a backward pass."""
        shards = 0 if self.on_host else self.master_width * self.local_numel
        if self.pipeline.pp == 1:
            return shards if self.micro_batches > 1 else 0, shards
        if self.micro_batches == 1:
            return 0, 0
        if not self.pipeline.reduces_per_micro_batch:
            shards = self.reduce_width * self.numel
            # Each stage reduces its own before the next stage has any.
            if self.micro_batches <= self.pipeline.pp:
                shards /= self.pipeline.stages_per_rank
        return shards, shards

    @cached_property
    def device_bytes(self) -> float:
        saved = self.saved[0]
        before, after = self.gradients
        always = CUBLAS_HANDLES * CUBLAS_WORKSPACE + (0 if self.on_host else self.weight_bytes)
        block = self.gathered + self.transients
        head = self.head_bytes + (0 if self.gathers_again else self.gathered)
        always += max(0, self.in_flight - 1) * saved
        return always + max(saved + before + max(block, head), block + after)

    @property
    def checkpoint_copy_bytes(self) -> float:
        """Bytes of the copies that checkpoints keep on the host."""
        nodes = -(-self.plan.world_size // self.parallelism.ranks_per_node)
        return checkpoint_copies(self.plan.config.checkpoint, nodes).number * self.weight_bytes

    @cached_property
    def host_bytes(self) -> float:
        held = self.checkpoint_copy_bytes + self.in_flight * self.saved[1] * PINNED_OVERHEAD
        if self.on_host:
            held += self.weight_bytes + self.master_width * self.local_numel
        return held

    # ---- kernels

    def product_seconds(self, kind: LayerKind, weights: float) -> float:
        """Seconds of the products of all tokens with this number of weights."""
        rows = self.tokens / self.tiles
        dim = self.model.ffn_dim
        rate = self.matmul_rate
        if kind.feed_forward == "moe":
            rows *= self.model.top_k / max(1, self.model.num_experts // self.ep)
            dim = self.model.expert_dim
            rate *= GROUPED_MATMUL_SHARE
        slowdown = matmul_slowdown(max(1, rows)) * matmul_slowdown(dim / self.tp)
        return 2 * self.tokens * weights * slowdown / rate

    def attention_seconds(self, kind: LayerKind) -> tuple[float, float]:
        """(forward, backward) seconds of a block."""
        choice = self.training.attention if self.is_mixed else "flash"
        kernel = kernel_for(choice, tokens=self.length, window=kind.window)
        rates = self.device.attention_rates(kernel, self.model.head_dim)
        slowdown = attention_slowdown(self.attended_keys(kind)) / self.dtype_rate
        pairs = self.training.micro_batch_size * causal_pairs(self.training.seq_len, kind.window)
        flops = self.model.attention_flops([kind], pairs / (self.cp * self.tp))
        return slowdown * flops / rates[0], 2.5 * slowdown * flops / rates[1]

    def moved_bytes(self, kind: LayerKind) -> float:
        """Bytes that memory-bound operations of a block move, forward and backward."""
        heads = (80 if self.is_compiled else 220) if kind.qk_norm else 20
        moved = 35 * self.residual + 15 * self.gate(kind) + heads * (self.queries + self.kv / 2)
        moved += 45 * self.dispatched(kind) / self.sequence_shards
        if self.ring > 1:
            hops = 1 if self.context.rotate_method == "allgather" else self.ring
            moved += 12 * hops * self.queries
        moved *= (1 if self.is_compiled else 1.15) + 0.05 * (self.memory.head_groups - 1)
        weights = self.weights(kind).experts or 3 * self.model.dim * self.model.ffn_dim // self.tp
        return moved + 20 * (self.tiles - 1) * weights

    @cached_property
    def kernels(self) -> tuple[float, float]:
        """(forward, backward with recomputation) seconds of all blocks of a step."""
        forward = backward = 0.0
        launch = (45 if self.is_compiled else 110) * self.device.launch_latency
        for kind, count in self.kinds.items():
            products = self.weights(kind).products
            every = self.product_seconds(kind, products.every)
            attention, attention_backward = self.attention_seconds(kind)
            moved = self.moved_bytes(kind) / self.device.hbm_bandwidth
            run = every + attention + moved / 3
            back = 2 * every + attention_backward + 2 * moved / 3
            if self.recomputes:
                again = self.product_seconds(kind, products.recomputed)
                back += again + 0.3 * moved + self.repeated * (every - again + 0.3 * moved)
            if self.memory.recompute == "full":
                back += attention + self.product_seconds(kind, products.attention_inputs)
            forward += count * max(run, launch / 3)
            backward += count * max(back, launch * (1 if self.recomputes else 2 / 3))
        return self.micro_batches * forward, self.micro_batches * backward

    @cached_property
    def head_seconds(self) -> float:
        if not self.has_head:
            return 0
        row_bytes = self.master_width * self.head_rows
        rows = min(self.tokens, self.memory.loss_chunk_bytes / row_bytes)
        flops = 6 * self.tokens * self.head_rows * self.model.dim
        product = flops * matmul_slowdown(min(rows, self.model.dim)) / self.matmul_rate
        moved = (2.0 if self.is_compiled else 11.0) * self.tokens * row_bytes
        # Each chunk reads and writes the gradient of the weight.
        moved += 2 * self.tokens / rows * row_bytes * self.model.dim
        return self.micro_batches * (product + moved / self.device.hbm_bandwidth)

    # ---- messages

    def send(self, channel: str, kind: str, size: float) -> float:
        """Seconds of a call in which a rank of the channel's group has `size` bytes, as in
        `sent_bytes`.
        """
        group = self.plan.groups.get(channel)
        if group is None or group.ranks == 1 or not size:
            return 0
        sent = sent_bytes(kind, size, group.ranks)
        return sent / bandwidth(kind, group, self.device) + latency(kind, group, self.device)

    @property
    def num_exchanges(self) -> tuple[float, float]:
        """(gathers, reductions) of a block in a step."""
        if self.pipeline.pp > 1:
            return 1, self.micro_batches if self.pipeline.reduces_per_micro_batch else 1
        gathers = 2 + self.repeated if self.gathers_again else 1
        return self.micro_batches * gathers, self.micro_batches

    def fsdp_seconds(self, kind: LayerKind) -> float:
        """Gathers and reductions of a block in a step."""
        gathers, reductions = self.num_exchanges
        dense, experts, _ = self.weights(kind)
        sizes = {"fsdp": dense + experts} if self.ep == 1 else {"fsdp": dense, "efsdp": experts}
        seconds = 0.0
        for channel, numel in sizes.items():
            shard = numel / self.plan.groups[channel].ranks
            seconds += gathers * self.send(channel, "all_gather", self.width * shard)
            for reduction in ((channel, "reduce_scatter"), ("dp_replicate", "all_reduce")):
                seconds += reductions * self.send(*reduction, self.reduce_width * shard)
        return seconds

    def tp_seconds(self, kind: LayerKind) -> float:
        """Exchanges of a block's hidden states."""
        whole = ("all_gather", "reduce_scatter") if self.sequence_shards > 1 else ("all_reduce",)
        seconds = sum(self.send("tp", each, self.residual) for each in whole)
        seconds *= (3 if self.recomputes else 2) + 1.2 * self.repeated
        if kind.feed_forward == "moe":
            return seconds + 7 * self.send("tp", "all_to_all", self.dispatched(kind))
        return 2 * seconds * (1 - ASYNC_TP_OVERLAP if self.parallelism.async_tp else 1)

    def ep_seconds(self, kind: LayerKind) -> float:
        runs = 6 if self.recomputes else 5
        return runs * self.send("ep", "all_to_all", self.dispatched(kind) / self.sequence_shards)

    def ulysses_wait(self) -> float:
        groups = self.memory.head_groups
        channel = "exchange" if self.ring > 1 else "cp"
        seconds = groups * self.send(channel, "all_to_all", (2 * self.queries + self.kv) / groups)
        return (3 if self.recomputes else 2) * (1 if groups == 1 else 0.8) * seconds

    def ring_wait(self, kind: LayerKind) -> float:
        """Seconds in which attention waits for the KV of other ranks."""
        if self.ring == 1:
            return 0
        channel = "rotate" if self.context.ulysses_degree > 1 else "cp"
        grads = self.kv * self.master_width / self.width
        forward, backward = self.attention_seconds(kind)
        if kind.window is not None and self.training.seq_len // self.ring > 2 * kind.window:
            halo = 2 * kind.window * self.ring / self.training.seq_len
            sent = self.send(channel, "all_to_all", halo * (2 * self.kv + grads))
            return max(0.0, sent - (forward + backward) / self.ring) + sent / 3
        is_gathered = self.context.rotate_method == "allgather"
        hidden = (1 if is_gathered else self.ring - 1) / self.ring
        there = self.send(channel, "all_gather", self.kv)
        back = self.send(channel, "all_gather", self.kv if is_gathered else self.kv + grads)
        runs = 2 if self.memory.recompute == "full" else 1
        waits = runs * max(0.0, there - forward * hidden) + max(0.0, back - backward * hidden)
        return waits + self.send(channel, "reduce_scatter" if is_gathered else "send", grads)

    @cached_property
    def exposed_attention(self) -> float:
        """Seconds in which attention waits for queries, keys and values of other ranks."""
        waits = self.of_blocks(lambda kind: self.ring_wait(kind) + self.ulysses_wait())
        return self.micro_batches * waits

    # ---- the step

    @cached_property
    def busy(self) -> float:
        """Seconds of all forward and backward passes."""
        # Weights that FSDP gathers are copied.
        copied = (6.6 if self.is_compiled else 1.75) * self.width * self.numel
        copied *= self.num_exchanges[0] / self.device.hbm_bandwidth
        computed = sum(self.kernels) + self.head_seconds + copied
        fsdp = self.of_blocks(self.fsdp_seconds)
        # Nothing runs beside the first gathers and the last reductions.
        exposed = max(0.2 * fsdp, fsdp - computed)
        offloaded = self.micro_batches * self.saved[1] / self.device.host_link_bandwidth
        waits = 0 if self.memory.head_groups == 1 else offloaded * (1 + 2 * self.repeated)
        exposed += max(waits, 2 * offloaded - computed)
        if self.on_host:
            state = self.master_width * self.local_numel / self.device.host_link_bandwidth
            gathers, reductions = (each * state for each in self.num_exchanges)
            # A single rank copies when it needs the weights.
            exposed += max(0.0, gathers - (computed if self.shards > 1 else 0))
            exposed += max(0.0, reductions - computed)
        sent = self.of_blocks(lambda kind: self.tp_seconds(kind) + self.ep_seconds(kind))
        return computed + exposed + self.micro_batches * sent + self.exposed_attention

    @property
    def send_seconds(self) -> float:
        """Seconds to send the residual stream to the next stage."""
        return self.send("pp", "send", self.residual)

    @cached_property
    def optimizer_seconds(self) -> float:
        # Weights and gradients are read and written, moments too.
        moved = 2 * self.weight_bytes + 3 * self.master_width * self.local_numel
        if not self.on_host:
            return moved / (OPTIMIZER_MEMORY_SHARE * self.device.hbm_bandwidth)
        rate = HOST_MEMORY_EFFICIENCY * self.device.host_bandwidth / self.plan.ranks_per_node
        return max(0.0, moved / rate - self.kernels[0] / self.micro_batches)
