"""Gathered weights and gradients of a rank during a pass. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from trainer.config.sections import OPTIMIZER_CHUNK_ELEMENTS
from trainer.memory.passes import Pass
from trainer.memory.rank import RankMemory, Shapes, numel, padded_numel
from trainer.trace.tensors import TRANSIENT_ACTIVATIONS, MemoryTensor, Tensors, tensors

FSDP = "parallelisms/fsdp.py: apply"
Unit = Literal["block", "embedding"]
Part = tuple[str, Shapes, int]
"""(name, shapes of the weights, how many) of whole gradients."""


class WeightMemory:
    """Gathered weights and gradients of FSDP units: the embedding, each block, and the head."""

    def __init__(self, rank: RankMemory) -> None:
        self.rank = rank
        self.is_pipeline = rank.pipeline.pp > 1
        self.last_stage = rank.pipeline.num_stages - 1

    def unit(
        self,
        line: str,
        name: str,
        shapes: Shapes,
        dtype: str,
        *,
        copies: float = 1,
        padded: bool = False,
        lifetime: str = "while the unit runs",
    ) -> Tensors:
        # All-gathers and reduce-scatters need equal shards, so uneven ones are padded.
        size = padded_numel(shapes, self.rank.num_shards) if padded else numel(shapes)
        return tensors(line, FSDP, lifetime, MemoryTensor(name, (size,), dtype, copies=copies))

    def gathered(self, name: str, shapes: Shapes, copies: float = 1) -> Tensors:
        lifetime = (
            "until the stage's last micro-batch" if self.is_pipeline else "while the unit runs"
        )
        copies = copies if self.rank.is_sharded else 0
        return self.unit(
            "gathered weights",
            name,
            shapes,
            self.rank.compute_dtype,
            copies=copies,
            padded=True,
            lifetime=lifetime,
        )

    def gathered_in(self, found: Pass, num_blocks: int) -> Tensors:
        """Units that are gathered in a pass through the first `num_blocks` blocks of a stage."""
        rank = self.rank
        if self.is_pipeline:
            # A pipeline gathers a stage once per step, and reshards it when its gradients are
            # reduced.
            stages = [stage for stage in rank.blocks_by_stage if stage not in found.reduced]
            blocks = sum(rank.blocks_by_stage[stage] for stage in stages)
            return (
                *self.gathered("weights of blocks", rank.block_shapes, blocks),
                *(
                    self.gathered("weights of the embedding", rank.embed_shapes)
                    if 0 in stages
                    else ()
                ),
                *(
                    self.gathered("weights of the head", rank.head_unit)
                    if self.last_stage in stages
                    else ()
                ),
            )
        # With resharding only one block is gathered; the one ahead is counted by `next_block`.
        gathered = min(1, num_blocks) if rank.parallelism.reshard_after_forward else num_blocks
        blocks_of_pass = self.gathered("weights of blocks", rank.block_shapes, gathered)
        if rank.model.tie_embeddings:
            tied = self.gathered("weights of embedding and head", rank.head_shapes)
            return tied + blocks_of_pass
        if rank.parallelism.reshard_after_forward:
            return blocks_of_pass
        return self.gathered("weights of the embedding", rank.embed_shapes) + blocks_of_pass

    @property
    def adds_at_once(self) -> bool:
        """Whether a gradient is added to that of earlier micro-batches when it is computed: FSDP
        widens whole units.
        """
        reduces_first = self.rank.is_sharded and not self.sums_whole
        return (
            self.is_pipeline
            and not reduces_first
            and self.rank.reduce_dtype == self.rank.compute_dtype
        )

    @property
    def gathers_again(self) -> bool:
        """Whether the backward pass gathers weights."""
        return self.rank.reshards_after_forward and self.rank.num_shards > 1

    def next_block(self, index: int) -> Tensors:
        """Weights being gathered for the block before block `index`."""
        if index == 0 or not self.gathers_again:
            return ()
        return self.gathered("weights of the next block", self.rank.block_shapes)

    def shards(self, name: str, count: float) -> Tensors:
        """Gradients in the dtype of the weights; with the optimizer on the host they are counted
        there.
        """
        gradient = MemoryTensor(
            name, (round(count),), self.rank.master_dtype, copies=1 if count > 0 else 0
        )
        return tensors(
            "gradients",
            FSDP,
            "until the optimizer step",
            gradient,
            on_host=self.rank.optimizer_on_host,
        )

    @property
    def sums_whole(self) -> bool:
        """Whether whole gradients are summed over the micro-batches of a step before they are
        reduced.
        """
        return (
            self.is_pipeline
            and self.rank.is_sharded
            and not self.rank.pipeline.reduces_per_micro_batch
        )

    def reduces(self, found: Pass) -> bool:
        """Whether a pass reduces the gradients of its stage."""
        return (
            self.rank.is_sharded and found.kind == "B" and (found.is_last or not self.sums_whole)
        )

    def gradients(
        self,
        found: Pass,
        *,
        done_blocks: int,
        with_head: bool,
        previous: Shapes = (),
        copied: Unit | None = None,
    ) -> Tensors:
        """Gradients beside those of the unit that runs. Of this stage, the head and the last
        `done_blocks` blocks are done.

        `previous`: the unit before it, whose reduction may be under way. `copied`: the unit that
        runs, once its gradients have been copied to where they are reduced.
        """
        rank = self.rank
        is_end = found.stage == self.last_stage
        done = done_blocks * rank.sharded_numel(rank.block_shapes)
        if is_end and with_head and not (rank.model.tie_embeddings and rank.is_sharded):
            done += rank.sharded_numel(rank.head_unit)
        if not rank.is_sharded:
            if found.is_first:
                return self.shards("gradients", done)
            is_tied = rank.model.tie_embeddings and is_end and with_head
            again = numel(rank.head_shapes) if is_tied else 0
            return self.shards("gradients", rank.local_numel) + self.shards(
                "gradient of the tied weight", again
            )
        # Gradients that are summed whole become shards with the stage's last micro-batch, others
        # with the first.
        if self.sums_whole:
            finished = found.reduced
            own = done if self.reduces(found) else 0
        else:
            finished = (*found.reduced, *found.whole)
            own = done if found.is_first else self.stage_numel(found.stage)
        # Gradients are shards once they are reduced, and whole until then.
        shards = self.shards("gradients", own + sum(map(self.stage_numel, finished)))
        if self.reduces(found):
            is_new = found.is_first or self.sums_whole
            shards += self._all_reduced(done, is_new=is_new)
            shards += () if is_new and self._become_gradients else self._reducing(previous)
        return shards + self._unreduced(
            found, done_blocks=done_blocks, with_head=with_head, copied=copied
        )

    def _unreduced(
        self, found: Pass, *, done_blocks: int, with_head: bool, copied: Unit | None
    ) -> Tensors:
        """Whole gradients of earlier passes, and in a pipeline of this one."""
        rank = self.rank
        if not self.is_pipeline:
            if not (rank.model.tie_embeddings and with_head) or copied == "embedding":
                return ()
            return self.unit(
                "unreduced gradients",
                "gradients of embedding and head",
                rank.head_shapes,
                rank.compute_dtype,
            )
        parts: list[Part] = []
        for stage in found.whole if self.sums_whole else ():
            parts += self._stage_parts(
                stage, rank.blocks_by_stage[stage], has_head=True, has_embedding=True
            )
        is_reduced = self.reduces(found)
        # This pass has computed whole gradients, or has still to reduce those of earlier ones.
        if found.is_first and not is_reduced:
            parts += self._stage_parts(
                found.stage, done_blocks, has_head=with_head, has_embedding=False
            )
        elif not found.is_first and self.sums_whole:
            remaining = rank.blocks_by_stage[found.stage] - (done_blocks if is_reduced else 0)
            parts += self._stage_parts(
                found.stage,
                remaining - 1 if copied == "block" else remaining,
                has_head=not (is_reduced and with_head),
                has_embedding=copied != "embedding",
            )
        return tuple(
            each
            for name, shapes, count in parts
            for each in self.unit(
                "unreduced gradients",
                f"gradients of {name}",
                shapes,
                rank.reduce_dtype,
                copies=count,
                lifetime="until they are reduced",
            )
        )

    def _stage_parts(
        self, stage: int, blocks: int, *, has_head: bool, has_embedding: bool
    ) -> Iterator[Part]:
        """Whole gradients of some blocks of a stage, and of the head and embedding it may have."""
        yield f"blocks of stage {stage}", self.rank.block_shapes, blocks
        if has_head and stage == self.last_stage:
            yield "the head", self.rank.head_unit, 1
        if has_embedding and stage == 0:
            yield "the embedding", self.rank.embed_shapes, 1

    def reduction(self, found: Pass, shapes: Shapes, last: Shapes) -> Iterator[Tensors]:
        """Two moments of a unit's reduce-scatter: its input copied, then the result. `last`: the
        unit's last weight.

        FSDP2 divides the result of a single shard, and holds the gradient of the last weight while
        there are several shards. A single rank has no result by itself.
        """
        rank = self.rank
        is_new = found.is_first or not self.sums_whole
        count = self.rank.sharded_numel(shapes)
        yield self._reducing(shapes) + (self.computed(shapes) if is_new else ())
        result = MemoryTensor(
            "a reduced gradient",
            (count,),
            rank.reduce_dtype,
            copies=0 if rank.is_single_rank else 1,
        )
        widened = result._replace(name="the same in the weights' dtype", dtype=rank.master_dtype)
        # A result is divided or cast, each into a new tensor, one after the other: the larger
        # counts.
        copies = [
            result._replace(
                name="the same, divided",
                copies=1 if rank.num_shards == 1 and rank.num_replicas > 1 else 0,
            ),
            widened._replace(copies=1 if rank.reduce_dtype != rank.master_dtype else 0),
        ]
        yield (
            *self._reducing(shapes),
            *tensors(
                "unreduced gradients",
                FSDP,
                "until it is added",
                result,
                max(copies, key=lambda each: each.bytes),
            ),
            *self.unit(
                "unreduced gradients",
                "gradient of the last weight",
                last,
                rank.compute_dtype if is_new else rank.reduce_dtype,
                copies=1 if rank.num_shards > 1 else 0,
            ),
        )

    def _reducing(self, shapes: Shapes) -> Tensors:
        return self.unit(
            "unreduced gradients",
            "gradients being reduced",
            shapes,
            self.rank.reduce_dtype,
            padded=True,
        )

    @property
    def _become_gradients(self) -> bool:
        """Whether the gradients that FSDP2 would reduce are final: a single rank passes them on
        without a copy.
        """
        rank = self.rank
        return (
            rank.is_single_rank and rank.reduce_dtype == rank.master_dtype and not self._are_moved
        )

    @property
    def _are_moved(self) -> bool:
        """Whether gradients go from a GPU to an optimizer on the host."""
        return self.rank.optimizer_on_host and self.rank.block.kernel != "cpu"

    def _all_reduced(self, count: float, *, is_new: bool = True) -> Tensors:
        """All-reduced gradients of replicas, which FSDP2 keeps until the backward pass ends.

        New gradients of the same dtype are views of them, and need no memory.
        """
        rank = self.rank
        is_held = rank.num_replicas > 1 and (
            self._are_moved or not is_new or rank.reduce_dtype != rank.master_dtype
        )
        held = MemoryTensor(
            "gradients that were all-reduced",
            (round(count),),
            rank.reduce_dtype,
            copies=1 if is_held else 0,
        )
        return tensors("unreduced gradients", FSDP, "until the backward pass ends", held)

    def stage_numel(self, stage: int) -> int:
        """Elements of the gradients of a stage on this rank."""
        rank = self.rank
        if not self.is_pipeline:
            return rank.local_numel
        count = rank.blocks_by_stage[stage] * rank.sharded_numel(rank.block_shapes)
        if stage == self.last_stage:
            count += rank.sharded_numel(rank.head_unit)
        if stage == 0:
            count += rank.sharded_numel(rank.embed_shapes)
        return count

    def computed(self, shapes: Shapes) -> Tensors:
        """Gradients of the unit that runs."""
        if self.rank.is_sharded:
            return self.unit(
                "unreduced gradients", "gradients of this unit", shapes, self.rank.compute_dtype
            )
        return self.shards("gradients of this block", numel(shapes))

    def optimizer_step(self) -> tuple[Tensors, Tensors]:
        """Gradients, and moments in bfloat16 that are widened chunk by chunk."""
        rank = self.rank
        # The optimizer widens and rounds one parameter chunk at a time: see
        # `OPTIMIZER_CHUNK_ELEMENTS`.
        chunk = min(
            OPTIMIZER_CHUNK_ELEMENTS,
            max(rank.sharded_numel((shape,)) for shape in rank.block_shapes + rank.end_shapes),
        )
        is_widened = rank.moment_dtype != rank.master_dtype and not rank.optimizer_on_host
        widened = MemoryTensor(
            "a chunk of both moments", (2, chunk), rank.master_dtype, copies=1 if is_widened else 0
        )
        where = "trainer/step/optimizer.py: Optimizer"
        when = "while a chunk is updated"
        return self.shards("gradients", rank.local_numel), tensors(
            TRANSIENT_ACTIVATIONS, where, when, widened
        )
