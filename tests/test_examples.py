"""The examples run as their first lines say, and hold themselves to one process."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.ranks import team
from tests.system.runs import become, free_port

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4

pytestmark = pytest.mark.ranks
compiled = (
    pytest.mark.slow,
    pytest.mark.skipif(
        not any(map(shutil.which, ("c++", "g++", "clang++"))),
        reason="torch.compile needs a C++ compiler",
    ),
)


def run(name: str, *options: str) -> list[str]:
    """The output lines of an example on four ranks."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
    ]
    done = subprocess.run(
        [*launcher, "-m", f"examples.{name}", *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run_here(rank: int, port: int, log: Path, name: str, options: tuple[str, ...]) -> None:
    become(rank, RANKS, port, log)
    sys.argv[1:] = options
    runpy.run_module(f"examples.{name}", run_name="__main__", alter_sys=True)
    sys.stdout.flush()


def run_in_pool(name: str, *options: str, log: Path) -> list[str]:
    """As `run`, on ranks that have imported torch already."""
    port = free_port()
    with team(
        [partial(run_here, rank, port, log, name, options) for rank in range(RANKS)], fresh=True
    ) as ranks:
        outcomes = ranks.outcomes(60, failed=lambda outcome: not outcome.succeeded)
    assert len(outcomes) == RANKS and all(outcome.succeeded for outcome in outcomes.values()), (
        outcomes
    )
    return log.read_text().splitlines()


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        pytest.param(
            (), "ring (4 ranks), layout doc_headtail (as configured)", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--rotation", "alltoall"),
            "alltoall (4 ranks), layout doc_headtail (as configured)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--rotation", "allgather"),
            "allgather (4 ranks), layout balanced (as configured)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--compile",),
            "ring (4 ranks), layout doc_headtail (as configured), compiled",
            marks=compiled,
        ),
        pytest.param(
            ("--rotation", "allgather", "--compile"),
            "allgather (4 ranks), layout balanced (as configured), compiled",
            marks=compiled,
        ),
    ],
)
def test_attention_on_four_ranks_equals_one_rank(options: tuple[str, ...], plan: str) -> None:
    *errors, summary = run("context_parallel", *options)
    assert [line.split(":")[0].strip() for line in errors] == ["out", "dq", "dk", "dv"]
    for line in errors:
        error, largest = map(float, re.findall(r"[\d.]+(?:e-\d+)?", line))
        assert error <= 1e-4 <= largest
    assert summary == plan


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        pytest.param(
            (), "hybrid (2 x 2, ring across), layout doc_headtail", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--ulysses", "1"),
            "hybrid (1 x 4, ring across), layout doc_headtail",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--ulysses", "4"),
            "hybrid (4 x 1, ring across), layout doc_headtail",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--compile",), "hybrid (2 x 2, ring across), layout doc_headtail", marks=compiled
        ),
    ],
)
def test_model_on_four_ranks_has_the_losses_of_one_rank(
    options: tuple[str, ...], plan: str
) -> None:
    check_losses(run("unified_attention", *options), plan, options)


def test_model_on_ranks_of_the_pool_has_the_losses_of_one_rank(tmp_path: Path) -> None:
    said = run_in_pool("unified_attention", log=tmp_path / "log")
    check_losses(said, "hybrid (2 x 2, ring across), layout doc_headtail")


def check_losses(said: list[str], plan: str, options: tuple[str, ...] = ()) -> None:
    summary, losses = said
    assert summary == f"{plan} (as configured){', compiled' if '--compile' in options else ''}"
    found = re.fullmatch(
        r"losses on 4 ranks (\S+) \.\.\. (\S+), on 1 rank (\S+) \.\.\. (\S+)", losses
    )
    assert found
    first, last, first_alone, last_alone = map(float, found.groups())
    assert (first, last) == pytest.approx((first_alone, last_alone), rel=1e-5)
    assert last < first - 1, "it should learn"
