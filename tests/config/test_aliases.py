"""Keys of other trainers are answered with ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.aliases import ALIASES, NO_EQUIVALENT, suggest
from trainer.config.parse import all_sections, load, section_keys
from trainer.errors import ConfigError


def load_problem(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(argv)
    (problem,) = error.value.problems
    return problem


def test_every_alias_leads_to_an_existing_key_and_is_none() -> None:
    keys = {f"{section}.{key}" for section in all_sections() for key in section_keys(section)}
    ours = {
        key.partition(" (")[0] for key in ALIASES.values() if not key.startswith(NO_EQUIVALENT)
    }
    assert ours <= keys
    assert not keys & ALIASES.keys()


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--activation_checkpoint.mode", "memory.recompute"),
        ("--parallelism.context_parallel_degree", "parallelism.cp"),
        ("--context_parallel_degree", "parallelism.cp"),
        ("--job.dump_folder", "job.output_dir"),
        ("--training.batch_size", "training.micro_batch_size"),
        ("--training.local_batch_size", "training.micro_batch_size"),
        ("--training.max_seq_len", "training.seq_len"),
        ("--lr_scheduler.warmup_steps", "schedule.warmup_steps"),
        ("--tensor-model-parallel-size", "parallelism.tp"),
        ("--tensor_model_parallel_size", "parallelism.tp"),
        ("--per_device_train_batch_size", "training.micro_batch_size"),
        ("--model.hidden_size", "model.dim"),
    ],
)
def test_a_flag_of_another_trainer_suggests_ours(option: str, key: str) -> None:
    assert (
        load_problem(option, "1") == f"command line: {option} 1: unknown key; did you mean {key}?"
    )


def test_a_key_without_equivalent_says_so() -> None:
    for option in ("--metrics.enable_wandb", "--enable_wandb", "--wandb-project", "--report_to"):
        assert "unknown key; did you mean metrics.trackers (a list" in load_problem(option, "x")
    for option in ("--moe-expert-capacity-factor",):
        assert load_problem(option, "x").endswith(
            "unknown key; no equivalent: no token is dropped"
        )


def test_sections_of_another_trainers_file_suggest_ours(tmp_path: Path) -> None:
    path = tmp_path / "theirs.toml"
    path.write_text('[activation_checkpoint]\nmode = "selective"\nother = 1')
    assert load_problem("--config", str(path)) == (
        f"{path}: [activation_checkpoint]: unknown section; mode: did you mean memory.recompute?"
    )
    path.write_text("[training]\nlocal_batch_size = 8")
    assert load_problem("--config", str(path)).endswith(
        "unknown key; did you mean training.micro_batch_size?"
    )


def test_unrelated_keys_have_no_suggestion() -> None:
    assert suggest("memory.zebra") is None
    assert suggest("mode") is None, "too general without its section"
