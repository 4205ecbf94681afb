"""Problems of the options of routers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from models.config import ModelConfig
from trainer.config.sections import TrainingSection
from trainer.config.toml_format import toml_value


def router_problems(training: TrainingSection, model: ModelConfig) -> Iterator[str]:
    """Keys of [training] for routers that have no effect."""
    for key in ("balance_loss", "balance_over", "router_z_loss", "correction_bias_rate"):
        value = getattr(training, key)
        given = f"training.{key} = {toml_value(value)}"
        if value == type(training).model_fields[key].default:
            continue
        if not model.has_experts:
            yield f"{given} is not used: no layer of the model has experts"
        elif key == "correction_bias_rate" and not any(
            kind.correction_bias for kind in model.kinds
        ):
            yield f"{given} needs model.correction_bias = true"
        elif key == "balance_over" and not training.balance_loss:
            yield f"{given} is only used with training.balance_loss"
