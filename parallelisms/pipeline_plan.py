"""A pipeline as data: the blocks of each stage, the stages of each rank, and what a schedule asks of both.

Numbers and words only, without torch, as `rules.py`. The layers are cut into stages, and ranks hold one stage, or
several in turn, or two as the arms of a V. 8 stages on 4 ranks, Interleaved1F1B and ZBVZeroBubble:

    stage         0  1  2  3  4  5  6  7
    in turn       0  1  2  3  0  1  2  3
    V             0  1  2  3  3  2  1  0
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from models.transformer import Part

Schedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
SINGLE: tuple[Schedule, ...] = ("1F1B", "GPipe")
IN_TURN: tuple[Schedule, ...] = ("Interleaved1F1B", "InterleavedZeroBubble")
FOLDED: tuple[Schedule, ...] = ("ZBVZeroBubble", "DualPipeV")
# These find the gradient of a stage's input first, and those of its weights when nothing else is to be done.
SPLIT: tuple[Schedule, ...] = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """How `pp` ranks share the layers, and in which order they run the `micro_batches` of an update.

    `per_rank` and `layers` (the blocks of each stage) None chooses them. `embed_cost` and `head_cost` are in blocks.
    With one rank there is one stage, whatever the rest says.
    """

    pp: int
    schedule: Schedule = "1F1B"
    num_layers: int
    per_rank: int | None = None
    layers: tuple[int, ...] | None = None
    embed_cost: float = 0.0
    head_cost: float = 0.0
    micro_batches: int
    tied: bool = False
    compiled: bool = False
    recompute: str = "none"

    @property
    def stages_per_rank(self) -> int:
        if self.pp == 1 or self.schedule in SINGLE:
            return 1
        return 2 if self.schedule in FOLDED else self.per_rank or 2

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Where each stage is."""
        folded = self.schedule in FOLDED
        laps = (divmod(stage, self.pp) for stage in range(self.num_stages))
        return tuple(self.pp - 1 - place if folded and lap % 2 else place for lap, place in laps)

    def rank_of(self, stage: int) -> int:
        return self.ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, where in enumerate(self.ranks) if where == rank)

    @property
    def last_rank(self) -> int:
        """Where the losses are."""
        return self.rank_of(self.num_stages - 1)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """How many blocks each stage has, first to last.

        In steady state every rank runs all its stages once per micro-batch, so the busiest rank sets the pace, and
        only then the largest stage matters. Blocks are alike: dealt one by one to the rank that has least to do, and
        there to its smallest stage, they make both as small as can be. Between equals the later stage gets the
        block, as its rank holds fewer micro-batches at a time.
        """
        if self.layers is not None and self.pp > 1:
            return self.layers
        return _dealt(self.num_layers, self.ranks, self.embed_cost, self.head_cost)

    def part(self, stage: int) -> Part:
        """What of the model a stage is."""
        # Here, because it needs torch, and plans are checked without.
        from models.transformer import Part

        first = sum(self.blocks[:stage])
        layers = range(first, first + self.blocks[stage])
        return Part(layers, embed=stage == 0, head=stage == self.num_stages - 1)

    @property
    def most_in_flight(self) -> int:
        """No more micro-batches than that are between their forward and their backward pass on a rank."""
        if self.pp == 1:
            return 1
        return self.micro_batches if self.schedule == "GPipe" else min(self.micro_batches, 2 * self.pp)

    @property
    def bubble(self) -> float | None:
        """The share of an update that a rank waits, were all stages alike and nothing else took time.

        As Narayanan et al. (2021) count it; None where weight gradients fill the waits.
        """
        if self.schedule in SPLIT and self.pp > 1:
            return None
        laps, batches = self.stages_per_rank, self.micro_batches
        # With fewer micro-batches than ranks, the first is awaited at the start of every lap.
        steps = max(laps * batches + self.pp - 1, laps * self.pp + batches - 1)
        return 1 - laps * batches / steps

    def problems(self) -> list[str]:
        """Every rule that is broken, in words; empty when the plan can run."""
        if self.pp == 1:
            return []
        found = [*self._stage_problems(), *self._count_problems(), *self._split_problems()]
        if self.tied:
            found.append(
                f"model.tie_embeddings needs parallelism.pp = 1, not {self.pp}: the embedding is in the first stage, "
                "the head in the last"
            )
        return found

    def summary(self) -> str:
        """One line for the log."""
        waits = "" if self.bubble is None else f", {self.bubble:.0%} idle at best"
        blocks = " ".join(map(str, self.blocks))
        return (
            f"{self.schedule}: {self.num_stages} stages on {self.pp} ranks, blocks {blocks}; "
            f"{self.micro_batches} micro-batches{waits}"
        )

    def _stage_problems(self) -> list[str]:
        found = []
        each = self.stages_per_rank
        stages = f"{self.num_stages} stages (parallelism.pp = {self.pp}, {each} each)"
        if self.per_rank not in (None, each):
            found.append(
                f'parallelism.pp_stages_per_rank = {self.per_rank} does not fit parallelism.pp_schedule "{self.schedule}", '
                f"which has {each} on each rank"
            )
        if self.layers is None:
            if self.num_layers < self.num_stages - 2:
                found.append(
                    f"model.num_layers = {self.num_layers} is too few for {stages}: all but the first and the last, "
                    "which have embedding and head, need a block"
                )
            return found
        if len(self.layers) != self.num_stages:
            found.append(f"parallelism.pp_layers names {len(self.layers)} stages; there are {stages}")
        if sum(self.layers) != self.num_layers:
            found.append(f"parallelism.pp_layers adds up to {sum(self.layers)}; model.num_layers = {self.num_layers}")
        empty = [str(stage) for stage, blocks in enumerate(self.layers[1:-1], start=1) if blocks == 0]
        if empty:
            found.append(
                f"parallelism.pp_layers leaves stage {', '.join(empty)} without a block; only the first and the last, "
                "which have embedding and head, may have none"
            )
        return found

    def _count_problems(self) -> list[str]:
        asked, stages = self.micro_batches, self.num_stages
        rounds = max(1, asked // self.pp)
        rule = ""
        if self.schedule in ("1F1B", "DualPipeV") and asked < stages:
            rule = f"needs at least as many as stages, {stages}"
        elif self.schedule in IN_TURN and asked % rounds:
            rule = f"runs them in {rounds} rounds ({asked} // parallelism.pp = {self.pp}), all of the same number"
        if not rule:
            return []
        return [
            f"training.global_batch_size and training.micro_batch_size give each data rank {asked} micro-batches per "
            f'update; parallelism.pp_schedule "{self.schedule}" {rule}'
        ]

    def _split_problems(self) -> list[str]:
        if self.schedule not in SPLIT:
            return []
        schedule = (
            f'parallelism.pp_schedule "{self.schedule}" goes back through a stage twice, for its input and its weights'
        )
        found = []
        if self.compiled:
            found.append(
                f"{schedule}; training.compile must be false: compiled blocks overwrite the first time what they need the "
                "second, if torch has them from its cache, and gradients would be wrong"
            )
        if self.recompute != "none":
            found.append(
                f'{schedule}; memory.recompute must be "none", not "{self.recompute}": what is computed again serves one '
                "way back, and each weight would have its own"
            )
        return found


@lru_cache(maxsize=256)
def _dealt(blocks: int, ranks: tuple[int, ...], embed_cost: float, head_cost: float) -> tuple[int, ...]:
    """How many of so many blocks each stage has, where `ranks` are those of the stages."""
    last = len(ranks) - 1
    dealt = [0 if stage in (0, last) else 1 for stage in range(len(ranks))]
    costs = [float(count) for count in dealt]
    costs[0] += embed_cost
    costs[last] += head_cost
    loads = [0.0] * (max(ranks) + 1)
    for rank, cost in zip(ranks, costs, strict=True):
        loads[rank] += cost
    for _ in range(blocks - sum(dealt)):
        stage = min(range(len(ranks)), key=lambda stage: (loads[ranks[stage]], costs[stage], -stage))
        dealt[stage] += 1
        costs[stage] += 1
        loads[ranks[stage]] += 1
    return tuple(dealt)
