"""Schema versions of stored configurations and training states, and the renames and removals
between them.

A run folder's `config.toml` and a checkpoint's `state.json` carry `schema_version`. Older ones are
migrated when they are read. In a file or flag that a user writes, the same tables turn an old name
into an error that gives the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainer.errors import ConfigError


class Removal(NamedTuple):
    """Values that a key no longer has."""

    values: tuple[str, ...]
    substitute: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Migration:
    """Changes from one schema version to the next.

    Keys are dotted; items of `[[data.mix]]` are `data.mix.KEY`.
    """

    renamed_keys: Mapping[str, str] = field(default_factory=dict)
    """Old to new key of the same section."""
    renamed_values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """New key to its old and new values."""
    removed_values: Mapping[str, Removal] = field(default_factory=dict)
    new_keys: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys that did not exist, with the value that gives what was done without them."""

    def new_value(self, key: str, value: str) -> str:
        removal = self.removed_values.get(key)
        if removal is not None and value in removal.values:
            return removal.substitute
        return self.renamed_values.get(key, {}).get(value, value)


# MIGRATIONS[n - 1] leads from version n to n + 1. A new one is appended; the others never change.
MIGRATIONS = (
    Migration(
        renamed_keys={
            "checkpoint.initial": "checkpoint.initial_load_path",
            "data.mix.at_least": "data.mix.min_length",
            "data.mix.below": "data.mix.max_length",
            "health.skipped_in_a_row": "health.max_consecutive_skips",
            "memory.head_chunk_mib": "memory.loss_chunk_mib",
            "memory.input_every": "memory.blocks_per_checkpoint",
            "parallelism.cp_outer": "parallelism.cp_outer_method",
            "parallelism.node_ranks": "parallelism.ranks_per_node",
            "schedule.final": "schedule.min_lr_factor",
        },
        renamed_values={
            "data.bad_files": {"refuse": "error"},
            "health.on_spike": {"tell": "warn"},
        },
    ),
    Migration(
        removed_values={
            "parallelism.pp_schedule": Removal(
                ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
                "Interleaved1F1B",
                "it allowed neither compilation nor recomputation, and held as much memory as blocks without recomputation",
            )
        }
    ),
    Migration(renamed_keys={"model.layer_pattern": "model.layers"}),
    # Sequences of older runs were packed by version 1; a resume must not pack them otherwise.
    Migration(new_keys={"data.packing_version": 1}),
)
SCHEMA_VERSION = len(MIGRATIONS) + 1
SCHEMA_KEY = "schema_version"

STATE_MIGRATIONS = (
    # Version 1 is of before files were sealed.
    Migration(
        renamed_keys={
            "stage.stage": "stage.name",
            "stage.updates before the stage": "stage.start_step",
            "stage.rows of an update": "stage.global_batch_size",
            "trainer.goodput.began": "trainer.goodput.start_time",
            "trainer.losses.skipped_in_a_row": "trainer.losses.consecutive_skips",
            "trainer.next_row": "trainer.next_sequence",
        },
        new_keys={
            "trainer.losses": {},
            "trainer.goodput": None,
            "schema_version": 1,
            "plans": {},
            "optimizer_steps": None,
        },
    ),
)
"""Migrations of `state.json`; the configuration in it follows `MIGRATIONS`."""

# Version 1 wrote no schema_version. Its resolved files state all of these sections, which no
# manually written file does.
VERSION_1_SECTIONS = (
    *(
        "job",
        "model",
        "tokenizer",
        "data",
        "training",
        "parallelism",
        "memory",
        "optimizer",
        "schedule",
        "checkpoint",
    ),
    *("validation", "metrics", "profiler", "distributed"),
)


def migrate(values: Mapping[str, Any], *, version: object) -> dict[str, Any]:
    """The values of a stored configuration, nested or by dotted key, in today's schema.

    Raises `ConfigError` for a version that does not exist yet.
    """
    if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
        raise ConfigError(
            [
                f"{SCHEMA_KEY} = {version} is unknown; this version of the trainer reads 1 to {SCHEMA_VERSION}"
            ]
        )
    return apply_migrations(values, MIGRATIONS[version - 1 :], name_of=_section_name)


def apply_migrations(
    values: Mapping[str, Any],
    migrations: Sequence[Migration],
    *,
    name_of: Callable[[str], str] = str,
) -> dict[str, Any]:
    """The values, nested or by dotted key, after these changes in turn.

    `name_of`: the name that migrations have for a key.
    """
    migrated = dict(values)
    for migration in migrations:
        migrated = _migrate_table("", migrated, migration, name_of)
        for name, value in migration.new_keys.items():
            # A stored value wins over the value of a new key. Values by dotted key have no tables
            # of sections.
            section, _, key = name.partition(".")
            if key and section in migrated:
                migrated[section] = {key: value} | migrated[section]
            else:
                migrated.setdefault(name, value)
    return migrated


def migrate_file(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a TOML file, migrated if a run wrote it; a user's file has no version and must
    use today's keys.
    """
    is_version_1 = all(section in values for section in VERSION_1_SECTIONS)
    version = values.get(SCHEMA_KEY, 1 if is_version_1 else SCHEMA_VERSION)
    return migrate(
        {key: value for key, value in values.items() if key != SCHEMA_KEY}, version=version
    )


def renamed_message(name: str) -> str | None:
    """Names the key that replaced a dotted key, or None."""
    # A key may have been renamed in several versions: follow it through all of them.
    current = name = _section_name(name)
    for migration in MIGRATIONS:
        current = migration.renamed_keys.get(current, current)
    return None if current == name else f"renamed to {current}"


def replaced_value_message(name: str, value: object) -> str | None:
    """Names the value that replaced a key's value, or None."""
    key = _section_name(name)
    current = str(value)
    message = None
    for migration in MIGRATIONS:
        if (new := migration.new_value(key, current)) != current:
            removal = migration.removed_values.get(key)
            message = (
                f'was removed: {removal.reason}; use "{new}"'
                if removal
                else f'was renamed to "{new}"'
            )
            current = new
    return message and f'"{value}" {message}'


def _section_name(name: str) -> str:
    """The dotted key that a key of `[[stage]]` overrides."""
    if not name.startswith("stage."):
        return name
    name = name.removeprefix("stage.")
    return f"data.{name}" if name.partition(".")[0] == "mix" else name


def _migrate_table(
    path: str, table: Mapping[str, Any], migration: Migration, name_of: Callable[[str], str]
) -> dict[str, Any]:
    migrated = {}
    for key, value in table.items():
        name = name_of(f"{path}.{key}" if path else key)
        name = migration.renamed_keys.get(name, name)
        # Renaming never moves a key to another section, so only the last part changes, in a nested
        # table as in a dotted key.
        new = (
            f"{key.rpartition('.')[0]}.{name.rpartition('.')[2]}"
            if "." in key
            else name.rpartition(".")[2]
        )
        # If a file has both names, the new one wins.
        if new != key and new in table:
            continue
        if isinstance(value, dict):
            value = _migrate_table(name, value, migration, name_of)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            value = [_migrate_table(name, item, migration, name_of) for item in value]
        elif isinstance(value, str):
            value = migration.new_value(name, value)
        migrated[new] = value
    return migrated
