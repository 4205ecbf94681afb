"""What a self-check says of numbers that are apart, and of command lines that are wrong."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from trainer.config.parse import load
from trainer.selfcheck.__main__ import default_world_size, main, split_world_size
from trainer.selfcheck.comparison import (
    SCALAR_TOLERANCE,
    TENSOR_TOLERANCE,
    StepDifference,
    comparison_table,
    relative_error,
    within_tolerance,
    worst_over_ranks,
)
from trainer.selfcheck.worker import max_relative_error

ALONE = [StepDifference(loss=5.0, grad_norm=0.5, tensor_errors={"gradient of a": 0.0, "a": 0.0, "b": 0.0})] * 2
FIRST = StepDifference(loss=5.0, grad_norm=0.5, tensor_errors={"gradient of a": 1e-14, "a": 2e-14})
SECOND = StepDifference(loss=5.0, grad_norm=0.5, tensor_errors={"b": 3e-14})


def judged(*changed: StepDifference) -> bool:
    return within_tolerance(ALONE, worst_over_ranks(ALONE, [[FIRST, FIRST], [SECOND, SECOND], [FIRST, *changed]]))


def test_rounding_is_the_same() -> None:
    assert judged(replace(FIRST, loss=5 + 1e-13, grad_norm=0.5 - 1e-13))


@pytest.mark.parametrize("value", [5 * (1 + 1.1 * SCALAR_TOLERANCE), math.nan, math.inf, 0.0])
def test_one_rank_with_another_number_is_a_difference(value: float) -> None:
    assert not judged(replace(FIRST, loss=value))
    assert not judged(replace(FIRST, grad_norm=value / 10))


@pytest.mark.parametrize("far", [1.1 * TENSOR_TOLERANCE, math.inf])
def test_one_tensor_of_one_rank_in_one_update_is_a_difference(far: float) -> None:
    assert not judged(replace(FIRST, tensor_errors=FIRST.tensor_errors | {"gradient of a": far}))


def test_a_tensor_that_no_rank_has_is_a_difference() -> None:
    mesh = worst_over_ranks(ALONE, [[FIRST, FIRST]])
    assert mesh[0].tensor_errors["b"] == math.inf
    assert not within_tolerance(ALONE, mesh)


def test_a_table_names_what_differs_most() -> None:
    worse = replace(FIRST, loss=5.5, tensor_errors=FIRST.tensor_errors | {"a": 0.25})
    mesh = worst_over_ranks(ALONE, [[FIRST, worse], [SECOND, SECOND]])
    heading, first, second, worst = comparison_table(ALONE, mesh)
    assert heading.split("  ")[0] == "update"
    assert first.split() == ["1", "5", "5", "0.5", "0.5", "3.0e-14"]
    assert second.split() == ["2", "5", "5.5", "0.5", "0.5", "2.5e-01"]
    assert worst == "farthest: a 2.5e-01, b 3.0e-14, gradient of a 1.0e-14"


def test_distances_are_relative_and_infinite_where_there_is_no_number() -> None:
    theirs = torch.tensor([4.0, -8.0], dtype=torch.float64)
    assert (
        max_relative_error(theirs.clone(), theirs)
        == relative_error(1.0, 1.0)
        == max_relative_error(theirs * 0, theirs * 0)
        == 0
    )
    assert max_relative_error(theirs + torch.tensor([0.0, 2.0]), theirs) == relative_error(6.0, 8.0) == 0.25
    for ours in (theirs * math.nan, theirs / 0, theirs[:1], theirs.view(2, 1)):
        assert max_relative_error(ours, theirs) == math.inf
    assert (
        max_relative_error(theirs, None)
        == max_relative_error(theirs, theirs * 0)
        == max_relative_error(theirs, theirs * math.nan)
        == math.inf
    )
    assert relative_error(math.nan, math.nan) == relative_error(1.0, 0.0) == relative_error(1.0, math.inf) == math.inf


# ---- the command line


def test_the_number_of_processes_is_no_key() -> None:
    words = ["--world-size", "8", "--config", "debug", "--world-size=16", "--training.seed", "1"]
    assert split_world_size(words) == (["--config", "debug", "--training.seed", "1"], "16")
    assert split_world_size(["--world-size"]) == ([], "")
    assert split_world_size([]) == ([], None)


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ([], 2),
        (["--parallelism.dp_shard", "1"], 1),
        (["--parallelism.cp", "4", "--parallelism.tp", "8"], 32),
        (["--config", "llama3_405b_128k"], 4096),
    ],
)
def test_left_out_it_is_the_product_of_the_stated_degrees(options: list[str], processes: int) -> None:
    assert default_world_size(load(options)) == processes


@pytest.mark.parametrize(
    ("words", "problem", "world"),
    [
        (["--world-size", "two"], "command line: --world-size two must be an integer, at least 1", ""),
        (["--world-size", "0"], "command line: --world-size 0 must be an integer, at least 1", ""),
        (["--training.step", "3"], "there is no such key; did you mean steps?", ""),
        (["--parallelism.tp", "16"], "parallelism.tp = 16 must divide model.num_heads = 8", " for 16 processes"),
    ],
)
def test_a_wrong_configuration_is_told_as_by_the_launcher(
    words: list[str], problem: str, world: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert problem in said.err
    assert said.err.endswith(f" in train_configs/debug.toml{world}\n")


def test_help_has_the_usage_and_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "--no.such", "key"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("python -m trainer.selfcheck [--config NAME|PATH] [--world-size N]")
    assert "--parallelism.cp_method  " in said


def test_a_run_is_made_small_without_torch() -> None:
    code = "import sys, trainer.selfcheck.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
