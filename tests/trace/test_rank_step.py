"""What a plan keeps of a trace, and its way to the disk and back."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.trace.small_steps import FOUR, configured
from trainer.config.job_config import Config
from trainer.config.sections import OPTIMIZER_CHUNK_ELEMENTS
from trainer.storage.durable_io import file_lock
from trainer.trace import answers
from trainer.trace.answers import traced_rank_steps
from trainer.trace.rank_step import rank_step
from trainer.trace.record import trace_step
from trainer.trace.tensors import MemoryEstimate

CASE = "model.num_layers=6 training.global_batch_size=4 parallelism.cp=2 memory.recompute=keep_attention training.compile=false"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def case(**changes: str) -> Config:
    return configured(
        " ".join((CASE, *(f"{key.replace('__', '.')}={value}" for key, value in changes.items())))
    )


def test_tensors_at_the_peak_add_up_to_it() -> None:
    config = case()
    traced = trace_step(config, 2)
    step = rank_step(config, traced.short, traced.trace, traced.whole, on_gpu=False)
    assert step.memory.device_bytes == traced.whole.peak.size


def test_lines_of_the_table_are_those_of_the_states() -> None:
    (step,) = traced_rank_steps(
        case(checkpoint__enabled="true", checkpoint__async="true"), 2, on_gpu=False
    )
    lines = {item.name: (item.device_bytes, item.host_bytes) for item in step.memory.items}
    weights = lines["parameters"][0]
    moments = lines["optimizer state"][0]
    assert 2 * weights == pytest.approx(moments, rel=1e-3)
    assert lines["gradients"][0] == pytest.approx(weights, rel=0.01)
    assert lines["async-checkpoint staging"] == pytest.approx((0, weights + moments), rel=0.01)
    assert lines["saved activations"][0] > 0


def test_states_of_an_optimizer_on_the_host_are_there() -> None:
    (step,) = traced_rank_steps(case(memory__optimizer_placement="host"), 2, on_gpu=False)
    for name in ("parameters", "optimizer state"):
        item = step.memory.item(name)
        assert item.device_bytes < 1000 < item.host_bytes


def test_every_tensor_names_a_line_of_the_program() -> None:
    (step,) = traced_rank_steps(case(), 2, on_gpu=False)
    saved = {
        each.source.partition(":")[0]
        for each in step.memory.tensors
        if each.line == "saved activations"
    }
    assert saved
    assert all((answers.ROOT / file).is_file() for file in saved)


def test_a_trace_does_not_depend_on_those_before_it() -> None:
    config = case(model__family="gemma3")
    first, second = (trace_step(config, 2).whole.peak for _ in range(2))
    assert second == first


def test_an_answer_comes_back_from_the_disk_as_it_was() -> None:
    config = case()
    first = traced_rank_steps(config, 2, on_gpu=False)
    (file,) = answers.cache_folder().iterdir()
    assert traced_rank_steps(config, 2, on_gpu=False) == first
    file.write_text("[]]")
    assert traced_rank_steps(config, 2, on_gpu=False) == first
    assert json.loads(file.read_text())


ASK = (
    "import sys; from trainer.config.job_config import Config; from trainer.trace.answers import traced_rank_steps; "
    "traced_rank_steps(Config.model_validate_json(sys.argv[1]), 2, on_gpu=False); assert 'torch' not in sys.modules"
)
"""Asks for a step without importing torch."""


def test_a_known_answer_imports_no_torch() -> None:
    config = case()
    traced_rank_steps(config, 2, on_gpu=False)
    subprocess.run(
        [sys.executable, "-c", ASK, config.model_dump_json(exclude={"stage"})], check=True
    )


def test_of_processes_that_ask_at_once_one_traces() -> None:
    config = case()
    traced_rank_steps(config, 2, on_gpu=False)
    (file,) = answers.cache_folder().iterdir()
    text = file.read_text()
    file.unlink()
    with file_lock(file.with_suffix(".lock")):
        command = [sys.executable, "-c", ASK, config.model_dump_json(exclude={"stage"})]
        other = subprocess.Popen(command)
        # Long enough for it to ask: it would begin to trace.
        with suppress(subprocess.TimeoutExpired):
            other.wait(3)
        file.write_text(text)
    assert other.wait(60) == 0


def test_a_configuration_that_steps_alike_is_the_same_question() -> None:
    traced_rank_steps(case(), 2, on_gpu=False)
    traced_rank_steps(case(training__steps="7", metrics__log_interval="3"), 2, on_gpu=False)
    assert len([*answers.cache_folder().iterdir()]) == 1


def test_another_world_size_is_another_question() -> None:
    traced_rank_steps(case(), 2, on_gpu=False)
    traced_rank_steps(case(), 4, on_gpu=False)
    assert len([*answers.cache_folder().iterdir()]) == 2


def peaks(config: Config, world_size: int = 1) -> list[MemoryEstimate]:
    return [step.memory for step in traced_rank_steps(config, world_size, on_gpu=False)]


@pytest.mark.parametrize(
    ("ffn_dim", "elements"), [(8192, 8192 * 128), (200_000, OPTIMIZER_CHUNK_ELEMENTS)]
)
def test_bfloat16_moments_take_half_and_are_upcast_in_chunks(ffn_dim: int, elements: int) -> None:
    """Chunks of the largest weight, or of at most OPTIMIZER_CHUNK_ELEMENTS."""
    short = "training.seq_len=16 model.num_layers=1 model.ffn_dim"
    wide, narrow = (
        peaks(configured(f"{short}={ffn_dim} memory.optimizer_dtype={kept}"))[0]
        for kept in ("float32", "bfloat16")
    )
    halved = wide.item("optimizer state").device_bytes / 2
    assert narrow.item("optimizer state").device_bytes == pytest.approx(halved, rel=1e-3)
    assert narrow.phase == "optimizer" != wide.phase
    both = narrow.item("transient activations").device_bytes
    assert both == pytest.approx(8 * elements, rel=0.01)


def test_the_first_pipeline_rank_has_the_highest_peak() -> None:
    first, last = peaks(configured(FOUR), 2)
    assert first.device_bytes > last.device_bytes
    assert (first.pp_rank, last.pp_rank) == (0, 1)


def test_each_recompute_policy_saves_fewer_activations() -> None:
    none, some, full = (
        peaks(configured(f"memory.recompute={policy}"))[0].item("saved activations").device_bytes
        for policy in ("none", "keep_attention", "full")
    )
    assert none > some > full


def test_a_step_is_that_of_the_busiest_rank() -> None:
    config = case(
        model__num_layers="1", parallelism__cp_method="ring", parallelism__cp_layout="contiguous"
    )
    (step,) = traced_rank_steps(config, 2, on_gpu=False)
    attended = sum(step.pieces[index].work.attention_flops.total() for index in step.order)
    by_rank = [trace_step(config, 2, rank).whole.work.attention_flops.total() for rank in (0, 1)]
    assert attended == max(by_rank)
