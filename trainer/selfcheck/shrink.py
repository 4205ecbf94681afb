"""Reduces a run to one machine: fewer ranks, layers, heads and tokens, but the same code paths.

Kept: mesh dimensions, methods, schedule, recomputation, packing and masks. Kept relations: whether
heads divide among ranks, sequences need padding, and some ranks have empty micro-batches. Imports
no torch.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from math import gcd, log2, prod
from pathlib import Path
from textwrap import fill
from typing import Any

from models.config import ModelConfig
from models.rope_config import RopeConfig
from parallelisms.mesh.context_plan import ContextPlan
from parallelisms.mesh.parallel_dims import AXES
from parallelisms.mesh.pipeline_plan import PipelinePlan
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import deep_merge
from trainer.errors import ConfigError
from trainer.selfcheck.launches import Launch, reference_values

MAX_PROCESSES = 8
"""Limit of processes in one mesh case."""
NUM_STEPS = 3
SEQ_LEN = 192
SEQ_LEN_MULTIPLE = 16
"""Sequence length and its divisor, which is a multiple of that of any folded mesh."""
MAX_VOCAB_SIZE = 2048
NUM_EXPERTS = 8
EXPERT_DIM = 24
MODEL_WIDTHS = {"dim": 32, "head_dim": 8, "ffn_dim": 96}
LEARNING_RATE = 1e-2
"""High, so that one step changes the weights noticeably."""
LINE_WIDTH = 110
NO_BREAK_SPACE = "\u00a0"
COPIED_SECTIONS = ("model", "data", "training", "parallelism", "memory", "optimizer")
"""Sections that determine what is computed."""

ConfigValues = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MeshCase:
    """The reduced run on some dimensions of its mesh."""

    name: str
    launch: Launch


@dataclass(frozen=True, kw_only=True)
class ReducedRun:
    """`reference` runs in one process without recomputation and compilation; all mesh cases should
    match it.
    """

    reference: Launch
    mesh_cases: list[MeshCase]
    description: list[str]
    """The changes to the run, as printed."""


class FullRun:
    """The run to reduce, which must be valid, with its derived plans."""

    def __init__(self, config: Config, world_size: int) -> None:
        self.config = config
        self.world_size = world_size
        self.model = config.model.build()
        self.degrees = config.parallelism.degrees(world_size)
        self.context_plan = config.context_plan()
        self.pipeline_plan = config.pipeline_plan(world_size)
        self.folded_degrees = fold_mesh(self.degrees, self.context_plan)


def reduce_run(config: Config, world_size: int, folder: Path) -> ReducedRun:
    """Reduces the run of `world_size` processes; it trains on the documents of
    `write_sample_documents` in `folder`.

    Any two mesh dimensions occur together in some mesh case. Raises `ConfigError` if the run is
    invalid; its corpus and tokenizer may be missing.
    """
    config = _with_sample_documents(config, folder)
    checks.require_valid(config, world_size)
    run = FullRun(config, world_size)
    meshes = [_parallelism_values(run, axes) for axes in cover_axis_pairs(run.folded_degrees)]
    problems: list[str] = []
    for global_batch_size in _candidate_batch_sizes(run):
        reduced = _reduced_values(run, global_batch_size)
        cases = [_mesh_case(reduced, mesh) for mesh in meshes]
        launches = [case.launch for case in cases]
        problems = [
            problem
            for each in launches
            for problem in checks.problems(each.config, each.world_size)
        ]
        if not problems:
            reference = replace(
                _launch(Config.model_validate(reference_values(reduced)), 1), is_reference=True
            )
            return ReducedRun(
                reference=reference, mesh_cases=cases, description=_describe_reduction(run, cases)
            )
    raise ConfigError([f"reduced run: {problem}" for problem in problems])


def write_sample_documents(folder: Path, num_documents: int = 160) -> None:
    """Writes texts in sixteen folders, from single words to several sequence lengths."""
    rng = random.Random(0)
    for index in range(num_documents):
        path = folder / "documents" / f"part-{index % 16}" / f"{index:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Uniform in log2: single tokens up to three sequences, so that packing cuts and fills.
        length = int(2 ** rng.uniform(1, log2(3 * SEQ_LEN)))
        path.write_text("".join(rng.choices("etaoinshrdlu .\n", k=length)) + "\n")


# ---- mesh


def fold_mesh(degrees: Mapping[str, int], plan: ContextPlan) -> dict[str, int]:
    """Reduces each mesh dimension to two ranks, and `hybrid` context parallelism to 2 (Ulysses) x
    2 (ring).

    A ring gets four ranks if they fit, because with two the next and the previous rank are the
    same.
    """
    folded = {axis: min(2, size) for axis, size in degrees.items()}
    if plan.cp > 1:
        folded["cp"] = min(2, plan.ulysses_degree) * min(2, plan.ring_degree)
        if plan.ring_degree >= 4 and 2 * prod(folded.values()) <= MAX_PROCESSES:
            folded["cp"] *= 2
    return folded


def cover_axis_pairs(folded_degrees: Mapping[str, int]) -> list[tuple[str, ...]]:
    """A small number of axis sets of at most `MAX_PROCESSES` processes that together contain every
    pair of axes.
    """
    axes = [axis for axis, size in folded_degrees.items() if size > 1]
    # Largest sets first: the greedy cover below then needs few launches.
    choices = [
        axis_set for number in range(len(axes), -1, -1) for axis_set in combinations(axes, number)
    ]
    fitting = [
        axis_set
        for axis_set in choices
        if prod(folded_degrees[axis] for axis in axis_set) <= MAX_PROCESSES
    ]
    uncovered = _axis_pairs(axes)
    chosen = list[tuple[str, ...]]()
    while uncovered or not chosen:
        chosen.append(max(fitting, key=lambda axis_set: len(uncovered & _axis_pairs(axis_set))))
        uncovered -= _axis_pairs(chosen[-1])
    return chosen


def _axis_pairs(axes: Sequence[str]) -> set[frozenset[str]]:
    """All pairs of axes, and each axis alone."""
    return {frozenset(pair) for pair in product(axes, repeat=2)}


def _parallelism_values(run: FullRun, axes: tuple[str, ...]) -> ConfigValues:
    """The `parallelism` section for these axes, with the choices that `auto` made on the full
    mesh.
    """
    inactive_prefixes = tuple(f"{axis}_" for axis in ("cp", "pp") if axis not in axes)
    section = run.config.parallelism.model_dump()
    values = {
        key: value for key, value in section.items() if not key.startswith(inactive_prefixes)
    }
    values |= {axis: run.folded_degrees[axis] if axis in axes else 1 for axis in AXES} | {
        "async_tp": False
    }
    plan = run.context_plan
    if "cp" in axes:
        values |= {"cp_method": plan.resolved_method, "cp_layout": plan.resolved_layout}
        if plan.resolved_method == "hybrid":
            values |= {
                "cp_ulysses": min(2, plan.ulysses_degree),
                "cp_outer_method": plan.rotate_method,
            }
    # ep must divide dp_shard x cp and the number of experts, which are reduced.
    values["ep"] = gcd(run.config.parallelism.ep, values["dp_shard"] * values["cp"], NUM_EXPERTS)
    if "pp" in axes:
        values |= {"pp_layers": _reduced_stage_blocks(run.pipeline_plan, len(run.model.kinds))}
    return values


def _mesh_case(reduced: ConfigValues, mesh: ConfigValues) -> MeshCase:
    degrees = {axis: mesh[axis] for axis in AXES}
    return MeshCase(
        name=" x ".join(f"{axis} {size}" for axis, size in degrees.items() if size > 1)
        or "one rank",
        launch=_launch(
            Config.model_validate(reduced | {"parallelism": mesh}), prod(degrees.values())
        ),
    )


def _launch(config: Config, world_size: int) -> Launch:
    steps = config.training.steps
    return Launch(
        config=config, world_size=world_size, last_step=steps, compared_steps=range(1, steps + 1)
    )


# ---- model and sequences


def reduced_heads(num_heads: int, num_kv_heads: int, *, tp: int, ulysses: int) -> tuple[int, int]:
    """Numbers of query and KV heads for two tp and two Ulysses ranks with the same divisibility as
    the full run.
    """
    ranks = min(2, tp)
    ulysses_ranks = min(2, ulysses)
    if num_kv_heads < tp:
        reduced_kv_heads = 1
    elif num_kv_heads // tp % ulysses:
        reduced_kv_heads = ranks
    else:
        reduced_kv_heads = ranks * ulysses_ranks * min(2, num_kv_heads // tp // ulysses)
    group_size = min(2, num_heads // num_kv_heads)
    # Query heads must divide among tp x Ulysses ranks, even where KV heads are replicated.
    while reduced_kv_heads * group_size % (ranks * ulysses_ranks):
        group_size += 1
    return reduced_kv_heads * group_size, reduced_kv_heads


def _reduced_stage_blocks(plan: PipelinePlan, num_kinds: int) -> tuple[int, ...]:
    """Blocks per pipeline stage: none stays none; others get one, or two if the full stage has
    more than the smallest. The largest gets more if kinds of layers outnumber the blocks.
    """
    stages = 2 * plan.stages_per_rank
    last_stage = plan.num_stages - 1
    sampled = [
        plan.blocks_per_stage[stage * last_stage // (stages - 1)] for stage in range(stages)
    ]
    fewest = min((blocks for blocks in sampled if blocks), default=0)
    reduced = (
        [min(blocks, 2 if blocks > fewest else 1) for blocks in sampled]
        if fewest
        else [1] * stages
    )
    reduced[reduced.index(max(reduced))] += max(0, num_kinds - sum(reduced))
    return (*reduced,)


def _reduced_model(model: ModelConfig, num_layers: int, scale: float) -> ConfigValues:
    """The section `model`, except its heads. `scale` is the reduction of the sequence length."""
    return (
        MODEL_WIDTHS
        | {name: _reduced_rope(getattr(model, name), scale) for name in ("rope", "local_rope")}
        | {"nope_every": model.nope_every and min(model.nope_every, num_layers)}
        | _reduced_layers(model, scale)
        | _reduced_experts(model)
        | {"num_layers": num_layers}
        | {"vocab_size": min(MAX_VOCAB_SIZE, model.vocab_size // 2 * 2)}
    )


def _reduced_values(run: FullRun, global_batch_size: int) -> ConfigValues:
    """All sections except `parallelism`."""
    model = run.model
    training = run.config.training
    data = run.config.data
    num_layers = min(max(2, len(model.kinds)), model.num_layers)
    layers = (
        _reduced_stage_blocks(run.pipeline_plan, len(model.kinds))
        if run.pipeline_plan.pp > 1
        else (num_layers,)
    )
    ulysses = run.context_plan.ulysses_degree if run.context_plan.cp > 1 else 1
    num_heads, num_kv_heads = reduced_heads(
        model.num_heads, model.num_kv_heads, tp=run.degrees["tp"], ulysses=ulysses
    )
    groups = (
        gcd(run.config.memory.head_groups, max(1, num_kv_heads // run.degrees["tp"]))
        if ulysses == 1
        else 1
    )
    needs_padding = training.seq_len % run.context_plan.seq_len_divisor > 0
    multiple = min(SEQ_LEN, training.seq_len) // SEQ_LEN_MULTIPLE * SEQ_LEN_MULTIPLE
    length = max(SEQ_LEN_MULTIPLE, multiple)
    if needs_padding:
        length -= 1
    changes: ConfigValues = {
        "model": _reduced_model(model, sum(layers), length / training.seq_len)
        | {"num_heads": num_heads, "num_kv_heads": num_kv_heads},
        "data": {
            name: value and max(3, value * length // training.seq_len)
            for name, value in (
                ("max_document", data.max_document),
                ("copy_period", data.copy_period),
            )
        },
        "training": {
            "seq_len": length,
            "global_batch_size": global_batch_size,
            "micro_batch_size": min(2, training.micro_batch_size),
            "steps": NUM_STEPS,
            "dtype": "float64",
            "attention": "auto",
        },
        "memory": {
            "loss_chunk_mib": 1,
            "optimizer_dtype": "float32",
            "head_groups": groups,
            "device_gib": None,
        }
        # With a small model, `auto` would choose no recomputation, unlike the full run.
        | ({"recompute": "keep_attention"} if run.config.memory.recompute == "auto" else {}),
        # AdamW divides a gradient of pure rounding error by little more than eps, which amplifies
        # it.
        "optimizer": {"lr": LEARNING_RATE, "eps": max(1e-8, run.config.optimizer.eps)},
        "schedule": {"kind": "constant"},
        "job": {"extension": run.config.job.extension},
        "checkpoint": {"enabled": False},
        "distributed": {"start_timeout_minutes": 5, "timeout_minutes": 5},
    }
    return deep_merge(run.config.model_dump(include=set(COPIED_SECTIONS)), changes)


def _reduced_layers(model: ModelConfig, scale: float) -> ConfigValues:
    """One layer of each kind, with windows that are as long relative to the sequence."""
    if not (model.layers or model.windows):
        return {}
    options = [dataclasses.asdict(kind) for kind in model.kinds]
    for each in options:
        each["window"] = each["window"] and max(2, round(each["window"] * scale))
    return {"layers": options, "window": None}


def _reduced_experts(model: ModelConfig) -> ConfigValues:
    """Fewer and narrower ones, in as many groups if they are enough."""
    if not model.has_experts:
        return {}
    groups = gcd(model.expert_groups, NUM_EXPERTS)
    top_k_groups = min(model.top_k_groups, groups)
    values = {"num_experts": NUM_EXPERTS, "expert_groups": groups, "top_k_groups": top_k_groups}
    values |= {
        "top_k": min(model.top_k, 2, NUM_EXPERTS // groups * top_k_groups),
        "expert_dim": EXPERT_DIM,
    }
    return values | ({"shared_expert_dim": EXPERT_DIM} if model.shared_expert_dim else {})


def _reduced_rope(rope: RopeConfig, scale: float) -> ConfigValues:
    """`longrope` with one factor per frequency of the reduced head, and the short or long factors
    as in the full run.
    """
    if rope.kind != "longrope":
        return {}
    factors = {
        key: getattr(rope, key)[: MODEL_WIDTHS["head_dim"] // 2]
        for key in ("short_factors", "long_factors")
    }
    return {**factors, "original_length": max(2, int(rope.original_length * scale))}


def _candidate_batch_sizes(run: FullRun) -> Iterator[int]:
    """Global batch sizes to try, smallest first; keeps whether ranks have several or empty
    micro-batches.
    """
    training = run.config.training
    ranks = run.folded_degrees["dp_replicate"] * run.folded_degrees["dp_shard"]
    total, per_rank = run.config.micro_batches(run.world_size)
    has_empty_micro_batch = (
        ranks > 1 and total % (run.degrees["dp_replicate"] * run.degrees["dp_shard"]) > 0
    )
    reduced_per_rank = min(per_rank, 4 if run.pipeline_plan.pp > 1 else 2)
    # One sequence less than a multiple leaves a rank with an empty micro-batch, as in the full
    # run.
    for missing in (1, 0) if has_empty_micro_batch else (0,):
        for multiplier in (1, 2, 4):
            yield (reduced_per_rank * multiplier * ranks - missing) * min(
                2, training.micro_batch_size
            )


def _with_sample_documents(config: Config, folder: Path) -> Config:
    corpus = {} if config.data.is_synthetic else {"corpus": str(folder / "documents")}
    values = deep_merge(config.model_dump(), {"data": corpus | {"cache_dir": folder / "prepared"}})
    values["data"] |= {"sources": {}, "mix": (), "holdout": 0.0}
    values["validation"] = {}
    if config.tokenizer.kind != "byte" and config.tokenizer.path is not None:
        values["tokenizer"] = {}
    return Config.model_validate(values)


# ---- description


def _describe_reduction(run: FullRun, mesh_cases: Sequence[MeshCase]) -> list[str]:
    config = run.config
    reduced = mesh_cases[0].launch.config
    degrees = {axis: size for axis, size in run.degrees.items() if size > 1}
    models = (run.model, reduced.model.build())
    unchanged = [
        f"pp_schedule {run.pipeline_plan.schedule}" if "pp" in degrees else "",
        f"cp_method {run.context_plan.summary()}" if "cp" in degrees else "",
        f"packing {config.data.packing}, mask {config.data.mask}, recompute {config.memory.recompute}",
        "compile (aot_eager)" if config.training.compile is True else "",
        "async_tp off (needs CUDA)" if config.parallelism.async_tp else "",
    ]
    sections = {
        "mesh": ", ".join(
            _format_change(axis, size, run.folded_degrees[axis]) for axis, size in degrees.items()
        )
        or "one process",
        "model": _format_changes(
            *({each.name: getattr(of, each.name) for each in fields(of)} for of in models)
        ),
        "run": _format_changes(
            *(dict(of.training) | dict(of.memory) | dict(of.optimizer) for of in (config, reduced))
        ),
        "kept": "; ".join(filter(None, unchanged)),
        "compare": f"with one process: {'; '.join(mesh_case.name.replace(' ', NO_BREAK_SPACE) for mesh_case in mesh_cases)}",
    }
    lines = (
        fill(f"{label:<8}{text}", LINE_WIDTH, subsequent_indent=" " * 8)
        for label, text in sections.items()
    )
    return [line.replace(NO_BREAK_SPACE, " ") for line in lines]


def _format_changes(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    return ", ".join(
        _format_change(key, value, new[key]) for key, value in old.items() if value != new[key]
    )


def _format_change(key: str, old: object, new: object) -> str:
    old_text, new_text = (
        f"{value:,}" if type(value) is int else str(value) for value in (old, new)
    )
    change = f"{key} {old_text} -> {new_text}" if old_text != new_text else f"{key} {old_text}"
    return change.replace(" ", NO_BREAK_SPACE)
