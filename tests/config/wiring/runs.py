"""What whole runs of one rank leave behind, from `train.main`; each runs without a process group,
which the run makes.
"""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from contextlib import chdir
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import train
from tests.system.runs import lines
from trainer.checkpoint import in_memory, manager, save
from trainer.config.run_spec import RunSpec
from trainer.config.training_stages import Recipe
from trainer.data.prepare import prepare_datasets
from trainer.metrics import loggers
from trainer.resilience import replicas
from trainer.resilience.replicas import DriftedRank
from trainer.resilience.signals import SignalHandler
from trainer.resilience.watchdog import Watchdog
from trainer.run import train_loop


@dataclass
class Run:
    metrics: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Metrics, TensorBoard folders and checkpoints."""
    timeouts: list[tuple[str, float, timedelta]] = field(default_factory=list)
    """(phase, timeout in seconds, timeout of the default process group) of the watchdog."""
    backends: set[str] = field(default_factory=set)
    """That of the default process group."""
    writers: list[str] = field(default_factory=list)
    """The thread that writes each checkpoint."""
    replica_checks: list[int] = field(default_factory=list)
    """The number of tensors in each check."""

    def lines(self, *keys: str) -> list[tuple[Any, ...]]:
        return [tuple(line[key] for key in keys) for line in self.metrics]


@cache
def finished(spec: str) -> Run:
    """Trains all stages in a new folder that has the corpora of this one."""
    run = Run()
    inputs = [*Path.cwd().iterdir()]
    with tempfile.TemporaryDirectory() as name, chdir(name), pytest.MonkeyPatch.context() as patch:
        _record(run, patch)
        for path in inputs:
            Path(path.name).symlink_to(path)
        recipe = Recipe.model_validate_json(spec)
        if recipe.checkpoint.initial_load_path is not None:
            _train(_without_initial_weights(recipe))
        _train(recipe)
        run.metrics = lines(recipe.output_dir / "metrics.jsonl")
        found = (
            path
            for pattern in ("metrics.jsonl", "step-*", "tensorboard", "lines.txt")
            for path in Path(name).rglob(pattern)
        )
        run.files = sorted(str(path.relative_to(name)) for path in found)
    return run


def _train(recipe: Recipe) -> None:
    # In place of the log file of the run before.
    loggers.configure_logging(0)
    spec = RunSpec(config=recipe, datasets=prepare_datasets(recipe)).to_json()
    for _ in recipe.training_stages:
        status = train.main([spec], SignalHandler())
        faulthandler.cancel_dump_traceback_later()
        assert status == 0


def _without_initial_weights(recipe: Recipe) -> Recipe:
    """The run in the folder that `recipe` loads its weights from."""
    values = recipe.model_dump(exclude_unset=True)
    return Recipe.model_validate(
        values | {"checkpoint": {}, "job": {"output_dir": recipe.checkpoint.initial_load_path}}
    )


def _record(run: Run, patch: pytest.MonkeyPatch) -> None:
    class RecordingWatchdog(Watchdog):
        def arm(self, phase: str, timeout_seconds: float) -> None:
            world = distributed.group.WORLD
            assert world is not None
            backend = world._get_backend(torch.device("cpu"))
            run.timeouts.append((phase, timeout_seconds, backend.options._timeout))
            run.backends.add(distributed.get_backend())
            super().arm(phase, timeout_seconds)

    def write_checkpoint(*arguments: Any) -> int:
        run.writers.append(threading.current_thread().name)
        return write(*arguments)

    def publish(*arguments: Any) -> int:
        run.writers.append(f"in memory: {threading.current_thread().name}")
        return publish_in_memory(*arguments)

    def find_drifted_ranks(state: dict[str, Tensor]) -> list[DriftedRank]:
        run.replica_checks.append(len(state))
        return check(state)

    check = replicas.find_drifted_ranks
    write = save.write_checkpoint
    publish_in_memory = in_memory.InMemoryCheckpoints._publish
    patch.setattr(train_loop, "find_drifted_ranks", find_drifted_ranks)
    patch.setattr(train_loop, "Watchdog", RecordingWatchdog)
    patch.setattr(manager, "write_checkpoint", write_checkpoint)
    patch.setattr(in_memory.InMemoryCheckpoints, "_publish", publish)


def _run(recipe: Recipe) -> Run:
    return finished(recipe.model_dump_json(exclude_unset=True))


def run_losses(recipe: Recipe) -> list[tuple[Any, ...]]:
    return _run(recipe).lines("step", "loss")


def logged_steps(recipe: Recipe) -> list[tuple[Any, ...]]:
    return _run(recipe).lines("step")


def stage_names(recipe: Recipe) -> list[tuple[Any, ...]]:
    return _run(recipe).lines("stage")


def stated_peak(recipe: Recipe) -> list[float | None]:
    """Peak TFLOP/s by which the MFU of each step is computed."""
    return [
        mfu and round(tflops / mfu, 6)
        for tflops, mfu in _run(recipe).lines("tflops_per_device", "mfu")
    ]


def run_files(recipe: Recipe) -> list[str]:
    return _run(recipe).files


def checkpoint_threads(recipe: Recipe) -> list[str]:
    return _run(recipe).writers


def replica_checks(recipe: Recipe) -> list[int]:
    return _run(recipe).replica_checks


def phase_timeouts(recipe: Recipe) -> list[tuple[str, float]]:
    return [(phase, seconds) for phase, seconds, _ in _run(recipe).timeouts]


def world_timeouts(recipe: Recipe) -> list[timedelta]:
    return [timeout for *_, timeout in _run(recipe).timeouts]


def backends(recipe: Recipe) -> set[str]:
    return _run(recipe).backends
