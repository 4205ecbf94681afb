"""`memory.recompute = "auto"` selects the fastest options predicted to fit, or raises with the
reason.
"""

from __future__ import annotations

import re

import pytest

from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.errors import ConfigError
from trainer.hardware.device_specs import load_device
from trainer.hardware.host import GIB
from trainer.plan.memory_estimate import estimate_memory, rank_memory
from trainer.plan.memory_options import (
    Choice,
    choose_memory_options,
    describe_choice,
    describe_memory_options,
    fit_memory_options,
)
from trainer.plan.plan import plan_stage
from trainer.plan.reserves import DEVICE_FRACTION

TERABYTE = 2.0**40


def automatic(*words: str) -> Config:
    return load(["--config", "llama3_8b_128k", "--memory.recompute", "auto", *words])


def chosen(gib: float, *words: str, host: float = TERABYTE) -> Config:
    return fit_memory_options(
        automatic(*words), 8, ranks_per_node=8, device_bytes=gib * GIB, host_bytes=host
    )


def test_enough_memory_selects_no_recomputation() -> None:
    assert describe_memory_options(chosen(200)) == 'memory.recompute = "none"'


def test_less_memory_costs_more_flops() -> None:
    flops = []
    for gib in (200, 80, 45, 38, 30):
        config = chosen(gib)
        assert estimate_memory(config, 8).device_bytes <= DEVICE_FRACTION * gib * GIB
        memory = config.memory
        assert checks.layout_problems(config, 8) == []
        flops.append(
            config.model.build().hardware_flops(
                tokens=1,
                pairs=1 << 16,
                recompute=memory.recompute,
                blocks_per_checkpoint=memory.blocks_per_checkpoint,
            )
        )
    assert flops == sorted(flops)


def test_the_next_faster_option_does_not_fit() -> None:
    everything = estimate_memory(automatic("--memory.recompute", "none"), 8).device_bytes / GIB
    assert chosen(everything / DEVICE_FRACTION + 1).memory.recompute == "none"
    assert chosen(everything / DEVICE_FRACTION - 1).memory.recompute == "keep_attention"


def test_explicit_keys_are_kept() -> None:
    config = chosen(40, "--memory.head_groups", "4", "--memory.offload", "none")
    assert (config.memory.head_groups, config.memory.offload) == (4, "none")


def test_offload_stays_within_host_memory() -> None:
    tight = ("--memory.loss_chunk_mib", "256", "--memory.blocks_per_checkpoint", "1")
    for node in (TERABYTE, 240 * GIB):
        config = chosen(32, *tight, host=node)
        held = estimate_memory(config, 8).host_bytes * 8
        assert held <= 0.75 * node
        if config.memory.offload != "none":
            assert config.memory.host_budget_gib == pytest.approx(0.75 * node / GIB)


def test_the_error_names_the_minimum_of_device_memory() -> None:
    leanest = r'no options that fit: at least, memory\.recompute = "\w+", .* needs [12]\d\.\d of the 9\.0 GiB usable on a device'
    with pytest.raises(ConfigError, match=leanest):
        chosen(10)


def test_the_error_names_the_host_where_that_keeps_a_device_from_fitting() -> None:
    shortage = r"usable on a device .*; .* would fit the device, but needs .* of the 0\.1 GiB of memory\.host_budget_gib"
    with pytest.raises(ConfigError, match=shortage):
        chosen(30, "--memory.host_budget_gib", "0.1")


def test_an_explicit_policy_is_unchanged() -> None:
    config = load(["--config", "llama3_8b_128k"])
    assert fit_memory_options(config, 8, ranks_per_node=8, device_bytes=1, host_bytes=1) is config


def test_the_error_names_host_memory_if_that_is_short() -> None:
    with pytest.raises(
        ConfigError, match=r"needs .* of the 6\.0 GiB of host memory usable on a node"
    ):
        chosen(80, host=8 * GIB)


def test_a_stated_device_size_is_planned_with() -> None:
    plan = plan_stage(automatic("--memory.device_gib", "40"), 8, load_device("h100-80gb"))
    assert plan.peak_memory.device_bytes <= DEVICE_FRACTION * 40 * GIB


def test_host_optimizer_state_does_not_count_against_the_offload_budget() -> None:
    words = (
        "--memory.optimizer_placement",
        "host",
        "--memory.host_budget_gib",
        "1",
        "--memory.offload",
        "none",
    )
    assert chosen(60, *words).memory.recompute == "keep_attention"


def test_the_error_names_the_violated_rule() -> None:
    with pytest.raises(ConfigError, match=r"memory[.]head_groups"):
        chosen(400, "--memory.head_groups", "3")


# ---- memory.loss_chunk_mib


def chunk_of(gib: float, *words: str, world_size: int = 8) -> Config:
    config = load(["--config", "llama3_8b_128k", "--memory.loss_chunk_mib", "auto", *words])
    return fit_memory_options(
        config, world_size, ranks_per_node=8, device_bytes=gib * GIB, host_bytes=TERABYTE
    )


def peak_with(mib: int) -> float:
    config = load(["--config", "llama3_8b_128k", "--memory.loss_chunk_mib", str(mib)])
    return estimate_memory(config, 8).device_bytes


def test_a_chunk_of_logits_takes_memory_that_is_free() -> None:
    assert chunk_of(500).memory.loss_chunk_mib == 1024


def test_a_chunk_of_logits_never_raises_the_peak_of_a_full_device() -> None:
    smallest = peak_with(256)
    tight = chunk_of(smallest / GIB)
    assert estimate_memory(tight, 8).device_bytes == smallest
    assert tight.memory.loss_chunk_mib == max(
        mib for mib in (256, 512, 1024) if peak_with(mib) <= smallest
    )


def test_a_chunk_of_logits_fills_the_device_up_to_its_limit() -> None:
    short = (
        "--training.seq_len",
        "8192",
        "--parallelism.cp",
        "1",
        "--memory.recompute",
        "keep_attention",
    )
    peaks = {
        mib: estimate_memory(
            load(["--config", "llama3_8b_128k", "--memory.loss_chunk_mib", str(mib), *short]), 8
        )
        for mib in (256, 512, 1024)
    }
    assert peaks[256].device_bytes < peaks[512].device_bytes < peaks[1024].device_bytes
    between = (peaks[512].device_bytes + peaks[1024].device_bytes) / 2
    assert chunk_of(between / DEVICE_FRACTION / GIB, *short).memory.loss_chunk_mib == 512


def test_a_chunk_of_logits_is_larger_where_another_moment_is_the_peak() -> None:
    """Of a wide vocabulary above few layers with experts, which peaks when the optimizer steps."""
    words = "--config debug --model.family gpt_oss --model.size 20b --model.num_layers 4 --training.seq_len 32768 "
    words += "--training.dtype bfloat16 --memory.recompute keep_attention --training.global_batch_size 1 --memory.loss_chunk_mib"
    chosen, smaller = (load([*words.split(), mib]) for mib in ("auto", "1024"))
    fitted = fit_memory_options(
        chosen, 1, ranks_per_node=1, device_bytes=140 * GIB, host_bytes=TERABYTE
    )
    assert fitted.memory.loss_chunk_mib == 4096
    assert estimate_memory(fitted, 1).device_bytes == estimate_memory(smaller, 1).device_bytes


def test_a_chunk_of_logits_is_not_wider_than_all_of_them() -> None:
    """8192 tokens of 8 sequence shards: half a GiB of logits."""
    config = chunk_of(500, "--training.seq_len", "8192")
    tokens = rank_memory(config, 8, 0).head_tokens
    assert tokens * 128256 * 4 < (config.memory.loss_chunk_bytes) < 4 * tokens * 128256 * 4


def test_a_stated_chunk_of_logits_is_kept() -> None:
    assert chunk_of(500, "--memory.loss_chunk_mib", "300").memory.loss_chunk_mib == 300
    assert chosen(200, "--memory.loss_chunk_mib", "300").memory.loss_chunk_mib == 300


def test_recomputation_is_chosen_before_the_chunk_of_logits() -> None:
    everything = estimate_memory(
        automatic("--memory.recompute", "none", "--memory.loss_chunk_mib", "256"), 8
    )
    config = chosen(
        everything.device_bytes / DEVICE_FRACTION / GIB + 0.001, "--memory.loss_chunk_mib", "auto"
    )
    assert config.memory.recompute == "none"
    assert estimate_memory(config, 8).device_bytes <= everything.device_bytes + 0.001 * GIB


def test_a_choice_names_the_options_that_were_auto() -> None:
    config = automatic("--memory.loss_chunk_mib", "auto")
    choice = choose_memory_options(
        config, 8, ranks_per_node=8, device_bytes=500 * GIB, host_bytes=TERABYTE
    )
    assert (
        describe_choice(config, choice)
        == 'memory.recompute = "none", memory.loss_chunk_mib = 1024'
    )
    assert describe_choice(choice.config, Choice(choice.config)) == ""


# ---- the limit that binds


def described(gib: float, *words: str, host: float = TERABYTE) -> str:
    config = automatic(*words)
    choice = choose_memory_options(
        config, 8, ranks_per_node=8, device_bytes=gib * GIB, host_bytes=host
    )
    return describe_choice(config, choice)


def test_a_choice_names_the_device_where_that_rules_out_a_faster_option() -> None:
    everything = estimate_memory(automatic("--memory.recompute", "none"), 8).device_bytes / GIB
    shortage = f'"none" needs {everything:.1f} of the 72.0 GiB usable on a device (90% of it)'
    assert described(80) == f'memory.recompute = "keep_attention": {shortage}'


def test_a_choice_names_the_host_where_that_rules_out_a_faster_option() -> None:
    within_budget = described(36, "--memory.host_budget_gib", "20")
    within_node = described(36, host=150 * GIB)
    assert re.search(
        r"; memory\.\w+ = \d+ needs .* of the 20\.0 GiB of memory\.host_budget_gib", within_budget
    )
    assert re.search(
        r"; memory\.\w+ = \d+ needs .* of the 112\.5 GiB of host memory usable on a node",
        within_node,
    )


def test_the_fastest_choice_names_no_limit() -> None:
    assert described(200) == 'memory.recompute = "none"'


def test_a_plan_says_what_was_chosen_and_the_limit_that_binds() -> None:
    (note,) = (
        each
        for each in plan_stage(automatic(), 8, load_device("h100-80gb")).assumptions
        if "auto" in each
    )
    assert re.match(
        r'memory options that are "auto": memory.* "none" needs .* of the 71\.2 GiB usable on a device',
        note,
    )
