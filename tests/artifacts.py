"""Sealed files that tests write, read and forge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config.job_config import Config
from trainer.config.migrations import SCHEMA_VERSION
from trainer.storage.artifact import HEADER_BYTES, seal_object
from trainer.storage.run_dir import flatten_config, stage_position
from trainer.storage.train_state import SpikeState, TrainerState, TrainState


def content(path: Path) -> dict[str, Any]:
    """Of a text file, or in the header of a binary one."""
    found: dict[str, Any] = json.loads(
        path.read_bytes()[:HEADER_BYTES] if path.suffix == ".plan" else path.read_text()
    )["content"]
    return found


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the content, and seals the file again."""
    envelope = json.loads(path.read_text())
    change(envelope["content"])
    path.write_bytes(
        seal_object({key: value for key, value in envelope.items() if key != "sha256"})
    )


def train_state(config: Config, *, step: int = 6) -> TrainState:
    """Of a checkpoint without tensors."""
    counts = {"step": step, "next_sequence": 0, "tokens": 0, "skipped": 0, "sources": {}}
    return TrainState(
        step=step,
        trainer=TrainerState(**counts, losses=SpikeState(), goodput=None),  # type: ignore[arg-type]
        stage=stage_position(config.training_stages[0]),
        data={},
        plans={},
        config=flatten_config(config),
        schema_version=SCHEMA_VERSION,
        degrees={},
        torch="2",
        optimizer_steps=None,
    )
