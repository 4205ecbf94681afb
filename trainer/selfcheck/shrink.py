"""A run made small enough for one machine: fewer ranks, layers, heads and tokens, and the same paths through the code.

What decides the path stays: axes of the mesh, methods, schedule, recomputation, packing and masks. So do relations
between numbers: whether heads divide among ranks, rows need padding, some rank runs empty. Nothing here imports torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, count
from math import gcd, log2, prod
from pathlib import Path
from textwrap import fill
from typing import Any

from models.config import ModelConfig, RopeConfig
from parallelisms.parallel_dims import AXES, ContextPlan
from parallelisms.pipeline_plan import PipelinePlan
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import deep_merge
from trainer.errors import ConfigError

MAX_PROCESSES = 8
"""Processes at once."""
NUM_STEPS = 3
SEQ_LEN, SEQ_LEN_MULTIPLE = 192, 16
"""Tokens in a row, and what divides them: more than any folded mesh asks for."""
MAX_VOCAB_SIZE = 2048
MODEL_WIDTHS = {"dim": 32, "head_dim": 8, "ffn_dim": 96}
LEARNING_RATE = 1e-2
"""High, so that after one update the weights are no longer small."""
LINE_WIDTH = 110
NO_BREAK_SPACE = "\u00a0"
"""A space at which lines are not broken."""
COPIED_SECTIONS = ("model", "data", "training", "parallelism", "memory", "optimizer")
"""Sections that say what is computed."""

ConfigValues = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MeshCase:
    """The small run on some axes of its mesh."""

    name: str
    processes: int
    config: Config


@dataclass(frozen=True, kw_only=True)
class ReducedRun:
    """`reference` is for one process, which neither recomputes nor compiles; all pairings should compute the same."""

    reference: Config
    mesh_cases: list[MeshCase]
    description: list[str]
    """What became of the run, in words."""


@dataclass(frozen=True)
class FullRun:
    """The run to be made small, and what its configuration means."""

    config: Config
    world_size: int

    @cached_property
    def degrees(self) -> dict[str, int]:
        return self.config.parallelism.degrees(self.world_size)

    @cached_property
    def model(self) -> ModelConfig:
        return self.config.model.build()

    @cached_property
    def context_plan(self) -> ContextPlan:
        return self.config.context_plan()

    @cached_property
    def pipeline_plan(self) -> PipelinePlan:
        return self.config.pipeline_plan(self.world_size)

    @cached_property
    def folded_degrees(self) -> dict[str, int]:
        return fold_mesh(self.degrees, self.context_plan)


def reduce_run(config: Config, world_size: int, folder: Path) -> ReducedRun:
    """The run of `world_size` processes made small, on what `write_documents` leaves in the folder.

    Any two axes of the mesh are together in one of the pairings. Raises `ConfigError` with what is wrong with the run,
    which may lack its corpus and its tokenizer's file here.
    """
    run = FullRun(_with_sample_documents(config, folder), world_size)
    checks.require_valid(run.config, world_size)
    meshes = [_parallelism_values(run, axes) for axes in cover_axis_pairs(run.folded_degrees)]
    problems: list[str] = []
    for global_batch_size in _candidate_batch_sizes(run):
        reduced = _reduced_values(run, global_batch_size)
        mesh_cases = [_mesh_case(reduced, mesh) for mesh in meshes]
        problems = [
            problem for mesh_case in mesh_cases for problem in checks.problems(mesh_case.config, mesh_case.processes)
        ]
        if not problems:
            reference = deep_merge(reduced, {"training": {"compile": False}}) | {
                "parallelism": {"dp_shard": 1},
                "memory": {"recompute": "none"},
            }
            description = _describe_reduction(run, mesh_cases)
            return ReducedRun(
                reference=Config.model_validate(reference), mesh_cases=mesh_cases, description=description
            )
    raise ConfigError([f"made small: {problem}" for problem in problems])


def write_sample_documents(folder: Path, num_documents: int = 160) -> None:
    """Text of very different lengths, in three folders: from single words to what fills several rows."""
    rng = random.Random(0)
    for index in range(num_documents):
        path = folder / "documents" / f"part-{index % 3}" / f"{index:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        length = int(2 ** rng.uniform(1, log2(3 * SEQ_LEN)))
        path.write_text("".join(rng.choices("etaoinshrdlu .\n", k=length)) + "\n")


# ---- the mesh


def fold_mesh(degrees: Mapping[str, int], plan: ContextPlan) -> dict[str, int]:
    """Two ranks for many on each axis. For `hybrid` twice two: those that exchange heads, and those that rotate keys
    and values. Of a ring four, if they fit: of two, each is before and behind the other.
    """
    folded = {axis: min(2, size) for axis, size in degrees.items()}
    if plan.cp > 1:
        folded["cp"] = min(2, plan.ulysses_degree) * min(2, plan.ring_degree)
        if plan.ring_degree >= 4 and 2 * prod(folded.values()) <= MAX_PROCESSES:
            folded["cp"] *= 2
    return folded


def cover_axis_pairs(folded_degrees: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Few sets of axes, each for at most `MOST` processes, such that any two axes are together in one of them."""
    axes = [axis for axis, size in folded_degrees.items() if size > 1]
    choices = [axis_set for number in range(len(axes), -1, -1) for axis_set in combinations(axes, number)]
    fitting = [some for some in choices if prod(folded_degrees[axis] for axis in some) <= MAX_PROCESSES]
    uncovered, chosen = _axis_pairs(axes), list[tuple[str, ...]]()
    while uncovered or not chosen:
        chosen.append(max(fitting, key=lambda some: len(uncovered & _axis_pairs(some))))
        uncovered -= _axis_pairs(chosen[-1])
    return chosen


def _axis_pairs(axes: Iterable[str]) -> set[frozenset[str]]:
    axis_list = list(axes)
    return {frozenset(axis_set) for axis_set in (*combinations(axis_list, 1), *combinations(axis_list, 2))}


def _parallelism_values(run: FullRun, axes: tuple[str, ...]) -> ConfigValues:
    """The section of a mesh of these axes, with what `auto` chose on the whole one."""
    inactive_prefixes = tuple(f"{axis}_" for axis in ("cp", "pp") if axis not in axes)
    section = run.config.parallelism.model_dump()
    values = {key: value for key, value in section.items() if not key.startswith(inactive_prefixes)}
    values |= {axis: run.folded_degrees[axis] if axis in axes else 1 for axis in AXES} | {"async_tp": False}
    if "cp" in axes:
        values |= {"cp_method": run.context_plan.resolved_method, "cp_layout": run.context_plan.resolved_layout}
        if run.context_plan.resolved_method == "hybrid":
            values |= {
                "cp_ulysses": min(2, run.context_plan.ulysses_degree),
                "cp_outer_method": run.context_plan.rotate_method,
            }
    if "pp" in axes:
        values |= {"pp_layers": _reduced_stage_blocks(run.pipeline_plan)}
    return values


def _mesh_case(reduced: ConfigValues, mesh: ConfigValues) -> MeshCase:
    degrees = {axis: mesh[axis] for axis in AXES}
    return MeshCase(
        name=" x ".join(f"{axis} {size}" for axis, size in degrees.items() if size > 1) or "one rank",
        processes=prod(degrees.values()),
        config=Config.model_validate(reduced | {"parallelism": mesh}),
    )


# ---- model and rows


def reduced_heads(num_heads: int, num_kv_heads: int, *, tp: int, ulysses: int) -> tuple[int, int]:
    """Few query and key/value heads that divide among two ranks of either kind as many do among these."""
    ranks, ulysses_ranks = min(2, tp), min(2, ulysses)
    if num_kv_heads < tp:
        reduced_kv_heads = 1
    elif num_kv_heads // tp % ulysses:
        reduced_kv_heads = ranks
    else:
        reduced_kv_heads = ranks * ulysses_ranks * min(2, num_kv_heads // tp // ulysses)
    group_size = next(
        each
        for each in count(min(2, num_heads // num_kv_heads))
        if reduced_kv_heads * each % (ranks * ulysses_ranks) == 0
    )
    return reduced_kv_heads * group_size, reduced_kv_heads


def _reduced_stage_blocks(plan: PipelinePlan) -> tuple[int, ...]:
    """Of each stage: none, one, or two where other stages have fewer."""
    stages, last_stage = 2 * plan.stages_per_rank, plan.num_stages - 1
    sampled = [plan.blocks_per_stage[stage * last_stage // (stages - 1)] for stage in range(stages)]
    fewest = min((blocks for blocks in sampled if blocks), default=0)
    return tuple(min(blocks, 1 + (blocks > fewest)) for blocks in sampled) if fewest else (1,) * stages


def _reduced_values(run: FullRun, global_batch_size: int) -> ConfigValues:
    """All sections but the mesh."""
    model, training, data = run.model, run.config.training, run.config.data
    layers = _reduced_stage_blocks(run.pipeline_plan) if run.pipeline_plan.pp > 1 else (min(2, model.num_layers),)
    ulysses = run.context_plan.ulysses_degree if run.context_plan.cp > 1 else 1
    num_heads, num_kv_heads = reduced_heads(model.num_heads, model.num_kv_heads, tp=run.degrees["tp"], ulysses=ulysses)
    groups = gcd(run.config.memory.head_groups, max(1, num_kv_heads // run.degrees["tp"])) if ulysses == 1 else 1
    needs_padding = training.seq_len % run.context_plan.seq_len_divisor > 0
    length = (
        max(SEQ_LEN_MULTIPLE, min(SEQ_LEN, training.seq_len) // SEQ_LEN_MULTIPLE * SEQ_LEN_MULTIPLE) - needs_padding
    )
    changes: ConfigValues = {
        "model": MODEL_WIDTHS
        | {"rope": _reduced_rope(model.rope, length / training.seq_len)}
        | {"nope_every": model.nope_every and min(model.nope_every, sum(layers))}
        | {"num_layers": sum(layers), "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        | {"vocab_size": min(MAX_VOCAB_SIZE, model.vocab_size // 2 * 2)},
        "data": {
            name: value and max(3, value * length // training.seq_len)
            for name, value in (("max_document", data.max_document), ("copy_period", data.copy_period))
        },
        "training": {
            "seq_len": length,
            "global_batch_size": global_batch_size,
            "micro_batch_size": min(2, training.micro_batch_size),
            "steps": NUM_STEPS,
            "dtype": "float64",
            "attention": "auto",
        },
        "memory": {"loss_chunk_mib": 1, "optimizer_dtype": "float32", "head_groups": groups, "device_gib": None}
        # Of a small model all would fit; the run takes something else.
        | ({"recompute": "keep_attention"} if run.config.memory.recompute == "auto" else {}),
        # Where a gradient is nothing but rounding, AdamW divides it by little more than eps.
        "optimizer": {"lr": LEARNING_RATE, "eps": max(1e-8, run.config.optimizer.eps)},
        "schedule": {"kind": "constant"},
        "checkpoint": {"enabled": False},
        "distributed": {"start_timeout_minutes": 5, "timeout_minutes": 5},
    }
    return deep_merge(run.config.model_dump(include=set(COPIED_SECTIONS)), changes)


def _reduced_rope(rope: RopeConfig, scale: float) -> ConfigValues:
    """Of `longrope` as many factors as there are frequencies, and those that the run has: for rows as long as they are."""
    if rope.kind != "longrope":
        return {}
    factors = {key: getattr(rope, key)[: MODEL_WIDTHS["head_dim"] // 2] for key in ("short_factors", "long_factors")}
    return {**factors, "original_length": max(2, int(rope.original_length * scale))}


def _candidate_batch_sizes(run: FullRun) -> Iterator[int]:
    """Rows of an update to try, the fewest first: if a rank has several micro-batches, or some run empty, so it stays."""
    training, ranks = run.config.training, run.folded_degrees["dp_replicate"] * run.folded_degrees["dp_shard"]
    total, per_rank = run.config.micro_batches(run.world_size)
    has_empty_micro_batch = ranks > 1 and total % (run.degrees["dp_replicate"] * run.degrees["dp_shard"]) > 0
    reduced_per_rank = min(per_rank, 4 if run.pipeline_plan.pp > 1 else 2)
    for missing in (1, 0) if has_empty_micro_batch else (0,):
        for multiplier in (1, 2, 4):
            yield (reduced_per_rank * multiplier * ranks - missing) * min(2, training.micro_batch_size)


def _with_sample_documents(config: Config, folder: Path) -> Config:
    corpus = {} if config.is_synthetic else {"corpus": str(folder / "documents")}
    values = deep_merge(config.model_dump(), {"data": corpus | {"cache_dir": folder / "prepared"}})
    values["data"] |= {"sources": {}, "mix": (), "holdout": 0.0}
    values["validation"] = {}
    if config.tokenizer.kind != "byte" and config.tokenizer.path is not None:
        values["tokenizer"] = {}
    return Config.model_validate(values)


# ---- in words


def _describe_reduction(run: FullRun, mesh_cases: Sequence[MeshCase]) -> list[str]:
    config, reduced = run.config, mesh_cases[0].config
    degrees = {axis: size for axis, size in run.degrees.items() if size > 1}
    unchanged = [
        f"pp_schedule {run.pipeline_plan.schedule}" if "pp" in degrees else "",
        f"cp_method {run.context_plan.summary()}" if "cp" in degrees else "",
        f"packing {config.data.packing}, mask {config.data.mask}, recompute {config.memory.recompute}",
        "compile, to graphs without kernels (aot_eager)" if config.training.compile else "",
        "without async_tp, which needs CUDA" if config.parallelism.async_tp else "",
    ]
    sections = {
        "mesh": ", ".join(_format_change(axis, size, run.folded_degrees[axis]) for axis, size in degrees.items())
        or "one process",
        "model": _format_changes(vars(run.model), vars(reduced.model.build())),
        "run": _format_changes(*(dict(of.training) | dict(of.memory) | dict(of.optimizer) for of in (config, reduced))),
        "kept": "; ".join(filter(None, unchanged)),
        "beside": f"one process: {'; '.join(mesh_case.name.replace(' ', NO_BREAK_SPACE) for mesh_case in mesh_cases)}",
    }
    lines = (fill(f"{label:<8}{text}", LINE_WIDTH, subsequent_indent=" " * 8) for label, text in sections.items())
    return [line.replace(NO_BREAK_SPACE, " ") for line in lines]


def _format_changes(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    return ", ".join(_format_change(key, value, new[key]) for key, value in old.items() if value != new[key])


def _format_change(key: str, old: object, new: object) -> str:
    old_text, new_text = (f"{value:,}" if type(value) is int else str(value) for value in (old, new))
    return (f"{key} {old_text} -> {new_text}" if old_text != new_text else f"{key} {old_text}").replace(
        " ", NO_BREAK_SPACE
    )
