"""A short model and a short step that have every kind of piece of the whole ones. Imports no
torch.

Layers repeat: 32 blocks that are alike run like 5 of them, the two at either end and one between.
A pattern of kinds is kept whole once, so that every block has the neighbours that it would have.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from models.config import ALIKE_OPTIONS, ModelConfig
from models.layers import LayerKind
from parallelisms.mesh.pipeline_plan import PipelinePlan
from parallelisms.pipeline_schedules import ActionKind, Message, ticks
from trainer.config.job_config import Config
from trainer.hardware.host import GIB
from trainer.trace.compose import Correspondence
from trainer.trace.host_budget import Offloaded, host_budget
from trainer.trace.pieces import BEGIN, FINISH, OPTIMIZER, Place, Unit

ACTIONS: dict[ActionKind, str] = {"F": "forward", "B": "backward"}
FIRST_BLOCKS = 2
LAST_BLOCKS = 2
"""FSDP gathers the weights of the next block during one, so the ends of a model reach two blocks
into it.
"""


@dataclass(frozen=True)
class ShortenedBlocks:
    """The blocks of a stage that are recorded, by their place in the stage, and the recorded one
    for every block.
    """

    kept: tuple[int, ...]
    originals: tuple[int, ...]


def shortened_runs(runs: Iterable[Sequence[Hashable]], extra: int = 0) -> ShortenedBlocks:
    """Every run of blocks by itself, as in `shortened_blocks`."""
    kept = list[int]()
    originals = list[int]()
    first = 0
    for run in runs:
        short = shortened_blocks(run, extra)
        originals += [len(kept) + original for original in short.originals]
        kept += [first + block for block in short.kept]
        first += len(run)
    return ShortenedBlocks(tuple(kept), tuple(originals))


def shortened_blocks(kinds: Sequence[Hashable], extra: int = 0) -> ShortenedBlocks:
    """The shortest sequence with the start, the end and a whole period of `kinds`, and `extra`
    periods before that one.
    """
    count = len(kinds)
    start, period = _pattern(kinds)
    last = max(LAST_BLOCKS, period)
    # The irregular start, both ends, and whole periods between them.
    least = start + FIRST_BLOCKS + last + (1 + extra) * period
    # Congruent to `count` modulo the period, so that both ends keep their neighbours.
    length = least + (count - least) % period
    if length >= count:
        everything = tuple(range(count))
        return ShortenedBlocks(everything, everything)
    head = length - last
    # Blocks that are not recorded repeat the last recorded period.
    between = (head - period + (block - head) % period for block in range(head, count - last))
    kept = (*range(head), *range(count - last, count))
    return ShortenedBlocks(kept, (*range(head), *between, *range(head, length)))


def _pattern(kinds: Sequence[Hashable]) -> tuple[int, int]:
    """Start and period of the pattern that lasts until the end and needs the fewest blocks."""
    count = len(kinds)
    best = (len(kinds), 1)
    for period in range(1, count + 1):
        start = count - period
        while start > 0 and kinds[start - 1] == kinds[start - 1 + period]:
            start -= 1
        # A short model has the start and one period, so their sum is what recording costs.
        best = min(best, (start, period), key=sum)
    return best


@dataclass(frozen=True)
class ShortStep:
    """A configuration whose step is recorded, and how the whole step follows from it."""

    whole: Config
    world_size: int
    rank: int = 0
    extra: int = 0
    """Periods of layers, recorded beyond one."""
    extra_micro_batches: int = 0
    """Micro-batches that a pipeline records beyond three."""
    offloaded: tuple[Offloaded, ...] = ()
    """Bytes that a host budget lets every block offload; empty without a budget."""

    @cached_property
    def plan(self) -> PipelinePlan:
        return self.whole.pipeline_plan(self.world_size)

    @property
    def pp_rank(self) -> int:
        return self.rank * self.plan.pp // self.world_size

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a host."""
        return max(
            1, self.world_size // max(1, self.world_size // self.whole.parallelism.ranks_per_node)
        )

    @cached_property
    def stages(self) -> dict[int, ShortenedBlocks]:
        """The stages of this rank."""
        return {
            stage: shortened_runs(self._runs(stage), self.extra)
            for stage in self.plan.stages_of(self.pp_rank)
        }

    @property
    def size(self) -> Hashable:
        """Equal for steps of this rank that record as much."""
        return self.micro_batches, tuple(blocks.kept for blocks in self.stages.values())

    @property
    def likeness(self) -> Hashable:
        """Equal for ranks of a pipeline whose short steps differ by the numbers of their stages
        alone.
        """
        kinds = {
            stage: [kind for run in self._runs(stage) for kind in run] for stage in self.stages
        }
        kept = [
            tuple(kinds[stage][place] for place in blocks.kept)
            for stage, blocks in self.stages.items()
        ]
        return (
            *zip(map(self._ends, self.stages), kept, strict=True),
            self.offloaded,
            self.micro_batches,
        )

    def _ends(self, stage: int) -> tuple[bool, bool]:
        return stage == 0, stage == self.plan.num_stages - 1

    def _runs(self, stage: int) -> Iterator[list[Hashable]]:
        """Kinds of blocks, in runs of those that offload alike.

        They also differ by which of them saves its input.
        """
        layers = self.whole.model.build().layer_kinds
        every = self.whole.memory.blocks_per_checkpoint
        places = enumerate(self.plan.stage_module(stage).layers)
        blocks = (
            (place // every * every, (layers[layer], place % every)) for place, layer in places
        )
        for _, run in groupby(
            blocks, key=lambda block: self.offloaded[block[0] : block[0] + every]
        ):
            yield [kind for _, kind in run]

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of the short step: with a pipeline the last one differs, since it reduces
        gradients.
        """
        recorded = 2 if self.plan.pp == 1 else 3 + self.extra_micro_batches
        return min(self.plan.num_micro_batches, recorded)

    @cached_property
    def model(self) -> ModelConfig:
        whole = self.whole.model.build()
        kinds = list[LayerKind]()
        for stage in range(self.plan.num_stages):
            layers = self.plan.stage_module(stage).layers
            if stage in self.stages:
                kinds += [whole.layer_kinds[layers[place]] for place in self.stages[stage].kept]
            else:
                # Another rank's, of which only the number of blocks counts.
                kinds += [whole.layer_kinds[layer] for layer in layers[:1]]
        if len(whole.kinds) == 1:
            return replace(whole, num_layers=len(kinds))
        alike = {name: getattr(ModelConfig, name) for name in (*ALIKE_OPTIONS, "nope_every")}
        return replace(whole, num_layers=len(kinds), layers=tuple(kinds), **alike)

    @cached_property
    def config(self) -> Config:
        """Configuration of the short step.

        Its model section is that of the whole one: `model` takes its place.
        """
        plan = self.plan
        whole = self.whole
        blocks = [
            len(self.stages[stage].kept) if stage in self.stages else min(1, count)
            for stage, count in enumerate(plan.blocks_per_stage)
        ]
        parallelism = whole.parallelism
        if plan.pp > 1:
            # 1F1B needs more micro-batches than are recorded.
            schedule = "GPipe" if parallelism.pp_schedule == "1F1B" else parallelism.pp_schedule
            parallelism = parallelism.model_copy(
                update={"pp_layers": tuple(blocks), "pp_schedule": schedule}
            )
        memory = whole.memory
        if self.offloaded:
            budget = host_budget(
                [self.offloaded[place] for place in self.stages[0].kept],
                memory.blocks_per_checkpoint,
            )
            # Half a byte more, because the budget is converted to GiB and rounded down to bytes
            # again.
            memory = memory.model_copy(
                update={"host_budget_gib": (budget + 0.5) * self.ranks_per_node / GIB}
            )
        sequences = whole.training.global_batch_size * self.micro_batches // plan.num_micro_batches
        training = whole.training.model_copy(update={"global_batch_size": sequences})
        return whole.model_copy(
            update={"parallelism": parallelism, "training": training, "memory": memory}
        )

    @cached_property
    def correspondence(self) -> Correspondence:
        return Correspondence(
            {stage: blocks.originals for stage, blocks in self.stages.items()},
            self.plan.num_micro_batches,
            self.micro_batches,
        )

    def order(self) -> Iterator[Place]:
        """The pieces of the whole step."""
        yield BEGIN
        if self.plan.pp == 1:
            for number in range(self.plan.num_micro_batches):
                yield Place("load", micro_batch=number)
                yield from self._pass("forward", 0, number)
                yield from self._pass("backward", 0, number)
        else:
            yield from self._pipeline()
            yield FINISH
        yield OPTIMIZER

    def _pipeline(self) -> Iterator[Place]:
        for number in range(self.plan.num_micro_batches):
            yield Place("load", micro_batch=number)
        for tick in ticks(self.plan):
            if (action := tick.actions[self.pp_rank]) is not None:
                yield from self._pass(ACTIONS[action.kind], action.stage, action.micro_batch)
            for message in tick.messages:
                if self.pp_rank in (message.source, message.target):
                    yield from message_places(message, self.pp_rank)

    def _pass(self, action: str, stage: int, number: int) -> Iterator[Place]:
        blocks = range(len(self.stages[stage].originals))
        units: tuple[Unit, ...] = ("embedding", *blocks, "head")
        for unit in units if action == "forward" else reversed(units):
            yield Place(action, stage, number, unit)

    def target(self, place: Place) -> int:
        """The pipeline rank that a message goes to."""
        neighbour = place.stage + (1 if place.action == "send forward" else -1)
        return self.plan.stage_ranks[neighbour]


def message_places(message: Message, rank: int) -> Iterator[Place]:
    """The piece in which a rank sends or receives a message, named after its own stage; none for
    other ranks.
    """
    kind, stage, micro_batch = message.key
    if message.source == rank:
        sender = stage - 1 if kind == "F" else stage + 1
        yield Place(f"send {ACTIONS[kind]}", sender, micro_batch, "message")
    elif message.target == rank:
        yield Place(f"receive {ACTIONS[kind]}", stage, micro_batch, "message")
