"""Keys of the configuration schema, and pairs of configurations that differ in one of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, get_origin

from trainer.config.sections import Section
from trainer.config.training_stages import Recipe, StageSection

Values = dict[str, Any]

# Entries of tables that a file may repeat: the one that a case changes.
ENTRIES = {
    "model.layers.": "model.layers.0.",
    "data.sources.": "data.sources.web.",
    "data.mix.": "data.mix.0.",
    "validation.sets.": "validation.sets.held.",
    "stage.optimizer.": "stage.1.optimizer.",
    "stage.mix.": "stage.0.mix.0.",
    "stage.": "stage.0.",
}
BASE: Values = {
    "model": {
        "num_layers": 1,
        "dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_dim": 48,
        "vocab_size": 264,
    },
    "data": {"corpus": "corpus"},
    "training": {
        "seq_len": 64,
        "global_batch_size": 2,
        "micro_batch_size": 2,
        "steps": 1,
        "dtype": "float32",
    },
    "optimizer": {"lr": 1e-2},
    "metrics": {"log_interval": 1, "tensorboard": False},
}


@dataclass(frozen=True)
class Case:
    """Two legal values of a key, on `worlds` ranks, for which `observable` differs."""

    observable: Callable[[Recipe], Any]
    pair: tuple[Any, Any]
    base: Mapping[str, Any] = field(default_factory=dict)
    """Values of other keys by dotted name; None leaves a key out."""
    worlds: tuple[int, int] = (1, 1)

    def values(self, key: str, value: Any) -> Values:
        """The configuration with this value of the key."""
        values = copy.deepcopy(BASE)
        for name, other in self.base.items():
            assign(values, name, copy.deepcopy(other))
        assign(values, entry(key), value)
        return values

    def tasks(self, key: str) -> tuple[Task, Task]:
        a, b = (
            Task(self.observable, self.values(key, value), world)
            for value, world in zip(self.pair, self.worlds, strict=True)
        )
        return a, b


@dataclass(frozen=True)
class Task:
    """An observable of a configuration on a number of ranks; equal tasks have equal text."""

    observable: Callable[[Recipe], Any]
    values: Values
    world_size: int

    def __str__(self) -> str:
        return f"{self.observable.__name__} on {self.world_size} of {json.dumps(self.values, sort_keys=True)}"


def schema_keys(section: type[Section] = Recipe, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that holds a value, with its type.

    Keys of a table that may be repeated occur once.
    """
    for key, info in section.fields_by_key().items():
        inner = [*_sections(info.annotation)]
        for each in inner:
            yield from schema_keys(each, f"{prefix}{key}.")
        if not inner:
            yield f"{prefix}{key}", info.annotation


def has_one_value(annotation: Any) -> bool:
    """No two configurations can differ in such a key."""
    return get_origin(annotation) is Literal and len(get_args(annotation)) == 1


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)


def entry(key: str) -> str:
    """The dotted name at which a case sets a key."""
    table = next((table for table in ENTRIES if f"{key}.".startswith(table)), "")
    return (ENTRIES.get(table, "") + f"{key}.".removeprefix(table)).rstrip(".")


def assign(values: Values, name: str, value: Any) -> None:
    """Sets a dotted name in nested tables and lists; None removes it."""
    *path, key = name.split(".")
    table: Any = values
    for part in path:
        table = table[int(part)] if isinstance(table, list) else table.setdefault(part, {})
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


# ---- sections that a stage overrides

STAGE_SECTIONS = {
    "rope": "model.rope",
    "mix": "data.mix",
    "schedule": "schedule",
    "parallelism": "parallelism",
    "memory": "memory",
}


def inherited_key(key: str) -> str | None:
    """The key of the section that `stage.SECTION.key` overrides; None for other keys."""
    _, *path = key.split(".")
    if len(path) != 2 or path[0] not in STAGE_SECTIONS or key.split(".")[0] != "stage":
        return None
    assert path[0] in StageSection.model_fields
    return f"{STAGE_SECTIONS[path[0]]}.{path[1]}"


def as_stage(task: Task, key: str) -> Task:
    """The same configuration with the section, or the key alone, in a `[[stage]]` instead."""
    name = key.split(".")[1]
    section = STAGE_SECTIONS[key.split(".")[1]]
    values = copy.deepcopy(task.values)
    training = values["training"]
    stage: Values = {
        "name": "only",
        "seq_len": training.pop("seq_len"),
        "steps": training.pop("steps"),
    }
    *path, last = section.split(".")
    parent = values
    for part in path:
        parent = parent[part]
    table = parent.get(last, {})
    if name in ("rope", "mix"):  # Replaced as a whole.
        stage[name] = parent.pop(last, {})
    elif key.split(".")[2] in table:
        stage[name] = {key.split(".")[2]: table.pop(key.split(".")[2])}
    return replace(task, values=values | {"stage": [stage]})
