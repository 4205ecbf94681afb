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
    from models.transformer import StageSpec

PipelineSchedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
SINGLE_STAGE_SCHEDULES: tuple[PipelineSchedule, ...] = ("1F1B", "GPipe")
INTERLEAVED_SCHEDULES: tuple[PipelineSchedule, ...] = ("Interleaved1F1B", "InterleavedZeroBubble")
V_SCHEDULES: tuple[PipelineSchedule, ...] = ("ZBVZeroBubble", "DualPipeV")
# These find the gradient of a stage's input first, and those of its weights when nothing else is to be done.
SPLIT_BACKWARD_SCHEDULES: tuple[PipelineSchedule, ...] = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """How `pp` ranks share the layers, and in which order they run the `micro_batches` of an update.

    `per_rank` and `layers` (the blocks of each stage) None chooses them. `embed_cost` and `head_cost` are in blocks.
    With one rank there is one stage, whatever the rest says.
    """

    pp: int
    schedule: PipelineSchedule = "1F1B"
    num_layers: int
    pp_stages_per_rank: int | None = None
    pp_layers: tuple[int, ...] | None = None
    embed_cost: float = 0.0
    head_cost: float = 0.0
    num_micro_batches: int
    tie_embeddings: bool = False
    compiled: bool = False
    recompute: str = "none"

    @property
    def stages_per_rank(self) -> int:
        if self.pp == 1 or self.schedule in SINGLE_STAGE_SCHEDULES:
            return 1
        return 2 if self.schedule in V_SCHEDULES else self.pp_stages_per_rank or 2

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """Where each stage is."""
        is_v = self.schedule in V_SCHEDULES
        chunks = (divmod(stage, self.pp) for stage in range(self.num_stages))
        return tuple(self.pp - 1 - position if is_v and chunk % 2 else position for chunk, position in chunks)

    def rank_of(self, stage: int) -> int:
        return self.stage_ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, stage_rank in enumerate(self.stage_ranks) if stage_rank == rank)

    @property
    def last_rank(self) -> int:
        """Where the losses are."""
        return self.rank_of(self.num_stages - 1)

    @cached_property
    def blocks_per_stage(self) -> tuple[int, ...]:
        """How many blocks each stage has, first to last.

        In steady state every rank runs all its stages once per micro-batch, so the busiest rank sets the pace, and
        only then the largest stage matters. Blocks are alike: dealt one by one to the rank that has least to do, and
        there to its smallest stage, they make both as small as can be. Between equals the later stage gets the
        block, as its rank holds fewer micro-batches at a time.
        """
        if self.pp_layers is not None and self.pp > 1:
            return self.pp_layers
        return _balance_blocks(self.num_layers, self.stage_ranks, self.embed_cost, self.head_cost)

    def stage_module(self, stage: int) -> StageSpec:
        """What of the model a stage is."""
        # Here, because it needs torch, and plans are checked without.
        from models.transformer import StageSpec

        first = sum(self.blocks_per_stage[:stage])
        layers = range(first, first + self.blocks_per_stage[stage])
        return StageSpec(layers, has_embedding=stage == 0, has_head=stage == self.num_stages - 1)

    @property
    def max_in_flight(self) -> int:
        """No more micro-batches than that are between their forward and their backward pass on a rank."""
        if self.pp == 1:
            return 1
        return self.num_micro_batches if self.schedule == "GPipe" else min(self.num_micro_batches, 2 * self.pp)

    @property
    def bubble_fraction(self) -> float | None:
        """The share of an update that a rank waits, were all stages alike and nothing else took time.

        As Narayanan et al. (2021) count it; None where weight gradients fill the waits.
        """
        if self.schedule in SPLIT_BACKWARD_SCHEDULES and self.pp > 1:
            return None
        num_chunks, num_batches = self.stages_per_rank, self.num_micro_batches
        # With fewer micro-batches than ranks, the first is awaited at the start of every lap.
        steps = max(num_chunks * num_batches + self.pp - 1, num_chunks * self.pp + num_batches - 1)
        return 1 - num_chunks * num_batches / steps

    def problems(self) -> list[str]:
        """Every rule that is broken, in words; empty when the plan can run."""
        if self.pp == 1:
            return []
        problems = [*self._stage_problems(), *self._micro_batch_problems(), *self._split_backward_problems()]
        if self.tie_embeddings:
            problems.append(
                f"model.tie_embeddings needs parallelism.pp = 1, not {self.pp}: the embedding is in the first stage, "
                "the head in the last"
            )
        return problems

    def summary(self) -> str:
        """One line for the log."""
        bubble = "" if self.bubble_fraction is None else f", {self.bubble_fraction:.0%} idle at best"
        blocks = " ".join(map(str, self.blocks_per_stage))
        return (
            f"{self.schedule}: {self.num_stages} stages on {self.pp} ranks, blocks {blocks}; "
            f"{self.num_micro_batches} micro-batches{bubble}"
        )

    def _stage_problems(self) -> list[str]:
        problems = []
        stages_per_rank = self.stages_per_rank
        stages = f"{self.num_stages} stages (parallelism.pp = {self.pp}, {stages_per_rank} each)"
        if self.pp_stages_per_rank not in (None, stages_per_rank):
            problems.append(
                f'parallelism.pp_stages_per_rank = {self.pp_stages_per_rank} does not fit parallelism.pp_schedule "{self.schedule}", '
                f"which has {stages_per_rank} on each rank"
            )
        if self.pp_layers is None:
            if self.num_layers < self.num_stages - 2:
                problems.append(
                    f"model.num_layers = {self.num_layers} is too few for {stages}: all but the first and the last, "
                    "which have embedding and head, need a block"
                )
            return problems
        if len(self.pp_layers) != self.num_stages:
            problems.append(f"parallelism.pp_layers names {len(self.pp_layers)} stages; there are {stages}")
        if sum(self.pp_layers) != self.num_layers:
            problems.append(
                f"parallelism.pp_layers adds up to {sum(self.pp_layers)}; model.num_layers = {self.num_layers}"
            )
        empty = [str(stage) for stage, blocks in enumerate(self.pp_layers[1:-1], start=1) if blocks == 0]
        if empty:
            problems.append(
                f"parallelism.pp_layers leaves stage {', '.join(empty)} without a block; only the first and the last, "
                "which have embedding and head, may have none"
            )
        return problems

    def _micro_batch_problems(self) -> list[str]:
        num_micro_batches, num_stages = self.num_micro_batches, self.num_stages
        rounds = max(1, num_micro_batches // self.pp)
        requirement = ""
        if self.schedule in ("1F1B", "DualPipeV") and num_micro_batches < num_stages:
            requirement = f"needs at least as many as stages, {num_stages}"
        elif self.schedule in INTERLEAVED_SCHEDULES and num_micro_batches % rounds:
            requirement = f"runs them in {rounds} rounds ({num_micro_batches} // parallelism.pp = {self.pp}), all of the same number"
        if not requirement:
            return []
        return [
            f"training.global_batch_size and training.micro_batch_size give each data rank {num_micro_batches} micro-batches per "
            f'update; parallelism.pp_schedule "{self.schedule}" {requirement}'
        ]

    def _split_backward_problems(self) -> list[str]:
        if self.schedule not in SPLIT_BACKWARD_SCHEDULES:
            return []
        schedule = (
            f'parallelism.pp_schedule "{self.schedule}" goes back through a stage twice, for its input and its weights'
        )
        problems = []
        if self.compiled:
            problems.append(
                f"{schedule}; training.compile must be false: compiled blocks overwrite the first time what they need the "
                "second, if torch has them from its cache, and gradients would be wrong"
            )
        if self.recompute != "none":
            problems.append(
                f'{schedule}; memory.recompute must be "none", not "{self.recompute}": what is computed again serves one '
                "way back, and each weight would have its own"
            )
        return problems


@lru_cache(maxsize=256)
def _balance_blocks(
    num_blocks: int, stage_ranks: tuple[int, ...], embed_cost: float, head_cost: float
) -> tuple[int, ...]:
    """How many of so many blocks each stage has, where `ranks` are those of the stages."""
    last = len(stage_ranks) - 1
    blocks_per_stage = [0 if stage in (0, last) else 1 for stage in range(len(stage_ranks))]
    stage_costs = [float(count) for count in blocks_per_stage]
    stage_costs[0] += embed_cost
    stage_costs[last] += head_cost
    rank_costs = [0.0] * (max(stage_ranks) + 1)
    for rank, cost in zip(stage_ranks, stage_costs, strict=True):
        rank_costs[rank] += cost
    for _ in range(num_blocks - sum(blocks_per_stage)):
        stage = min(
            range(len(stage_ranks)), key=lambda stage: (rank_costs[stage_ranks[stage]], stage_costs[stage], -stage)
        )
        blocks_per_stage[stage] += 1
        stage_costs[stage] += 1
        rank_costs[stage_ranks[stage]] += 1
    return tuple(blocks_per_stage)
