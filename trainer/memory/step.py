"""The moments of a pipeline rank's step that can be its peak. Imports no torch.

A moment is a sum of named tensors (`tensors.py`). Communication library buffers and allocator
fragmentation are not included. Symbols are those of docs/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from trainer.memory import ends
from trainer.memory.autograd import (
    ATTENTION_NORM,
    FEED_FORWARD_NORM,
    autograd_forward,
    autograd_moments,
    whole_block_moment,
)
from trainer.memory.block import BlockMemory
from trainer.memory.passes import Pass, fullest_passes
from trainer.memory.rank import RankMemory
from trainer.memory.recompute import feed_forward_pass, recompute_moments, recomputed_input
from trainer.memory.weights import WeightMemory
from trainer.trace.checkpoint_copies import checkpoint_copies
from trainer.trace.tensors import (
    CUBLAS_HANDLES,
    CUBLAS_WORKSPACE,
    SAVED_ACTIVATIONS,
    MemoryEstimate,
    MemoryTensor,
    Tensors,
    tensors,
    total_bytes,
)

STEP = "the step"
RUN = "the run"


class StepMemory:
    """The tensors of one pipeline rank in a step."""

    def __init__(self, rank: RankMemory) -> None:
        self.rank = rank
        self.block = rank.block
        self.is_pipeline = rank.pipeline.pp > 1
        self.last_stage = rank.pipeline.num_stages - 1
        self.weights = WeightMemory(rank)
        self._saved_by_stage: dict[int, Tensors] = {}
        self._held_beside: dict[object, Tensors] = {}
        self._fullest_parts: dict[object, tuple[str, Tensors]] = {}

    def moments(self) -> Iterator[MemoryEstimate]:
        # A step may have thousands of passes; those that some other pass dominates are left out.
        for found in fullest_passes(self.rank.pipeline, self.rank.pp_rank):
            if found.kind == "F":
                yield from self._forward_moments(found)
            else:
                yield from self._backward_moments(found)
        yield self._moment("in the optimizer step", *self.weights.optimizer_step())

    def _moment(self, phase: str, *groups: Tensors) -> MemoryEstimate:
        alive = self._always + tuple(each for group in groups for each in group)
        return MemoryEstimate(phase, self.rank.pp_rank, self.rank.pipeline.pp, alive)

    # ---- always

    @cached_property
    def _always(self) -> Tensors:
        rank = self.rank
        on_host = self.rank.optimizer_on_host
        kept = checkpoint_copies(rank.settings.checkpoint, rank.num_nodes)
        weights = MemoryTensor("shards of weights", (rank.local_numel,), rank.master_dtype)
        moments = MemoryTensor("shards of both moments", (2, rank.local_numel), rank.moment_dtype)
        batch = MemoryTensor(
            "tokens, labels, positions and document ids", (4, rank.tokens), "int64"
        )
        workspaces = MemoryTensor(
            "workspaces of cuBLAS",
            (CUBLAS_HANDLES, CUBLAS_WORKSPACE),
            "uint8",
            copies=0 if rank.block.kernel == "cpu" else 1,
        )
        accumulate = "trainer/step/trainer.py: Trainer.accumulate_gradients"
        return (
            *tensors(
                "parameters", "trainer/step/build.py: ParallelModel", RUN, weights, on_host=on_host
            ),
            *tensors(
                "optimizer state",
                "trainer/step/optimizer.py: Optimizer",
                RUN,
                moments,
                on_host=on_host,
            ),
            *tensors(
                kept.line,
                kept.source,
                kept.lifetime,
                weights._replace(copies=kept.number),
                moments._replace(copies=kept.number),
                on_host=True,
            ),
            *tensors("batch", accumulate, STEP, batch._replace(copies=self._batches_on_device)),
            *tensors("matmul workspaces", "models/linear.py: Linear", RUN, workspaces),
            # The host also prefetches the next step, and each worker another micro-batch.
            *tensors(
                "batch",
                "trainer/data/loader.py: MicroBatchLoader",
                STEP,
                batch._replace(copies=2 * rank.num_micro_batches + rank.settings.num_workers),
                on_host=True,
            ),
        )

    @property
    def _batches_on_device(self) -> int:
        # A pipeline moves all micro-batches to the device before its schedule starts.
        return self.rank.num_micro_batches if self.is_pipeline else 1

    # ---- what passes leave behind

    def _saved(self, stage: int) -> Tensors:
        """Tensors that a stage saves of one micro-batch between its forward and its backward pass."""
        if stage not in self._saved_by_stage:
            self._saved_by_stage[stage] = self._saved_by(stage)
        return self._saved_by_stage[stage]

    def _saved_by(self, stage: int) -> Tensors:
        blocks = self.rank.blocks_by_stage[stage]
        alive = self.rank.saved_blocks(stage, blocks) + self._rotation(stage)
        return alive + ends.saved_head(self.rank) if stage == self.last_stage else alive

    def _rotation(self, stage: int) -> Tensors:
        """Tables of rotary angles, one for each kind of RoPE of the stage. Layers without rotation
        expand one number of a table.
        """
        ropes = {
            self.rank.model.layer_kinds[layer].rope for layer in self.rank.layers_by_stage[stage]
        }
        angles = MemoryTensor(
            "cosines and sines of rotary angles",
            (self.rank.tokens, self.rank.model.rope.rotary_dim(self.rank.model.head_dim)),
            self.rank.master_dtype,
            copies=len({"global" if each == "none" else each for each in ropes}),
        )
        return tensors(
            SAVED_ACTIVATIONS,
            "models/rope.py: cos_sin_table",
            "until the stage's backward pass",
            angles,
        )

    def _held(self, found: Pass) -> Tensors:
        """Tensors of other micro-batches during a pass."""
        key = found.waiting, found.num_messages
        if key not in self._held_beside:
            self._held_beside[key] = self._held_by_others(found)
        return self._held_beside[key]

    def _held_by_others(self, found: Pass) -> Tensors:
        message = MemoryTensor(
            "residual streams and gradients on their way",
            (self.block.local_tokens, self.rank.model.dim),
            self.rank.compute_dtype,
            copies=found.num_messages,
        )
        return (
            *(
                each._replace(copies=each.copies * count)
                for stage, count in found.waiting
                for each in self._saved(stage)
            ),
            *tensors(
                "pipeline messages",
                "parallelisms/pipeline.py: StreamExchange",
                "until used or sent",
                message,
            ),
        )

    # ---- moments

    def _forward_moments(self, found: Pass) -> Iterator[MemoryEstimate]:
        if found.gathers and self.rank.num_shards > 1:
            if self.rank.blocks_by_stage[found.stage]:
                yield self._first_forward_moment(found)
            elif found.stage == 0:
                yield self._moment(
                    "in the embedding, forward",
                    self._held(found),
                    self.weights.gathered_in(found, 0),
                    self.weights.gathered(
                        "weights of the embedding, being gathered", self.rank.embed_shapes
                    ),
                    ends.embedding_forward(self.rank),
                )
        if found.stage != self.last_stage:
            yield self._moment(
                "at the end of the forward pass",
                self._held(found),
                self._saved(found.stage),
                self.weights.gathered_in(found, 1),
                self.weights.gradients(found, done_blocks=0, with_head=False),
            )
            return
        rank = self.rank
        blocks = self.rank.blocks_by_stage[found.stage]
        own = self.rank.saved_blocks(found.stage, blocks) + self._rotation(found.stage)
        # Otherwise it is the first block's, or counted with the head.
        if found.stage > 0 and blocks:
            own += self._hosted_input(0)
        gathered = self.weights.gathered_in(found, 0 if rank.reshards_after_forward else blocks)
        # Tied weights belong to FSDP's root unit, which is gathered throughout.
        units = () if rank.model.tie_embeddings else rank.head_unit
        if not self.is_pipeline:
            # The all-gather's output and what is copied out of it.
            copies = 2 if rank.num_shards > 1 else 1
            gathered += self.weights.gathered(
                "weights of the head",
                units or rank.block_shapes,
                copies if units else copies - 1,
            )
        elif found.gathers:
            gathered += self.weights.gathered(
                "weights of the head, being gathered",
                rank.head_unit,
                1 if rank.num_shards > 1 else 0,
            )
        yield self._moment(
            "in the loss head, forward",
            self._held(found),
            own,
            gathered,
            self.weights.gradients(found, done_blocks=0, with_head=False),
            ends.saved_head(self.rank),
            ends.head_forward(rank),
        )

    def _first_forward_moment(self, found: Pass) -> MemoryEstimate:
        """First forward pass of the last block, which still holds the buffer in which its weights
        were gathered.
        """
        rank = self.rank
        blocks = self.rank.blocks_by_stage[found.stage]
        last = self._block(found.stage, -1)
        alive = autograd_forward(last)
        if rank.recomputes:
            memory = rank.memory
            group, position = divmod(blocks - 1, memory.blocks_per_checkpoint)
            is_saved = (
                memory.recompute == "keep_attention" and memory.offload != "inputs_and_attention"
            )
            unsaved = self.block.block_input() if position else self._hosted_input(group)
            alive = (
                feed_forward_pass(last)
                + unsaved
                + self.block.attention_output(copies=0 if is_saved else 1)
            )
        return self._moment(
            "in the first forward pass",
            self._held(found),
            rank.saved_blocks(found.stage, blocks),
            self._rotation(found.stage),
            self.weights.gathered_in(found, blocks),
            self.weights.gathered("weights of a block, being gathered", rank.block_shapes),
            self.weights.gradients(found, done_blocks=0, with_head=False),
            alive,
        )

    def _backward_moments(self, found: Pass) -> Iterator[MemoryEstimate]:
        if found.stage == self.last_stage:
            yield from self._head_backward_moments(found)
        for index in self._sampled_blocks(found.stage):
            yield from self._block_moments(found, index)
        if found.stage == 0:
            yield from self._embedding_moments(found)

    def _embedding_moments(self, found: Pass) -> Iterator[MemoryEstimate]:
        rank = self.rank
        embed = self.rank.embed_shapes
        blocks = self.rank.blocks_by_stage[0]
        computed = self.weights.computed(embed)
        held = self._held(found) + self.weights.gathered_in(found, 0)
        previous = rank.block_shapes if blocks else ()
        gradients = self.weights.gradients(
            found, done_blocks=blocks, with_head=True, previous=previous
        )
        yield self._moment(
            "in the embedding, backward", held, gradients, computed, ends.embedding_backward(rank)
        )
        if rank.tp > 1:
            yield self._moment(
                "in the mask of the embedding's gradient",
                held,
                gradients,
                ends.masked_gradient(rank),
            )
        if self.block.is_gathered:
            yield self._moment(
                "in the gather of the embedding's gradient",
                held,
                gradients,
                ends.gather_over_tp(rank),
            )
        if (
            rank.model.tie_embeddings
            and self.block.is_gathered
            and not rank.parallelism.loss_parallel
        ):
            summed = ends.sum_over_tp(rank)
            yield self._moment(
                "in the sum of the tied gradient over tp ranks", held, gradients, computed, summed
            )
        if rank.is_sharded and (found.is_last or not self.weights.sums_whole):
            before, after = self.weights.reduction(found, embed, embed)
            gradients = self.weights.gradients(found, done_blocks=blocks, with_head=True)
            copied = self.weights.gradients(
                found, done_blocks=blocks, with_head=True, copied="embedding"
            )
            yield self._moment(
                "before the reduce-scatter of the embedding", held, gradients, before
            )
            yield self._moment("after the reduce-scatter of the embedding", held, copied, after)

    def _block(self, stage: int, index: int) -> BlockMemory:
        return self.rank.blocks[self.rank.kinds_by_stage[stage][index]]

    def _sampled_blocks(self, stage: int) -> list[int]:
        """Blocks of a stage at whose backward pass it may hold most: the first and last of the
        first and last checkpoint group, and of each kind.
        """
        every = self.rank.memory.blocks_per_checkpoint
        blocks = self.rank.blocks_by_stage[stage]
        kinds = self.rank.kinds_by_stage[stage]
        sampled = {0, blocks // every * every - 1, blocks - 1}
        # Kinds differ in what they save and hold, so each needs a sample of its first and last
        # block.
        for kind in self.rank.kinds if len(self.rank.kinds) > 1 else ():
            of_kind = [index for index, each in enumerate(kinds) if each is kind]
            sampled |= {*of_kind[:1], *of_kind[-1:]}
        if not self.is_pipeline:  # Weights are gathered block by block.
            ends = (2, every, blocks // every * every, blocks)
            sampled |= {end - offset for end in ends for offset in (1, 2)}
        return sorted(sampled & {*range(blocks)})

    def _head_backward_moments(self, found: Pass) -> Iterator[MemoryEstimate]:
        rank = self.rank
        blocks = self.rank.blocks_by_stage[found.stage]
        units = () if rank.model.tie_embeddings else rank.head_unit
        gathered = self.weights.gathered_in(found, blocks)
        if not self.is_pipeline and units:
            gathered += self.weights.gathered("weights of the head", units)
        alive = (
            self._held(found)
            + self.rank.saved_blocks(found.stage, blocks)
            + self._rotation(found.stage)
            + gathered
            + self.weights.gradients(found, done_blocks=0, with_head=False)
        )
        yield self._moment(
            "in the loss head, backward",
            alive,
            ends.saved_head(self.rank),
            ends.head_backward(rank),
        )
        yield self._moment(
            "in the final norm, backward",
            alive,
            self.weights.computed(rank.head_shapes),
            ends.final_norm_backward(rank),
        )

    def _block_moments(self, found: Pass, index: int) -> Iterator[MemoryEstimate]:
        """The backward pass of a stage's block `index`, after all later ones."""
        rank = self.rank
        blocks = self.rank.blocks_by_stage[found.stage]
        later = blocks - 1 - index
        shapes = rank.block_shapes
        block = f"block {index}"
        if self.is_pipeline:
            block += f" of stage {found.stage}"
        previous = (
            shapes
            if later
            else (
                ()
                if rank.model.tie_embeddings or found.stage != self.last_stage
                else rank.head_unit
            )
        )
        base = (
            self._held(found)
            + self.rank.saved_blocks(found.stage, index, is_running=True)
            + self._rotation(found.stage)
        )
        gathered = self.weights.gathered_in(found, index + 1)
        gradients = self.weights.gradients(
            found, done_blocks=later, with_head=True, previous=previous
        )
        this = self._block(found.stage, index)
        name, alive = self._fullest_part(
            this, index, adds=self.weights.adds_at_once and not found.is_first
        )
        yield self._moment(f"in {name} of {block}, backward", base, gathered, gradients, alive)
        if index % rank.memory.blocks_per_checkpoint:
            recomputed = recomputed_input(
                self._block(found.stage, index - 1)
            ) + self._recomputed_for(index)
            again = self.weights.gathered(
                "weights of the block that is recomputed",
                shapes,
                1 if self.weights.gathers_again else 0,
            )
            yield self._moment(
                f"in the recomputation of the input of {block}",
                base,
                gathered,
                again,
                gradients,
                recomputed,
            )
        # A pipeline that reduces once per step adds whole gradients until the last micro-batch.
        if not rank.is_sharded or (self.weights.sums_whole and not found.is_last):
            return
        # The block's own weights are freed by now.
        gathered = self.weights.gathered_in(found, 0 if rank.reshards_after_forward else index)
        held = base + self.block.block_input() + gathered + self.weights.next_block(index)
        before, after = self.weights.reduction(found, shapes, shapes[-1:])
        gradients = self.weights.gradients(found, done_blocks=later, with_head=True)
        copied = self.weights.gradients(found, done_blocks=later, with_head=True, copied="block")
        yield self._moment(f"before the reduce-scatter of {block}", held, gradients, before)
        yield self._moment(f"after the reduce-scatter of {block}", held, copied, after)

    def _fullest_part(self, block: BlockMemory, index: int, *, adds: bool) -> tuple[str, Tensors]:
        """The part of a block's backward pass that needs most, with the gradients of weights that
        exist by then.

        `adds`: gradients are added to those of earlier micro-batches as soon as half a block has
        them.
        """
        beside = self._prefetched(index), self._recomputed_for(index)
        # Parts depend on nothing else, and a model has hundreds of blocks that share these.
        key = adds, block.kind, index == 0, self._is_last_of_group(index), beside
        if key not in self._fullest_parts:
            parts = self._parts(block, index, adds=adds)
            self._fullest_parts[key] = max(parts, key=lambda part: total_bytes(part[1]))
        return self._fullest_parts[key]

    def _parts(
        self, block: BlockMemory, index: int, *, adds: bool
    ) -> Iterator[tuple[str, Tensors]]:
        output, *feed_forward = self.rank.after_attention(block.kind)
        grad_dtype = self.rank.kv_grad_dtype
        if not block.kind.in_pieces:
            again = self._recomputed_for(index)
            computed = (output, *feed_forward)
            yield "the whole", whole_block_moment(block) + again + self.weights.computed(computed)
            return
        if not self.rank.recomputes:
            by_moment = {
                FEED_FORWARD_NORM: (),
                "feed-forward": (*feed_forward[-1:],),
                ATTENTION_NORM: (*feed_forward,),
            }
            for name, alive in autograd_moments(block, grad_dtype):
                computed = by_moment.get(name, () if adds else (output, *feed_forward))
                yield (
                    name,
                    alive + self.weights.next_block(index) + self.weights.computed(computed),
                )
            return
        position = index % self.rank.memory.blocks_per_checkpoint
        recomputed = self._recomputed_for(index)
        # The inputs of a group of blocks are recomputed together, which uses up what is gathered
        # ahead.
        recomputes_inputs = position > 0 and self._is_last_of_group(index)
        for name, alive in recompute_moments(block, grad_dtype, self._prefetched(index)):
            is_feed_forward = "feed-forward" in name
            computed = () if is_feed_forward else (output,) if adds else (output, *feed_forward)
            ahead = () if recomputes_inputs else self.weights.next_block(index)
            yield name, alive + recomputed + ahead + self.weights.computed(computed)

    def _is_last_of_group(self, index: int) -> bool:
        return (
            index + 1
        ) % self.rank.memory.blocks_per_checkpoint == 0 or index == self.rank.num_blocks - 1

    def _recomputed_for(self, index: int) -> Tensors:
        """Recomputed tensors of the checkpoint group before block `index`: block outputs, and
        attention outputs that were not saved.
        """
        position = index % self.rank.memory.blocks_per_checkpoint
        _, recomputed = self.rank.split_outputs(range(index - position, index))
        return self.block.block_input(copies=position) + self.block.attention_output(
            copies=recomputed
        )

    def _prefetched(self, index: int) -> Tensors:
        """Activations being copied back from the host for the preceding block; with several head
        groups only its input.
        """
        if index == 0:
            return ()
        rank = self.rank
        memory = self.rank.memory
        group, position = divmod(index, memory.blocks_per_checkpoint)
        preceding_input = () if position else self._hosted_input(group - 1)
        if memory.head_groups > 1 or memory.offload != "inputs_and_attention":
            return preceding_input
        output, _ = rank.split_outputs(range(index - 1, index))
        return preceding_input + self.block.attention_output(copies=output)

    def _hosted_input(self, group: int) -> Tensors:
        """Device copy of a block input that is saved on the host."""
        on_host, _ = self.rank.split_inputs(range(group, group + 1))
        return self.block.block_input(copies=on_host)
