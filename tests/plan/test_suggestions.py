"""Suggested changes help, by traces, and none of the likely ones helps more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.made_up_traces import made_up_plan, made_up_traces
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.errors import ConfigError
from trainer.hardware.attention_choice import with_attention_choice
from trainer.hardware.device_specs import load_device
from trainer.plan.changes import competition_key, memory_saving_changes, speedup_changes
from trainer.plan.plan import TrainingPlan
from trainer.plan.suggestions import MIN_TIME_SAVING, Suggestion, suggestions

H100 = load_device("h100-80gb")
EXACT = made_up_traces()


def planned(*, attention: str = "auto", **sections: Any) -> TrainingPlan:
    training = {"seq_len": 1 << 17, "global_batch_size": 8, "attention": attention}
    given = {"model": {"family": "llama3.1", "size": "8b"}, "training": training} | sections
    config = with_attention_choice(Config.model_validate(given), H100)
    assert checks.layout_problems(config, 8) == []
    return made_up_plan(TrainingPlan(config, 8, H100))


def texts(found: list[Suggestion]) -> list[str]:
    return [each.change.text for each in found]


def test_suggestions_reduce_memory_if_the_plan_does_not_fit() -> None:
    plan = planned(memory={"recompute": "none"})
    found = suggestions(plan, EXACT)
    assert len(found) == 3
    reliefs = [plan.memory_utilization - each.plan.memory_utilization for each in found]
    assert reliefs == sorted(reliefs, reverse=True)
    assert min(reliefs) > 0
    assert texts(found)[0] == 'memory.recompute = "full"'
    assert found[0].plan.config.memory.recompute == "full"
    assert found[0].freed_bytes == pytest.approx(
        plan.peak_memory.device_bytes - found[0].plan.peak_memory.device_bytes
    )
    assert all("frees" in f"{each}" and "saves" not in f"{each}" for each in found)


def test_suggestions_save_time_if_the_plan_fits() -> None:
    mesh = {"cp": 8, "cp_method": "allgather"}
    plan = planned(parallelism=mesh, memory={"recompute": "full"}, attention="flash")
    found = suggestions(plan, EXACT)
    saved = [each.saved_seconds for each in found]
    assert saved == sorted(saved, reverse=True)
    assert min(saved) > MIN_TIME_SAVING * plan.step_seconds
    assert all(each.plan.fits and each.plan.world_size == 8 for each in found)
    assert saved[0] == pytest.approx(plan.step_seconds - found[0].plan.step_seconds)
    assert 'training.attention = "auto"' in texts(found)
    assert all("saves" in f"{each}" for each in found)


@pytest.mark.parametrize("recompute", ["none", "keep_attention"])
def test_no_other_change_helps_more(recompute: str) -> None:
    """Among all that compete under other keys."""
    plan = planned(parallelism={"cp": 8}, memory={"recompute": recompute})
    found = suggestions(plan, EXACT)
    suggested = {competition_key(each.change) for each in found}
    changes = (
        speedup_changes(plan.config, 8, H100)
        if plan.fits
        else memory_saving_changes(plan.config, 8)
    )
    for change in changes:
        config = with_attention_choice(change.config, H100)
        if competition_key(change) in suggested or checks.layout_problems(
            config, change.world_size
        ):
            continue
        other = made_up_plan(TrainingPlan(config, change.world_size, H100))
        if plan.fits:
            assert not other.fits or other.step_seconds >= found[-1].plan.step_seconds
        else:
            assert other.memory_utilization >= found[-1].plan.memory_utilization


def test_a_change_that_a_trace_finds_to_be_slower_is_not_suggested() -> None:
    plan = planned(parallelism={"cp": 8}, memory={"recompute": "full"})
    slow = replace(H100, hbm_bandwidth=H100.hbm_bandwidth / 100)

    def slower(plans: Any) -> list[TrainingPlan | None]:
        return [made_up_plan(replace(each, device=slow)) for each in plans]

    assert suggestions(plan, EXACT) != []
    assert suggestions(plan, slower) == []


def test_changes_for_a_device_may_take_memory_of_the_host() -> None:
    plan = planned(parallelism={"cp": 8})
    found = suggestions(plan, EXACT, goal="device memory")
    assert len(found) == 3
    assert all(each.freed_bytes > 0 for each in found)
    full = made_up_plan(replace(plan, device=replace(H100, host_memory=40 << 30)))
    assert full.host_utilization > 1 > full.device_utilization
    assert texts(suggestions(full, EXACT, goal="device memory")) == texts(found)


@pytest.mark.parametrize("recompute", ["none", "keep_attention", "full"])
@pytest.mark.parametrize(
    "mesh", [{"cp": 8, "cp_method": "ulysses"}, {"pp": 4, "dp_shard": 2}, {"tp": 2, "cp": 4}]
)
def test_suggestions_are_valid_configurations(recompute: str, mesh: dict[str, Any]) -> None:
    plan = planned(parallelism=mesh, memory={"recompute": recompute})
    found = suggestions(plan, EXACT) + suggestions(plan, EXACT, goal="device memory")
    assert found
    for each in found:
        assert checks.layout_problems(each.plan.config, each.plan.world_size) == []


def test_degrees_of_a_mesh_are_suggested_once() -> None:
    plan = planned(memory={"recompute": "none"})
    first = [text.split(", ") for text in texts(suggestions(plan, EXACT))]
    assert len({frozenset(parts) for parts in first}) == len(first)


def test_a_suggestion_is_traced() -> None:
    """Of a small model: what it says is the difference of two traced peaks."""
    config = load(
        ["--config", "debug", "--memory.recompute", "none", "--training.seq_len", "4096"]
    )
    plan = TrainingPlan(with_attention_choice(config, H100), 2, H100)
    (first, *_) = suggestions(plan, goal="device memory")
    again = TrainingPlan(first.plan.config, first.plan.world_size, H100)
    assert first.freed_bytes == plan.peak_memory.device_bytes - again.peak_memory.device_bytes > 0


def test_a_host_budget_that_a_pipeline_shares_is_an_error_by_its_name() -> None:
    words = "--config debug --parallelism.pp 2 --parallelism.dp_shard 1 --memory.recompute full"
    config = load(
        [*words.split(), "--memory.offload", "inputs", "--memory.host_budget_gib", "0.0001"]
    )
    with pytest.raises(ConfigError, match=r"memory\.host_budget_gib = 0\.0001 is less than"):
        _ = TrainingPlan(with_attention_choice(config, H100), 2, H100).peak_memory
