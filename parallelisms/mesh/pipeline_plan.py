"""Pipeline stages: the blocks of each stage, the stages of each rank, and the rules of a schedule.
Imports no torch.

A rank has one stage, or several interleaved ones. The rank of each of 8 stages on 4 ranks:

    stage    0  1  2  3  4  5  6  7
    rank     0  1  2  3  0  1  2  3
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from models.config import StageSpec

PipelineSchedule = Literal["1F1B", "GPipe", "Interleaved1F1B"]
SINGLE_STAGE_SCHEDULES: tuple[PipelineSchedule, ...] = ("1F1B", "GPipe")


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """How `pp` ranks share the layers and schedule the `num_micro_batches` of a step.

    `pp_stages_per_rank` and `pp_layers` (blocks per stage) are chosen if None. `embed_cost` and
    `head_cost` are in units of one block. With pp = 1 there is one stage and the other fields are
    ignored.
    """

    pp: int
    schedule: PipelineSchedule = "1F1B"
    num_layers: int
    pp_stages_per_rank: int | None = None
    pp_layers: tuple[int, ...] | None = None
    embed_cost: float = 0.0
    head_cost: float = 0.0
    num_micro_batches: int
    reduces_per_micro_batch: bool = False
    """Whether gradients are reduced over ranks after every micro-batch, rather than once per
    step.
    """
    tie_embeddings: bool = False

    @property
    def stages_per_rank(self) -> int:
        if self.pp == 1 or self.schedule in SINGLE_STAGE_SCHEDULES:
            return 1
        return self.pp_stages_per_rank or 2

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage; that of the last stage has the losses."""
        return tuple(stage % self.pp for stage in range(self.num_stages))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(range(rank, self.num_stages, self.pp))

    @cached_property
    def blocks_per_stage(self) -> tuple[int, ...]:
        """The number of blocks of each stage.

        In steady state every rank runs all its stages once per micro-batch, so the busiest rank
        limits throughput, then the largest stage. Blocks cost the same: giving each to the least
        loaded rank, and there to its smallest stage, minimizes both. Ties go to the later stage,
        whose rank holds fewer micro-batches in flight.
        """
        if self.pp_layers is not None and self.pp > 1:
            return self.pp_layers
        return _balance_blocks(self.num_layers, self.stage_ranks, self.embed_cost, self.head_cost)

    def stage_module(self, stage: int) -> StageSpec:
        """The layers of a stage, and whether it has the embedding or the head."""
        first = sum(self.blocks_per_stage[:stage])
        layers = range(first, first + self.blocks_per_stage[stage])
        return StageSpec(layers, has_embedding=stage == 0, has_head=stage == self.num_stages - 1)

    @property
    def max_in_flight(self) -> int:
        """An upper bound on the micro-batches of a rank whose backward is pending."""
        if self.pp == 1:
            return 1
        return (
            self.num_micro_batches
            if self.schedule == "GPipe"
            else min(self.num_micro_batches, 2 * self.pp)
        )

    def in_flight(self, rank: int) -> float:
        """Micro-batches whose activations a rank saves at the same time, in units of all its
        blocks.
        """
        if self.pp == 1:
            return 1
        if self.schedule == "GPipe":
            return self.num_micro_batches
        # 1F1B: rank r starts `pp - r` forward passes before its first backward pass.
        if self.schedule in SINGLE_STAGE_SCHEDULES:
            return min(self.num_micro_batches, self.pp - rank)
        # Interleaved 1F1B (Megatron-LM): `2 * (pp - 1 - r) + (chunks - 1) * pp` warm-up passes of
        # one stage each, and one more before the first backward pass.
        chunks = self.stages_per_rank
        passes = (chunks - 1) * self.pp + 2 * (self.pp - 1 - rank) + 1
        return min(chunks * self.num_micro_batches, passes) / chunks

    @property
    def num_chunks(self) -> int:
        """Chunks that a rank computes in a step: a chunk is one micro-batch in one stage."""
        return self.stages_per_rank * self.num_micro_batches

    @property
    def bubble_chunks(self) -> int:
        """The pipeline bubble, in chunks of equal stages that a rank could compute while it waits
        (Narayanan et al., 2021).
        """
        # With fewer micro-batches than ranks, every stage of a rank first waits for the first
        # micro-batch.
        shortest = self.stages_per_rank * self.pp + self.num_micro_batches - 1
        return max(self.num_chunks + self.pp - 1, shortest) - self.num_chunks

    @property
    def bubble_fraction(self) -> float:
        """Share of the step in which a rank waits."""
        return self.bubble_chunks / (self.bubble_chunks + self.num_chunks)

    def problems(self) -> list[str]:
        """Every broken rule, one message each."""
        if self.pp == 1:
            return []
        problems = [*self._stage_problems(), *self._micro_batch_problems()]
        if self.tie_embeddings:
            problems.append(
                f"model.tie_embeddings needs parallelism.pp = 1, not {self.pp}: the first stage has the embedding, the last "
                "the head"
            )
        return problems

    def summary(self) -> str:
        """One line for the log."""
        blocks = " ".join(map(str, self.blocks_per_stage))
        return (
            f"{self.schedule}: {self.num_stages} stages on {self.pp} ranks, blocks {blocks}; "
            f"{self.num_micro_batches} micro-batches, pipeline bubble at least {self.bubble_fraction:.0%}"
        )

    def _stage_problems(self) -> list[str]:
        problems = []
        stages = f"{self.num_stages} stages (parallelism.pp = {self.pp} x {self.stages_per_rank} per rank)"
        if self.pp_stages_per_rank not in (None, self.stages_per_rank):
            problems.append(
                f"parallelism.pp_stages_per_rank = {self.pp_stages_per_rank} must be {self.stages_per_rank} for "
                f'parallelism.pp_schedule = "{self.schedule}"'
            )
        if self.pp_layers is None and self.num_layers < self.num_stages - 2:
            problems.append(
                f"model.num_layers = {self.num_layers} must be at least {self.num_stages - 2} for {stages}: every "
                "stage but the first and the last needs a block"
            )
        if self.pp_layers is None:
            return problems
        if len(self.pp_layers) != self.num_stages:
            problems.append(
                f"parallelism.pp_layers has {len(self.pp_layers)} entries, but there are {stages}"
            )
        if sum(self.pp_layers) != self.num_layers:
            problems.append(
                f"parallelism.pp_layers sums to {sum(self.pp_layers)}, which must be model.num_layers = {self.num_layers}"
            )
        empty = [
            str(stage) for stage, blocks in enumerate(self.pp_layers[1:-1], start=1) if blocks == 0
        ]
        if empty:
            problems.append(
                f"parallelism.pp_layers has no block for stage {', '.join(empty)}; only the first and the last stage may "
                "be empty"
            )
        return problems

    def _micro_batch_problems(self) -> list[str]:
        rounds = max(1, self.num_micro_batches // self.pp)
        if self.schedule == "1F1B" and self.num_micro_batches < self.num_stages:
            requirement = (
                f"at least {self.num_stages}, the number of stages (parallelism.pp = {self.pp})"
            )
        elif self.schedule == "Interleaved1F1B" and self.num_micro_batches % rounds:
            requirement = (
                f"a multiple of {rounds}, its rounds (micro-batches // parallelism.pp = {self.pp})"
            )
        else:
            return []
        return [
            f"training.global_batch_size and training.micro_batch_size give each dp rank {self.num_micro_batches} "
            f'micro-batches per step; parallelism.pp_schedule = "{self.schedule}" needs {requirement}'
        ]


@lru_cache(maxsize=256)
def _balance_blocks(
    num_blocks: int, stage_ranks: tuple[int, ...], embed_cost: float, head_cost: float
) -> tuple[int, ...]:
    last = len(stage_ranks) - 1
    # An inner stage needs a block; the first and the last have the embedding and the head.
    blocks_per_stage = [0 if stage in (0, last) else 1 for stage in range(len(stage_ranks))]
    stage_costs = [float(count) for count in blocks_per_stage]
    stage_costs[0] += embed_cost
    stage_costs[last] += head_cost
    rank_costs = [0.0] * (max(stage_ranks) + 1)
    for rank, cost in zip(stage_ranks, stage_costs, strict=True):
        rank_costs[rank] += cost
    for _ in range(num_blocks - sum(blocks_per_stage)):
        stage = min(
            range(len(stage_ranks)),
            key=lambda stage: (rank_costs[stage_ranks[stage]], stage_costs[stage], -stage),
        )
        blocks_per_stage[stage] += 1
        stage_costs[stage] += 1
        rank_costs[stage_ranks[stage]] += 1
    return tuple(blocks_per_stage)
