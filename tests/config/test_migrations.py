"""Stored configurations of earlier schema versions are migrated; old names that a user writes are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli

from trainer.config import migrations
from trainer.config.migrations import MIGRATIONS, SCHEMA_VERSION, migrate
from trainer.config.parse import all_sections, load, repeated_tables
from trainer.config.toml_format import to_toml
from trainer.errors import ConfigError

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def load_problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(argv)
    return error.value.problems


def test_every_migration_leads_to_existing_keys() -> None:
    keys = {
        f"{section}.{key}"
        for section, owner in [*all_sections().items(), *repeated_tables().items()]
        for key in owner.fields_by_key()
    }
    for migration in MIGRATIONS:
        assert not keys & migration.renamed_keys.keys()
        assert migration.renamed_values.keys() <= keys
        assert {migrations.renamed_message(key) for key in migration.renamed_keys} <= {
            f"renamed to {key}" for key in keys
        }


def test_a_version_1_config_is_migrated_in_sections_mixes_and_stages() -> None:
    config = load(["--config", str(FIXTURES / "run_5676d2a" / "config.toml")])
    assert (config.memory.blocks_per_checkpoint, config.memory.loss_chunk_mib) == (2, 1)
    assert (config.parallelism.cp_outer_method, config.parallelism.ranks_per_node) == ("ring", 4)
    assert (config.schedule.min_lr_factor, config.checkpoint.initial_load_path) == (0.2, "initial")
    assert (config.health.on_spike, config.health.max_consecutive_skips) == ("warn", 5)
    assert config.data.bad_files == "error"
    assert [(item.min_length, item.max_length) for item in config.data.mix] == [(None, 64), (64, None)]
    _, second = load(["--config", str(FIXTURES / "recipe_5676d2a" / "config.toml")]).training_stages
    assert second.config.schedule.min_lr_factor == 0.3
    assert (second.config.memory.blocks_per_checkpoint, second.config.memory.loss_chunk_mib) == (1, 2)
    assert (second.config.parallelism.cp_outer_method, second.config.parallelism.ranks_per_node) == ("alltoall", 2)
    assert [(item.min_length, item.max_length) for item in second.config.data.mix] == [(None, None), (64, 4096)]


def test_dotted_keys_of_a_checkpoint_are_migrated() -> None:
    stored = {
        "memory.input_every": 2,
        "data.bad_files": "refuse",
        "data.mix": [{"source": "a", "at_least": 3}],
        "data.sources.below.path": "x",
    }
    assert migrate(stored, version=1) == {
        "memory.blocks_per_checkpoint": 2,
        "data.bad_files": "error",
        "data.mix": [{"source": "a", "min_length": 3}],
        "data.sources.below.path": "x",
    }
    assert migrate(stored, version=SCHEMA_VERSION) == stored


def test_a_resolved_file_states_its_version_and_a_later_one_is_an_error(tmp_path: Path) -> None:
    text = to_toml(load([]))
    assert tomli.loads(text)["schema_version"] == SCHEMA_VERSION
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert load(["--config", str(path)]) == load([])
    for version in ("3", '"2"', "0"):
        path.write_text(text.replace("schema_version = 2", f"schema_version = {version}"))
        (problem,) = load_problems("--config", str(path))
        assert "is unknown; this version of the trainer reads 1 to 2" in problem


FILE_ERRORS = {
    "[memory]\ninput_every = 2": "memory.input_every = 2: renamed to memory.blocks_per_checkpoint",
    "[schedule]\nfinal = 0.1": "schedule.final = 0.1: renamed to schedule.min_lr_factor",
    '[[data.mix]]\nsource = "x"\nbelow = 9': "data.mix 1: below = 9: renamed to data.mix.max_length",
    '[[stage]]\nname = "a"\nseq_len = 8\nmemory = { head_chunk_mib = 2 }': (
        'stage "a": memory.head_chunk_mib = 2: renamed to memory.loss_chunk_mib'
    ),
    '[[stage]]\nname = "a"\nseq_len = 8\nmix = [{ source = "x", at_least = 1 }]': (
        'stage "a": mix 1: at_least = 1: renamed to data.mix.min_length'
    ),
    '[data]\nbad_files = "refuse"': (
        'data.bad_files = "refuse" must be "skip" or "error"; "refuse" was renamed to "error"'
    ),
    '[health]\non_spike = "tell"': '"tell" was renamed to "warn"',
}


@pytest.mark.parametrize("text", FILE_ERRORS)
def test_an_old_name_in_a_users_file_is_an_error_with_the_new_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    (problem,) = load_problems("--config", str(path))
    assert FILE_ERRORS[text] in problem


@pytest.mark.parametrize(("old", "new"), MIGRATIONS[0].renamed_keys.items())
def test_an_old_flag_is_an_error_with_the_new_name(old: str, new: str) -> None:
    if not old.startswith("data.mix."):
        assert load_problems(f"--{old}", "1") == [f"command line: --{old} 1: renamed to {new}"]


def test_an_old_value_of_a_flag_is_an_error_with_the_new_value() -> None:
    values: dict[str, Any] = {"data.bad_files": ("refuse", "error"), "health.on_spike": ("tell", "warn")}
    for key, (old, new) in values.items():
        (problem,) = load_problems(f"--{key}", old)
        assert problem.endswith(f'; "{old}" was renamed to "{new}"')
