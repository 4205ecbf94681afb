"""Stages, sources and data mixes: their resolved configurations and error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.config.toml_format import to_toml
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError
from trainer.step.lr_schedule import learning_rate
from trainer.storage.run_dir import stage_position
from trainer.storage.train_state import StagePosition

TWO = {
    "model": {"num_layers": 3, "rope": {"kind": "llama3", "factor": 8.0}},
    "training": {"global_batch_size": 6, "micro_batch_size": 2},
    "schedule": {"kind": "wsd", "warmup_steps": 5},
    "parallelism": {"tp": 2, "cp_method": "ring"},
    "stage": [
        {"name": "a", "seq_len": 128, "steps": 10},
        {
            "name": "b",
            "seq_len": 512,
            "tokens": 10_000,
            "batch_tokens": 1024,
            "micro_batch_size": 1,
            "rope": {"theta": 8e6, "kind": "default"},
            "mask": "none",
            "packing": "concat",
            "lr": 1e-5,
            "warmup": 0.1,
            "schedule": {"kind": "constant"},
            "optimizer": "fresh",
            "parallelism": {"cp": 4},
            "memory": {"recompute": "full"},
        },
    ],
}


def configured(**values: Any) -> Recipe:
    return Recipe.model_validate(values)


def test_a_stage_overrides_the_sections() -> None:
    first, second = configured(**TWO).training_stages
    assert (first.config.training.seq_len, first.config.training.steps) == (128, 10)
    assert first.config.training.global_batch_size == 6
    assert first.config.model == configured(**TWO).model
    assert (first.config.parallelism.tp, first.config.parallelism.cp) == (2, 1)
    assert type(first.config) is type(second.config) is Config
    training = second.config.training
    schedule = second.config.schedule
    assert (training.seq_len, training.global_batch_size, training.steps) == (512, 2, 10)
    assert training.micro_batch_size == 1
    assert second.config.model.rope.model_dump(exclude_unset=True) == {
        "theta": 8e6,
        "kind": "default",
    }
    assert second.config.model.num_layers == 3
    assert (second.config.data.mask, second.config.data.packing) == ("none", "concat")
    assert (second.config.optimizer.lr, schedule.warmup_steps, schedule.kind) == (
        1e-5,
        1,
        "constant",
    )
    mesh = second.config.parallelism
    assert (mesh.tp, mesh.cp, mesh.cp_method) == (2, 4, "ring")
    assert second.config.memory.recompute == "full"
    assert (second.resets_optimizer, first.resets_optimizer) == (True, False)
    assert [
        (stage.start_step, stage.end_step, stage.total_steps) for stage in (first, second)
    ] == [
        (0, 10, 20),
        (10, 20, 20),
    ]
    assert stage_position(first) == StagePosition(name="a", index=0, start_step=0)
    # With a length in tokens, the number of steps depends on the batch size.
    assert stage_position(second) == StagePosition(
        name="b", index=1, start_step=10, global_batch_size=2
    )


def test_a_run_without_stages_has_one_stage() -> None:
    config = configured(training={"steps": 7})
    (only,) = config.training_stages
    assert (only.config, only.name, only.start_step, only.end_step, only.total_steps) == (
        Config(training=config.training),
        "",
        0,
        7,
        7,
    )


@pytest.mark.parametrize(
    ("over", "expected"), [("stage", [0.5, 1.0, 0.5, 1.0]), ("run", [0.5, 1.0, 1.0, 1.0])]
)
def test_the_learning_rate_curve_spans_a_stage_or_the_run(
    over: str, expected: list[float]
) -> None:
    stages = [{"name": name, "seq_len": 8, "steps": 2} for name in ("a", "b")]
    schedule = {"kind": "constant", "warmup_steps": 2, "over": over}
    config = configured(stage=stages, schedule=schedule, optimizer={"lr": 1.0})
    first, second = config.training_stages
    rates = [
        learning_rate(stage, step)
        for stage, step in ((first, 1), (first, 2), (second, 3), (second, 4))
    ]
    assert rates == expected


def test_a_written_recipe_parses_to_equal_stages(tmp_path: Path) -> None:
    given = TWO | {
        "data": {
            "sources": {"x": {"path": "docs"}},
            "mix": [{"source": "x", "weight": 0.3, "max_length": 9}],
        }
    }
    config = Recipe.model_validate(given)
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(config))
    again = load(["--config", str(path)])
    assert again.training_stages == config.training_stages
    assert to_toml(again) == to_toml(config)


def problems(**values: Any) -> list[str]:
    return checks.problems(configured(**values), 2)


STAGE = {"name": "a", "seq_len": 64}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"stage": [STAGE]}, 'stage "a": exactly one of steps and tokens must be given'),
        (
            {"stage": [STAGE | {"steps": 1, "tokens": 64}]},
            'stage "a": exactly one of steps and tokens must be given',
        ),
        (
            {"stage": [STAGE | {"steps": 1, "batch_tokens": 100}]},
            'stage "a": batch_tokens = 100 must be a multiple of seq_len = 64, as 64 or 128 is',
        ),
        (
            {"stage": [STAGE | {"steps": 1, "batch_tokens": 10}]},
            'stage "a": batch_tokens = 10 must be a multiple of seq_len = 64, as 64 is',
        ),
        ({"stage": [STAGE | {"steps": 1}] * 2}, 'two stages are named "a"'),
        (
            {
                "stage": [STAGE | {"steps": 1}, STAGE | {"name": "b", "steps": 1}],
                "checkpoint": {"enabled": False},
            },
            "checkpoint.enabled = false: each stage starts from a checkpoint of the one before",
        ),
        (
            {"stage": [STAGE | {"steps": 1, "warmup": 0.1, "schedule": {"warmup_steps": 3}}]},
            'stage "a": warmup = 0.1 and schedule.warmup_steps are both given; keep one',
        ),
        (
            {"stage": [STAGE | {"steps": 1, "parallelism": {"cp": 3}}]},
            'stage "a": the mesh pp 1 x dp_replicate 1 x dp_shard 1 x cp 3 x tp 1 needs 3 processes, but the world size is 2',
        ),
        (
            {"stage": [STAGE | {"steps": 1, "mix": [{"source": "x"}]}]},
            'stage "a": data.mix: source = "x" is not one of corpus',
        ),
        (
            {"data": {"sources": {"x": {"path": "docs"}}}},
            "data.sources.x: no mix and no validation set uses this source",
        ),
        (
            {"data": {"sources": {"corpus": {"path": "docs"}}}},
            "data.sources.corpus is reserved for data.corpus",
        ),
        (
            {"data": {"sources": {"x": {"path": "nowhere"}}, "mix": [{"source": "x"}]}},
            'data.sources.x.path = "nowhere" is neither "python-stdlib", "copy", a dataset ("hf:NAME"), nor an',
        ),
        (
            {"data": {"mix": [{"source": "corpus", "min_length": 8, "max_length": 8}]}},
            "data.mix: max_length = 8 must be above min_length = 8",
        ),
        (
            {"data": {"mix": [{"source": "corpus"}, {"source": "corpus"}]}},
            "data.mix: corpus occurs twice",
        ),
        (
            {"data": {"corpus": "copy", "mix": [{"source": "corpus"}]}},
            'data.corpus = "copy" cannot be part of data.mix',
        ),
        (
            {
                "data": {
                    "mix": [
                        {"source": "corpus"},
                        {"source": "corpus", "max_length": 9, "weight": 1e-4},
                    ]
                }
            },
            "data.mix: weights [1.0, 0.0001] must not differ by more than a factor of 1000",
        ),
        (
            {"stage": [STAGE | {"steps": 1, "warmup": 0.1, "schedule": {"over": "run"}}]},
            'stage "a": warmup = 0.1 is a fraction of one stage; with schedule.over = "run" use',
        ),
        (
            {"training": {"steps": 5, "seq_len": 8}, "stage": [STAGE | {"steps": 1}]},
            "training.steps = 5 is not used with [[stage]]: each stage has its own",
        ),
        (
            {"optimizer": {"lr": 1e-3}, "stage": [STAGE | {"steps": 1, "lr": 1e-4}]},
            "optimizer.lr is not used: every [[stage]] sets lr",
        ),
        (
            {
                "model": {"rope": {"theta": 1e5}},
                "stage": [STAGE | {"steps": 1, "rope": {"theta": 1e6}}],
            },
            "model.rope is not used: every [[stage]] sets rope",
        ),
    ],
)
def test_a_stage_problem_names_stage_keys_and_rule(values: dict[str, Any], problem: str) -> None:
    assert [found for found in problems(**values) if found.startswith(problem)]


FILE_ERRORS = {
    '[[stage]]\nname = "a"\nseq_len = "x"\nsteps = 1': 'stage "a": seq_len = "x" must be an integer, not a string',
    "[[stage]]\nseq_len = 8\nsteps = 1": "stage 1: name is missing",
    '[[stage]]\nname = "a"\nseq_len = 8\nstep = 1': 'stage "a": step = 1: unknown key; did you mean steps?',
    '[[stage]]\nname = "a"\nseq_len = 8\nrope = { tehta = 1.0 }': 'stage "a": rope.tehta = 1.0: unknown key; did you mean theta?',
    '[[stage]]\nname = "a"\nseq_len = 8\nparallelism = { cpp = 1 }': 'stage "a": parallelism.cpp = 1: unknown key; did you mean pp?',
    '[[stage]]\nname = "a"\nseq_len = 8\nmix = [{ source = "x", weight = 0.0 }]': 'stage "a": mix 1: weight = 0.0 must be above 0',
    '[data]\nmix = [{ source = "x" }, { weight = 1.0 }]': "data.mix 2: source is missing",
    '[data.sources.x]\npth = "docs"': "data.sources.x.path is missing",
    '[stage]\nname = "a"': "[stage] must be a list",
}


@pytest.mark.parametrize("text", FILE_ERRORS)
def test_an_error_in_a_table_names_the_table(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(["--config", str(path)])
    assert [problem for problem in caught.value.problems if FILE_ERRORS[text] in problem], (
        caught.value.problems
    )


@pytest.mark.parametrize(
    "option", ["--stage.steps", "--data.mix", "--data.sources.x.path", "--stage"]
)
def test_tables_cannot_be_set_on_the_command_line(option: str) -> None:
    with pytest.raises(ConfigError, match="can only be set in the file"):
        load([option, "1"])
