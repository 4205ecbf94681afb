"""Where a run's memory goes: bytes of its fullest rank, predicted from the configuration alone, without torch.

An update is fullest at one of a few moments, which are all added up; the largest is what the run needs. What kernels and
communication take for themselves is not counted, nor holes in the allocator. Letters are those of docs/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

from parallelisms.pipeline_plan import SINGLE, SPLIT
from trainer.config.job_config import Config
from trainer.config.sections import PIECE
from trainer.memory.block import Block

GIB = 1 << 30
KEPT = "kept for the backward pass"
BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
Shapes = list[tuple[int, int]]
"""Rows and columns of parameters, as one tp rank holds them; norms have one column."""


@dataclass(frozen=True)
class Line:
    """What one kind of thing takes, in bytes."""

    name: str
    device: float = 0
    host: float = 0

    @property
    def total(self) -> float:
        return self.device + self.host


@dataclass(frozen=True)
class Ledger:
    """What a rank holds when it holds most."""

    moment: str
    place: int
    """Among the `pp` ranks of the pipeline."""
    pp: int
    stream: int
    """Bytes of the residual stream on one rank: u."""
    lines: tuple[Line, ...]

    @property
    def device(self) -> float:
        return sum(line.device for line in self.lines)

    @property
    def host(self) -> float:
        return sum(line.host for line in self.lines)

    def line(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states, as far as they are on the device."""
        return sum(line.device for line in self.lines[:3])

    @property
    def k(self) -> float:
        """The peak is states + k u."""
        return (self.device - self.states) / self.stream


def ledger(config: Config, world_size: int) -> Ledger:
    """Of the fullest rank. The configuration must have no problems."""
    return max(ledgers(config, world_size), key=lambda found: found.device)


def ledgers(config: Config, world_size: int) -> list[Ledger]:
    """Of each rank of the pipeline, at its fullest moment; one where it is not cut."""
    ranks = (Rank(config, world_size, place) for place in range(config.parallelism.pp))
    return [_fullest([*rank.moments()]) for rank in ranks]


def _fullest(moments: list[Ledger]) -> Ledger:
    """Of the device; what the host keeps is most at another moment, when the forward pass ends."""
    fullest = max(moments, key=lambda found: found.device)
    most = max(found.line(KEPT).host for found in moments)
    return replace(
        fullest, lines=tuple(replace(line, host=most) if line.name == KEPT else line for line in fullest.lines)
    )


class Rank:
    """One rank of the pipeline, with what follows from the configuration for it."""

    def __init__(self, config: Config, world_size: int, place: int) -> None:
        training, parallelism = config.training, config.parallelism
        self.config, self.place, self.model = config, place, config.model.build()
        degrees = parallelism.degrees(world_size)
        self.tp, self.pipeline = degrees["tp"], config.pipeline_plan(world_size)
        self.shards = degrees["dp_shard"] * degrees["cp"]
        self.micro_batches = config.micro_batches(world_size)[1]
        self.compute, self.stored = BYTES[training.dtype], max(4, BYTES[training.dtype])
        self.reduced = BYTES[training.reduce_dtype] if self.compute == 2 else self.stored
        self.moment = 2 if config.memory.optimizer_dtype == "bfloat16" else self.stored
        self.on_host = config.memory.optimizer_placement == "host"
        alone = self.shards * degrees["dp_replicate"] == 1
        self.is_sharded = not alone or self.compute != self.stored or self.on_host
        plan = config.context_plan()
        self.tokens = training.micro_batch_size * plan.padded(training.seq_len) // degrees["cp"]
        self.block = Block(
            self.model, self.tokens, self.compute, self.stored, self.tp, parallelism.sequence_parallel,
            training.compile, plan if degrees["cp"] > 1 else None, config.memory.head_groups,
            None if config.memory.mlp_tile_mib is None else config.memory.mlp_tile_mib << 20,
        )  # fmt: skip
        self.node = min(world_size, parallelism.node_ranks)
        stages = self.pipeline.stages_of(place)
        self.blocks = sum(self.pipeline.blocks[stage] for stage in stages)
        self.is_first, self.is_last = 0 in stages, self.pipeline.num_stages - 1 in stages

    # ---- parameters

    def block_shapes(self) -> Shapes:
        E, G, tp = self.model.dim, self.model.ffn_dim // self.tp, self.tp
        queries = self.model.num_heads * self.model.head_dim // tp
        keys = self.model.num_kv_heads * self.model.head_dim // (tp if self.model.num_kv_heads >= tp else 1)
        heads = [(self.model.head_dim, 1)] * (2 * self.model.qk_norm)
        return [(queries, E), (keys, E), (keys, E), (E, queries), (G, E), (G, E), (E, G), (E, 1), (E, 1), *heads]

    def head_shapes(self) -> Shapes:
        shared = self.config.parallelism.loss_parallel
        return [(self.model.vocab_size // (self.tp if shared else 1), self.model.dim)]

    def embed_shapes(self) -> Shapes:
        tied = self.model.tie_embeddings
        return self.head_shapes() if tied else [(self.model.vocab_size // self.tp, self.model.dim)]

    def ends(self) -> Shapes:
        """What of embedding and head is on this rank."""
        head = self.head_shapes() * (not self.model.tie_embeddings) + [(self.model.dim, 1)]
        return self.embed_shapes() * self.is_first + head * self.is_last

    def shard(self, shapes: Shapes) -> int:
        """Elements that this rank holds for good; of rows that do not divide, the first rank has most."""
        return sum(-(-rows // self.shards) * columns for rows, columns in shapes)

    def parameters(self) -> int:
        return self._parameters

    @cached_property
    def _parameters(self) -> int:
        return self.blocks * self.shard(self.block_shapes()) + self.shard(self.ends())

    # ---- what is gathered, and what is not yet scattered

    def weights(self, unit: Shapes) -> int:
        """Bytes of a unit of FSDP that is gathered, in the type of computation; without FSDP the parameters serve."""
        return self.compute * _elements(unit) * self.is_sharded

    def others(self, gathered: int) -> int:
        """Bytes of gathered units that stay so: those of a tied head, of so many blocks, of all stages of a pipeline."""
        block = self.weights(self.block_shapes())
        if self.pipeline.pp > 1:
            return self.blocks * block + self.weights(self.ends())
        root = self.weights(self.head_shapes()) * self.model.tie_embeddings
        return root + block * (gathered if not self.config.parallelism.reshard_after_forward else min(1, gathered))

    def unscattered(self, unit: Shapes) -> int:
        """Bytes of a unit's gradients on their way to be summed. They stay until the next unit's are there."""
        if not self.is_sharded or self.pipeline.pp > 1:
            return 0
        return self.reduced * self.shard(unit) * self.shards

    # ---- moments

    def moments(self) -> Iterator[Ledger]:
        kept = self._kept()
        if self.is_last:
            yield from self._in_head(kept)
        for index in sorted({0, min(1, self.blocks - 1), self.blocks - 1} - {-1}):
            yield from self._in_block(index, kept)
        if self.is_first:
            yield self._in_embedding()
        # Narrow moments are widened by pieces.
        piece = min(PIECE, max(self.shard([shape]) for shape in self.block_shapes() + self.ends()))
        wide = 2 * self.stored * piece * (self.moment < self.stored and not self.on_host)
        yield self._at("in the optimizer", gradients=self.parameters(), passing=wide)

    def in_flight(self) -> float:
        """Micro-batches through all blocks of this rank of which it keeps activations."""
        plan, count = self.pipeline, self.micro_batches
        if plan.pp == 1 or plan.schedule == "GPipe":
            return 1 if plan.pp == 1 else count
        if plan.schedule in SPLIT:
            return plan.pp + (plan.schedule == "DualPipeV") / 2
        if plan.schedule in SINGLE:
            return min(count, plan.pp - self.place)
        laps = plan.stages_per_rank
        return min(laps * count, (laps - 1) * plan.pp + 2 * (plan.pp - 1 - self.place) + 1) / laps

    def _kept(self) -> float:
        """By all blocks; tables of angles; and the stream behind the last, if it does not begin in a buffer."""
        rotation = self.stored * self.model.head_dim * self.tokens * self.pipeline.stages_per_rank
        return self.in_flight() * (self.by_blocks(self.blocks)[0] + rotation + self.block.stream * self.is_first)

    def by_blocks(self, count: int, *, at_work: bool = False) -> tuple[float, float]:
        """Bytes that so many blocks keep on the device and on the host; one more is at work, with its inputs, or not."""
        memory, block, every = self.config.memory, self.block, self.config.memory.input_every
        if memory.recompute == "none":
            return count * block.kept("none"), 0
        inputs = count // every if at_work else -(-count // every)
        attended = block.attended * (memory.recompute == "keep_attention")
        all_inputs = self.in_flight() * -(-self.blocks // every)
        if memory.offload == "none" or not all_inputs:
            return inputs * block.stream + count * attended, 0
        room = inf if memory.host_budget_gib is None else memory.host_budget_gib * GIB / self.node
        stream = min(block.stream, room / all_inputs)
        room -= all_inputs * block.stream
        on_host, on_device = stream * inputs, (block.stream - stream) * inputs
        if memory.offload == "inputs":
            return on_device + count * attended, on_host
        # What attention gave and finds no room is computed again.
        return on_device, on_host + count * min(attended, max(0, room / (self.in_flight() * self.blocks)))

    def _in_head(self, kept: float) -> Iterator[Ledger]:
        rows, width = self.head_shapes()[0]
        entering, weight = self._entering(), self.stored * rows * width
        tokens = entering // (self.compute * width)
        narrow = self.compute * (self.compute < self.stored)
        chunk = max(1, (self.config.memory.head_chunk_mib << 20) // (self.stored * rows))
        token = (self.stored + narrow) * rows
        logits = token * min(chunk, tokens) + self.compute * rows * width  # And its part of the weight's gradient.
        begun, on_host = self._all_or(0), self.in_flight() * self.by_blocks(self.blocks)[1]
        unit = [] if self.model.tie_embeddings else self.head_shapes()
        head, before = self.weights(unit) * (self.pipeline.pp == 1), self.weights(self.block_shapes())
        twice = self.shards > 1  # What was gathered last is there as it came, and as it is used.
        at = partial(self._at, gradients=begun, whole_gradients=self._accumulated(), kept=kept, on_host=on_host)
        yield at(
            "in the head, forward",
            weights=self.others(self.blocks) - before * self._reshards() + head + twice * (head or before),
            head=2 * entering + weight + logits,
        )
        yield at(
            "in the head, backward",
            weights=self.others(self.blocks) + head + twice * head,
            head=2 * entering + 2 * weight + narrow * rows * width,
        )
        # Its norm goes back by chunks, in single precision, from the gradient that came to the one that goes.
        chunk = min(chunk, self.block.stream // (self.compute * width))
        yield at(
            "in the norm of the head, backward",
            weights=self.others(self.blocks) + head,
            whole_gradients=self._accumulated() or self.compute * rows * width,
            head=2 * self.block.stream + chunk * width * (3 * self.stored + self.compute),
        )

    def _in_block(self, index: int, kept: float) -> Iterator[Ledger]:
        """Backward through block `index` of the rank, when those after it are done."""
        shapes, tied = self.block_shapes(), self.model.tie_embeddings
        is_last, later = index == self.blocks - 1, self.blocks - 1 - index
        done = self._all_or(later * self.shard(shapes) + self.shard(self.head_shapes()) * self.is_last)
        again = self.config.memory.recompute != "none"
        everything, left = self.by_blocks(self.blocks), self.by_blocks(index if again else index + 1, at_work=again)
        on_device = kept - everything[0] + left[0] - self.block.stream * self.is_last
        on_host = self.in_flight() * everything[1] - everything[1] + left[1]
        own = self.weights(shapes)
        following = own * (self._reshards() and self.shards > 1 and index > 0)
        late = self.unscattered(([] if tied else self.head_shapes()) if is_last else shapes)
        waiting = self._accumulated() + self.weights(self.head_shapes()) * tied
        for name, passing, found in self._phases(index):
            grown = _elements(found)
            yield self._at(
                f"in {name} of block {index}, backward",
                gradients=done if self.is_sharded else done + grown,
                weights=self.others(index + 1) + following,
                whole_gradients=late + waiting + self.compute * grown * self.is_sharded,
                kept=on_device,
                on_host=on_host,
                # The gradient that came may lie in a buffer of the pipeline.
                passing=passing - self.block.stream * (is_last and not self.is_last),
            )
        if not self.is_sharded:
            return
        yield self._at(
            f"behind block {index}, scattering",
            gradients=done,
            weights=self.others(index) if not self._reshards() else self.others(0) + following,
            whole_gradients=waiting + own + self.unscattered(shapes),
            kept=on_device - (0 if again else self.block.kept("none")),
            on_host=on_host,
            passing=self.block.stream + self._fetched(index) if again else 0,
        )

    def _phases(self, index: int) -> Iterator[tuple[str, float, Shapes]]:
        """Of the backward pass of a block: bytes in passing, and the matrices whose gradients have been found."""
        block = self.block
        _, _, _, output, *inner = self.block_shapes()[:7]
        if self.config.memory.recompute == "none":
            yield "feed-forward", block.in_feed_forward(), inner[2:]
            yield "attention", block.in_attention(self._travels()) - block.kept_by_feed_forward(), [output, *inner]
            return
        inputs = index % self.config.memory.input_every * block.stream
        yield "feed-forward", block.feed_forward_again() + inputs, []
        fetched = self._fetched(index) if self.config.memory.head_groups == 1 else 0
        yield "attention", block.attention_again(self._travels()) + inputs + fetched, [output, *inner]
        yield "projections", block.projections_again() + inputs + self._fetched(index), [output, *inner]

    def _fetched(self, index: int) -> float:
        """Bytes on their way back to the device for the block before."""
        if self.config.memory.offload == "none" or index == 0:
            return 0
        inputs, attention = self.by_blocks(1)[1], 0.0
        inputs = min(self.block.stream, inputs)
        if self.config.memory.head_groups == 1:
            attention = self.by_blocks(1)[1] - inputs
        return inputs + attention

    def _in_embedding(self) -> Ledger:
        unit = self.embed_shapes()
        whole = self.weights(unit) + self.unscattered(unit) + self._accumulated()
        return self._at(
            "in the embedding, backward",
            gradients=self.parameters() + _elements(unit) * (not self.is_sharded and self.micro_batches > 1),
            weights=self.others(0),
            whole_gradients=whole,
        )

    def _at(
        self,
        moment: str,
        *,
        gradients: float,
        weights: float = 0,
        whole_gradients: float = 0,
        kept: float = 0,
        on_host: float = 0,
        passing: float = 0,
        head: float = 0,
    ) -> Ledger:
        """`gradients` in elements, all else in bytes."""
        plan, states = self.pipeline, self.stored * self.parameters()
        # One for each input and each gradient that a stage receives in an update.
        received = self.micro_batches * (2 * plan.stages_per_rank - self.is_first - self.is_last)
        buffers = (plan.pp > 1) * (received + self._sent()) * self.block.stream
        # Each micro-batch that is in the head has gradients there.
        waiting = {"GPipe": self.micro_batches, "InterleavedZeroBubble": plan.pp}.get(plan.schedule, 1) - 1
        if self.is_last and plan.pp > 1:
            head += waiting * (self._entering() + self.stored * _elements(self.head_shapes()))
        batch = 32 * self.tokens  # Tokens, labels, positions and documents are int64.
        saving = self.config.checkpoint.enabled and self.config.checkpoint.asynchronous
        held = self.stored * (self.parameters() if self.on_host else gradients)  # The host has to have room for all.
        states_of = {"parameters": states, "gradients": held, "optimizer states": 2 * self.moment * self.parameters()}
        lines = (
            *(Line(name, **{"host" if self.on_host else "device": size}) for name, size in states_of.items()),
            Line("gathered weights", weights),
            Line("gradients before they are summed", whole_gradients),
            Line(KEPT, kept, on_host),
            Line("a block in passing", passing),
            Line("the head", head),
            Line("buffers of the pipeline", buffers),
            Line("the copy that checkpoints are written of", 0, (states + states_of["optimizer states"]) * saving),
            # An update is read while the one before it is computed.
            Line("the batch", batch * (self.micro_batches if plan.pp > 1 else 1), 2 * batch * self.micro_batches),
        )
        return Ledger(moment, self.place, plan.pp, self.block.stream, lines)

    def _sent(self) -> float:
        """Outputs and gradients of micro-batches that are through, which longer schedules keep until the update ends."""
        laps = self.pipeline.stages_per_rank
        if self.pipeline.schedule in SINGLE:
            return 0
        through = laps * (self.micro_batches - self.in_flight())
        return max(0, 2 * through - self.is_first * (through // laps) - self.is_last * -(-through // laps))

    def _reshards(self) -> bool:
        return self.is_sharded and self.pipeline.pp == 1 and self.config.parallelism.reshard_after_forward

    def _all_or(self, found: int) -> int:
        """Elements of the gradients that are there: all, unless the first micro-batch that goes back is the fullest."""
        if self.pipeline.pp > 1 and self.is_sharded:
            return 0  # They are scattered once, at the end of the update.
        return self.parameters() if self.micro_batches > self.in_flight() else found

    def _accumulated(self) -> int:
        """Bytes of the whole gradients that a pipeline holds of its stages until the end of the update."""
        if self.pipeline.pp == 1 or not self.is_sharded:
            return 0
        return self.reduced * (self.blocks * _elements(self.block_shapes()) + _elements(self.ends()))

    def _entering(self) -> int:
        """Bytes of the tokens that enter the head on this rank."""
        shared = self.config.parallelism.loss_parallel
        return self.compute * self.tokens * self.model.dim if shared else self.block.stream

    def _travels(self) -> int:
        return BYTES[self.config.parallelism.cp_reduce_dtype] if self.compute == 2 else self.compute


def _elements(shapes: Iterable[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in shapes)
