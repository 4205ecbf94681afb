"""A coarse estimate of the memory of a pipeline rank. Imports no torch.

Widths and counts were fitted to traces (`python -m benchmarks.rough_plans`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from models.config import ModelConfig
from models.layers import LayerKind
from parallelisms.mesh.pipeline_plan import PipelinePlan
from trainer.config.job_config import Config
from trainer.hardware.device_specs import matmul_slowdown
from trainer.plan.reserves import PINNED_OVERHEAD
from trainer.trace.checkpoint_copies import checkpoint_copies
from trainer.trace.tensors import CUBLAS_HANDLES, CUBLAS_WORKSPACE, DTYPE_BYTES


@dataclass(frozen=True)
class BlockWeights:
    """Weights of a kind of block on one of `tp` ranks."""

    dense: int
    """Elements that every ep rank has."""
    experts: int
    """Elements of this ep rank's experts."""
    products: int
    """Weights that a token is multiplied with."""
    again: int
    """Weights of `products` that recomputation multiplies with again."""
    attention_inputs: int
    slowdown: float
    """Factor of the seconds of products, for their narrow dimensions."""


@lru_cache(maxsize=4096)
def block_weights(model: ModelConfig, kind: LayerKind, tp: int, ep: int) -> BlockWeights:
    """Weights of a block on one of `tp` x `ep` ranks."""
    shapes = {
        name: each.local_shape(model.sizes, tp, ep) for name, each in kind.parameters.items()
    }
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    experts = sum(sizes[name] for name, each in kind.parameters.items() if each.per_expert)
    products = model.products_of(kind, tp)
    matrices = [shapes[name] for name, each in kind.parameters.items() if each.is_matrix]
    weighted = sum(prod(shape) * matmul_slowdown(min(shape[-2:])) for shape in matrices)
    return BlockWeights(
        dense=sum(sizes.values()) - experts,
        experts=experts,
        products=products.every,
        again=products.recomputed,
        attention_inputs=products.attention_inputs,
        slowdown=weighted / max(1, sum(map(prod, matrices))),
    )


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


class RoughMemory:
    """Sizes of one pipeline rank, and what it holds at most."""

    def __init__(
        self, config: Config, world_size: int, pipeline: PipelinePlan, pp_rank: int
    ) -> None:
        self.world_size = world_size
        self.training = config.training
        self.parallelism = config.parallelism
        self.memory = config.memory
        self.checkpoint = config.checkpoint
        self.compiled = config.compiles_on_gpu
        self.model = config.model.build()
        self.context = config.context_plan()
        self.pipeline = pipeline
        self.pp_rank = pp_rank
        degrees = config.parallelism.degrees(world_size)
        self.tp = degrees["tp"]
        self.cp = degrees["cp"]
        self.ep = config.parallelism.ep
        self.shards = degrees["dp_shard"] * self.cp
        self.replicas = degrees["dp_replicate"]
        self.micro_batches = config.micro_batches(world_size)[1]
        self.is_mixed = self.training.dtype == "bfloat16"
        self.compute_bytes = DTYPE_BYTES[self.training.dtype]
        self.master_bytes = max(4, self.compute_bytes)
        self.reduce_bytes = (
            DTYPE_BYTES[self.training.reduce_dtype] if self.is_mixed else self.master_bytes
        )
        padded = self.context.padded_length(self.training.seq_len)
        self.tokens = self.training.micro_batch_size * padded // self.cp
        self.sequence_shards = self.tp if self.parallelism.sequence_parallel else 1
        stages = self.pipeline.stages_of(pp_rank)
        self.blocks_by_stage = [self.pipeline.blocks_per_stage[stage] for stage in stages]
        self.num_blocks = sum(self.blocks_by_stage)
        self.kinds = kinds_by_rank(self.model, pipeline)[pp_rank]
        self.has_embedding = 0 in stages
        self.has_head = self.pipeline.num_stages - 1 in stages
        self.recomputes = self.memory.recompute != "none"
        self.on_host = self.memory.optimizer_placement == "host"

    def weights(self, kind: LayerKind) -> BlockWeights:
        return block_weights(self.model, kind, self.tp, self.ep)

    # ---- sizes

    @cached_property
    def residual(self) -> float:
        """Bytes of the residual stream."""
        return self.compute_bytes * self.tokens * self.model.dim / self.sequence_shards

    @cached_property
    def queries(self) -> float:
        """Bytes of all query heads of this rank."""
        return self.compute_bytes * self.tokens * self.model.sizes["Q"] / self.tp

    @cached_property
    def kv(self) -> float:
        """Bytes of keys and values."""
        heads = max(self.model.num_kv_heads / self.tp, 1)
        return 2 * self.compute_bytes * self.tokens * heads * self.model.head_dim

    @cached_property
    def head_rows(self) -> int:
        return self.model.vocab_size // (self.tp if self.parallelism.loss_parallel else 1)

    @cached_property
    def block_numel(self) -> int:
        """Elements of the largest block."""
        found = map(self.weights, self.kinds)
        return max((each.dense + each.experts for each in found), default=0)

    @cached_property
    def end_numel(self) -> int:
        """Elements of embedding and loss head."""
        if self.model.tie_embeddings:
            return self.head_rows * self.model.dim
        embedding = self.model.vocab_size // self.tp if self.has_embedding else 0
        head = self.head_rows if self.has_head else 0
        return (embedding + head) * self.model.dim

    @cached_property
    def local_numel(self) -> float:
        """Elements of this rank's shards."""
        dense = sum(count * self.weights(kind).dense for kind, count in self.kinds.items())
        experts = sum(count * self.weights(kind).experts for kind, count in self.kinds.items())
        return (dense + self.ep * experts + self.end_numel) / self.shards

    def ffn_numel(self, kind: LayerKind, tokens: float) -> float:
        """Elements of a feed-forward's gate."""
        if kind.feed_forward != "moe":
            return tokens * self.model.ffn_dim / self.tp
        shared = self.model.sizes["Z"] if kind.shared_expert else 0
        return tokens * (self.model.top_k * self.model.expert_dim + shared) / self.tp

    def ffn_weights(self, kind: LayerKind) -> int:
        """Elements of a feed-forward's weights, whose gradients of tiles are summed."""
        weights = self.weights(kind)
        return weights.experts or 3 * self.model.dim * self.model.ffn_dim // self.tp

    def dispatched(self, kind: LayerKind, tokens: float) -> float:
        """Elements of the rows that go to experts."""
        return tokens * self.model.top_k * self.model.dim if kind.feed_forward == "moe" else 0

    @cached_property
    def tiles(self) -> int:
        """Pieces in which a feed-forward runs."""
        if not self.recomputes or self.memory.mlp_tile_mib is None:
            return 1
        widest = max((self.ffn_numel(kind, 1) for kind in self.kinds), default=0)
        width = 3 * widest + self.model.dim
        tokens = max(1, (self.memory.mlp_tile_mib << 20) / (self.compute_bytes * width))
        return max(1, round(self.tokens / tokens))

    @property
    def is_gathered_again(self) -> bool:
        """Whether the backward pass gathers weights once more."""
        return self.pipeline.pp == 1 and self.parallelism.reshard_after_forward

    # ---- memory

    @cached_property
    def in_flight(self) -> float:
        """Micro-batches whose activations are saved at the same time."""
        return self.pipeline.in_flight(self.pp_rank)

    @cached_property
    def num_inputs(self) -> int:
        """Saved block inputs of a micro-batch."""
        every = self.memory.blocks_per_checkpoint
        return sum(-(-blocks // every) for blocks in self.blocks_by_stage)

    @cached_property
    def repeated(self) -> float:
        """Share of blocks whose output is recomputed, as it is the input of the next."""
        if not self.recomputes or not self.num_blocks:
            return 0
        return 1 - self.num_inputs / self.num_blocks

    @cached_property
    def attention_output(self) -> float:
        """Bytes of attention's output and its log-sum-exp."""
        lse = self.master_bytes * self.tokens * self.model.num_heads / self.tp
        return self.queries + lse

    @cached_property
    def saved(self) -> tuple[float, float]:
        """(device, host) bytes that a micro-batch saves between forward and backward."""
        if not self.recomputes:
            return sum(count * self.all_saved(kind) for kind, count in self.kinds.items()), 0
        inputs = self.num_inputs * self.residual
        outputs = 0.0
        if self.memory.recompute == "keep_attention":
            outputs = self.num_blocks * self.attention_output
        if self.memory.offload == "none":
            return inputs + outputs, 0
        if self.memory.offload == "inputs":
            return outputs, inputs
        return 0, inputs + outputs

    def all_saved(self, kind: LayerKind) -> float:
        """Bytes that autograd saves of a block that is not recomputed."""
        saved = self.queries + self.kv + self.attention_output
        norms = 2 * self.residual
        if self.sequence_shards > 1:
            norms *= 0.5 + self.tp / 2
        saved += norms
        gates = 3 if self.compiled else 2
        saved += gates * self.compute_bytes * self.ffn_numel(kind, self.tokens)
        saved += self.compute_bytes * self.dispatched(kind, self.tokens)
        if kind.qk_norm or kind.full_qk_norm:
            saved += self.queries + self.kv / 2
        streams = 2 if self.compiled else 3
        return saved + streams * self.residual

    @cached_property
    def weight_bytes(self) -> tuple[float, float]:
        """(device, host) bytes of weights and optimizer state."""
        moment = 2 if self.memory.optimizer_dtype == "bfloat16" else self.master_bytes
        size = self.local_numel * (self.master_bytes + 2 * moment)
        return (0, size) if self.on_host else (size, 0)

    @cached_property
    def gathered(self) -> float:
        """Bytes of gathered weights while a block runs backward."""
        if self.shards == 1 and not self.is_mixed and not self.on_host:
            return 0
        if self.is_gathered_again:
            blocks = (2 if self.shards > 1 else 1) * self.block_numel
            tied = self.end_numel if self.model.tie_embeddings else 0
            return self.compute_bytes * (blocks + tied)
        return self.compute_bytes * self.numel

    @cached_property
    def attention_transients(self) -> float:
        """Bytes of attention's backward pass, of one head group."""
        groups = self.memory.head_groups
        fraction = (1 if groups == 1 else 2) / groups
        gathered = self.tp if self.sequence_shards > 1 else 0
        kept = self.attention_output
        kept += (2 + 2 * gathered) * self.residual
        grads = self.queries
        if groups > 1:
            grads += self.kv
        own = 4.5 * self.queries + 2.5 * self.kv
        if self.context.ulysses_degree > 1:
            own += 3.5 * self.queries + 2 * self.kv
        if self.context.ring_degree > 1:
            wide = self.master_bytes / self.compute_bytes
            copies = 4 + 2 * wide
            if self.context.rotate_method == "allgather":
                copies = 3.5 * wide * self.context.ring_degree
            own += copies * self.kv
            own += wide * self.queries
        copied = 0 if self.memory.offload == "none" else 2 * self.residual
        if self.memory.offload == "inputs_and_attention":
            copied += 2 * self.attention_output
        return kept + grads + fraction * own + copied + self.scores

    @property
    def scores(self) -> float:
        """Bytes of scores and their gradients, which the plain kernel alone holds."""
        if self.training.attention != "plain":
            return 0
        length: float = self.training.seq_len
        # Ranks of a ring have a head and a tail of the sequence, each a block.
        if self.context.ring_degree > 1:
            length /= 2 * self.context.ring_degree
        windows = [kind.window or length for kind in self.kinds]
        block = min(length, max(windows, default=0))
        heads = self.model.num_heads / self.tp
        heads /= self.context.ulysses_degree * self.memory.head_groups
        is_capped = any(kind.softcap for kind in self.kinds)
        copies = 5 if is_capped else 4
        scores = heads * block**2
        return copies * self.master_bytes * scores

    def ffn_transients(self, kind: LayerKind) -> float:
        """Bytes of a feed-forward's backward pass, of one tile."""
        tokens = self.tokens / self.tiles
        stream = self.residual / self.tiles
        gate = 4.5 * self.compute_bytes * self.ffn_numel(kind, tokens)
        gate += 3 * self.compute_bytes * self.dispatched(kind, tokens)
        gate += stream
        if self.sequence_shards > 1:
            gate += 2 * self.tp * stream
        wide = self.master_bytes / self.compute_bytes
        norm = 2 * stream
        if not self.compiled:
            norm += 3 * wide * stream
        kept = 3 * self.residual + self.attention_output
        return kept + max(gate, norm)

    @cached_property
    def transients(self) -> float:
        """Bytes of the largest moment of a block's backward pass, with its weights' gradients."""
        gradient = self.compute_bytes * self.block_numel
        # Gradients of tiles are summed in the dtype of sums; experts sum by themselves.
        is_summed = self.tiles > 1 and not self.model.has_experts
        summed = self.master_bytes * self.block_numel if is_summed else 0
        parts = [self.attention_transients, *map(self.ffn_transients, self.kinds)]
        if not self.recomputes:
            parts = [part - 2 * self.residual - self.attention_output for part in parts]
        reducing = (self.reduce_bytes + self.compute_bytes) * self.block_numel
        if self.memory.blocks_per_checkpoint > 1:
            parts[0] += (self.memory.blocks_per_checkpoint - 1) * self.residual
        return max(max(parts) + max(gradient, summed), reducing) + 0.3 * gradient

    @cached_property
    def head_bytes(self) -> float:
        """Bytes of the loss head, forward and backward, beside the saved blocks."""
        if not self.has_head:
            return 0
        weight = self.head_rows * self.model.dim
        logits = self.master_bytes * self.tokens * self.head_rows
        chunk = min(self.memory.loss_chunk_bytes, logits)
        hidden = self.residual
        if self.sequence_shards > 1:
            hidden *= self.tp
        sums = self.master_bytes * weight
        gathered = 2 * self.compute_bytes * weight
        return 1.6 * chunk + 3 * hidden + sums + gathered

    @cached_property
    def numel(self) -> float:
        """Elements of this rank's weights before they are sharded."""
        blocks = sum(
            count * (self.weights(kind).dense + self.weights(kind).experts)
            for kind, count in self.kinds.items()
        )
        return blocks + self.end_numel

    @cached_property
    def gradients(self) -> tuple[float, float]:
        """(before, after) bytes of gradients at the begin and the end of a backward pass."""
        shards = 0 if self.on_host else self.master_bytes * self.local_numel
        if self.pipeline.pp > 1:
            if self.micro_batches == 1:
                return 0, 0
            if self.pipeline.reduces_per_micro_batch:
                return shards, shards
            whole = self.reduce_bytes * self.numel / self.pipeline.stages_per_rank
            return whole, whole
        # Replicas keep what they have all-reduced until the backward pass ends.
        is_kept = self.replicas > 1 and (self.on_host or self.reduce_bytes != self.master_bytes)
        reduced = self.reduce_bytes * self.local_numel if is_kept else 0
        return shards if self.micro_batches > 1 else 0, shards + reduced

    @cached_property
    def device_bytes(self) -> float:
        saved = self.saved[0]
        before, after = self.gradients
        batches = self.micro_batches if self.pipeline.pp > 1 else 1
        always = self.weight_bytes[0] + CUBLAS_HANDLES * CUBLAS_WORKSPACE
        always += (4 * 8 * batches + self.master_bytes * self.model.head_dim) * self.tokens
        others = (self.in_flight - 1) * saved
        block = self.gathered + self.transients
        moments = (
            saved + block + before,
            saved / max(1, self.num_blocks) + block + after,
            after + self.embedding_bytes,
            saved + self.head_bytes + before + (0 if self.is_gathered_again else self.gathered),
        )
        return always + max(0, others) + max(moments)

    @property
    def embedding_bytes(self) -> float:
        """Bytes of the embedding's backward pass."""
        rows = self.model.vocab_size // self.tp if self.has_embedding else 0
        gradients = (self.compute_bytes + self.reduce_bytes) * rows * self.model.dim
        return gradients + 2 * self.residual

    @property
    def checkpoint_copy_bytes(self) -> float:
        """Bytes of the copies that checkpoints keep on the host."""
        nodes = -(-self.world_size // self.parallelism.ranks_per_node)
        return checkpoint_copies(self.checkpoint, nodes).number * sum(self.weight_bytes)

    @cached_property
    def host_bytes(self) -> float:
        held = self.checkpoint_copy_bytes + self.weight_bytes[1]
        if self.on_host:  # Gradients, too.
            held += self.master_bytes * self.local_numel
        return held + self.in_flight * self.saved[1] * PINNED_OVERHEAD
