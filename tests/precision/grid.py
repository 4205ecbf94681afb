"""Every accumulator of the product, with its numbers of parts; and those that keep bfloat16 on
purpose.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from models.batch import Batch
from parallelisms.mesh.collectives import to_local
from parallelisms.mesh.pipeline_plan import PipelineSchedule
from tests.precision import across_ranks, local
from tests.precision.errors import Accumulator, Factor, Results, factor
from tests.ranks import run_ranks
from tests.system.in_process import configured, trainer_of
from tests.system.runs import write_run

HALF = torch.bfloat16


@cache
def over_ranks(size: int) -> dict[str, Results]:
    """By accumulator, the results of all ranks."""
    merged: dict[str, Results] = {}
    for rank, by_name in enumerate(run_ranks(across_ranks.all_results, size)):
        for name, results in by_name.items():
            merged.setdefault(name, {}).update(
                {f"{key}, rank {rank}": pair for key, pair in results.items()}
            )
    return merged


def rank_results(name: str, parts: int) -> Results:
    return over_ranks(parts)[name] if parts > 1 else {}


def pipeline_results(schedule: PipelineSchedule, parts: int) -> Results:
    if parts == 1:
        return {}
    by_rank = run_ranks(across_ranks.pipelined, 2, schedule, parts)
    return {name: pair for results in by_rank for name, pair in results.items()}


@cache
def micro_batches(parts: int) -> Results:
    """Equal micro-batches of a bfloat16 run on one rank: gradients, and the metric vector.

    A power of two, by which the loss is divided exactly: the sum is the gradient of one
    micro-batch.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = configured(
            write_run(Path(folder)), Path(folder) / "run", "--training.dtype=bfloat16"
        )
        with trainer_of(config) as trainer:
            batch = next(trainer.loader.steps(start_sequence=0))[0]

            def sums(batches: list[Batch]) -> dict[str, Tensor]:
                vector = trainer.accumulate_gradients(batches)
                grads = {"loss": trainer.accumulator.layout.split(vector)["loss"].clone()}
                for name, parameter in trainer.optimizer.parameters_by_name.items():
                    assert parameter.grad is not None
                    grads[name] = to_local(parameter.grad).clone()
                    parameter.grad = None
                return grads

            one = sums([batch])
            found = sums([batch] * parts)
            one["loss"] *= parts
            return {name: (grad, one[name].double()) for name, grad in found.items()}


WIDE = torch.float32
SCHEDULES: dict[PipelineSchedule, tuple[int, ...]] = {"1F1B": (8,), "Interleaved1F1B": ()}
THOUSANDS = (8, 64, 2048)
ACCUMULATORS = [
    Accumulator("loss head: chunks", local.loss_head, THOUSANDS, (256,)),
    Accumulator("head norm: chunks", local.head_norm, THOUSANDS, (256,)),
    Accumulator("norm statistics: width", local.norm_statistics, THOUSANDS, (1 << 16,), WIDE),
    Accumulator("norm weight: tokens", local.norm_backward, THOUSANDS, (1 << 16,), WIDE),
    Accumulator("experts: rows of a token", local.expert_rows, THOUSANDS, (256,)),
    Accumulator("weight gradients: tiles", local.tile_grads, THOUSANDS, (4096,)),
    Accumulator("block: tiles", local.block_tiles, (8, 256), (64,)),
    Accumulator("block: head groups", local.head_groups, (2, 8), (4,)),
    Accumulator(
        "attention: pieces of KV", local.remote_pieces, (8, 256), (64, 2048), float32=("lse",)
    ),
    Accumulator("attention: score blocks", local.score_blocks, (8, 1024), (64,), float32=("lse",)),
    Accumulator("attention: query heads", local.query_heads, (8, 64), (1024,), float32=("lse",)),
    Accumulator("ring: hops of dk, dv", local.ring_hops, (2, 8, 2048), (), WIDE),
    Accumulator("embedding: equal tokens", local.embedding, THOUSANDS, (1 << 16,)),
    Accumulator("gradient norm: tensors", local.grad_norm, (8, 2048), (), WIDE),
    Accumulator("gradient norm: 16K elements", local.grad_norm_elements, (8, 64), (2048,), WIDE),
    Accumulator("AdamW moments: steps", local.moments, (8, 64), (2048,), WIDE),
    Accumulator("micro-batches", micro_batches, (8,), (64, 512), WIDE),
    *(
        Accumulator(
            f"micro-batches, {schedule}", partial(pipeline_results, schedule), parts, (64,), WIDE
        )
        for schedule, parts in SCHEDULES.items()
    ),
    *(
        Accumulator(name, partial(rank_results, name), (8,), (2, 4), dtype)
        for name, (_, dtype) in across_ranks.ACCUMULATORS.items()
    ),
]
# Sums in the compute dtype, and dtypes that the user asks for.
EXCEPTIONS = [
    *(Accumulator(name, partial(rank_results, name), (8,)) for name in across_ranks.EXCEPTIONS),
    Accumulator(
        'parallelism.cp_reduce_dtype = "bfloat16", ring',
        partial(local.ring_hops, reduce_dtype=HALF),
        (8,),
    ),
    Accumulator(
        'memory.optimizer_dtype = "bfloat16": steps',
        partial(local.moments, moment_dtype=HALF),
        (64,),
        (2048,),
    ),
]


def factors() -> Iterator[Factor]:
    """The whole table: every accumulator and every number of parts, those of slow tests too."""
    for accumulator in (*ACCUMULATORS, *EXCEPTIONS):
        for parts in sorted((*accumulator.parts, *accumulator.slow_parts)):
            yield factor(accumulator, parts)
