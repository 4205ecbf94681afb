"""Predicts the peak memory of each pipeline rank from the configuration alone. Imports no torch.

Sums the items alive in each candidate phase of a step and takes the maximum. Kernel workspaces, communication library
buffers and allocator fragmentation are not included. Symbols are those of docs/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

from parallelisms.pipeline_plan import SINGLE_STAGE_SCHEDULES, SPLIT_BACKWARD_SCHEDULES
from trainer.config.job_config import Config
from trainer.config.sections import OPTIMIZER_CHUNK_ELEMENTS
from trainer.memory.block import BlockMemory

GIB = 1 << 30
SAVED_ACTIVATIONS, TRANSIENT_ACTIVATIONS = "saved activations", "transient activations"
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
Shapes = list[tuple[int, int]]
"""(rows, columns) of the parameters on one tp rank; norms have one column."""


@dataclass(frozen=True)
class MemoryItem:
    name: str
    device_bytes: float = 0
    host_bytes: float = 0

    @property
    def total_bytes(self) -> float:
        return self.device_bytes + self.host_bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of a rank in one phase of a step."""

    phase: str
    pp_rank: int
    pp: int
    residual_bytes: int
    """u: the residual stream on one rank."""
    items: tuple[MemoryItem, ...]

    @property
    def device_bytes(self) -> float:
        return sum(item.device_bytes for item in self.items)

    @property
    def host_bytes(self) -> float:
        return sum(item.host_bytes for item in self.items)

    def item(self, name: str) -> MemoryItem:
        return next(item for item in self.items if item.name == name)

    @property
    def state_bytes(self) -> float:
        """Parameters, gradients and optimizer state on the device."""
        return sum(item.device_bytes for item in self.items[:3])

    @property
    def residual_multiple(self) -> float:
        """k, where the peak is state_bytes + k u."""
        return (self.device_bytes - self.state_bytes) / self.residual_bytes


def estimate_memory(config: Config, world_size: int) -> MemoryEstimate:
    """Of the rank with the highest peak. The configuration must be valid."""
    return max(estimate_memory_per_pp_rank(config, world_size), key=lambda estimate: estimate.device_bytes)


def estimate_memory_per_pp_rank(config: Config, world_size: int) -> list[MemoryEstimate]:
    """The peak of each pipeline rank."""
    ranks = (RankMemory(config, world_size, pp_rank) for pp_rank in range(config.parallelism.pp))
    return [_peak([*rank.phase_estimates()]) for rank in ranks]


def _peak(estimates: list[MemoryEstimate]) -> MemoryEstimate:
    """The phase with the device's peak, with the host's own peak, which is at the end of the forward pass."""
    peak = max(estimates, key=lambda estimate: estimate.device_bytes)
    saved_on_host = max(found.item(SAVED_ACTIVATIONS).host_bytes for found in estimates)
    return replace(
        peak,
        items=tuple(
            replace(item, host_bytes=saved_on_host) if item.name == SAVED_ACTIVATIONS else item for item in peak.items
        ),
    )


class RankMemory:
    """Sizes that the configuration implies for one pipeline rank."""

    def __init__(self, config: Config, world_size: int, pp_rank: int) -> None:
        training, parallelism = config.training, config.parallelism
        self.config, self.pp_rank, self.model = config, pp_rank, config.model.build()
        degrees = parallelism.degrees(world_size)
        self.tp, self.pipeline = degrees["tp"], config.pipeline_plan(world_size)
        self.num_shards = degrees["dp_shard"] * degrees["cp"]
        self.num_micro_batches = config.micro_batches(world_size)[1]
        self.compute_bytes, self.master_bytes = DTYPE_BYTES[training.dtype], max(4, DTYPE_BYTES[training.dtype])
        self.reduce_bytes = DTYPE_BYTES[training.reduce_dtype] if self.compute_bytes == 2 else self.master_bytes
        self.moment_bytes = 2 if config.memory.optimizer_dtype == "bfloat16" else self.master_bytes
        self.optimizer_on_host = config.memory.optimizer_placement == "host"
        is_single_rank = self.num_shards * degrees["dp_replicate"] == 1
        self.is_sharded = not is_single_rank or self.compute_bytes != self.master_bytes or self.optimizer_on_host
        context_plan = config.context_plan()
        self.tokens = training.micro_batch_size * context_plan.padded_length(training.seq_len) // degrees["cp"]
        self.block_memory = BlockMemory(
            self.model, self.tokens, self.compute_bytes, self.master_bytes, self.tp, parallelism.sequence_parallel,
            training.compile, context_plan if degrees["cp"] > 1 else None, config.memory.head_groups,
            None if config.memory.mlp_tile_mib is None else config.memory.mlp_tile_mib << 20,
        )  # fmt: skip
        self.ranks_per_node = min(world_size, parallelism.ranks_per_node)
        stages = self.pipeline.stages_of(pp_rank)
        self.num_blocks = sum(self.pipeline.blocks_per_stage[stage] for stage in stages)
        self.has_first_stage, self.has_last_stage = 0 in stages, self.pipeline.num_stages - 1 in stages

    # ---- parameters

    def block_shapes(self) -> Shapes:
        E, G, tp = self.model.dim, self.model.ffn_dim // self.tp, self.tp
        q_dim = self.model.num_heads * self.model.head_dim // tp
        kv_dim = self.model.num_kv_heads * self.model.head_dim // (tp if self.model.num_kv_heads >= tp else 1)
        qk_norms = [(self.model.head_dim, 1)] * (2 * self.model.qk_norm)
        return [(q_dim, E), (kv_dim, E), (kv_dim, E), (E, q_dim), (G, E), (G, E), (E, G), (E, 1), (E, 1), *qk_norms]

    def head_shapes(self) -> Shapes:
        loss_parallel = self.config.parallelism.loss_parallel
        return [(self.model.vocab_size // (self.tp if loss_parallel else 1), self.model.dim)]

    def embed_shapes(self) -> Shapes:
        tied = self.model.tie_embeddings
        return self.head_shapes() if tied else [(self.model.vocab_size // self.tp, self.model.dim)]

    def embedding_and_head_shapes(self) -> Shapes:
        """The parts of embedding and loss head on this rank."""
        head = self.head_shapes() * (not self.model.tie_embeddings) + [(self.model.dim, 1)]
        return self.embed_shapes() * self.has_first_stage + head * self.has_last_stage

    def sharded_numel(self, shapes: Shapes) -> int:
        """Elements of this rank's FSDP shard, rounded up to whole rows as on the first rank."""
        return sum(-(-rows // self.num_shards) * columns for rows, columns in shapes)

    def local_numel(self) -> int:
        return self._local_numel

    @cached_property
    def _local_numel(self) -> int:
        return self.num_blocks * self.sharded_numel(self.block_shapes()) + self.sharded_numel(
            self.embedding_and_head_shapes()
        )

    # ---- unsharded weights and unreduced gradients

    def unsharded_weight_bytes(self, unit: Shapes) -> int:
        """An all-gathered FSDP unit in the compute dtype; 0 without FSDP, where the parameters are used directly."""
        return self.compute_bytes * _numel(unit) * self.is_sharded

    def resident_weight_bytes(self, num_blocks: int) -> int:
        """Units that stay gathered: a tied head, `num_blocks` blocks unless resharded, or all stages of a pipeline."""
        block_bytes = self.unsharded_weight_bytes(self.block_shapes())
        if self.pipeline.pp > 1:
            return self.num_blocks * block_bytes + self.unsharded_weight_bytes(self.embedding_and_head_shapes())
        root_bytes = self.unsharded_weight_bytes(self.head_shapes()) * self.model.tie_embeddings
        return root_bytes + block_bytes * (
            num_blocks if not self.config.parallelism.reshard_after_forward else min(1, num_blocks)
        )

    def unreduced_gradient_bytes(self, unit: Shapes) -> int:
        """Reduce-scatter input of a unit, alive until the next unit's gradients arrive."""
        if not self.is_sharded or self.pipeline.pp > 1:
            return 0
        return self.reduce_bytes * self.sharded_numel(unit) * self.num_shards

    # ---- phases

    def phase_estimates(self) -> Iterator[MemoryEstimate]:
        saved = self._saved_activation_bytes()
        if self.has_last_stage:
            yield from self._head_estimates(saved)
        for index in sorted({0, min(1, self.num_blocks - 1), self.num_blocks - 1} - {-1}):
            yield from self._block_backward_estimates(index, saved)
        if self.has_first_stage:
            yield self._embedding_estimate()
        # Bfloat16 moments are upcast chunk by chunk.
        chunk = min(
            OPTIMIZER_CHUNK_ELEMENTS,
            max(self.sharded_numel([shape]) for shape in self.block_shapes() + self.embedding_and_head_shapes()),
        )
        master_chunk_bytes = (
            2 * self.master_bytes * chunk * (self.moment_bytes < self.master_bytes and not self.optimizer_on_host)
        )
        yield self._estimate("in the optimizer step", gradients=self.local_numel(), transient=master_chunk_bytes)

    def in_flight_micro_batches(self) -> float:
        """Micro-batches whose activations this rank saves at the same time, in units of all its blocks."""
        plan, num_micro_batches = self.pipeline, self.num_micro_batches
        if plan.pp == 1 or plan.schedule == "GPipe":
            return 1 if plan.pp == 1 else num_micro_batches
        if plan.schedule in SPLIT_BACKWARD_SCHEDULES:
            return plan.pp + (plan.schedule == "DualPipeV") / 2
        if plan.schedule in SINGLE_STAGE_SCHEDULES:
            return min(num_micro_batches, plan.pp - self.pp_rank)
        stages_per_rank = plan.stages_per_rank
        return (
            min(
                stages_per_rank * num_micro_batches,
                (stages_per_rank - 1) * plan.pp + 2 * (plan.pp - 1 - self.pp_rank) + 1,
            )
            / stages_per_rank
        )

    def _saved_activation_bytes(self) -> float:
        """All blocks, rotary tables, and the embedding output on the first stage (later stages receive into a buffer)."""
        rotation = self.master_bytes * self.model.head_dim * self.tokens * self.pipeline.stages_per_rank
        return self.in_flight_micro_batches() * (
            self.saved_block_bytes(self.num_blocks)[0]
            + rotation
            + self.block_memory.residual_bytes * self.has_first_stage
        )

    def saved_block_bytes(self, num_blocks: int, *, in_backward: bool = False) -> tuple[float, float]:
        """(device, host) bytes saved by `num_blocks` blocks; `in_backward` excludes the group being recomputed."""
        memory, block, blocks_per_checkpoint = (
            self.config.memory,
            self.block_memory,
            self.config.memory.blocks_per_checkpoint,
        )
        if memory.recompute == "none":
            return num_blocks * block.saved_bytes("none"), 0
        num_inputs = num_blocks // blocks_per_checkpoint if in_backward else -(-num_blocks // blocks_per_checkpoint)
        attention_bytes = block.attention_output_bytes * (memory.recompute == "keep_attention")
        total_inputs = self.in_flight_micro_batches() * -(-self.num_blocks // blocks_per_checkpoint)
        if memory.offload == "none" or not total_inputs:
            return num_inputs * block.residual_bytes + num_blocks * attention_bytes, 0
        host_budget = inf if memory.host_budget_gib is None else memory.host_budget_gib * GIB / self.ranks_per_node
        offloaded_bytes = min(block.residual_bytes, host_budget / total_inputs)
        host_budget -= total_inputs * block.residual_bytes
        on_host, on_device = offloaded_bytes * num_inputs, (block.residual_bytes - offloaded_bytes) * num_inputs
        if memory.offload == "inputs":
            return on_device + num_blocks * attention_bytes, on_host
        # Attention outputs beyond the host budget are recomputed.
        return on_device, on_host + num_blocks * min(
            attention_bytes, max(0, host_budget / (self.in_flight_micro_batches() * self.num_blocks))
        )

    def _head_estimates(self, saved: float) -> Iterator[MemoryEstimate]:
        vocab_rows, dim = self.head_shapes()[0]
        input_bytes, weight_bytes = self._head_input_bytes(), self.master_bytes * vocab_rows * dim
        tokens = input_bytes // (self.compute_bytes * dim)
        low_precision_bytes = self.compute_bytes * (self.compute_bytes < self.master_bytes)
        chunk = max(1, (self.config.memory.loss_chunk_mib << 20) // (self.master_bytes * vocab_rows))
        bytes_per_token = (self.master_bytes + low_precision_bytes) * vocab_rows
        logits_bytes = (
            bytes_per_token * min(chunk, tokens) + self.compute_bytes * vocab_rows * dim
        )  # With the chunk's weight gradient.
        gradients, on_host = (
            self._gradient_numel(0),
            self.in_flight_micro_batches() * self.saved_block_bytes(self.num_blocks)[1],
        )
        head_unit = [] if self.model.tie_embeddings else self.head_shapes()
        head_bytes, last_block_bytes = (
            self.unsharded_weight_bytes(head_unit) * (self.pipeline.pp == 1),
            self.unsharded_weight_bytes(self.block_shapes()),
        )
        has_gather_copy = self.num_shards > 1  # The last all-gather output and its copy-out both exist.
        estimate = partial(
            self._estimate,
            gradients=gradients,
            unsharded_gradients=self._pipeline_gradient_bytes(),
            saved=saved,
            on_host=on_host,
        )
        yield estimate(
            "in the loss head, forward",
            weights=self.resident_weight_bytes(self.num_blocks)
            - last_block_bytes * self._reshards_after_forward()
            + head_bytes
            + has_gather_copy * (head_bytes or last_block_bytes),
            head=2 * input_bytes + weight_bytes + logits_bytes,
        )
        yield estimate(
            "in the loss head, backward",
            weights=self.resident_weight_bytes(self.num_blocks) + head_bytes + has_gather_copy * head_bytes,
            head=2 * input_bytes + 2 * weight_bytes + low_precision_bytes * vocab_rows * dim,
        )
        # The norm backward runs in float32 chunks from the incoming to the outgoing gradient.
        chunk = min(chunk, self.block_memory.residual_bytes // (self.compute_bytes * dim))
        yield estimate(
            "in the final norm, backward",
            weights=self.resident_weight_bytes(self.num_blocks) + head_bytes,
            unsharded_gradients=self._pipeline_gradient_bytes() or self.compute_bytes * vocab_rows * dim,
            head=2 * self.block_memory.residual_bytes + chunk * dim * (3 * self.master_bytes + self.compute_bytes),
        )

    def _block_backward_estimates(self, index: int, saved: float) -> Iterator[MemoryEstimate]:
        """Backward of block `index` of the rank, after all later blocks."""
        shapes, is_tied = self.block_shapes(), self.model.tie_embeddings
        is_last_block, num_later_blocks = index == self.num_blocks - 1, self.num_blocks - 1 - index
        gradients = self._gradient_numel(
            num_later_blocks * self.sharded_numel(shapes) + self.sharded_numel(self.head_shapes()) * self.has_last_stage
        )
        recomputes = self.config.memory.recompute != "none"
        all_saved, still_saved = (
            self.saved_block_bytes(self.num_blocks),
            self.saved_block_bytes(index if recomputes else index + 1, in_backward=recomputes),
        )
        saved_on_device = saved - all_saved[0] + still_saved[0] - self.block_memory.residual_bytes * self.has_last_stage
        saved_on_host = self.in_flight_micro_batches() * all_saved[1] - all_saved[1] + still_saved[1]
        block_bytes = self.unsharded_weight_bytes(shapes)
        prefetched_weights = block_bytes * (self._reshards_after_forward() and self.num_shards > 1 and index > 0)
        unreduced = self.unreduced_gradient_bytes(([] if is_tied else self.head_shapes()) if is_last_block else shapes)
        unsharded_gradients = (
            self._pipeline_gradient_bytes() + self.unsharded_weight_bytes(self.head_shapes()) * is_tied
        )
        for name, transient, computed in self._block_backward_phases(index):
            gradient_numel = _numel(computed)
            yield self._estimate(
                f"in {name} of block {index}, backward",
                gradients=gradients if self.is_sharded else gradients + gradient_numel,
                weights=self.resident_weight_bytes(index + 1) + prefetched_weights,
                unsharded_gradients=unreduced
                + unsharded_gradients
                + self.compute_bytes * gradient_numel * self.is_sharded,
                saved=saved_on_device,
                on_host=saved_on_host,
                # The incoming gradient may already be counted as a pipeline buffer.
                transient=transient - self.block_memory.residual_bytes * (is_last_block and not self.has_last_stage),
            )
        if not self.is_sharded:
            return
        yield self._estimate(
            f"reduce-scatter after block {index}",
            gradients=gradients,
            weights=self.resident_weight_bytes(index)
            if not self._reshards_after_forward()
            else self.resident_weight_bytes(0) + prefetched_weights,
            unsharded_gradients=unsharded_gradients + block_bytes + self.unreduced_gradient_bytes(shapes),
            saved=saved_on_device - (0 if recomputes else self.block_memory.saved_bytes("none")),
            on_host=saved_on_host,
            transient=self.block_memory.residual_bytes + self._prefetched_bytes(index) if recomputes else 0,
        )

    def _block_backward_phases(self, index: int) -> Iterator[tuple[str, float, Shapes]]:
        """(name, transient bytes, matrices whose gradients exist) of each part of a block's backward."""
        block_memory = self.block_memory
        _, _, _, output, *ffn_shapes = self.block_shapes()[:7]
        if self.config.memory.recompute == "none":
            yield "feed-forward", block_memory.feed_forward_backward_bytes(), ffn_shapes[2:]
            yield (
                "attention",
                block_memory.attention_backward_bytes(self._grad_comm_bytes())
                - block_memory.feed_forward_saved_bytes(),
                [output, *ffn_shapes],
            )
            return
        recomputed_inputs = index % self.config.memory.blocks_per_checkpoint * block_memory.residual_bytes
        yield "feed-forward", block_memory.feed_forward_recompute_bytes() + recomputed_inputs, []
        prefetched = self._prefetched_bytes(index) if self.config.memory.head_groups == 1 else 0
        yield (
            "attention",
            block_memory.attention_recompute_bytes(self._grad_comm_bytes()) + recomputed_inputs + prefetched,
            [output, *ffn_shapes],
        )
        yield (
            "projections",
            block_memory.qkv_recompute_bytes() + recomputed_inputs + self._prefetched_bytes(index),
            [output, *ffn_shapes],
        )

    def _prefetched_bytes(self, index: int) -> float:
        """Activations being copied back from the host for the preceding block."""
        if self.config.memory.offload == "none" or index == 0:
            return 0
        input_bytes, attention_bytes = self.saved_block_bytes(1)[1], 0.0
        input_bytes = min(self.block_memory.residual_bytes, input_bytes)
        if self.config.memory.head_groups == 1:
            attention_bytes = self.saved_block_bytes(1)[1] - input_bytes
        return input_bytes + attention_bytes

    def _embedding_estimate(self) -> MemoryEstimate:
        unit = self.embed_shapes()
        unsharded_bytes = (
            self.unsharded_weight_bytes(unit) + self.unreduced_gradient_bytes(unit) + self._pipeline_gradient_bytes()
        )
        return self._estimate(
            "in the embedding, backward",
            gradients=self.local_numel() + _numel(unit) * (not self.is_sharded and self.num_micro_batches > 1),
            weights=self.resident_weight_bytes(0),
            unsharded_gradients=unsharded_bytes,
        )

    def _estimate(
        self,
        phase: str,
        *,
        gradients: float,
        weights: float = 0,
        unsharded_gradients: float = 0,
        saved: float = 0,
        on_host: float = 0,
        transient: float = 0,
        head: float = 0,
    ) -> MemoryEstimate:
        """`gradients` is in elements, everything else in bytes."""
        plan, parameter_bytes = self.pipeline, self.master_bytes * self.local_numel()
        # One per input and gradient that a stage receives in a step.
        num_receive_buffers = self.num_micro_batches * (
            2 * plan.stages_per_rank - self.has_first_stage - self.has_last_stage
        )
        buffers = (plan.pp > 1) * (num_receive_buffers + self._num_send_buffers()) * self.block_memory.residual_bytes
        # Every micro-batch in the loss head holds its gradients.
        waiting_micro_batches = {"GPipe": self.num_micro_batches, "InterleavedZeroBubble": plan.pp}.get(
            plan.schedule, 1
        ) - 1
        if self.has_last_stage and plan.pp > 1:
            head += waiting_micro_batches * (self._head_input_bytes() + self.master_bytes * _numel(self.head_shapes()))
        batch_bytes = 32 * self.tokens  # Tokens, labels, positions and document ids are int64.
        async_checkpoint = self.config.checkpoint.enabled and self.config.checkpoint.asynchronous
        gradient_bytes = self.master_bytes * (self.local_numel() if self.optimizer_on_host else gradients)
        state_bytes = {
            "parameters": parameter_bytes,
            "gradients": gradient_bytes,
            "optimizer state": 2 * self.moment_bytes * self.local_numel(),
        }
        items = (
            *(
                MemoryItem(name, **{"host_bytes" if self.optimizer_on_host else "device_bytes": size})
                for name, size in state_bytes.items()
            ),
            MemoryItem("gathered weights", weights),
            MemoryItem("unreduced gradients", unsharded_gradients),
            MemoryItem(SAVED_ACTIVATIONS, saved, on_host),
            MemoryItem(TRANSIENT_ACTIVATIONS, transient),
            MemoryItem("loss head", head),
            MemoryItem("pipeline buffers", buffers),
            MemoryItem(
                "async-checkpoint staging",
                0,
                (parameter_bytes + state_bytes["optimizer state"]) * async_checkpoint,
            ),
            # The host also prefetches the next step.
            MemoryItem(
                "batch",
                batch_bytes * (self.num_micro_batches if plan.pp > 1 else 1),
                2 * batch_bytes * self.num_micro_batches,
            ),
        )
        return MemoryEstimate(phase, self.pp_rank, plan.pp, self.block_memory.residual_bytes, items)

    def _num_send_buffers(self) -> float:
        """Sent outputs and gradients, which multi-stage schedules keep until the end of the step."""
        stages_per_rank = self.pipeline.stages_per_rank
        if self.pipeline.schedule in SINGLE_STAGE_SCHEDULES:
            return 0
        finished_micro_batches = stages_per_rank * (self.num_micro_batches - self.in_flight_micro_batches())
        return max(
            0,
            2 * finished_micro_batches
            - self.has_first_stage * (finished_micro_batches // stages_per_rank)
            - self.has_last_stage * -(-finished_micro_batches // stages_per_rank),
        )

    def _reshards_after_forward(self) -> bool:
        return self.is_sharded and self.pipeline.pp == 1 and self.config.parallelism.reshard_after_forward

    def _gradient_numel(self, numel: int) -> int:
        """Elements of existing gradients: all from the second micro-batch's backward on, else `numel`."""
        if self.pipeline.pp > 1 and self.is_sharded:
            return 0  # Reduce-scattered once, at the end of the step.
        return self.local_numel() if self.num_micro_batches > self.in_flight_micro_batches() else numel

    def _pipeline_gradient_bytes(self) -> int:
        """Unsharded gradients, which a pipeline rank accumulates until the end of the step."""
        if self.pipeline.pp == 1 or not self.is_sharded:
            return 0
        return self.reduce_bytes * (
            self.num_blocks * _numel(self.block_shapes()) + _numel(self.embedding_and_head_shapes())
        )

    def _head_input_bytes(self) -> int:
        """Hidden states that enter the loss head on this rank."""
        loss_parallel = self.config.parallelism.loss_parallel
        return self.compute_bytes * self.tokens * self.model.dim if loss_parallel else self.block_memory.residual_bytes

    def _grad_comm_bytes(self) -> int:
        return DTYPE_BYTES[self.config.parallelism.cp_reduce_dtype] if self.compute_bytes == 2 else self.compute_bytes


def _numel(shapes: Iterable[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in shapes)
