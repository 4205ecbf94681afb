"""Plans: memory, time and bottlenecks; and predictions against published results."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from benchmarks.published import CONSTANTS, exact_values, report, rows, summary, tables
from tests.plan.made_up_traces import made_up_traces
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import CONFIG_DIR, load
from trainer.hardware.device_specs import MATMUL_SHARE, DeviceSpec, load_device
from trainer.hardware.host import GIB
from trainer.plan.plan import SECONDS_PER_DAY, TrainingPlan
from trainer.plan.reserves import HOST_BYTES_PER_PROCESS
from trainer.plan.run_plan import plan_run, plan_stage
from trainer.plan.tracing import Trace, traced_plans
from trainer.trace.tensors import SAVED_ACTIVATIONS

H100 = load_device("h100-80gb")
K = 1 << 10
MADE_UP = made_up_traces()
QUICK = ("debug", "llama3_8b", "stages_debug")


def planned(
    world: int = 8, device: DeviceSpec = H100, trace: Trace = MADE_UP, **sections: Any
) -> TrainingPlan:
    given: dict[str, Any] = {"model": {"family": "llama3.1", "size": "8b"}} | sections
    given["training"] = {"seq_len": 128 * K, "global_batch_size": 8} | given.get("training", {})
    config = Config.model_validate(given)
    assert checks.layout_problems(config, world) == []
    return plan_stage(config, world, device, trace=trace)


def shipped(name: str, *words: str) -> tuple[Config, int]:
    config = load(["--config", name, *words])
    return config, max(
        prod(stage.config.parallelism.degrees(1).values()) for stage in config.training_stages
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=[pytest.mark.slow] * (path.stem not in QUICK))
        for path in sorted(CONFIG_DIR.glob("*.toml"))
    ],
)
def test_every_shipped_configuration_can_be_planned(name: str) -> None:
    config, ranks = shipped(name)
    found = plan_run(config, ranks, load_device("h200"))
    assert found.fits
    assert found.days == pytest.approx(
        sum(plan.step_seconds * plan.config.training.steps for plan in found.stages)
        / SECONDS_PER_DAY
    )
    assert found.device_hours == pytest.approx(found.days * 24 * ranks)
    for plan in found.stages:
        assert 0 < plan.mfu < plan.hfu < 0.65 or plan.config.model.size == "debug"
        assert plan.bottlenecks
        assert (
            len(plan.memory_by_pp_rank) == len(plan.step_time.ranks) == plan.config.parallelism.pp
        )


def test_plan_metrics_follow_their_definitions() -> None:
    mesh = {"cp": 8, "cp_method": "ulysses"}
    plan = planned(parallelism=mesh, training={"steps": 500})
    assert plan.config.training.tokens_per_step == 8 * 128 * K
    # 7.505e9 matmul weights, 32 layers of 4096, one document per sequence.
    flops = 6 * 7.505e9 * 8 * 128 * K + 12 * 32 * 4096 * 8 * (128 * K) * (128 * K + 1) / 2
    assert plan.mfu == pytest.approx(flops / (plan.step_seconds * 8 * 989.4e12), rel=1e-3)
    assert plan.hfu == pytest.approx(
        plan.step_time.executed_flops / (plan.step_seconds * 8 * 989.4e12)
    )
    assert plan.tokens_per_second_per_device == pytest.approx(128 * K / plan.step_seconds)
    assert plan.total_tokens == 500 * 8 * 128 * K
    assert plan.days == pytest.approx(500 * plan.step_seconds / 86_400)
    assert plan.device_hours == pytest.approx(500 * plan.step_seconds * 8 / 3600)


def test_a_checkpoint_holds_weights_and_two_moments() -> None:
    parameters = 8.03e9
    assert planned().checkpoint_bytes == pytest.approx(12 * parameters, rel=1e-3)
    assert planned(memory={"optimizer_dtype": "bfloat16"}).checkpoint_bytes == pytest.approx(
        8 * parameters, rel=1e-3
    )


def test_a_tenth_of_device_memory_is_reserved() -> None:
    plan = planned(memory={"recompute": "full"})
    tight = replace(H100, memory=plan.peak_memory.device_bytes / 0.9)
    assert planned(device=tight, memory={"recompute": "full"}).fits
    over = planned(
        device=replace(tight, memory=0.999 * tight.memory), memory={"recompute": "full"}
    )
    assert not over.fits
    assert "a device needs" in over.memory_shortages[0]
    assert over.memory_utilization == pytest.approx(1 / 0.999)


def test_host_memory_covers_activations_staging_and_processes() -> None:
    plan = planned(
        16,
        trace=traced_plans,
        parallelism={"cp": 16},
        memory={"recompute": "full", "offload": "inputs"},
    )
    residual = 2 * 4096 * 8 * K
    states = 12 * 8.03e9 / 16
    assert plan.host_memory[SAVED_ACTIVATIONS] == pytest.approx(8 * 32 * residual * 17 / 16)
    assert plan.host_memory["async-checkpoint staging"] == pytest.approx(8 * states, rel=1e-3)
    assert plan.host_memory["processes"] == 8 * HOST_BYTES_PER_PROCESS
    small = replace(plan, device=replace(H100, host_memory=0.999 * plan.host_memory_needed / 0.9))
    assert "a node of 8 ranks needs" in small.memory_shortages[0]


def test_host_optimizer_state_counts_as_host_memory() -> None:
    plan = planned(
        trace=traced_plans,
        memory={"optimizer_placement": "host"},
        checkpoint={"enabled": False},
    )
    assert plan.host_memory["parameters"] + plan.host_memory["gradients"] == pytest.approx(
        8 * 8.03e9, rel=1e-3
    )
    # Constants of rotary embeddings stay.
    assert plan.peak_memory.item("parameters").device_bytes < 1024


def test_memory_shortages_name_the_largest_items() -> None:
    plan = planned(trace=traced_plans, memory={"recompute": "none"})
    assert not plan.fits
    assert plan.memory_shortages[0].startswith("a device needs")
    assert plan.bottlenecks[0] == plan.memory_shortages[0]
    assert SAVED_ACTIVATIONS in plan.memory_shortages[0]


def test_auto_recompute_depends_on_the_device() -> None:
    tight, roomy = (
        planned(
            device=replace(H100, memory=gib * GIB),
            parallelism={"cp": 8},
            memory={"recompute": "auto"},
        )
        for gib in (32, 140)
    )
    assert tight.config.memory.recompute != "auto"
    assert tight.fits
    assert roomy.fits
    assert roomy.step_seconds <= tight.step_seconds
    none = planned(device=replace(H100, memory=4 * GIB), memory={"recompute": "auto"})
    assert 'memory.recompute = "auto" finds no options that fit' in none.memory_shortages[0]


def test_stages_are_planned_separately_and_summed() -> None:
    config, ranks = shipped("prolong_8b_512k")
    found = plan_run(config, ranks, H100, trace=MADE_UP)
    assert [plan.name for plan in found.stages] == [stage.name for stage in config.training_stages]
    assert found.total_tokens == sum(
        stage.config.training.steps * plan.config.training.tokens_per_step
        for stage, plan in zip(config.training_stages, found.stages, strict=True)
    )
    tiny = plan_run(config, ranks, replace(H100, memory=20 * GIB), trace=MADE_UP)
    assert not tiny.fits
    assert tiny.memory_shortages[0].startswith(
        f'stage "{config.training_stages[-1].name}": a device needs'
    )


def test_assumptions_are_listed() -> None:
    assert planned(data={"packing": "single"}).assumptions == []
    (documents,) = planned().assumptions
    assert "one document per sequence" in documents
    *_, wide = planned(training={"dtype": "float32"}).assumptions
    assert "one sixteenth of the bfloat16 rates for float32" in wide
    *_, kernel = planned(
        device=load_device("a100-80gb"), training={"attention": "efficient"}
    ).assumptions
    assert "uses those of flash" in kernel


@pytest.mark.slow
def test_equivalent_rows_but_one_are_predicted_within_25_percent() -> None:
    """Every row of their tables, whatever its error, and whether a constant was chosen by it or
    not.
    """
    equivalent = [row for row in rows() if row.group != "another system"]
    assert len(equivalent) >= 32
    # Of gpt-oss-120b the passes around small experts are underestimated: 50 %.
    assert sorted(abs(row.error) for row in equivalent)[-2] < 0.25
    assert max(abs(row.error) for row in equivalent) < 0.5
    assert sum(abs(row.error) for row in equivalent) / len(equivalent) < 0.1


def test_published_tables_enter_whole() -> None:
    found = {
        table.source: len(table.rows) + sum(each.lines for each in table.left_out)
        for table in tables()
    }
    assert found["Megatron Bridge 25.11, GB300, GB200, B200 and H100"] == 28
    assert found["torchtitan, December 2024, six tables"] == 18
    assert found["UPipe's paper, Llama3-8B on eight H100"] == 26
    assert all(each.why for table in tables() for each in table.left_out)


@pytest.mark.slow
def test_the_page_counts_the_rows_of_each_table_and_names_the_constants_chosen_by_some() -> None:
    found = [*tables()]
    page = report(found)
    assert (
        len(page)
        == len(CONSTANTS)
        + len(found)
        + len(exact_values(rows()))
        + len(summary(rows()))
        + len(rows())
        + 4
        + 4 * 2
    )
    assert "| torchtitan, December 2024, six tables | 18 | 18 | |" in page
    (fitted,) = (line for line in page if line.startswith("| sustained share of the matmul rate"))
    assert fitted.endswith(
        f"| {MATMUL_SHARE:.2f} | UPipe's table, ALST and TRL; later torchtitan: 8B with compile |"
    )
    assert all(abs(value / exact - 1) < 0.03 for _, value, exact in exact_values(rows()))
    chosen_by = {row.system for row in rows() if row.group == "used to set a constant"}
    assert {"UPipe", "PyTorch CP", "ALST", "TRL", "torchtitan, compile"} <= chosen_by


@pytest.mark.slow
def test_a_mixture_on_racks_is_predicted_near_its_published_rate() -> None:
    (row,) = (row for row in rows() if row.setting == "qwen3_moe 235b-a22b, 4K, 256 x GB200")
    full_racks = plan_stage(row.config, 256, replace(row.device, link_domain_used=72))
    assert abs(row.error) < 0.25
    assert full_racks.tokens_per_second_per_device < 0.5 * row.rate
