"""python -m benchmarks.memory_grid [--cases N] [--seed S] [--jobs N]: whole steps composed of short
traces against dry runs of drawn cases.

A case is a configuration, a world size and a pipeline rank, each drawn at random from `LEVELS`,
with DEPTH times as many layers; every schedule comes equally often, and so does every rank of a
pipeline. A dry run runs every layer and micro-batch of the same trainer; a trace runs few of them.
Prints each case whose device or host peak or bytes sent are off by more than LIMIT, whose FLOPs
differ, or whose trace was too short, then the counts. Exit status 1 if there is one.
`--case "..."` runs one that was printed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from math import gcd, prod
from typing import TypeVar

from parallelisms.mesh.pipeline_plan import SINGLE_STAGE_SCHEDULES
from trainer.commands import integer
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.model import LayerSection
from trainer.config.parse import load
from trainer.plan.layouts import divisors

Result = TypeVar("Result")
LIMIT = 0.005
DEPTH = 4
BASE = {
    "data.corpus": "copy",
    "model.dim": 512,
    "model.num_heads": 16,
    "training.steps": 4,
    "checkpoint.enabled": "false",
}
ONE_STAGE: dict[str, object] = {"parallelism.pp": 1}
PIPELINES: tuple[dict[str, object], ...] = (
    *[ONE_STAGE] * 5,
    *(
        {"parallelism.pp": pp, "parallelism.pp_schedule": schedule} | stages
        for schedule, degrees, stages in (
            ("1F1B", (2, 3), {}),
            ("GPipe", (2, 3), {}),
            ("Interleaved1F1B", (2, 4), {}),
            ("Interleaved1F1B", (2,), {"parallelism.pp_stages_per_rank": 3}),
        )
        for pp in degrees
    ),
)
LEVELS: dict[str, tuple[object, ...]] = {
    "model.num_layers": (2, 4, 5),
    "model.vocab_size": (4096, 16384),
    "model.head_dim": (32, 32, 64),
    "model.ffn_dim": (1536, 1536, 768),
    "model.num_kv_heads": (8, 2, 16),
    "model.qk_norm": ("false", "true"),
    "model.tie_embeddings": ("false", "true"),
    "parallelism.dp_replicate": (1, 1, 2),
    "parallelism.dp_shard": (1, 2, 3, 8),
    "parallelism.cp": (1, 1, 2, 4, 8),
    "parallelism.cp_method": ("allgather", "ring", "alltoall", "ulysses", "hybrid"),
    "parallelism.tp": (1, 1, 2, 8),
    "parallelism.sequence_parallel": ("true", "false"),
    "parallelism.loss_parallel": ("true", "false"),
    "parallelism.reshard_after_forward": ("true", "false"),
    "parallelism.pp_reduce_gradients": ("per_step", "per_micro_batch"),
    "parallelism.cp_reduce_dtype": ("float32", "bfloat16"),
    "training.seq_len": (4096, 8192),
    "training.micro_batch_size": (1, 2),
    "training.dtype": ("bfloat16", "bfloat16", "float32", "float64"),
    "training.reduce_dtype": ("float32", "bfloat16"),
    "memory.recompute": ("none", "keep_attention", "full"),
    "memory.offload": ("none", "inputs", "inputs_and_attention"),
    "memory.blocks_per_checkpoint": (1, 2, 3),
    "memory.head_groups": (1, 2, 4),
    "memory.loss_chunk_mib": (32, 128),
    "memory.mlp_tile_mib": (None, 8, 32),
    "memory.optimizer_placement": ("device", "device", "host"),
    "memory.optimizer_dtype": ("float32", "bfloat16"),
}
KINDS: dict[str, tuple[object, ...]] = {
    "model.norms": ("pre", "pre", "post", "sandwich"),
    "model.activation": ("silu", "silu", "gelu_tanh"),
    "model.sink": ("false", "true"),
    "model.residual_multiplier": (None, None, 0.5),
    "model.embedding_multiplier": (None, None, 2.0),
    "model.attention_scale": (None, None, 0.1),
    "model.logit_softcap": (None, None, 30.0),
}
EXPERTS: dict[str, tuple[object, ...]] = {
    "model.feed_forward": ("moe",),
    "model.num_experts": (8,),
    "model.top_k": (2,),
    "model.expert_dim": (256, 384),
    "model.shared_expert_dim": (None, 256),
    "model.router": ("softmax", "sigmoid"),
    "model.expert_bias": ("false", "true"),
}
"""Of every third case."""
PATTERNS = ((0, 1), (1, 0), (1, 1), (3, 1), (5, 1))
"""Consecutive layers with a window and without."""
WINDOWS = (512, 1024, 3000)
HOST_BUDGETS = (None, 0.02, 0.1)
"""GiB of a full node, with offload and without a pipeline: the micro-batches of one share a budget
unevenly.
"""
MICRO_BATCHES = (1, 2, 4, 6)
"""In a pipeline; without one, every micro-batch but the first is like the second."""


@dataclass(frozen=True)
class GridCase:
    changes: tuple[tuple[str, object], ...]
    world_size: int
    pp_rank: int

    @property
    def config(self) -> Config:
        return configured(dict(self.changes))

    @property
    def rank(self) -> int:
        """That with most of the widest window's halo."""
        from benchmarks.context_parallel import halo_tokens  # Imports torch, slowly.

        config = self.config
        busiest = 0
        plan = config.context_plan()
        windows = config.model.build().windows
        tp = config.parallelism.tp
        if windows and plan.ring_degree > 1:
            seq_len = config.training.seq_len
            bounds = (0, seq_len, plan.padded_length(seq_len))
            halo = halo_tokens(plan.resolved_layout, plan.ring_degree, bounds, max(windows))
            moved = [
                sum(map(sum, both)) for both in zip(halo, zip(*halo, strict=True), strict=True)
            ]
            busiest = moved.index(max(moved))
        return (
            self.pp_rank * self.world_size // config.parallelism.pp
            + busiest * plan.ulysses_degree * tp
        )

    def __str__(self) -> str:
        varied = (f"--{key} {value}" for key, value in self.changes if BASE.get(key) != value)
        return f"{' '.join(varied)} --world-size {self.world_size} --rank {self.rank}"


def configured(changes: Mapping[str, object]) -> Config:
    """`model.layers`, which only a file can have, is JSON."""
    config = load([f"--{key}={value}" for key, value in changes.items() if key != "model.layers"])
    layers = [
        LayerSection.model_validate(each)
        for each in json.loads(str(changes.get("model.layers", "[]")))
    ]
    return config.model_copy(
        update={"model": config.model.model_copy(update={"layers": tuple(layers)})}
    )


def parse_case(text: str) -> GridCase:
    """What `str(case)` gives. Raises ValueError for anything else."""
    words = text.split()
    given: dict[str, object] = dict(
        zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True)
    )
    if not {"world-size", "rank", "parallelism.pp"} <= given.keys():
        raise ValueError("a case has --world-size, --rank and --parallelism.pp")
    world_size, rank = (int(str(given.pop(key))) for key in ("world-size", "rank"))
    pp = int(str(given["parallelism.pp"]))
    return GridCase(tuple((BASE | given).items()), world_size, rank * pp // world_size)


def draw_cases(seed: int) -> Iterator[GridCase]:
    """Endless."""
    rng, budgets, biases, kinds, experts = (
        random.Random(each) for each in (seed, seed, seed + 1, seed + 2, seed + 3)
    )
    pp_ranks = {
        index: cycle(range(int(str(pipeline["parallelism.pp"]))))
        for index, pipeline in enumerate(PIPELINES)
    }
    for index in cycle(range(len(PIPELINES))):
        while (case := _draw(rng, PIPELINES[index])) is None:
            pass
        changes = (*case[0], ("model.qkv_bias", biases.choice(("false", "true"))))
        world_size = case[1]
        values = dict(changes)
        budget = budgets.choice(HOST_BUDGETS)
        is_full = world_size < 8 or world_size % 8 == 0
        if (
            budget is not None
            and is_full
            and values["parallelism.pp"] == 1
            and values["memory.offload"] != "none"
        ):
            changes += (("memory.host_budget_gib", budget),)
        changes += (*_draw_kinds(kinds), *_draw_experts(experts, values))
        yield GridCase(changes, world_size, next(pp_ranks[index]))


def _draw_kinds(rng: random.Random) -> Iterator[tuple[str, object]]:
    """What layers differ in. `model.layers` takes its other options from those of all layers."""
    drawn = {key: rng.choice(levels) for key, levels in KINDS.items()}
    (with_window, without), window = rng.choice(PATTERNS), rng.choice(WINDOWS)
    if with_window and without:
        layers = [{"window": window, "repeat": with_window}, {"repeat": without}]
        drawn["model.layers"] = json.dumps(layers, separators=(",", ":"))
    elif with_window:
        drawn["model.window"] = window
    yield from ((key, value) for key, value in drawn.items() if value is not None)


def _draw_experts(
    rng: random.Random, values: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    drawn = {key: rng.choice(levels) for key, levels in EXPERTS.items()}
    shards = prod(int(str(values[f"parallelism.{axis}"])) for axis in ("dp_shard", "cp"))
    drawn["parallelism.ep"] = rng.choice(divisors(gcd(shards, 8)))
    drawn["model.shared_expert"] = json.dumps(drawn["model.shared_expert_dim"] is not None)
    if rng.randrange(3) == 0:
        yield from ((key, value) for key, value in drawn.items() if value is not None)


def _draw(
    rng: random.Random, pipeline: dict[str, object]
) -> tuple[tuple[tuple[str, object], ...], int] | None:
    values = BASE | {key: rng.choice(levels) for key, levels in LEVELS.items()} | pipeline
    if (pp := int(str(pipeline["parallelism.pp"]))) > 1:
        per_rank = 1 if pipeline["parallelism.pp_schedule"] in SINGLE_STAGE_SCHEDULES else 2
        per_rank = int(str(pipeline.get("parallelism.pp_stages_per_rank", per_rank)))
        values["model.num_layers"] = pp * per_rank + rng.choice((-1, 1))
    if values["memory.recompute"] == "none":
        values |= {
            "memory.offload": "none",
            "memory.blocks_per_checkpoint": 1,
            "memory.head_groups": 1,
        }
        values["memory.mlp_tile_mib"] = None
    if values["memory.recompute"] == "full" and values["memory.offload"] == "inputs_and_attention":
        values["memory.offload"] = "inputs"
    if pp == 1:
        del values["parallelism.pp_reduce_gradients"]
    if values["parallelism.cp"] == 1:
        del values["parallelism.cp_method"]
    if values.get("parallelism.cp_method") == "hybrid":
        values["parallelism.cp_ulysses"] = 2
    sequences = prod(
        int(str(values[f"parallelism.{axis}"])) for axis in ("dp_replicate", "dp_shard")
    )
    sequences *= int(str(values["training.micro_batch_size"])) * rng.choice(
        MICRO_BATCHES if pp > 1 else MICRO_BATCHES[:2]
    )
    values["training.global_batch_size"] = sequences
    changes = tuple((key, value) for key, value in values.items() if value is not None)
    config = load([f"--{key}={value}" for key, value in changes])
    world_size = prod(config.parallelism.degrees(1).values())
    return None if checks.layout_problems(config, world_size) else (changes, world_size)


@dataclass(frozen=True)
class Comparison:
    """A composed step beside the dry run of a case."""

    case: GridCase
    device: tuple[int, int]
    """Bytes composed and counted."""
    host: tuple[int, int]
    flops: tuple[int, int]
    messages: tuple[int, int]
    """Bytes sent."""
    blocks: tuple[int, int]
    """Recorded, and of this rank."""
    is_closed: bool

    @property
    def error(self) -> float:
        pairs = (self.device, self.host, self.messages)
        return max(abs(found / counted - 1) for found, counted in pairs if counted)

    @property
    def is_wrong(self) -> bool:
        return not self.is_closed or self.flops[0] != self.flops[1] or self.error > LIMIT

    def __str__(self) -> str:
        parts = {
            "device": self.device,
            "host": self.host,
            "FLOPs": self.flops,
            "sent": self.messages,
        }
        off = ", ".join(
            f"{name} {found / counted - 1:+.2%}"
            for name, (found, counted) in parts.items()
            if counted
        )
        closed = "" if self.is_closed else ", not closed"
        return f"{off}{closed}; {self.blocks[0]} of {self.blocks[1]} blocks: {self.case}"


def deepened(case: GridCase) -> GridCase:
    """The case with DEPTH times as many layers; as it is if its layout does not allow that."""
    changes = tuple(
        (key, DEPTH * int(str(value)) if key == "model.num_layers" else value)
        for key, value in case.changes
    )
    deep = GridCase(changes, case.world_size, case.pp_rank)
    return case if checks.layout_problems(deep.config, deep.world_size) else deep


def compare(case: GridCase) -> Comparison:
    from benchmarks.dry_run import dry_run  # Imports torch, slowly.
    from trainer.trace.record import trace_step

    found, step, _ = trace_step(case.config, case.world_size, case.rank)
    counted = dry_run(case.config, case.world_size, rank=case.rank)
    flops = Counter(found.work.matmul_flops) + Counter(found.work.attention_flops)
    return Comparison(
        case,
        (found.peak.size, counted.peak_bytes),
        (found.host_bytes, counted.peak_host_bytes),
        (flops.total(), counted.flops),
        (
            round(found.work.sent_bytes.total()),
            round(sum(each.bytes for each in counted.messages)),
        ),
        (
            sum(len(blocks.kept) for blocks in step.stages.values()),
            sum(len(blocks.originals) for blocks in step.stages.values()),
        ),
        found.is_closed,
    )


def grid_parser(name: str, doc: str | None, *, cases: int) -> argparse.ArgumentParser:
    """The options of a script that runs drawn cases. `cases`: how many by default."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=(doc or "").partition(": ")[2]
    )
    parser.add_argument("--cases", type=integer(minimum=1), default=cases)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=parse_case, help="as printed for one that is off")
    parser.add_argument("--jobs", type=integer(minimum=1), default=2)
    return parser


def results_of(
    run: Callable[[GridCase], Result], cases: Sequence[GridCase], jobs: int
) -> Iterator[Result]:
    """The result of every case, in order, from `jobs` processes; with a counter on a terminal."""
    with ProcessPoolExecutor(jobs) as pool:
        results = pool.map(run, cases, chunksize=4) if jobs > 1 else map(run, cases)
        for number, result in enumerate(results, start=1):
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\033[K{number} of {len(cases)}")
            yield result


def main(argv: Sequence[str]) -> int:
    options = grid_parser("memory_grid", __doc__, cases=200).parse_args(argv)
    if options.case is not None:
        result = compare(options.case)
        sys.stdout.write(f"{result}\n")
        return int(result.is_wrong)
    cases = [*map(deepened, islice(draw_cases(options.seed), options.cases))]
    wrong = 0
    exact = 0
    largest = 0.0
    for result in results_of(compare, cases, options.jobs):
        exact += result.device[0] == result.device[1]
        largest = max(largest, result.error)
        if result.is_wrong:
            wrong += 1
            sys.stdout.write(f"{result}\n")
            sys.stdout.flush()
    sys.stdout.write(
        f"{len(cases)} cases, {wrong} wrong; device peaks of {exact} equal to the byte, the largest error {largest:.2%}\n"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
