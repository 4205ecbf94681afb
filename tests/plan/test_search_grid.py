"""`search` and `memory.recompute = "auto"` against what `--check` refuses and what a dry run
counts, over drawn runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import pytest

from benchmarks.dry_run import dry_run
from benchmarks.memory_grid import LIMIT, configured, draw_cases
from tests.plan.made_up_traces import made_up_traces
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.overrides import with_overrides
from trainer.config.parse import load
from trainer.errors import ConfigError
from trainer.hardware.device_specs import DeviceSpec, device_names, load_device
from trainer.plan.memory_options import choose_memory_options
from trainer.plan.plan import TrainingPlan
from trainer.plan.rough import RoughPlan
from trainer.plan.search import SearchResult, search
from trainer.plan.traced_forms import TIE_FACTOR

FEW = 1
MANY = 60
"""Runs in the default check, and in the slow one."""
AS_ON_A_CPU = ("training.compile", "memory.optimizer_placement")
"""Pinned where a dry run follows, which runs a CPU's code and has no memory of a host."""
find = partial(search, trace=made_up_traces(spread=0.5))
DRAWN = [*range(FEW), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FEW, MANY))]
MODEL = "--data.corpus copy --model.dim 512 --model.num_heads 16 --model.vocab_size 16384 --checkpoint.enabled false"


class Run(NamedTuple):
    config: Config
    world_size: int
    device: DeviceSpec


def draw_run(seed: int) -> Run:
    """A small model on a device that has a few times as much memory as it needs at least."""
    rng = random.Random(seed)
    values = {
        "model.num_layers": rng.choice((3, 8, 12)),
        "model.num_kv_heads": rng.choice((2, 8, 16)),
        "model.head_dim": rng.choice((32, 64)),
        "training.seq_len": rng.choice((4096, 12_288, 32_768)),
        "training.global_batch_size": rng.choice((2, 6, 16)),
        "training.dtype": rng.choice(("bfloat16", "bfloat16", "float32")),
    }
    config = load(
        [
            *MODEL.split(),
            *(word for key, value in values.items() for word in (f"--{key}", str(value))),
        ]
    )
    device = load_device(rng.choice(device_names()))
    world_size = rng.choice((1, 2, 4, 8, 12))
    needed = RoughPlan(
        with_overrides(config, {"memory.recompute": "full"}), 1, device
    ).device_bytes
    return Run(
        config, world_size, replace(device, memory=needed / world_size * rng.uniform(0.7, 3))
    )


def fits_in_a_dry_run(plan: TrainingPlan) -> bool:
    """The fullest rank by the trace."""
    rank = plan.peak_memory.pp_rank * plan.world_size // plan.config.parallelism.pp
    counted = dry_run(plan.config, plan.world_size, rank=rank)
    return counted.peak_bytes <= plan.usable_device_memory * (1 + LIMIT)


def shortest(found: SearchResult) -> float:
    return min((plan.step_seconds for plan in found.best), default=float("inf"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(MANY // 3))
def test_what_search_returns_is_legal_and_fits(seed: int) -> None:
    config, world_size, device = draw_run(seed)
    for plan in (found := find(config, world_size, device)).best:
        assert plan.fits
        assert checks.layout_problems(plan.config, world_size) == []
    eager = with_overrides(config, {"training.compile": False})
    for plan in search(eager, world_size, device, max_results=1, pinned=AS_ON_A_CPU).best:
        assert fits_in_a_dry_run(plan)
    for plan in found.not_fitting:
        assert plan.memory_shortages


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(MANY))
def test_more_memory_is_never_slower(seed: int) -> None:
    run = draw_run(seed)
    more = run.device.memory * 1.5
    before, after = (
        find(run.config, run.world_size, device)
        for device in (run.device, replace(run.device, memory=more))
    )
    assert shortest(after) <= shortest(before) * TIE_FACTOR


@pytest.mark.parametrize("seed", DRAWN)
def test_what_fits_on_some_devices_fits_on_twice_as_many(seed: int) -> None:
    """Unless no layout of so many is legal, which the search says."""
    run = draw_run(seed)
    if find(run.config, run.world_size, run.device, max_results=1).best:
        twice = find(run.config, 2 * run.world_size, run.device, max_results=1)
        assert twice.best or twice.problems


def automatic_cases(seed: int) -> Iterator[tuple[Config, int]]:
    for case in draw_cases(1000 + seed):
        changes = {
            f"memory.{key}": value
            for key, value in (("recompute", "auto"), ("optimizer_placement", "device"))
        }
        kept = [
            (key, value)
            for key, value in case.changes
            if not key.startswith("memory.") or key == "memory.loss_chunk_mib"
        ]
        yield configured(dict((*kept, *changes.items()))), case.world_size


def fitted(config: Config, world_size: int, device: DeviceSpec) -> TrainingPlan | None:
    try:
        return choose_memory_options(config, world_size, device).plan
    except ConfigError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(MANY))
def test_what_auto_chooses_is_legal_and_fits(seed: int) -> None:
    ((config, world_size),) = islice(automatic_cases(seed), seed, seed + 1)
    device = load_device("h100-80gb")
    everything = with_overrides(config, {"memory.recompute": "none"})
    most = TrainingPlan(everything, world_size, device).peak_memory.device_bytes
    plans = [
        fitted(config, world_size, replace(device, memory=share * most, host_memory=2.0**40))
        for share in (0.3, 0.6, 0.8, 1.2)
    ]
    seconds = [plan.step_seconds if plan else float("inf") for plan in plans]
    assert all(more <= TIE_FACTOR * less for less, more in pairwise(seconds))
    fitting = [plan for plan in plans if plan is not None]
    assert all(checks.layout_problems(plan.config, world_size) == [] for plan in fitting)
    assert all(plan.fits for plan in fitting)
    assert fits_in_a_dry_run(fitting[0])
