"""Sizes that the configuration implies for one pipeline rank: parameters, shards, saved activations. Imports no torch.

Symbols are those of docs/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import inf

from parallelisms.pipeline_plan import SINGLE_STAGE_SCHEDULES, SPLIT_BACKWARD_SCHEDULES
from trainer.config.job_config import Config
from trainer.hardware.host import GIB
from trainer.memory.block import BlockMemory

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
Shapes = list[tuple[int, int]]
"""(rows, columns) of the parameters on one tp rank; norms have one column."""


class RankMemory:
    def __init__(self, config: Config, world_size: int, pp_rank: int) -> None:
        training, parallelism = config.training, config.parallelism
        self.config, self.pp_rank, self.model = config, pp_rank, config.model.build()
        degrees = parallelism.degrees(world_size)
        self.tp, self.pipeline = degrees["tp"], config.pipeline_plan(world_size)
        self.num_shards = degrees["dp_shard"] * degrees["cp"]
        self.num_micro_batches = config.micro_batches(world_size)[1]
        self.compute_bytes, self.master_bytes = DTYPE_BYTES[training.dtype], max(4, DTYPE_BYTES[training.dtype])
        is_bfloat16 = self.compute_bytes == 2
        self.reduce_bytes = DTYPE_BYTES[training.reduce_dtype] if is_bfloat16 else self.master_bytes
        self.kv_grad_bytes = DTYPE_BYTES[parallelism.cp_reduce_dtype] if is_bfloat16 else self.compute_bytes
        self.moment_bytes = 2 if config.memory.optimizer_dtype == "bfloat16" else self.master_bytes
        self.optimizer_on_host = config.memory.optimizer_placement == "host"
        is_single_rank = self.num_shards * degrees["dp_replicate"] == 1
        self.is_sharded = not is_single_rank or self.compute_bytes != self.master_bytes or self.optimizer_on_host
        context_plan = config.context_plan()
        self.tokens = training.micro_batch_size * context_plan.padded_length(training.seq_len) // degrees["cp"]
        self.block = BlockMemory(
            self.model,
            self.tokens,
            self.compute_bytes,
            self.master_bytes,
            self.tp,
            parallelism.sequence_parallel,
            training.compile,
            context_plan if degrees["cp"] > 1 else None,
            config.memory.head_groups,
            None if config.memory.mlp_tile_mib is None else config.memory.mlp_tile_mib << 20,
        )
        self.recomputes = config.memory.recompute != "none"
        self.ranks_per_node = min(world_size, parallelism.ranks_per_node)
        stages = self.pipeline.stages_of(pp_rank)
        self.blocks_by_stage = {stage: self.pipeline.blocks_per_stage[stage] for stage in stages}
        self.num_blocks = sum(self.blocks_by_stage.values())
        self.has_first_stage, self.has_last_stage = 0 in stages, self.pipeline.num_stages - 1 in stages

    # ---- parameters

    @cached_property
    def block_shapes(self) -> Shapes:
        E, G, tp = self.model.dim, self.model.ffn_dim // self.tp, self.tp
        q_dim = self.model.num_heads * self.model.head_dim // tp
        kv_dim = self.model.num_kv_heads * self.model.head_dim // (tp if self.model.num_kv_heads >= tp else 1)
        qk_norms = [(self.model.head_dim, 1)] * (2 * self.model.qk_norm)
        return [(q_dim, E), (kv_dim, E), (kv_dim, E), (E, q_dim), (G, E), (G, E), (E, G), (E, 1), (E, 1), *qk_norms]

    @property
    def head_rows(self) -> int:
        """Vocabulary entries whose logits this rank computes."""
        return self.model.vocab_size // (self.tp if self.config.parallelism.loss_parallel else 1)

    @cached_property
    def head_shapes(self) -> Shapes:
        return [(self.head_rows, self.model.dim)]

    @cached_property
    def embed_shapes(self) -> Shapes:
        tied = self.model.tie_embeddings
        return self.head_shapes if tied else [(self.model.vocab_size // self.tp, self.model.dim)]

    @cached_property
    def end_shapes(self) -> Shapes:
        """The parts of embedding, loss head and final norm on this rank."""
        head = self.head_shapes * (not self.model.tie_embeddings) + [(self.model.dim, 1)]
        return self.embed_shapes * self.has_first_stage + head * self.has_last_stage

    def sharded_numel(self, shapes: Shapes) -> int:
        """Elements of this rank's FSDP shard, rounded up to whole rows as on the first rank."""
        return sum(-(-rows // self.num_shards) * columns for rows, columns in shapes)

    @cached_property
    def local_numel(self) -> int:
        return self.num_blocks * self.sharded_numel(self.block_shapes) + self.sharded_numel(self.end_shapes)

    # ---- unsharded weights and unreduced gradients

    def gathered_bytes(self, unit: Shapes) -> int:
        """An all-gathered FSDP unit in the compute dtype; 0 without FSDP, where the parameters are used directly."""
        return self.compute_bytes * numel(unit) * self.is_sharded

    def resident_weight_bytes(self, num_blocks: int) -> int:
        """Units that stay gathered: a tied head, `num_blocks` blocks unless resharded, or all stages of a pipeline."""
        block = self.gathered_bytes(self.block_shapes)
        if self.pipeline.pp > 1:
            return self.num_blocks * block + self.gathered_bytes(self.end_shapes)
        gathered_blocks = min(1, num_blocks) if self.config.parallelism.reshard_after_forward else num_blocks
        return self.gathered_bytes(self.head_shapes) * self.model.tie_embeddings + block * gathered_blocks

    @property
    def reshards_after_forward(self) -> bool:
        return self.is_sharded and self.pipeline.pp == 1 and self.config.parallelism.reshard_after_forward

    def unreduced_gradient_bytes(self, unit: Shapes) -> int:
        """Reduce-scatter input of a unit, alive until the next unit's gradients arrive."""
        if not self.is_sharded or self.pipeline.pp > 1:
            return 0
        return self.reduce_bytes * self.sharded_numel(unit) * self.num_shards

    @property
    def pipeline_gradient_bytes(self) -> int:
        """Unsharded gradients, which a pipeline rank accumulates until the end of the step."""
        if self.pipeline.pp == 1 or not self.is_sharded:
            return 0
        return self.reduce_bytes * (self.num_blocks * numel(self.block_shapes) + numel(self.end_shapes))

    # ---- the loss head

    @property
    def head_tokens(self) -> int:
        """Tokens of a micro-batch whose logits this rank computes."""
        has_all_tokens = self.config.parallelism.loss_parallel or not self.block.sequence_parallel
        return self.tokens if has_all_tokens else self.tokens // self.tp

    @property
    def loss_chunk_tokens(self) -> int:
        return max(1, (self.config.memory.loss_chunk_mib << 20) // (self.master_bytes * self.head_rows))

    # ---- saved activations

    @cached_property
    def in_flight_micro_batches(self) -> float:
        """Micro-batches whose activations this rank saves at the same time, in units of all its blocks."""
        plan, micro_batches = self.pipeline, self.num_micro_batches
        if plan.pp == 1 or plan.schedule == "GPipe":
            return 1 if plan.pp == 1 else micro_batches
        if plan.schedule in SPLIT_BACKWARD_SCHEDULES:
            return plan.pp + (plan.schedule == "DualPipeV") / 2
        if plan.schedule in SINGLE_STAGE_SCHEDULES:
            return min(micro_batches, plan.pp - self.pp_rank)
        chunks = plan.stages_per_rank
        return min(chunks * micro_batches, (chunks - 1) * plan.pp + 2 * (plan.pp - 1 - self.pp_rank) + 1) / chunks

    @cached_property
    def num_recomputed_blocks(self) -> int:
        """Blocks whose output is recomputed in the backward pass because it is the unsaved input of the next block."""
        every = self.config.memory.blocks_per_checkpoint
        return sum(blocks - -(-blocks // every) for blocks in self.blocks_by_stage.values())

    @cached_property
    def attention_recompute_fraction(self) -> float:
        """Share of the rank's blocks that recompute attention: all, none, or those whose output exceeds the host budget."""
        memory = self.config.memory
        if memory.recompute != "keep_attention":
            return float(memory.recompute == "full")
        if memory.offload != "inputs_and_attention" or memory.host_budget_gib is None or not self.num_blocks:
            return 0
        inputs = self.pipeline.max_in_flight * (self.num_blocks - self.num_recomputed_blocks)
        budget = memory.host_budget_gib * GIB / self.ranks_per_node - inputs * self.block.residual_bytes
        outputs = max(0, budget // self.block.attention_output_bytes)
        return 1 - min(1, outputs / (self.in_flight_micro_batches * self.num_blocks))

    @property
    def saved_bytes(self) -> float:
        """All blocks, rotary tables, and the embedding output on the first stage (later stages receive into a buffer)."""
        rotation = self.master_bytes * self.model.head_dim * self.tokens * self.pipeline.stages_per_rank
        on_device, _ = self.saved_block_bytes(self.num_blocks)
        embedded = self.block.residual_bytes * self.has_first_stage
        return self.in_flight_micro_batches * (on_device + rotation + embedded)

    def saved_block_bytes(self, num_blocks: int, *, in_backward: bool = False) -> tuple[float, float]:
        """(device, host) bytes saved by `num_blocks` blocks; `in_backward` excludes the group being recomputed."""
        memory, block, in_flight = self.config.memory, self.block, self.in_flight_micro_batches
        if not self.recomputes:
            return num_blocks * block.saved_bytes("none"), 0
        every = memory.blocks_per_checkpoint
        num_inputs = num_blocks // every if in_backward else -(-num_blocks // every)
        attention_bytes = block.attention_output_bytes * (memory.recompute == "keep_attention")
        total_inputs = in_flight * -(-self.num_blocks // every)
        if memory.offload == "none" or not total_inputs:
            return num_inputs * block.residual_bytes + num_blocks * attention_bytes, 0
        host_budget = inf if memory.host_budget_gib is None else memory.host_budget_gib * GIB / self.ranks_per_node
        offloaded_bytes = min(block.residual_bytes, host_budget / total_inputs)
        on_host, on_device = offloaded_bytes * num_inputs, (block.residual_bytes - offloaded_bytes) * num_inputs
        if memory.offload == "inputs":
            return on_device + num_blocks * attention_bytes, on_host
        # Attention outputs beyond the host budget are recomputed.
        remaining = max(0, (host_budget - total_inputs * block.residual_bytes) / (in_flight * self.num_blocks))
        return on_device, on_host + num_blocks * min(attention_bytes, remaining)


def numel(shapes: Iterable[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in shapes)
