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
from trainer.config.job_config import Config
from trainer.config.parse import overlay
from trainer.errors import ConfigError

MOST = 8
"""Processes at once."""
UPDATES = 3
LENGTH, GRAIN = 192, 16
"""Tokens in a row, and what divides them: more than any folded mesh asks for."""
VOCABULARY = 2048
WIDTHS = {"dim": 32, "head_dim": 8, "ffn_dim": 96}
LEARNING_RATE = 1e-2
"""High, so that after one update the weights are no longer small."""
WIDTH = 110
TOGETHER = "\u00a0"
"""A space at which lines are not broken."""
KEPT = ("model", "data", "training", "parallelism", "memory", "optimizer")
"""Sections that say what is computed."""

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """The small run on some axes of its mesh."""

    name: str
    processes: int
    config: Config


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """`reference` is for one process, which neither recomputes nor compiles; all pairings should compute the same."""

    reference: Config
    pairings: list[Pairing]
    told: list[str]
    """What became of the run, in words."""


@dataclass(frozen=True)
class Run:
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
    def context(self) -> ContextPlan:
        return self.config.context_plan()

    @cached_property
    def pipeline(self) -> PipelinePlan:
        return self.config.pipeline_plan(self.world_size)

    @cached_property
    def folded(self) -> dict[str, int]:
        return fold(self.degrees, self.context)


def shrink(config: Config, world_size: int, folder: Path) -> Shrunk:
    """The run of `world_size` processes made small, on what `write_documents` leaves in the folder.

    Any two axes of the mesh are together in one of the pairings. Raises `ConfigError` with what is wrong with the run,
    which may lack its corpus and its tokenizer's file here.
    """
    run = Run(_with_documents(config, folder), world_size)
    run.config.require(world_size)
    meshes = [_mesh(run, axes) for axes in cover(run.folded)]
    problems: list[str] = []
    for rows in _rows(run):
        small = _small(run, rows)
        pairings = [_pairing(small, mesh) for mesh in meshes]
        problems = [problem for pairing in pairings for problem in pairing.config.problems(pairing.processes)]
        if not problems:
            alone = overlay(small, {"training": {"compile": False}}) | {
                "parallelism": {"dp_shard": 1},
                "memory": {"recompute": "none"},
            }
            told = _told(run, pairings)
            return Shrunk(reference=Config.model_validate(alone), pairings=pairings, told=told)
    raise ConfigError([f"made small: {problem}" for problem in problems])


def write_documents(folder: Path, number: int = 160) -> None:
    """Text of very different lengths, in three folders: from single words to what fills several rows."""
    draw = random.Random(0)
    for index in range(number):
        path = folder / "documents" / f"part-{index % 3}" / f"{index:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        length = int(2 ** draw.uniform(1, log2(3 * LENGTH)))
        path.write_text("".join(draw.choices("etaoinshrdlu .\n", k=length)) + "\n")


# ---- the mesh


def fold(degrees: Mapping[str, int], plan: ContextPlan) -> dict[str, int]:
    """Two ranks for many on each axis. For `hybrid` twice two: those that exchange heads, and those that rotate keys
    and values. Of a ring four, if they fit: of two, each is before and behind the other.
    """
    folded = {axis: min(2, size) for axis, size in degrees.items()}
    if plan.cp > 1:
        folded["cp"] = min(2, plan.ulysses) * min(2, plan.ring)
        if plan.ring >= 4 and 2 * prod(folded.values()) <= MOST:
            folded["cp"] *= 2
    return folded


def cover(folded: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Few sets of axes, each for at most `MOST` processes, such that any two axes are together in one of them."""
    axes = [axis for axis, size in folded.items() if size > 1]
    choices = [some for number in range(len(axes), -1, -1) for some in combinations(axes, number)]
    fitting = [some for some in choices if prod(folded[axis] for axis in some) <= MOST]
    missing, found = _together(axes), list[tuple[str, ...]]()
    while missing or not found:
        found.append(max(fitting, key=lambda some: len(missing & _together(some))))
        missing -= _together(found[-1])
    return found


def _together(axes: Iterable[str]) -> set[frozenset[str]]:
    named = list(axes)
    return {frozenset(some) for some in (*combinations(named, 1), *combinations(named, 2))}


def _mesh(run: Run, axes: tuple[str, ...]) -> Values:
    """The section of a mesh of these axes, with what `auto` chose on the whole one."""
    others = tuple(f"{axis}_" for axis in ("cp", "pp") if axis not in axes)
    section = run.config.parallelism.model_dump()
    values = {key: value for key, value in section.items() if not key.startswith(others)}
    values |= {axis: run.folded[axis] if axis in axes else 1 for axis in AXES} | {"async_tp": False}
    if "cp" in axes:
        values |= {"cp_method": run.context.chosen, "cp_layout": run.context.kind}
        if run.context.chosen == "hybrid":
            values |= {"cp_ulysses": min(2, run.context.ulysses), "cp_outer": run.context.rotation}
    if "pp" in axes:
        values |= {"pp_layers": _blocks(run.pipeline)}
    return values


def _pairing(small: Values, mesh: Values) -> Pairing:
    degrees = {axis: mesh[axis] for axis in AXES}
    return Pairing(
        name=" x ".join(f"{axis} {size}" for axis, size in degrees.items() if size > 1) or "one rank",
        processes=prod(degrees.values()),
        config=Config.model_validate(small | {"parallelism": mesh}),
    )


# ---- model and rows


def heads(query: int, key: int, *, tp: int, ulysses: int) -> tuple[int, int]:
    """Few query and key/value heads that divide among two ranks of either kind as many do among these."""
    ranks, exchanging = min(2, tp), min(2, ulysses)
    if key < tp:
        few = 1
    elif key // tp % ulysses:
        few = ranks
    else:
        few = ranks * exchanging * min(2, key // tp // ulysses)
    each = next(each for each in count(min(2, query // key)) if few * each % (ranks * exchanging) == 0)
    return few * each, few


def _blocks(plan: PipelinePlan) -> tuple[int, ...]:
    """Of each stage: none, one, or two where other stages have fewer."""
    stages, last = 2 * plan.stages_per_rank, plan.num_stages - 1
    picked = [plan.blocks[stage * last // (stages - 1)] for stage in range(stages)]
    fewest = min((blocks for blocks in picked if blocks), default=0)
    return tuple(min(blocks, 1 + (blocks > fewest)) for blocks in picked) if fewest else (1,) * stages


def _small(run: Run, rows: int) -> Values:
    """All sections but the mesh."""
    model, training, data = run.model, run.config.training, run.config.data
    layers = _blocks(run.pipeline) if run.pipeline.pp > 1 else (min(2, model.num_layers),)
    ulysses = run.context.ulysses if run.context.cp > 1 else 1
    query, key = heads(model.num_heads, model.num_kv_heads, tp=run.degrees["tp"], ulysses=ulysses)
    groups = gcd(run.config.memory.head_groups, max(1, key // run.degrees["tp"])) if ulysses == 1 else 1
    padded = training.seq_len % run.context.multiple > 0
    length = max(GRAIN, min(LENGTH, training.seq_len) // GRAIN * GRAIN) - padded
    changes: Values = {
        "model": WIDTHS
        | {"rope": _rope(model.rope, length / training.seq_len)}
        | {"nope_every": model.nope_every and min(model.nope_every, sum(layers))}
        | {"num_layers": sum(layers), "num_heads": query, "num_kv_heads": key}
        | {"vocab_size": min(VOCABULARY, model.vocab_size // 2 * 2)},
        "data": {
            name: value and max(3, value * length // training.seq_len)
            for name, value in (("max_document", data.max_document), ("copy_period", data.copy_period))
        },
        "training": {
            "seq_len": length,
            "global_batch_size": rows,
            "micro_batch_size": min(2, training.micro_batch_size),
            "steps": UPDATES,
            "dtype": "float64",
            "attention": "auto",
        },
        "memory": {"head_chunk_mib": 1, "optimizer_dtype": "float32", "head_groups": groups, "device_gib": None}
        # Of a small model all would fit; the run takes something else.
        | ({"recompute": "keep_attention"} if run.config.memory.recompute == "auto" else {}),
        # Where a gradient is nothing but rounding, AdamW divides it by little more than eps.
        "optimizer": {"lr": LEARNING_RATE, "eps": max(1e-8, run.config.optimizer.eps)},
        "schedule": {"kind": "constant"},
        "checkpoint": {"enabled": False},
        "distributed": {"start_timeout_minutes": 5, "timeout_minutes": 5},
    }
    return overlay(run.config.model_dump(include=set(KEPT)), changes)


def _rope(rope: RopeConfig, part: float) -> Values:
    """Of `longrope` as many factors as there are frequencies, and those that the run has: for rows as long as they are."""
    if rope.kind != "longrope":
        return {}
    factors = {key: getattr(rope, key)[: WIDTHS["head_dim"] // 2] for key in ("short_factors", "long_factors")}
    return {**factors, "original_length": max(2, int(rope.original_length * part))}


def _rows(run: Run) -> Iterator[int]:
    """Rows of an update to try, the fewest first: if a rank has several micro-batches, or some run empty, so it stays."""
    training, ranks = run.config.training, run.folded["dp_replicate"] * run.folded["dp_shard"]
    total, each = run.config.micro_batches(run.world_size)
    empty = ranks > 1 and total % (run.degrees["dp_replicate"] * run.degrees["dp_shard"]) > 0
    few = min(each, 4 if run.pipeline.pp > 1 else 2)
    for missing in (1, 0) if empty else (0,):
        for times in (1, 2, 4):
            yield (few * times * ranks - missing) * min(2, training.micro_batch_size)


def _with_documents(config: Config, folder: Path) -> Config:
    made = {} if config.is_made_up else {"corpus": str(folder / "documents")}
    values = overlay(config.model_dump(), {"data": made | {"cache_dir": folder / "prepared"}})
    values["data"] |= {"sources": {}, "mix": (), "holdout": 0.0}
    values["validation"] = {}
    if config.tokenizer.kind != "byte" and config.tokenizer.path is not None:
        values["tokenizer"] = {}
    return Config.model_validate(values)


# ---- in words


def _told(run: Run, pairings: Sequence[Pairing]) -> list[str]:
    config, small = run.config, pairings[0].config
    degrees = {axis: size for axis, size in run.degrees.items() if size > 1}
    kept = [
        f"pp_schedule {run.pipeline.schedule}" if "pp" in degrees else "",
        f"cp_method {run.context.summary()}" if "cp" in degrees else "",
        f"packing {config.data.packing}, mask {config.data.mask}, recompute {config.memory.recompute}",
        "compile, to graphs without kernels (aot_eager)" if config.training.compile else "",
        "without async_tp, which needs CUDA" if config.parallelism.async_tp else "",
    ]
    told = {
        "mesh": ", ".join(_changed(axis, size, run.folded[axis]) for axis, size in degrees.items()) or "one process",
        "model": _changes(vars(run.model), vars(small.model.build())),
        "run": _changes(*(dict(of.training) | dict(of.memory) | dict(of.optimizer) for of in (config, small))),
        "kept": "; ".join(filter(None, kept)),
        "beside": f"one process: {'; '.join(pairing.name.replace(' ', TOGETHER) for pairing in pairings)}",
    }
    lines = (fill(f"{label:<8}{text}", WIDTH, subsequent_indent=" " * 8) for label, text in told.items())
    return [line.replace(TOGETHER, " ") for line in lines]


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    return ", ".join(_changed(key, value, new[key]) for key, value in old.items() if value != new[key])


def _changed(key: str, old: object, new: object) -> str:
    was, now = (f"{value:,}" if type(value) is int else str(value) for value in (old, new))
    return (f"{key} {was} -> {now}" if was != now else f"{key} {was}").replace(" ", TOGETHER)
