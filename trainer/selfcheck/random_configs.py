"""Random legal configurations: what the self-check compares with one process besides a user's own
run. Imports no torch.

A case chooses one level of each factor (`factors.py`). `checks.layout_problems` decides which
cases are legal.
"""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from itertools import combinations, count, product
from math import prod
from pathlib import Path
from typing import Any, cast

from models.hf import HuggingFaceError
from models.hf_config_write import model_config_to_hf
from trainer.checkpoint.initial_weights import HF_PREFIX
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import deep_merge
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError
from trainer.selfcheck.factors import (
    BASE,
    FACTORS,
    LEVELS,
    MESH_FACTORS,
    MODEL_FACTORS,
    NEEDS,
    RARE,
    RESUMED_MESHES,
    SIMPLEST,
    ConfigValues,
)
from trainer.selfcheck.launches import EXPORT, PLAIN, Finish, Launch, reference_values

Case = Mapping[str, str]
"""The level of each factor that is not at its simplest."""
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two factors with a level each."""
NOTHING_FIXED: Case = {}
FIRST_RUN = "first"
"""Folder of the run from whose weights, or whose export, a case starts."""


def level_of(case: Case, factor: str) -> str:
    return case.get(factor, SIMPLEST[factor])


def has_effect(factor: str, case: Case) -> bool:
    """Whether the other factors have levels at which this one has an effect."""
    needs = NEEDS.get(factor, {})
    return all(
        level_of(case, other) in levels and has_effect(other, case)
        for other, levels in needs.items()
    )


def needs_of(levels: Case) -> dict[str, list[str]] | None:
    """The levels of each factor at which all of `levels` have an effect; None if there are
    none.
    """
    allowed = {factor: [level] for factor, level in levels.items()}
    waiting = [*allowed]
    # Needs have needs: intersect the allowed levels until no factor adds another.
    while waiting:
        for other, effective in NEEDS.get(waiting.pop(), {}).items():
            if other not in allowed:
                waiting.append(other)
            allowed[other] = [
                level for level in allowed.get(other, effective) if level in effective
            ]
            if not allowed[other]:
                return None
    return allowed


def without_simplest(case: Case) -> dict[str, str]:
    return {factor: level for factor, level in case.items() if level != SIMPLEST[factor]}


def normalize(case: Case) -> dict[str, str]:
    """The case without levels that are the simplest or would have no effect."""
    return {
        factor: level
        for factor, level in without_simplest(case).items()
        if has_effect(factor, case)
    }


def parse_case(text: str) -> dict[str, str]:
    """The case that `format_case` printed.

    Raises ConfigError for unknown or repeated factors, unknown levels, and levels without effect.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError([f"--case: {error}: {text}"]) from None
    case = dict[str, str]()
    problems = list[str]()
    for word in words:
        factor, _, level = word.partition("=")
        if factor not in FACTORS:
            near = get_close_matches(factor, FACTORS, n=1)
            known = f"did you mean {near[0]}?" if near else f"known are {', '.join(FACTORS)}"
            problems.append(
                f'--case: "{factor}" is none of the keys that random configurations vary; {known}'
            )
        elif factor in case:
            problems.append(f"--case: {factor} is given twice")
        elif level not in FACTORS[factor]:
            problems.append(
                f'--case: {factor} = "{level}" is not one of {", ".join(FACTORS[factor])}'
            )
        else:
            case[factor] = level
    for factor, level in without_simplest(case).items():
        if not problems and not has_effect(factor, case):
            needs = " and ".join(
                f"{other} = {' or '.join(levels)}" for other, levels in NEEDS[factor].items()
            )
            problems.append(f'--case: {factor} = "{level}" has no effect without {needs}')
    if problems:
        raise ConfigError(problems)
    return case


def format_case(case: Case) -> str:
    return " ".join(shlex.quote(f"{factor}={level}") for factor, level in case.items())


# ---- from a case to launches


def case_values(case: Case) -> ConfigValues:
    """The configuration values of a case, without its corpora."""
    values = BASE
    for factor in FACTORS:
        for key, value in FACTORS[factor][case.get(factor, SIMPLEST[factor])].items():
            nested: Any = value
            for part in reversed(key.split(".")):
                nested = {part: nested}
            values = deep_merge(values, nested)
    return values


def launches_of(case: Case, folder: Path) -> list[Launch]:
    """The launches of a case; corpora and checkpoints lie in `folder`.

    Raises ConfigError with every problem.
    """
    values = _with_folders(case_values(case), folder, "mesh")
    start = level_of(case, "start")
    if start != "drawn":
        path = (
            f"{HF_PREFIX}{folder / FIRST_RUN / EXPORT}"
            if start == "folder"
            else str(folder / FIRST_RUN)
        )
        values = deep_merge(values, {"checkpoint": {"initial_load_path": path}})
    launches = _launches(case, values)
    problems = [
        problem
        for launch in launches
        for problem in checks.layout_problems(
            launch.config, launch.world_size, first_stage=launch.stage
        )
    ]
    if not problems and (case.get("start") == "folder" or case.get("finish") == "export"):
        problems += export_problems(launches[-1].config)
    if problems:
        raise ConfigError([*dict.fromkeys(problems)])
    return launches


def export_problems(config: Config) -> list[str]:
    """The reasons why transformers has no such model; empty if it has one."""
    try:
        model_config_to_hf(config.model.build(), max_length=1, dtype="float64")
    except HuggingFaceError as error:
        return [each if "model." in each else f"model.rope: {each}" for each in error.problems]
    return []


def first_launches(case: Case, folder: Path) -> list[Launch]:
    """The run from whose weights the others start: one step in one process, from weights of
    another seed.
    """
    start = level_of(case, "start")
    if start == "drawn":
        return []
    values = reference_values(_with_folders(case_values(case), folder, FIRST_RUN))
    # Another seed, so that a case which ignores the weights it starts from fails.
    training = {"steps": 1, "seed": values["training"]["seed"] + 1}
    values = deep_merge(values, {"training": training, "checkpoint": {"enabled": True}})
    finish: Finish = "none"
    if start == "folder":
        finish = "export MXFP4" if level_of(case, "start.weights") == "MXFP4" else "export"
    return [replace(_launch(values, last_step=1), is_reference=True, finish=finish)]


def reference_launches(case: Case, folder: Path, *, weights: Path | None = None) -> list[Launch]:
    """Launches of the same steps in one process, one per stage.

    `weights`: the state from whose weights they start.
    """
    values = reference_values(_with_folders(case_values(case), folder, "reference"))
    kind = "stage" if case.get("checkpoint") == "stage" else "none"
    one_process = {
        "checkpoint": kind,
        "checkpoint.mesh": "one process",
        "finish": level_of(case, "finish"),
    }
    first, *others = (
        replace(launch, is_reference=True) for launch in _launches(one_process, values)
    )
    return [
        replace(first, weights=weights, takes_loads=level_of(case, "start") != "folder"),
        *others,
    ]


def _launches(case: Case, values: ConfigValues) -> list[Launch]:
    *others, last = _training_launches(case, values)
    return [*others, replace(last, finish=cast(Finish, level_of(case, "finish")))]


def _training_launches(case: Case, values: ConfigValues) -> list[Launch]:
    steps = values["training"]["steps"]
    kind = case.get("checkpoint", "none")
    if kind != "none" or level_of(case, "finish") != "none":
        values = deep_merge(values, {"checkpoint": {"enabled": True}})
    if kind == "none":
        return [_launch(values, last_step=steps)]
    mesh = RESUMED_MESHES[case.get("checkpoint.mesh", "same")]
    resumed = {**PLAIN, "parallelism": PLAIN["parallelism"] | mesh} if mesh is not None else {}
    if kind != "stage":
        return [
            _launch(values, last_step=1, compared=False),
            _launch(values | resumed, last_step=steps),
        ]
    training = dict(values["training"])
    # A recipe has them in its stages.
    seq_len = training.pop("seq_len")
    _ = training.pop("steps")
    long = {
        "name": "long",
        "seq_len": 2 * seq_len + 1,
        "steps": 1,
        "rope": {"theta": 20_000.0},
        "lr": 5e-3,
    }
    recipe = values | {
        "training": training,
        "stage": [{"name": "short", "seq_len": seq_len, "steps": 1}, long],
    }
    return [
        _launch(recipe, last_step=1, compared=False),
        _launch(recipe | resumed, last_step=2, stage=1),
    ]


def _launch(
    values: ConfigValues, *, last_step: int, stage: int = 0, compared: bool = True
) -> Launch:
    config = Recipe.model_validate(values)
    steps = (last_step,) if compared else ()
    ranks = prod(config.parallelism.degrees(1).values())
    return Launch(
        config=config, world_size=ranks, stage=stage, last_step=last_step, compared_steps=steps
    )


def _with_folders(values: ConfigValues, folder: Path, run: str) -> ConfigValues:
    data = values["data"] = {"corpus": str(folder / "documents")} | values.get("data", {})
    data["cache_dir"] = folder / "prepared"
    sources = data.get("sources", {}).items()
    data["sources"] = {
        name: source | {"path": str(folder / "documents")} for name, source in sources
    }
    return values | {"job": {"output_dir": folder / run}}


# ---- legal cases


@cache
def _problems(case: frozenset[tuple[str, str]]) -> list[str]:
    try:
        launches_of(dict(case), Path("/"))
    except ConfigError as error:
        return error.problems
    return []


def problems(case: Case) -> list[str]:
    """The reasons why the case is illegal; empty for a legal one."""
    return _problems(frozenset(case.items()))


def world_size(case: Case) -> int:
    return prod(int(case.get(factor, "1")) for factor in MESH_FACTORS)


def random_case(
    rng: random.Random, *, max_processes: int, fixed: Case = NOTHING_FIXED
) -> dict[str, str] | None:
    """A legal case with the levels of `fixed`, or None if none was found.

    Levels that a problem names are replaced by the simplest, one at a time, until there are no
    problems: first single options, so that models of transformers stay what they are.
    """
    wanted = without_simplest(fixed)
    needed = needs_of(fixed)
    if needed is None:
        return None
    case = dict[str, str]()
    for factor in FACTORS:
        if factor not in MESH_FACTORS:
            levels = needed.get(factor, [*FACTORS[factor]])
            (case[factor],) = rng.choices(
                levels, [RARE.get((factor, level), 1.0) for level in levels]
            )
    meshes = _meshes(
        max_processes, tuple(tuple(needed.get(key, FACTORS[key])) for key in MESH_FACTORS)
    )
    # By size first: of five and of seven processes there is one mesh each.
    size = rng.choice(sorted({world_size(mesh) for mesh in meshes}))
    case |= rng.choice([mesh for mesh in meshes if world_size(mesh) == size])
    for _ in range(len(FACTORS)):
        case = normalize(case)
        if not case.items() >= wanted.items() or world_size(case) > max_processes:
            return None
        found = problems(case)
        if not found:
            return case
        problem = rng.choice(found)
        named = [
            factor for factor in case if factor not in needed and is_named(factor, case, problem)
        ]
        options = [factor for factor in named if factor not in MODEL_FACTORS]
        # A problem that names no factor: any of them may be the cause.
        removable = options or named or [factor for factor in case if factor not in needed]
        if not removable:
            return None
        del case[rng.choice(removable)]
    return None


def draw_cases(seed: int, *, max_processes: int) -> Iterator[dict[str, str]]:
    """Yields the cases of a seed, without end."""
    rng = random.Random(seed)
    return (
        case
        for _ in count()
        if (case := random_case(rng, max_processes=max_processes)) is not None
    )


@cache
def _meshes(
    max_processes: int, levels_by_axis: tuple[tuple[str, ...], ...]
) -> list[dict[str, str]]:
    """Meshes of at most `max_processes` processes; that of one process if none is small enough."""
    meshes = [dict(zip(MESH_FACTORS, levels, strict=True)) for levels in product(*levels_by_axis)]
    return [mesh for mesh in meshes if world_size(mesh) <= max_processes] or [{}]


def is_named(factor: str, case: Case, problem: str) -> bool:
    """Whether the problem names the factor, or a key that its level in the case sets."""
    keys = {factor, *FACTORS[factor][level_of(case, factor)]}
    return any(re.search(rf"\b{re.escape(key)}\b", problem) for key in keys)


# ---- pairs


def pairs(case: Case) -> set[Pair]:
    """The pairs of levels in a case, also of simplest levels, that have an effect."""
    return {
        *combinations(
            [(factor, level_of(case, factor)) for factor in FACTORS if has_effect(factor, case)], 2
        )
    }


@cache
def all_pairs() -> frozenset[Pair]:
    """Every pair of levels that can have an effect together."""
    return frozenset(
        each for each in combinations(LEVELS, 2) if len(dict(each)) == 2 and needs_of(dict(each))
    )


# ---- the smallest failing case


def minimize(case: Case, fails: Callable[[Case], bool]) -> dict[str, str]:
    """The case with as many factors at their simplest level, or at a simpler one, as still
    fail.
    """
    case = normalize(case)
    size = len(case)
    # Delta debugging: remove ever smaller chunks of settings while the case still fails.
    while size:
        before = case
        for start in range(0, len(before), size):
            chunk = [*before][start : start + size]
            smaller = normalize(
                {factor: level for factor, level in case.items() if factor not in chunk}
            )
            if smaller != case and not problems(smaller) and fails(smaller):
                case = smaller
        if size > 1 or case == before:
            size //= 2
    for factor in [*case]:
        levels = [*FACTORS[factor]]
        # Levels are ordered from simple to complex; one between may fail as well.
        for level in levels[1 : levels.index(case[factor])]:
            smaller = normalize(case | {factor: level})
            if not problems(smaller) and fails(smaller):
                case = smaller
                break
    return case
