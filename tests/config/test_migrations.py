"""Stored configurations of earlier schema versions are migrated; old names that a user writes are
errors.
"""

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
REMOVED_SCHEDULES = MIGRATIONS[1].removed_values["parallelism.pp_schedule"].values


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
        assert migration.renamed_values.keys() | migration.removed_values.keys() <= keys
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
    assert [(item.min_length, item.max_length) for item in config.data.mix] == [
        (None, 64),
        (64, None),
    ]
    _, second = load(
        ["--config", str(FIXTURES / "recipe_5676d2a" / "config.toml")]
    ).training_stages
    assert second.config.schedule.min_lr_factor == 0.3
    assert (second.config.memory.blocks_per_checkpoint, second.config.memory.loss_chunk_mib) == (
        1,
        2,
    )
    assert (
        second.config.parallelism.cp_outer_method,
        second.config.parallelism.ranks_per_node,
    ) == ("alltoall", 2)
    assert [(item.min_length, item.max_length) for item in second.config.data.mix] == [
        (None, None),
        (64, 4096),
    ]


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
        "data.packing_version": 1,
    }
    assert migrate(stored, version=SCHEMA_VERSION) == stored


def test_a_resolved_file_states_its_version_and_a_later_one_is_an_error(tmp_path: Path) -> None:
    text = to_toml(load([]))
    assert tomli.loads(text)["schema_version"] == SCHEMA_VERSION
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert load(["--config", str(path)]) == load([])
    for version in (str(SCHEMA_VERSION + 1), f'"{SCHEMA_VERSION}"', "0"):
        path.write_text(
            text.replace(f"schema_version = {SCHEMA_VERSION}", f"schema_version = {version}")
        )
        (problem,) = load_problems("--config", str(path))
        assert f"is unknown; this version of the trainer reads 1 to {SCHEMA_VERSION}" in problem


def test_a_stored_run_with_a_removed_schedule_goes_on_interleaved(tmp_path: Path) -> None:
    key = "parallelism.pp_schedule"
    path = tmp_path / "config.toml"
    stored = load([f"--{key}=Interleaved1F1B"])
    old = to_toml(stored).replace(f"schema_version = {SCHEMA_VERSION}", "schema_version = 2")
    for schedule in REMOVED_SCHEDULES:
        assert migrate({key: schedule}, version=1)[key] == "Interleaved1F1B"
        path.write_text(old.replace("Interleaved1F1B", schedule))
        assert load(["--config", str(path)]).parallelism == stored.parallelism


def test_a_stored_run_keeps_the_packing_that_it_began_with() -> None:
    config = load(["--config", str(FIXTURES / "run_5676d2a" / "config.toml")])
    assert config.data.packing_version == 1
    assert migrate({"data": {"packing_version": 2}}, version=4) == {"data": {"packing_version": 2}}


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
    '[parallelism]\npp_schedule = "DualPipeV"': (
        'parallelism.pp_schedule = "DualPipeV" must be "1F1B", "GPipe" or "Interleaved1F1B"; "DualPipeV" was removed: it '
        "allowed neither compilation nor recomputation, and held as much memory as blocks without recomputation; use "
        '"Interleaved1F1B"'
    ),
    '[[stage]]\nname = "a"\nseq_len = 8\nparallelism = { pp_schedule = "ZBVZeroBubble" }': (
        'stage "a": parallelism.pp_schedule = "ZBVZeroBubble" must be "1F1B", "GPipe" or "Interleaved1F1B"; '
        '"ZBVZeroBubble" was removed: it allowed'
    ),
}


@pytest.mark.parametrize("text", FILE_ERRORS)
def test_an_old_name_in_a_users_file_is_an_error_with_the_new_name(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    (problem,) = load_problems("--config", str(path))
    assert FILE_ERRORS[text] in problem


@pytest.mark.parametrize(("old", "new"), MIGRATIONS[0].renamed_keys.items())
def test_an_old_flag_is_an_error_with_the_new_name(old: str, new: str) -> None:
    if not old.startswith("data.mix."):
        assert load_problems(f"--{old}", "1") == [f"command line: --{old} 1: renamed to {new}"]


def test_an_old_value_of_a_flag_is_an_error_with_the_new_value() -> None:
    values: dict[str, Any] = {
        "data.bad_files": ("refuse", "error"),
        "health.on_spike": ("tell", "warn"),
    }
    for key, (old, new) in values.items():
        (problem,) = load_problems(f"--{key}", old)
        assert problem.endswith(f'; "{old}" was renamed to "{new}"')


def test_a_removed_value_of_a_flag_is_an_error_with_its_reason_and_substitute() -> None:
    for schedule in REMOVED_SCHEDULES:
        (problem,) = load_problems("--parallelism.pp_schedule", schedule)
        assert problem.startswith(f"command line: --parallelism.pp_schedule {schedule} must be ")
        assert (
            f'"{schedule}" was removed: it allowed neither compilation nor recomputation'
            in problem
        )
        assert problem.endswith('; use "Interleaved1F1B"')
