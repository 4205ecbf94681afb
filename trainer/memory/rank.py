"""Sizes that the configuration implies for one pipeline rank: parameters, shards, saved
activations. Imports no torch.

Symbols are those of docs/parallelism.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from math import prod
from sys import maxsize

from models.config import ModelConfig
from models.layers import LayerKind
from parallelisms.mesh.context_plan import ContextPlan
from parallelisms.mesh.pipeline_plan import PipelinePlan
from parallelisms.mesh.shard_layout import SeqLayout
from trainer.config.sections import (
    CheckpointSection,
    MemorySection,
    ParallelismSection,
    TrainingSection,
)
from trainer.hardware.host import GIB
from trainer.memory.block import BlockMemory
from trainer.memory.experts import block_of
from trainer.trace.tensors import DTYPE_BYTES, Tensors, total_bytes

Shapes = tuple[tuple[int, ...], ...]
"""(rows, columns) of the parameters on one tp and ep rank; norms have one column.

A third number is the degree over which experts are distributed: each of these ranks has other
ones.
"""


@dataclass(frozen=True)
class RankSettings:
    """The parts of a configuration that the sizes of a pipeline rank follow from."""

    model: ModelConfig
    training: TrainingSection
    parallelism: ParallelismSection
    memory: MemorySection
    checkpoint: CheckpointSection
    degrees: Mapping[str, int]
    """Ranks by mesh dimension."""
    pipeline: PipelinePlan
    context_plan: ContextPlan
    pp_rank: int
    num_micro_batches: int
    """Per step and data-parallel rank."""
    num_workers: int
    """Processes that read data."""
    attention: str
    """The kernels of attention, or "cpu" for the CPU's, which alone takes every dtype."""
    is_compiled: bool


class RankMemory:
    """Sizes of one pipeline rank."""

    def __init__(self, settings: RankSettings) -> None:
        self.settings = settings
        self.pp_rank = settings.pp_rank
        self.model = settings.model
        self.training = settings.training
        self.parallelism = settings.parallelism
        self.memory = settings.memory
        degrees = settings.degrees
        self.tp = degrees["tp"]
        self.ep = self.parallelism.ep
        self.pipeline = settings.pipeline
        # FSDP shards over cp as well: its ranks have the same weights and other tokens.
        self.num_shards = degrees["dp_shard"] * degrees["cp"]
        self.num_replicas = degrees["dp_replicate"]
        self.num_micro_batches = settings.num_micro_batches
        self._set_dtypes()
        self.optimizer_on_host = self.memory.optimizer_placement == "host"
        self.is_single_rank = self.num_shards * self.num_replicas == 1
        # FSDP also runs on a single rank where it has to cast weights or move them from the host.
        self.is_sharded = (
            not self.is_single_rank
            or self.compute_bytes != self.master_bytes
            or self.optimizer_on_host
        )
        self.recomputes = self.memory.recompute != "none"
        self._set_sequences(degrees["cp"])
        world_size = prod(degrees.values())
        self.ranks_per_node = min(world_size, self.parallelism.ranks_per_node)
        self.num_nodes = -(-world_size // self.ranks_per_node)
        self._set_stages()

    def _set_dtypes(self) -> None:
        """Dtypes of weights, reductions and moments: float32 where products are bfloat16."""
        training = self.training
        is_bfloat16 = training.dtype == "bfloat16"
        self.compute_dtype = training.dtype
        # bfloat16 runs keep float32 master weights; other dtypes compute, sum and store in one
        # dtype.
        self.master_dtype = "float32" if is_bfloat16 else training.dtype
        self.reduce_dtype: str = training.reduce_dtype if is_bfloat16 else self.master_dtype
        self.kv_grad_dtype: str = (
            self.parallelism.cp_reduce_dtype if is_bfloat16 else self.compute_dtype
        )
        self.moment_dtype = (
            "bfloat16" if self.memory.optimizer_dtype == "bfloat16" else self.master_dtype
        )
        self.compute_bytes = DTYPE_BYTES[self.compute_dtype]
        self.master_bytes = DTYPE_BYTES[self.master_dtype]
        self.reduce_bytes = DTYPE_BYTES[self.reduce_dtype]
        self.kv_grad_bytes = DTYPE_BYTES[self.kv_grad_dtype]
        self.moment_bytes = DTYPE_BYTES[self.moment_dtype]

    def _set_sequences(self, cp: int) -> None:
        """The share of a micro-batch on this rank, and what its blocks hold for it."""
        training = self.training
        context_plan = self.settings.context_plan
        seq_len = training.seq_len
        padded_len = context_plan.padded_length(training.seq_len)
        self.layout = SeqLayout(
            context_plan.resolved_layout, context_plan.ring_degree, (0, seq_len, padded_len)
        )
        """Layout of a sequence that is one document; its padding is another."""
        self.tokens = training.micro_batch_size * padded_len // cp
        largest = self._largest_kind()
        tile_mib = self.memory.mlp_tile_mib
        block = BlockMemory(
            self.model,
            kind=largest,
            tokens=self.tokens,
            compute_dtype=self.compute_dtype,
            stats_dtype=self.master_dtype,
            tp=self.tp,
            sequence_parallel=self.parallelism.sequence_parallel,
            compiled=self.settings.is_compiled,
            context_plan=context_plan if cp > 1 else None,
            head_groups=self.memory.head_groups,
            mlp_tile_bytes=None if tile_mib is None else tile_mib << 20,
            sequences=training.micro_batch_size,
            attention=self.settings.attention,
            deterministic=training.deterministic,
            is_padded=padded_len != seq_len,
            layout=self.layout,
            ep=self.ep,
        )
        self.block = block_of(block, largest)

    def _set_stages(self) -> None:
        """The pipeline stages of this rank, and the kinds of their layers."""
        stages = self.pipeline.stages_of(self.pp_rank)
        self.blocks_by_stage = {stage: self.pipeline.blocks_per_stage[stage] for stage in stages}
        self.num_blocks = sum(self.blocks_by_stage.values())
        self.layers_by_stage = {
            stage: self.pipeline.stage_module(stage).layers for stage in stages
        }
        self.kinds_by_stage = {
            stage: tuple(self.model.unrotated_layers[layer] for layer in layers)
            for stage, layers in self.layers_by_stage.items()
        }
        self.kinds = Counter(chain.from_iterable(self.kinds_by_stage.values()))
        """Number of layers of each kind on this rank."""
        self.blocks = {kind: block_of(self.block, kind) for kind in self.kinds}
        self.has_first_stage = 0 in stages
        self.has_last_stage = self.pipeline.num_stages - 1 in stages

    def _largest_kind(self) -> LayerKind:
        """The kind of layer that saves most."""
        return max(
            self.model.kinds,
            key=lambda kind: (
                # A kind that does not run in pieces is recomputed whole, which outweighs any
                # width.
                self.recomputes and not kind.in_pieces,
                self.model.saved_width(kind),
            ),
        )

    # ---- parameters

    def weights_of(self, kind: LayerKind) -> dict[str, tuple[int, ...]]:
        """Weights of one block by name: (rows, columns, ranks with other ones). Norms have one
        column.
        """
        declared = kind.parameters.items()
        shapes = {
            name: each.local_shape(self.model.sizes, self.tp, self.ep) for name, each in declared
        }
        by_name = {
            name: (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (*shape, 1)
            for name, shape in shapes.items()
        }
        return {
            name: (*by_name[name], self.ep if each.per_expert else 1) for name, each in declared
        }

    @cached_property
    def block_shapes(self) -> Shapes:
        """Weight shapes of the largest kind of block."""
        return max(map(self.shapes_of, dict.fromkeys(self.model.unrotated_layers)), key=numel)

    def shapes_of(self, kind: LayerKind) -> Shapes:
        """Weight shapes of one block of this kind."""
        return tuple(self.weights_of(kind).values())

    def after_attention(self, kind: LayerKind) -> Shapes:
        """Matrices of such a block that follow attention, in the order of the forward pass: the
        output projection, then the feed-forward.
        """
        declared = kind.parameters.items()
        weights = self.weights_of(kind)
        after = (
            name
            for name, each in declared
            if each.initial == "residual" or name.startswith("feed_forward.")
        )
        return tuple(weights[name] for name in after)

    @property
    def head_rows(self) -> int:
        """Vocabulary entries whose logits this rank computes."""
        return self.model.vocab_size // (self.tp if self.parallelism.loss_parallel else 1)

    @cached_property
    def head_shapes(self) -> Shapes:
        return ((self.head_rows, self.model.dim),)

    @cached_property
    def head_unit(self) -> Shapes:
        """The head and the final norm, which FSDP gathers together."""
        return *self.head_shapes, (self.model.dim, 1)

    @cached_property
    def embed_shapes(self) -> Shapes:
        tied = self.model.tie_embeddings
        return self.head_shapes if tied else ((self.model.vocab_size // self.tp, self.model.dim),)

    @cached_property
    def end_shapes(self) -> Shapes:
        """The parts of embedding, loss head and final norm on this rank."""
        shapes: Shapes = self.embed_shapes if self.has_first_stage else ()
        if self.has_last_stage:
            head = () if self.model.tie_embeddings else self.head_shapes
            shapes += (*head, (self.model.dim, 1))
        return shapes

    def sharded_numel(self, shapes: Shapes) -> int:
        """Elements of this rank's FSDP shard, rounded up to whole rows as on the first rank."""
        return _sharded_numel(shapes, self.num_shards)

    @cached_property
    def local_numel(self) -> int:
        blocks = sum(
            count * self.sharded_numel(self.shapes_of(kind)) for kind, count in self.kinds.items()
        )
        return blocks + self.sharded_numel(self.end_shapes)

    @property
    def is_mixed(self) -> bool:
        """Whether products are computed in a narrower dtype than sums."""
        return self.compute_dtype != self.master_dtype

    @property
    def reshards_after_forward(self) -> bool:
        return self.is_sharded and self.pipeline.pp == 1 and self.parallelism.reshard_after_forward

    # ---- the loss head

    @property
    def head_tokens(self) -> int:
        """Tokens of a micro-batch whose logits this rank computes."""
        has_all_tokens = self.parallelism.loss_parallel or not self.block.sequence_parallel
        return self.tokens if has_all_tokens else self.tokens // self.tp

    @property
    def has_wide_products(self) -> bool:
        """Whether products are returned and added up in the master dtype, as in
        models/loss_head.py.
        """
        return not self.is_mixed or self.block.kernel != "cpu"

    @property
    def loss_chunk_tokens(self) -> int:
        return max(1, self.memory.loss_chunk_bytes // (self.master_bytes * self.head_rows))

    # ---- saved activations

    @cached_property
    def num_recomputed_blocks(self) -> int:
        """Blocks whose output is recomputed in the backward pass because it is the unsaved input
        of the next block.
        """
        every = self.memory.blocks_per_checkpoint
        return sum(blocks - -(-blocks // every) for blocks in self.blocks_by_stage.values())

    @cached_property
    def attention_recompute_fraction(self) -> float:
        """Share of the rank's blocks that recompute attention: all, none, or those whose output
        exceeds the host budget.
        """
        if self.memory.recompute != "keep_attention":
            return float(self.memory.recompute == "full")
        return (
            self.split_outputs(range(self.num_blocks))[1] / self.num_blocks
            if self.num_blocks
            else 0
        )

    @property
    def host_budget(self) -> float:
        """Bytes of the host for the activations of this rank."""
        gib = self.memory.host_budget_gib
        return maxsize if gib is None else gib * GIB // self.ranks_per_node

    @property
    def num_saved_inputs(self) -> int:
        """Saved block inputs of a micro-batch, in all stages of the rank."""
        return self.num_blocks - self.num_recomputed_blocks

    def split_inputs(self, groups: range) -> tuple[float, float]:
        """(on the host, on the device): the saved inputs of these groups of a stage's blocks."""
        if self.memory.offload == "none":
            return 0, len(groups)
        return self._split(
            groups, self.num_saved_inputs, self.host_budget // self.block.residual_bytes
        )

    def split_outputs(self, blocks: range) -> tuple[float, float]:
        """(saved, recomputed): the attention outputs of these blocks of a stage."""
        memory = self.memory
        if memory.recompute != "keep_attention":
            return 0, len(blocks)
        if memory.offload != "inputs_and_attention":
            return len(blocks), 0
        # Inputs come first, since nothing can replace them; an attention output beyond the budget
        # is recomputed.
        reserved = self.pipeline.max_in_flight * self.num_saved_inputs * self.block.residual_bytes
        return self._split(
            blocks,
            self.num_blocks,
            (self.host_budget - reserved) // self.block.attention_output_bytes,
        )

    def _split(self, indices: range, of_micro_batch: int, limit: float) -> tuple[float, float]:
        """(within, beyond) the host's limit: numbers of a stage's tensors. The first ones fill the
        limit.

        With a pipeline the micro-batches in flight share the limit, and their tensors take turns,
        so each counts in part.
        """
        if self.pipeline.pp == 1:
            return sum(index < limit for index in indices), sum(
                index >= limit for index in indices
            )
        # Which micro-batch finds a free buffer changes over the step; on average each has its
        # share.
        share = max(
            0, min(1, limit / max(1, self.pipeline.in_flight(self.pp_rank) * of_micro_batch))
        )
        return len(indices) * share, len(indices) * (1 - share)

    def saved_blocks(self, stage: int, num_blocks: int, *, is_running: bool = False) -> Tensors:
        """Tensors that the first blocks of a stage save of a micro-batch.

        `is_running`: the next block runs. The inputs of its checkpoint group, which are recomputed
        then, are counted there.
        """
        block = self.block
        memory = self.memory
        kinds = self._kinds_of(stage, num_blocks)
        if not self.recomputes:
            saved = (self.blocks[kind].all_saved(count) for kind, count in kinds.items())
            return tuple(chain.from_iterable(saved))
        every = memory.blocks_per_checkpoint
        inputs = num_blocks // every if is_running else -(-num_blocks // every)
        on_host, on_device = self.split_inputs(range(inputs))
        outputs, _ = self.split_outputs(range(num_blocks))
        # Kinds that do not run in pieces recompute the whole block from its input: each saves its
        # own, and no attention output.
        whole = sum(count for kind, count in kinds.items() if not kind.in_pieces) / max(
            1, num_blocks
        )
        return (
            *block.block_input(copies=on_device + whole * (num_blocks - inputs)),
            *block.block_input(copies=on_host, on_host=True),
            *block.attention_output(
                copies=outputs * (1 - whole), on_host=memory.offload == "inputs_and_attention"
            ),
        )

    def _kinds_of(self, stage: int, num_blocks: int) -> Mapping[LayerKind, int]:
        """Number of blocks of each kind among the first ones of a stage."""
        if len(self.kinds) == 1:  # A search calls this thousands of times.
            return dict.fromkeys(self.kinds, num_blocks)
        return Counter(self.kinds_by_stage[stage][:num_blocks])

    @property
    def offloaded_bytes(self) -> float:
        """Activations of one micro-batch that are copied to the host."""
        saved = (
            self.saved_blocks(stage, blocks) for stage, blocks in self.blocks_by_stage.items()
        )
        return sum(total_bytes(each, on_host=True) for each in saved)


@lru_cache(maxsize=4096)
def _sharded_numel(shapes: Shapes, num_shards: int) -> int:
    return sum(
        -(-rows // (num_shards // (ep[0] if ep else 1))) * columns for rows, columns, *ep in shapes
    )


@lru_cache(maxsize=4096)
def numel(shapes: Shapes) -> int:
    return sum(rows * columns for rows, columns, *_ in shapes)


@lru_cache(maxsize=4096)
def padded_numel(shapes: Shapes, num_shards: int) -> int:
    """Elements of gathered shards, with their padding."""
    return sum(
        _sharded_numel((shape,), num_shards) * (num_shards // (shape[2] if len(shape) > 2 else 1))
        for shape in shapes
    )
