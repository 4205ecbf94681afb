"""What a plan keeps of a trace, and its way to the disk and back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.memory.test_estimator import configured
from trainer.config.job_config import Config
from trainer.trace import answers
from trainer.trace.answers import traced_rank_steps
from trainer.trace.rank_step import rank_step
from trainer.trace.record import trace_step

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


def test_a_known_answer_imports_no_torch() -> None:
    config = case()
    traced_rank_steps(config, 2, on_gpu=False)
    program = (
        "import sys; from trainer.config.job_config import Config; from trainer.trace.answers import traced_rank_steps; "
        "traced_rank_steps(Config.model_validate_json(sys.argv[1]), 2, on_gpu=False); assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program, config.model_dump_json(exclude={"stage"})], check=True
    )


def test_a_configuration_that_steps_alike_is_the_same_question() -> None:
    traced_rank_steps(case(), 2, on_gpu=False)
    traced_rank_steps(case(training__steps="7", metrics__log_interval="3"), 2, on_gpu=False)
    assert len([*answers.cache_folder().iterdir()]) == 1


def test_another_world_size_is_another_question() -> None:
    traced_rank_steps(case(), 2, on_gpu=False)
    traced_rank_steps(case(), 4, on_gpu=False)
    assert len([*answers.cache_folder().iterdir()]) == 2
