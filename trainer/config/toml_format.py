"""Write a configuration as TOML."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from trainer.config.job_config import Config
from trainer.config.migrations import SCHEMA_KEY, SCHEMA_VERSION
from trainer.config.training_stages import Recipe


def to_toml(config: Config) -> str:
    """The resolved configuration as a TOML file that parses to an equal one; keys without a value
    are omitted.
    """
    values = {SCHEMA_KEY: SCHEMA_VERSION, **config.model_dump(mode="json", exclude_none=True)}
    # Stages list only their overrides, and sections nothing that all stages override.
    if isinstance(config, Recipe) and config.stage:
        values["stage"] = [
            stage.model_dump(mode="json", exclude_unset=True) for stage in config.stage
        ]
        for name in (*config.unused_keys, "training.steps", "training.seq_len"):
            section, _, key = name.partition(".")
            values[section].pop(key, None)
    return values_to_toml(values)


def values_to_toml(values: dict[str, Any]) -> str:
    """Nested values as a TOML file."""
    return "\n".join(_toml_lines((), values)).lstrip() + "\n"


def toml_value(value: object) -> str:
    """A value in TOML syntax."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml_value(inner)}' for key, inner in value.items())} }}"
    if isinstance(value, (bool, str)):
        # JSON strings are basic strings of TOML, except that TOML forbids a bare DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


def _toml_lines(path: tuple[str, ...], table: dict[str, Any]) -> Iterator[str]:
    array_tables = {
        key: value for key, value in table.items() if isinstance(value, list) and not path
    }
    scalars = {
        key: value
        for key, value in table.items()
        if not isinstance(value, dict) and key not in array_tables
    }
    # Values precede inner tables: TOML assigns every line after a header to that table.
    if scalars and path:
        yield f"\n[{'.'.join(path)}]"
    yield from (f"{key} = {toml_value(value)}" for key, value in scalars.items())
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _toml_lines((*path, key), value)
    for key, tables in array_tables.items():
        for entry in tables:
            yield f"\n[[{key}]]"
            yield from (f"{name} = {toml_value(value)}" for name, value in entry.items())
