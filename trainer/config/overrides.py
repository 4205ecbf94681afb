"""Variants of a configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from trainer.config.job_config import Config

ConfigT = TypeVar("ConfigT", bound=Config)


def with_overrides(config: ConfigT, changes: Mapping[str, Any]) -> ConfigT:
    """Replaces values by dotted key; does not validate."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=values)
            for name, values in sections.items()
        }
    )
