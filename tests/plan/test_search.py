"""The search finds what trying everything finds, and its answers to other questions hold."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from trainer.config import checks
from trainer.config.parse import load
from trainer.config.training_stages import Recipe
from trainer.hardware.device_specs import DeviceSpec, load_device
from trainer.memory.estimator import GIB
from trainer.plan.interconnect import group_topologies
from trainer.plan.plan import plan_stage
from trainer.plan.search import (
    MEMORY_CHOICES,
    TIE_FACTOR,
    describe_layout,
    divisors,
    enumerate_layouts,
    fewest_devices,
    longest_sequence,
    search,
    why_slower,
    with_overrides,
    with_seq_len,
)

H100 = load_device("h100-80gb")
ROOT = Path(__file__).resolve().parents[2]


def configured(*words: str) -> Recipe:
    return load(["--config", "llama3_8b_128k", *words])


def everything(config: Recipe, ranks: int, device: DeviceSpec) -> float:
    """Seconds of the fastest way that fits, of all that a search may look at."""
    best = inf
    for layout in enumerate_layouts(config, ranks, device):
        for keep in MEMORY_CHOICES:
            tried = with_overrides(config, layout | keep)
            if not checks.layout_problems(tried, ranks) and (plan := plan_stage(tried, ranks, device)).fits:
                best = min(best, plan.step_seconds)
    return best


@pytest.mark.parametrize("gib", [79, pytest.param(60, marks=pytest.mark.slow), 44])
def test_the_best_is_the_best_of_all(gib: int) -> None:
    device = replace(H100, memory=gib * GIB)
    config = configured("--training.seq_len", "32768", "--training.global_batch_size", "4")
    found = search(config, 4, device)
    fastest = everything(config, 4, device)
    assert fastest <= found.best[0].seconds <= TIE_FACTOR**2 * fastest
    assert all(way.plan.fits and not checks.layout_problems(way.plan.config, 4) for way in found.best)
    slower = [way.seconds for way in found.best if way.seconds > TIE_FACTOR * min(way.seconds for way in found.best)]
    assert slower == sorted(slower)


def test_meshes_differ_and_the_others_are_slower_for_a_reason() -> None:
    found = search(configured(), 32, H100)
    meshes = [tuple(way.mesh.values()) for way in found.best]
    assert len(meshes) == len({*meshes}) == 5
    assert all(why_slower(way, found.best[0]) for way in found.best[1:])
    assert found.num_plans > len(meshes)


def test_what_does_not_fit_is_told_with_what_is_missing() -> None:
    found = search(configured(), 8, replace(H100, memory=4 * GIB))
    assert not found.best
    assert found.not_fitting
    assert "a device needs" in found.not_fitting[0].plan.memory_shortages[0]
    assert len({describe_layout(way.plan) for way in found.not_fitting}) == len(found.not_fitting)


def test_what_is_pasted_is_what_was_planned(tmp_path: Path) -> None:
    shipped = ROOT / "train_configs" / "llama3_8b_128k.toml"
    for way in search(with_seq_len(configured(), 65_536), 16, H100).best:
        (tmp_path / "whole.toml").write_text(replaced(shipped.read_text(), way.toml()))
        config = load(["--config", str(tmp_path / "whole.toml")])
        assert config.training.seq_len == 65_536
        assert checks.layout_problems(config, 16) == []
        assert plan_stage(config, 16, H100).step_seconds == way.seconds


def replaced(text: str, pasted: str) -> str:
    """What a user does: their sections out, these in."""
    mine = {f"[{name}]" for name in tomllib.loads(pasted)}
    kept, inside = [], False
    for line in text.splitlines():
        inside = line.partition("#")[0].strip() in mine if line.startswith("[") else inside
        kept += [] if inside else [line]
    return "\n".join(kept) + "\n\n" + pasted + "\n"


def test_the_longest_rows_fit_and_longer_ones_do_not() -> None:
    device, config = (
        replace(H100, memory=16 * GIB),
        load(["--config", "llama3_1b", "--training.global_batch_size", "1"]),
    )
    length, found, stops = longest_sequence(config, 2, device)
    assert "a device needs" in stops
    assert found.best[0].plan.fits
    assert found.best[0].plan.config.training.seq_len == length
    assert not search(with_seq_len(config, length + length // 16), 2, device, max_results=1).best


def test_the_fewest_may_be_nodes_between_powers_of_two() -> None:
    config = load(["--config", "llama3_8b", "--training.global_batch_size", "8"])
    ranks, found = fewest_devices(config, replace(H100, memory=12 * GIB))
    assert ranks == 24
    assert found.best[0].plan.fits


def test_what_is_fixed_stays() -> None:
    config = configured("--parallelism.tp", "4", "--memory.recompute", "full")
    best = search(config, 16, H100, pinned=("parallelism.tp", "memory.recompute")).best
    assert {(way.mesh["tp"], way.plan.config.memory.recompute) for way in best} == {(4, "full")}


def test_what_belongs_to_the_files_own_mesh_stands_in_no_others_way() -> None:
    words = {
        "parallelism.pp": "4", "parallelism.cp": "1", "parallelism.dp_shard": "1", "parallelism.pp_layers": "6,9,9,8", "parallelism.tp": "2", "parallelism.async_tp": "true",
        "training.compile": "true", "memory.recompute": "auto", "memory.device_gib": "60",
    }  # fmt: skip
    config = configured(*(word for key, value in words.items() for word in (f"--{key}", value)))
    assert checks.layout_problems(config, 8) == []
    found, plain = (search(each, 8, H100) for each in (config, configured("--training.compile", "true")))
    assert found.best[0].seconds == plain.best[0].seconds


def test_groups_that_cross_a_border_of_fast_links_count_as_crossing() -> None:
    aligned, crossing = (
        plan_stage(with_overrides(configured(), {"parallelism.cp": cp, "parallelism.dp_shard": 24 // cp}), 24, H100)
        for cp in (4, 3)
    )
    assert group_topologies(aligned.config, 24, H100)["cp"].num_domains == 1
    assert group_topologies(crossing.config, 24, H100)["cp"].num_domains == 2
    assert group_topologies(crossing.config, 24, H100)["cp"].min_ranks_per_domain == 1


def test_heads_in_groups_may_beat_what_keeps_everything() -> None:
    slow = replace(H100, network_bandwidth=5e9)
    config = configured("--training.global_batch_size", "2")
    found = search(config, 25, slow)
    assert found.best[0].seconds <= TIE_FACTOR**2 * everything(config, 25, slow)


def test_the_fewest_devices_hold_the_run_and_half_of_them_do_not() -> None:
    config = configured("--training.seq_len", str(1 << 20), "--training.global_batch_size", "1")
    device = replace(H100, memory=40 * GIB)
    ranks, found = fewest_devices(config, device)
    assert ranks > 1
    assert found.best[0].plan.fits
    assert not search(config, ranks // 2, device).best


def test_other_lengths_leave_as_many_tokens_in_an_update() -> None:
    config = configured("--training.seq_len", "4096", "--training.global_batch_size", "64")
    for length in (1024, 4096, 1 << 18):
        changed_ = with_seq_len(config, length).training
        assert changed_.seq_len * changed_.global_batch_size == 64 * 4096
    assert with_seq_len(config, 1 << 20).training.global_batch_size == 1


def test_divisors_are_all_that_divide() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
