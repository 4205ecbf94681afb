"""Self-check: comparison of results, and command-line errors."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from trainer.config.parse import load
from trainer.selfcheck.__main__ import default_world_size, main
from trainer.selfcheck.comparison import (
    SCALAR_TOLERANCE,
    TENSOR_TOLERANCE,
    StepDifference,
    comparison_table,
    errors_by_kind,
    relative_error,
    within_tolerance,
    worst_over_ranks,
)
from trainer.selfcheck.worker import kind_of_state, least_scales, max_relative_error

VALUES = {"loss": 5.0, "grad_norm": 0.5, "tokens": 96.0}
MOMENT = "optimizer.exp_avg.a"
A = "model.a"
B = "model.b"
REFERENCE = [StepDifference(values=VALUES, tensor_errors={MOMENT: 0.0, A: 0.0, B: 0.0})] * 2
FIRST = StepDifference(values=VALUES, tensor_errors={MOMENT: 1e-14, A: 2e-14})
SECOND = StepDifference(values=VALUES, tensor_errors={B: 3e-14})


def matches(*changed: StepDifference) -> bool:
    return within_tolerance(
        REFERENCE,
        worst_over_ranks(REFERENCE, [[FIRST, FIRST], [SECOND, SECOND], [FIRST, *changed]]),
    )


def test_rounding_errors_match() -> None:
    assert matches(replace(FIRST, values=VALUES | {"loss": 5 + 1e-13, "grad_norm": 0.5 - 1e-13}))


@pytest.mark.parametrize("value", [5 * (1 + 1.1 * SCALAR_TOLERANCE), math.nan, math.inf, 0.0])
def test_a_different_loss_norm_or_count_on_one_rank_is_a_mismatch(value: float) -> None:
    for name, expected in VALUES.items():
        assert not matches(replace(FIRST, values=VALUES | {name: value * expected / 5}))


@pytest.mark.parametrize("error", [1.1 * TENSOR_TOLERANCE, math.inf])
def test_a_different_tensor_on_one_rank_in_one_step_is_a_mismatch(error: float) -> None:
    assert not matches(replace(FIRST, tensor_errors=FIRST.tensor_errors | {MOMENT: error}))
    assert not matches(replace(FIRST, tensor_errors=FIRST.tensor_errors | {A: error}))


def test_a_tensor_missing_on_all_ranks_is_a_mismatch() -> None:
    mesh = worst_over_ranks(REFERENCE, [[FIRST, FIRST]])
    assert mesh[0].tensor_errors[B] == math.inf
    assert not within_tolerance(REFERENCE, mesh)


def test_the_table_names_the_largest_errors() -> None:
    worse = replace(
        FIRST,
        values=VALUES | {"loss": 5.5, "tokens": 97.0},
        tensor_errors=FIRST.tensor_errors | {A: 0.25},
    )
    mesh = worst_over_ranks(REFERENCE, [[FIRST, worse], [SECOND, SECOND]])
    heading, first, second, worst, other = comparison_table(REFERENCE, mesh)
    assert heading.split("  ")[0] == "step"
    assert first.split() == ["1", "5", "5", "0.5", "0.5", "3.0e-14"]
    assert second.split() == ["2", "5", "5.5", "0.5", "0.5", "2.5e-01"]
    assert worst == "largest: model.a 2.5e-01, model.b 3.0e-14, optimizer.exp_avg.a 1.0e-14"
    assert other == "step 2: tokens 97, one process 96"
    assert errors_by_kind(REFERENCE, mesh) == {
        "loss": 0.1,
        "gradient norm": 0.0,
        "other metrics": pytest.approx(1 / 96),
        "weights": 0.25,
        "moments": 1e-14,
    }


def test_errors_are_relative_and_infinite_if_undefined() -> None:
    expected = torch.tensor([4.0, -8.0], dtype=torch.float64)
    assert (
        max_relative_error(expected.clone(), expected)
        == relative_error(1.0, 1.0)
        == max_relative_error(expected * 0, expected * 0)
        == 0
    )
    assert (
        max_relative_error(expected + torch.tensor([0.0, 2.0]), expected)
        == relative_error(6.0, 8.0)
        == 0.25
    )
    for actual in (expected * math.nan, expected / 0, expected[:1], expected.view(2, 1)):
        assert max_relative_error(actual, expected) == math.inf
    assert (
        max_relative_error(expected, None)
        == max_relative_error(expected, expected * 0)
        == max_relative_error(expected, expected * math.nan)
        == math.inf
    )
    assert (
        relative_error(math.nan, math.nan)
        == relative_error(1.0, 0.0)
        == relative_error(1.0, math.inf)
        == math.inf
    )


def test_a_moment_that_vanishes_is_compared_on_the_scale_of_its_kind() -> None:
    """One process finds zeros, a mesh rounding errors: as for queries and keys where each query
    sees one key.
    """
    zeros = torch.zeros(3, dtype=torch.float64)
    state = {
        A: zeros + 4,
        MOMENT: zeros - 1e-2,
        "optimizer.exp_avg.b": zeros,
        "optimizer.exp_avg_sq.a": zeros,
    }
    least = least_scales(state)
    assert least == {
        "model": pytest.approx(4e-5),
        "optimizer.exp_avg": pytest.approx(1e-7),
        "optimizer.exp_avg_sq": 0.0,
    }
    scale = least[kind_of_state("optimizer.exp_avg.b")]
    assert max_relative_error(zeros + 1e-18, zeros, least=scale) < TENSOR_TOLERANCE
    for wrong in (1e-15, 1e-3, math.inf, math.nan):
        assert max_relative_error(zeros + wrong, zeros, least=scale) > TENSOR_TOLERANCE
    assert (
        max_relative_error(zeros + 1e-18, zeros, least=least["optimizer.exp_avg_sq"]) == math.inf
    )


# ---- command line


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--seed", "3"], "--seed is only used with --random"),
        (["--max-processes", "3"], "--max-processes is only used with --random"),
        (
            ["--random", "3", "--training.seed", "1"],
            "give --random or --case, and no configuration, override or --world-size",
        ),
        (
            ["--case", "parallelism.cq=2"],
            '"parallelism.cq" is none of the keys that random configurations vary; did you',
        ),
        (
            ["--case", "nothing=2"],
            '"nothing" is none of the keys that random configurations vary; known are parallelism.',
        ),
        (["--case", "parallelism.cp=2 parallelism.cp=4"], "parallelism.cp is given twice"),
        (["--case", "'parallelism.cp=2"], "--case: No closing quotation: 'parallelism.cp=2"),
        (
            ["--case", "parallelism.pp_schedule=GPipe"],
            'parallelism.pp_schedule = "GPipe" has no effect without parallelism.pp = 2 or 3',
        ),
        (
            ["--case", "parallelism.dp_shard=3 parallelism.cp=4"],
            "12 processes are more than 8",
        ),
        (
            ["--random", "2", "--max-processes", "9"],
            "--max-processes 9 is above 8",
        ),
        (["--random", "2", "--device", "cuda"], "--device cuda: this machine has no GPU"),
        (
            ["--case", "parallelism.cp=2", "--device", "cuda"],
            "--device cuda: this machine has no GPU",
        ),
        (["--case", "parallelism.cp=7"], 'parallelism.cp = "7" is not one of 1, 2, 3, 4'),
        (
            ["--case", "parallelism.tp=4 'model.num_heads=6 / 3'"],
            "parallelism.tp = 4 must divide model.num_heads = 6",
        ),
    ],
)
def test_options_of_random_cases_are_checked(
    words: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.selfcheck.__main__.count_gpus", lambda: 0)
    assert main(words) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("value", ["two", "0", "-1"])
def test_a_wrong_world_size_is_an_error(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world-size", "8", f"--world-size={value}"]) == 2
    assert (
        capsys.readouterr().err
        == f"error: command line: --world-size {value} must be an integer, at least 1\n"
    )


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ([], 2),
        (["--parallelism.dp_shard", "1"], 1),
        (["--parallelism.cp", "4", "--parallelism.tp", "8"], 32),
        (["--config", "llama3_405b_128k"], 4096),
    ],
)
def test_the_default_world_size_is_the_product_of_the_stated_degrees(
    options: list[str], processes: int
) -> None:
    assert default_world_size(load(options)) == processes


@pytest.mark.parametrize(
    ("words", "problem", "world"),
    [
        (["--training.step", "3"], "unknown key; did you mean steps?", ""),
        (
            ["--parallelism.tp", "16"],
            "parallelism.tp = 16 must divide model.num_heads = 8",
            " for 16 processes",
        ),
        (
            ["--world-size", "8", "--parallelism.tp=16"],
            "needs 16 processes, but the world size is 8",
            " for 8 processes",
        ),
    ],
)
def test_configuration_errors_are_reported_as_by_the_launcher(
    words: list[str], problem: str, world: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert problem in printed.err
    assert printed.err.endswith(f" with train_configs/debug.toml{world}\n")


def test_help_has_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "--no.such", "key"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python -m trainer.selfcheck ")
    assert all(f"\n  {option} " in printed for option in ("--config", "--world-size", "--random"))
    assert "--section.key VALUE sets any key" in printed


def test_selfcheck_imports_no_torch() -> None:
    code = "import sys, trainer.selfcheck.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
