"""Run folders with invented numbers, which no training wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import exp, sin
from pathlib import Path
from typing import Any

from trainer.config.parse import load
from trainer.config.toml_format import to_toml
from trainer.hardware.host import GIB
from trainer.metrics.prediction import Prediction, write_prediction
from trainer.storage import lineage
from trainer.storage.lineage import Lineage
from trainer.storage.train_state import StagePosition

BEGAN = 1_790_000_000.0
BUCKETS = ("0-256", "256-1K", "1K-4K", "4K-16K")


def record(step: int) -> dict[str, Any]:
    """A line of metrics.jsonl of a model with experts, on GPUs."""
    loss = 2.1 + 6 * exp(-step / 120) + 0.03 * sin(step)
    return {
        "step": step,
        "tokens": step * 1_048_576,
        "loss": loss,
        "grad_norm": 0.4 + 2 * exp(-step / 50),
        "lr": 3e-4 * min(1, step / 100),
        "step_seconds": 11.6 + 0.4 * sin(step / 7),
        "tokens_per_second": 90_394.0,
        "tokens_per_second_per_device": 2_824.8,
        "mfu": 0.412,
        "hfu": 0.533,
        "data_wait_pct": 0.2,
        "goodput_pct": 93.5,
        "memory_peak_gib": 71.3,
        "memory_reserved_gib": 74.0,
        "rss_gib": 12.25,
        "attention_imbalance": 1.08,
        "dp_imbalance": 1.03,
        "loss_by_position": {name: loss - 0.1 * at for at, name in enumerate(BUCKETS)}
        | {"16K-64K": None},
        "expert_load_max": 1.7,
        "dead_experts": 1,
        "router_entropy": 1.9,
        "expert_load": [[1.7, 0.3, 1.0, 1.0], [1.2, 0.0, 1.8, 1.0]],
        "stage": "",
    }


EVENTS: tuple[dict[str, Any], ...] = (
    {"event": "start", "step": 0, "stage": "", "world_size": 32, "resumed": None},
    {
        "event": "planned",
        "device": "h100-80gb",
        "predicted_seconds": 11.2,
        "measured_seconds": 11.5,
    },
    {"event": "validation", "step": 0, "set": "held_out", "loss": 8.1},
    {
        "event": "checkpoint",
        "step": 100,
        "path": "/runs/x/checkpoints/step-100",
        "bytes": 96 * GIB,
        "seconds": 41.2,
        "blocked_seconds": 1.3,
    },
    {"event": "validation", "step": 100, "set": "held_out", "loss": 4.7},
    {"event": "spike", "step": 151, "loss": 9.75, "sigmas": 11.2},
    {
        "event": "rolled_back",
        "step": 151,
        "to": "/runs/x/checkpoints/step-100",
        "without_rows": [3200, 4864],
    },
    {
        "event": "checkpoint",
        "step": 200,
        "path": "/runs/x/checkpoints/step-200",
        "bytes": 96 * GIB,
        "seconds": 39.8,
        "blocked_seconds": 1.1,
    },
    {"event": "validation", "step": 200, "set": "held_out", "loss": 3.4},
    {"event": "straggler", "rank": 17, "host": "node-3", "phase": "compute", "ratio": 1.6},
    {"event": "preempted", "step": 240, "reason": "SIGTERM", "loss": 3.0, "skipped": 0},
    {
        "event": "start",
        "step": 240,
        "stage": "",
        "world_size": 32,
        "resumed": "/runs/x/checkpoints/step-240",
    },
)


def write_lines(path: Path, objects: Iterable[dict[str, Any]], *, mode: str = "a") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps(each) + "\n" for each in objects)


def write_invented_run(folder: Path, *, steps: int = 300, name: str = "long_code") -> Path:
    """A run of 2,000 steps that is at step `steps`."""
    folder.mkdir(parents=True)
    config = load(
        ["--config=debug", f"--job.name={name}", "--training.steps=2000", "--data.corpus=copy"]
    )
    (folder / "config.toml").write_text(to_toml(config))
    for step in (100, 200):
        (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", map(record, range(1, steps + 1)))
    write_lines(
        folder / "events.jsonl",
        ({"time": BEGAN + 600 * at, **event} for at, event in enumerate(EVENTS)),
    )
    write_prediction(
        folder / "prediction.json",
        Prediction(
            device="h100-80gb",
            step_seconds=11.2,
            device_bytes=69.8 * GIB,
            warnings=("the planner's figure of this network was not measured",),
        ),
    )
    parent = Lineage(
        parent="../long_web",
        step=4000,
        manifest="0" * 64,
        carries_step=False,
        carries_data=False,
        optimizer_start=0,
        stage=StagePosition(name="", index=0, start_step=0, global_batch_size=None),
        changed={"training.seq_len": (131072, 1048576)},
        created="2026-11-27T10:00:00+00:00",
    )
    lineage.write(folder, parent)
    return folder
