"""The planner beside a run: what it answers, writes and leaves out."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.hardware.host import GIB
from trainer.launch.predict import predict
from trainer.metrics.prediction import Prediction
from trainer.step.planner import ask_planner, trace_early
from trainer.storage.artifact import read_artifact
from trainer.trace.answers import cache_folder

LIMITS = {"ranks_per_node": 2, "device_bytes": 80.0 * GIB, "host_bytes": 512.0 * GIB}
DEBUG = ("--config", "debug", "--plan.device", "h100-80gb")


def asked(config: Config, folder: Path) -> dict[str, Any]:
    path = folder / "prediction.json"
    return ask_planner(config, 2, prediction_path=path, on_cpu=False, **LIMITS)


def test_a_planner_that_fails_stops_only_a_run_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    answer = asked(load(DEBUG), tmp_path)
    assert answer["problems"] == []
    assert answer["memory"]["loss_chunk_mib"] == 256
    assert asked(load([*DEBUG, "--memory.recompute", "auto"]), tmp_path)["problems"] == [
        'memory options that are "auto": the planner failed'
    ]


def test_what_a_launcher_traces_early_is_known_when_rank_0_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has resolved what to compile and knows the memory of its device."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = load([*DEBUG, "--training.compile", "auto"])
    early = {name: value for name, value in LIMITS.items() if name != "device_bytes"}
    trace_early(config, 2, on_cpu=False, **early)
    deadline = time.monotonic() + 120
    while not (known := [*cache_folder().glob("*.json")]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    compiled = config.training.model_copy(update={"compile": True})
    assert asked(config.model_copy(update={"training": compiled}), tmp_path)["problems"] == []
    # It goes on with advice, whose first trace takes a second.
    assert [*cache_folder().glob("*.json")] == known


def test_what_is_known_without_a_trace_has_no_numbers() -> None:
    prediction = predict(load(["--config", "llama3_8b_1m"]), 32, num_nodes=4)
    assert (prediction.step_seconds, prediction.device_bytes) == (None, None)
    assert len(prediction.out_of_memory_advice) == 3
    assert all(each.endswith(" may free memory") for each in prediction.out_of_memory_advice)


@pytest.mark.slow
def test_a_run_is_predicted_at_once_and_advised_later(tmp_path: Path) -> None:
    answer = asked(load([*DEBUG, "--memory.recompute", "auto"]), tmp_path)
    assert answer["memory"]["recompute"] == "none"
    assert answer["choice"].startswith('memory.recompute = "none"')
    found = read_artifact(tmp_path / "prediction.json", Prediction)
    assert found.device == "h100-80gb"
    assert found.step_seconds is not None
    assert found.device_bytes is not None
    deadline = time.monotonic() + 120
    while not any("would free" in each for each in found.out_of_memory_advice):
        assert time.monotonic() < deadline
        time.sleep(0.5)
        found = read_artifact(tmp_path / "prediction.json", Prediction)
    first, *changes = found.out_of_memory_advice
    assert first == found.memory_summary
    assert all(" would free " in each for each in changes)


@pytest.mark.slow
def test_a_budget_that_a_pipeline_shares_is_said_not_to_be_predicted(tmp_path: Path) -> None:
    words = "--parallelism.pp 2 --parallelism.dp_shard 1 --memory.recompute full"
    budget = "--memory.offload inputs --memory.host_budget_gib 0.0001 --memory.loss_chunk_mib 256"
    answer = asked(load([*DEBUG, *words.split(), *budget.split()]), tmp_path)
    assert answer["problems"] == []
    (warning,) = (
        each
        for each in read_artifact(tmp_path / "prediction.json", Prediction).warnings
        if "predicted" in each
    )
    assert warning.startswith("nothing is predicted: memory.host_budget_gib = 0.0001")
