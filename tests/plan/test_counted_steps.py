"""Communication, FLOPs and memory traffic of traces against real steps, counted call by call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import pytest

from tests.plan.counted_steps import Counted, Key, count, touched
from tests.ranks import run_ranks
from tests.trace import small_steps
from tests.trace.small_steps import FULL, HALF, KEEP
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.trace.pieces import Work
from trainer.trace.record import TracedStep, trace_pp_ranks

# All messages but those of norms exceed MIN_COUNTED_BYTES.
SHORT = "memory.recompute=none training.seq_len=256 training.global_batch_size=4"
TIED = "model.tie_embeddings=true"
TP = "parallelism.tp=2"
CP = "parallelism.cp=2 parallelism.cp_method="
PP = "parallelism.pp=2 model.num_layers=4"
WHOLE = f"{TP} parallelism.sequence_parallel=false"
PIECES = "memory.mlp_tile_mib=1 training.seq_len=2048 model.ffn_dim=512"
EVERY = f"{KEEP} memory.blocks_per_checkpoint=2"
HYBRID = "parallelism.cp=4 parallelism.cp_method=hybrid parallelism.cp_ulysses=2 parallelism.cp_outer_method="
LONG = "parallelism.pp=2 model.num_layers=8 training.global_batch_size=8"
WIDE = "model.dim=1024 model.ffn_dim=64 model.qk_norm=true"  # large enough norms
CASES = {
    1: (
        "",
        f"{FULL} training.micro_batch_size=2",
        f"{EVERY} memory.head_groups=2 memory.mlp_tile_mib=1 {TIED} model.qk_norm=true",
    ),
    2: (
        f"{HALF} {KEEP}",
        f"{TP} {KEEP} {PIECES} training.global_batch_size=2 model.num_layers=2",
        f"{WHOLE} {WIDE}",
        f"{CP}ring {HALF} {FULL}",
        f"{CP}ulysses model.num_kv_heads=1 {KEEP}",
        f"{PP} parallelism.pp_schedule=Interleaved1F1B {KEEP}",
    ),
    4: (
        f"parallelism.dp_replicate=2 {HALF} {KEEP}",
        f"{HYBRID}allgather {TIED}",
        f"{PP} {TP} training.global_batch_size=8",
    ),
}
MORE = {
    2: (
        "training.global_batch_size=2 model.vocab_size=267 model.ffn_dim=383",
        f"{HALF} training.reduce_dtype=bfloat16 {FULL} parallelism.reshard_after_forward=false",
        f"{TIED} {EVERY}",
        f"{HALF} {KEEP} memory.optimizer_placement=host",
        "parallelism.dp_replicate=2",
        "training.dtype=float64 training.micro_batch_size=2",
        TP,
        f"{TP} {EVERY} {PIECES} {HALF}",
        f"{TP} {KEEP} memory.mlp_tile_mib=1 training.seq_len=1001 training.micro_batch_size=2",
        f"{TP} {FULL} {TIED} parallelism.loss_parallel=false",
        f"{WHOLE} {EVERY} {PIECES} {TIED} parallelism.loss_parallel=false",
        f"{CP}ring {HALF} parallelism.cp_reduce_dtype=bfloat16",
        f"{CP}alltoall {KEEP} memory.head_groups=2",
        # The host budget holds the attention outputs of two of three blocks.
        f"{CP}ring {KEEP} memory.offload=inputs_and_attention memory.host_budget_gib=0.00063",
        f"{CP}allgather {FULL}",
        f"{CP}ulysses",
        PP,
        f"{PP} parallelism.pp_schedule=GPipe {HALF} {FULL}",
    ),
    4: (
        f"{TP} {WIDE} {KEEP} {HALF}",
        f"{TP} {CP}ulysses {EVERY} {HALF}",
        f"{TP} {CP}ring {FULL} training.seq_len=250",
        "parallelism.tp=4 parallelism.loss_parallel=false model.dim=1024 model.ffn_dim=64",
        f"parallelism.cp=4 parallelism.cp_method=ring {KEEP}",
        f"parallelism.cp=4 parallelism.cp_method=alltoall {FULL}",
        f"parallelism.cp=4 parallelism.cp_method=allgather {KEEP} memory.head_groups=2 {HALF}",
        "parallelism.cp=4 parallelism.cp_method=ulysses",
        f"{HYBRID}ring {FULL}",
        f"{PP} training.global_batch_size=8 {HALF} {KEEP}",
        f"{PP} {TP} parallelism.pp_schedule=Interleaved1F1B",
        f"{LONG} parallelism.pp_schedule=Interleaved1F1B parallelism.pp_stages_per_rank=4 {HALF}",
    ),
}


def configured(changes: str = "") -> Config:
    return small_steps.configured(f"{SHORT} {changes}")


def counted(cases: tuple[str, ...]) -> list[Counted]:
    return [count(configured(changes)) for changes in cases]


def compare(world_size: int, cases: tuple[str, ...]) -> None:
    for case, *ranks in zip(
        cases, *run_ranks(counted, world_size, cases, timeout=300), strict=True
    ):
        config = configured(case)
        assert checks.problems(config, world_size) == [], case
        steps = trace_pp_ranks(config, world_size)
        for found in ranks:
            compare_messages(case, config, found, steps[found.pp_rank].whole.work)
        for pp_rank, step in enumerate(steps):
            there = [found for found in ranks if found.pp_rank == pp_rank]
            for found in there:
                assert step.whole.work.matmul_flops.total() == found.matmul_flops, case
            busiest = max(found.pairs for found in there)
            padded = 0.02 if "seq_len=250" in case else 0
            assert attended_pairs(config, step) == pytest.approx(busiest, rel=padded, abs=0), case


def attended_pairs(config: Config, traced: TracedStep) -> float:
    """(query, key) pairs per head of a layer, over the step's micro-batches."""
    model = config.model.build()
    layers = sum(len(blocks.originals) for blocks in traced.short.stages.values())
    heads = model.num_heads // config.parallelism.tp
    return traced.whole.work.attention_flops["forward"] / (4 * layers * heads * model.head_dim)


def compare_messages(case: str, config: Config, found: Counted, work: Work) -> None:
    sizes = defaultdict[Key, float](float)
    calls = defaultdict[Key, float](float)
    for (channel, kind, phase), number in work.calls.items():
        key = (channel, kind, phase == "backward")
        sizes[key] += work.sent_bytes[channel, kind, phase]
        calls[key] += number
    assert _sums(found.bytes, config) == pytest.approx(_sums(sizes, config), rel=1e-12), case
    assert _sums(found.calls, config) == _sums(calls, config), case


def _sums(found: Mapping[Key, float], config: Config) -> dict[Key, float]:
    """Separates forward from backward, except for pipeline channels, which run outside of
    autograd.
    """
    beside = ("pp", "fsdp", "dp_replicate") if config.parallelism.pp > 1 else ()
    sums = defaultdict[Key, float](float)
    for (channel, kind, is_backward), number in found.items():
        sums[channel, kind, is_backward and channel not in beside] += number
    return dict(sums)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "world_size", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]
)
def test_traces_match_counted_steps(world_size: int) -> None:
    compare(world_size, CASES[world_size])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size",
    [
        2,
        4,
    ],
)
def test_traces_match_counted_steps_on_more_meshes(world_size: int) -> None:
    compare(world_size, MORE[world_size])


MOVED = (
    "training.seq_len=2048 model.num_layers=2 training.dtype=bfloat16 training.global_batch_size=1"
)
BOUND = {
    1: (
        MOVED,
        f"{MOVED} {FULL}",
        f"{MOVED} {EVERY} model.qk_norm=true",
        f"{MOVED} training.seq_len=1024 model.vocab_size=8192",
    ),
    2: (
        f"{MOVED} {CP}ring {KEEP}",
        f"{MOVED} {CP}allgather {KEEP}",
        f"{MOVED} {CP}ulysses {FULL}",
        f"{MOVED} {TP} {KEEP}",
    ),
}


def counted_bytes(cases: tuple[str, ...]) -> list[int]:
    return [touched(configured(changes)) for changes in cases]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world_size", BOUND)
def test_traced_memory_traffic_is_that_of_the_operators(world_size: int) -> None:
    """Within 2 %; within 3 % where ranks send KV, and within 5 % where they exchange heads, some of
    whose copies only one of both counts.
    """
    for case, *found in zip(
        BOUND[world_size], *run_ranks(counted_bytes, world_size, BOUND[world_size]), strict=True
    ):
        (step,) = trace_pp_ranks(configured(case), world_size)
        moved = step.whole.work.moved_bytes
        limit = 0.05 if "ulysses" in case else 0.03 if "cp=" in case else 0.02
        assert moved.total() - moved["step"] == pytest.approx(max(found), rel=limit), case
