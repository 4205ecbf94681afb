"""The search finds what trying everything finds, and its answers to other questions hold."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from trainer.ledger import GIB
from trainer.load import load, to_toml
from trainer.plan.devices import Device, load_device
from trainer.plan.plan import plan_of
from trainer.plan.search import (
    KEEPS,
    changed,
    divisors,
    fewest,
    layouts,
    longest,
    search,
    told,
    why_slower,
    with_length,
)
from trainer.stages import Recipe

H100 = load_device("h100-80gb")
ROOT = Path(__file__).resolve().parents[2]


def configured(*words: str) -> Recipe:
    return load(["--config", "llama3_8b_128k", *words])


def everything(config: Recipe, ranks: int, device: Device) -> float:
    """Seconds of the fastest way that fits, of all that a search may look at."""
    best = inf
    for layout in layouts(config, ranks, device):
        for keep in KEEPS:
            tried = changed(config, layout | keep)
            if not tried.shape_problems(ranks) and (plan := plan_of(tried, ranks, device)).fits:
                best = min(best, plan.seconds)
    return best


@pytest.mark.parametrize("gib", [79, pytest.param(60, marks=pytest.mark.slow), 44])
def test_the_best_is_the_best_of_all(gib: int) -> None:
    device = replace(H100, memory=gib * GIB)
    config = configured("--training.seq_len", "32768", "--training.global_batch_size", "4")
    found = search(config, 4, device)
    assert found.best[0].seconds == everything(config, 4, device)
    assert all(way.plan.fits and not way.plan.config.shape_problems(4) for way in found.best)
    assert [way.seconds for way in found.best] == sorted(way.seconds for way in found.best)


def test_meshes_differ_and_the_others_are_slower_for_a_reason() -> None:
    found = search(configured(), 32, H100)
    meshes = [tuple(way.mesh.values()) for way in found.best]
    assert len(meshes) == len({*meshes}) == 5
    assert all(why_slower(way, found.best[0]) for way in found.best[1:])
    assert found.tried > len(meshes)


def test_what_does_not_fit_is_told_with_what_is_missing() -> None:
    found = search(configured(), 8, replace(H100, memory=4 * GIB))
    assert not found.best
    assert found.misfits
    assert "a device needs" in found.misfits[0].plan.misfits[0]
    assert len({*map(told, found.misfits)}) == len(found.misfits)


def test_what_is_pasted_is_what_was_planned(tmp_path: Path) -> None:
    shipped = ROOT / "train_configs" / "llama3_8b_128k.toml"
    for way in search(configured(), 16, H100).best:
        pasted = tomllib.loads(way.toml())
        whole = tomllib.loads(shipped.read_text())
        for section, values in pasted.items():
            whole[section] = whole.get(section, {}) | values
        (tmp_path / "whole.toml").write_text(to_toml(Recipe.model_validate(whole)))
        assert plan_of(load(["--config", str(tmp_path / "whole.toml")]), 16, H100).seconds == way.seconds


def test_the_longest_rows_fit_and_longer_ones_do_not() -> None:
    device, config = (
        replace(H100, memory=16 * GIB),
        load(["--config", "llama3_1b", "--training.global_batch_size", "1"]),
    )
    length, found = longest(config, 2, device)
    assert found.best[0].plan.fits
    assert found.best[0].plan.config.training.seq_len == length
    assert not search(with_length(config, length + length // 8), 2, device, shown=1).best


def test_the_fewest_devices_hold_the_run_and_half_of_them_do_not() -> None:
    config = configured("--training.seq_len", str(1 << 20), "--training.global_batch_size", "1")
    device = replace(H100, memory=40 * GIB)
    ranks, found = fewest(config, device)
    assert ranks > 1
    assert found.best[0].plan.fits
    assert not search(config, ranks // 2, device).best


def test_other_lengths_leave_as_many_tokens_in_an_update() -> None:
    config = configured("--training.seq_len", "4096", "--training.global_batch_size", "64")
    for length in (1024, 4096, 1 << 18):
        changed_ = with_length(config, length).training
        assert changed_.seq_len * changed_.global_batch_size == 64 * 4096
    assert with_length(config, 1 << 20).training.global_batch_size == 1


def test_divisors_are_all_that_divide() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
