"""`state.json`: what a checkpoint holds besides tensors. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from models.config import ModelConfig
from models.layers import LayerKind
from trainer.config.migrations import STATE_MIGRATIONS, Migration, migrate
from trainer.errors import ConfigError, ResumeError
from trainer.storage.artifact import Artifact, DamageError, parse_object

STATE_FILE = "state.json"
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A count that fits into a tensor of int64."""


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SpikeState(Part):
    """State of a `LossSpikeDetector`."""

    losses: list[float] = []
    consecutive_skips: int = 0


class GoodputState(Part):
    start_time: float
    productive_seconds: float


class TrainerState(Part):
    """The values of `Trainer.train_state`."""

    step: Count
    next_sequence: Count
    tokens: Count
    skipped: Count
    sources: dict[str, Count]
    losses: SpikeState
    goodput: GoodputState | None
    """State of `Goodput`; None if the version that wrote the checkpoint did not measure it."""


class StagePosition(Part):
    """The place of a training stage in its run. A run that resumes must agree."""

    name: str
    index: Count
    start_step: Count
    global_batch_size: int | None = None
    """Set for a stage whose length is given in tokens: its steps depend on the batch size."""


class TrainState(Artifact):
    kind: ClassVar[str] = "training state"
    migrations: ClassVar[tuple[Migration, ...]] = STATE_MIGRATIONS
    step: int = Field(ge=0)
    trainer: TrainerState
    stage: StagePosition
    data: dict[str, str]
    """Token fingerprint of each data source."""
    plans: dict[str, str]
    """Hash of the packing plan of each data source; empty if it was not recorded."""
    config: dict[str, Any]
    """Configuration values by dotted key, in the schema of `schema_version`."""
    schema_version: int
    degrees: dict[str, int]
    torch: str
    optimizer_steps: int | None
    """Steps that the optimizer's tensors count. None: not recorded."""

    @classmethod
    def from_unsealed(cls, data: bytes) -> tuple[dict[str, Any], int]:
        values = parse_object(data)
        if not {"step", "trainer", "config"} <= values.keys():
            raise DamageError(f"it is not a {cls.kind}")
        return values, 1


def config_of(state: TrainState, path: Path) -> dict[str, Any]:
    """The configuration by dotted key, in today's schema. Raises `ResumeError`."""
    try:
        # A layer kind or option that is new has a default under which older models are what they
        # were.
        values = model_defaults() | migrate(state.config, version=state.schema_version)
        return values | {
            "model.layers": [
                dataclasses.asdict(LayerKind()) | kind for kind in values["model.layers"]
            ]
        }
    except ConfigError as error:
        raise ResumeError(f"{path}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ResumeError(f"{path} is damaged: its config cannot be migrated: {error}") from None


@cache
def model_defaults() -> dict[str, Any]:
    """Default values of a model's options by dotted key.

    They fill in options that the version of a checkpoint did not have.
    """
    required: dict[str, Any] = dict.fromkeys(
        (
            each.name
            for each in dataclasses.fields(ModelConfig)
            # Both are MISSING only for a field without default.
            if each.default is each.default_factory
        ),
        1,
    )
    values = flatten_model(ModelConfig(**required))
    return {
        key: value for key, value in values.items() if key.removeprefix("model.") not in required
    }


def flatten_model(model: ModelConfig) -> dict[str, Any]:
    # Tuples become lists.
    return flatten(json.loads(json.dumps({"model": dataclasses.asdict(model)})))


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = dict[str, Any]()
    for name, value in values.items():
        flat |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return flat
