"""Closed formulas for communication and FLOPs against the dry run, at world sizes that no test can
start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from benchmarks import memory_grid
from benchmarks.dry_run import dry_run
from tests.memory.test_estimator import FOUR, FULL, HALF, KEEP, configured
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.plan.comm_volume import CommVolume, comm_volumes
from trainer.plan.memory_estimate import rank_memory
from trainer.plan.rank_workload import rank_workload

SMALL = {
    "data.corpus": "copy",
    "model.dim": 128,
    "model.num_heads": 8,
    "model.num_kv_heads": 2,
    "model.head_dim": 32,
    "model.ffn_dim": 256,
    "model.vocab_size": 512,
    "training.steps": 4,
    "training.seq_len": 1024,
    "training.dtype": "bfloat16",
    "training.global_batch_size": 1,
}
LONG = "training.seq_len=16384 parallelism.dp_replicate=2"
DEEP = "model.num_layers=16 parallelism.pp=8 training.global_batch_size=64"
CASES = {
    1: (KEEP, f"{HALF} {FULL}"),
    4: (
        f"{FOUR} {HALF} parallelism.dp_shard=2",
        f"{FOUR} parallelism.tp=2 parallelism.pp_schedule=Interleaved1F1B",
    ),
    16: (
        f"{LONG} parallelism.cp=8 parallelism.cp_method=ring {HALF} {KEEP} training.global_batch_size=2",
        f"{LONG} parallelism.cp=4 parallelism.tp=2 parallelism.cp_method=allgather {FULL} training.global_batch_size=2",
        f"{LONG} parallelism.cp=4 parallelism.dp_shard=2 parallelism.cp_method=hybrid parallelism.cp_ulysses=2 {KEEP} "
        "training.global_batch_size=4",
    ),
    256: (
        "model.num_layers=8 parallelism.pp=4 parallelism.dp_shard=8 parallelism.dp_replicate=2 parallelism.tp=4 "
        f"{HALF} parallelism.pp_schedule=Interleaved1F1B training.global_batch_size=64",
        f"{DEEP} parallelism.dp_shard=4 parallelism.dp_replicate=2 parallelism.tp=4 {HALF} "
        "parallelism.pp_schedule=Interleaved1F1B training.global_batch_size=128",
    ),
    1024: (
        f"{LONG} parallelism.cp=8 parallelism.tp=4 parallelism.dp_shard=16 parallelism.cp_method=ring {HALF} {KEEP} "
        "training.global_batch_size=32",
    ),
}


def summed(
    messages: Iterable[CommVolume],
) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """(bytes, calls) by (channel, kind)."""
    sizes = Counter[tuple[str, str]]()
    calls = Counter[tuple[str, str]]()
    for message in messages:
        if message.bytes:
            sizes[message.channel, message.kind] += round(message.bytes)
            calls[message.channel, message.kind] += round(message.calls)
    return sizes, calls


def end_pp_ranks(config: Config) -> list[int]:
    return sorted({0, config.parallelism.pp - 1})


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        pytest.param(size, changes, marks=[pytest.mark.slow] * (number > 0 or size > 16))
        for size, cases in CASES.items()
        for number, changes in enumerate(cases)
    ],
)
def test_formulas_match_the_dry_run(world_size: int, changes: str) -> None:
    config = configured(changes)
    assert checks.layout_problems(config, world_size) == []
    for pp_rank in end_pp_ranks(config):
        dry = dry_run(config, world_size, rank=pp_rank * (world_size // config.parallelism.pp))
        assert summed(dry.messages) == summed(
            comm_volumes(rank_memory(config, world_size, pp_rank))
        )
        formulas = rank_workload(rank_memory(config, world_size, pp_rank))
        assert sum(dry.matmul_flops.values()) == pytest.approx(
            sum(formulas.matmul_flops.values()), rel=1e-9
        )
        assert sum(dry.attention_flops.values()) == pytest.approx(
            sum(formulas.attention_flops.values()), rel=0.01
        )


MIXED = {
    "5:1": '[{"window":40,"repeat":5},{}]',
    "1:1": '[{"window":100,"sink":true},{"sink":true}]',
    "3:1": '[{"window":300,"repeat":3},{}]',
}
CP = ("allgather", "ring", "alltoall", "ulysses", "hybrid")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "method", "recompute"),
    [
        (pattern, method, recompute)
        for pattern in MIXED
        for method in CP
        for recompute in ("none", "full")
    ],
)
def test_mixed_layers_match_the_dry_run_of_the_busiest_rank(
    pattern: str, method: str, recompute: str
) -> None:
    layers = {"1:1": 2, "3:1": 4, "5:1": 6}[pattern]
    config = memory_grid.configured(
        {
            **SMALL,
            "model.num_layers": layers,
            "model.layers": MIXED[pattern],
            "memory.recompute": recompute,
            "parallelism.cp": 4,
            "parallelism.cp_method": method,
        }
        | ({"parallelism.cp_ulysses": 2} if method == "hybrid" else {})
    )
    runs = [dry_run(config, 4, rank=rank) for rank in range(4)]
    sizes = Counter[tuple[str, str]]()
    calls = Counter[tuple[str, str]]()
    for size, count in (summed(dry.messages) for dry in runs):
        sizes = sizes | size
        calls = calls | count
    assert (sizes, calls) == summed(comm_volumes(rank_memory(config, 4, 0)))
    formulas = rank_workload(rank_memory(config, 4, 0))
    attended = max(sum(dry.attention_flops.values()) for dry in runs)
    assert attended == sum(formulas.attention_flops.values())
    assert {sum(dry.matmul_flops.values()) for dry in runs} == {
        sum(formulas.matmul_flops.values())
    }
