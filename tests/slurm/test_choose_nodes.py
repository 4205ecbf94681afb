"""Which nodes of a job train: those that pass the preflight, and first those that no event
accuses.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.slurm.choose_nodes import main

NODES = ["n1", "n2", "n3.cluster", "n4"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """All nodes passed."""
    (tmp_path / "slurm" / "preflight").mkdir(parents=True)
    for node in NODES:
        passes(tmp_path, node)
    return tmp_path


def passes(run: Path, node: str, **failed: str) -> None:
    checks = [{"name": "devices", "state": "passed", "detail": "8 GPUs"}]
    checks += [
        {"name": name, "state": "failed", "detail": detail} for name, detail in failed.items()
    ]
    (run / "slurm" / "preflight" / f"{node}.json").write_text(
        json.dumps({"host": node, "checks": checks})
    )


def test_the_first_nodes_train_if_all_are_good(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "2", *NODES]) == 0
    assert capsys.readouterr() == ("n1,n2\n", "")


def test_nodes_that_fail_hang_or_lie_are_left_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passes(run, "n1", product="cuda:3 computes a wrong product", disk="/scratch is full")
    (run / "slurm" / "preflight" / "n2.json").unlink()
    assert main([str(run), "2", *NODES]) == 0
    out, said = capsys.readouterr()
    assert out == "n3.cluster,n4\n"
    assert (
        "n1 is left out: product: cuda:3 computes a wrong product; disk: /scratch is full" in said
    )
    assert "n2 is left out: it did not end the preflight" in said


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"checks": 1}', '{"checks": [1]}', '{"checks": [{"name": 1}]}']
)
def test_a_result_that_says_nothing_is_a_failure(
    run: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (run / "slurm" / "preflight" / "n1.json").write_text(content)
    assert main([str(run), "1", "n1", "n2"]) == 0
    assert capsys.readouterr().out == "n2\n"


def test_too_few_good_nodes_exit_with_3(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passes(run, "n4", clock="late")
    assert main([str(run), "4", *NODES]) == 3
    out, said = capsys.readouterr()
    assert out == ""
    assert said.splitlines()[-1] == (
        'preflight: 3 of the 4 nodes that train passed; to leave them out, submit again with slurm.exclude = "n4"'
    )


def test_accused_nodes_come_last(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        {"event": "straggler", "rank": 3, "host": "n1"},
        {"event": "replica_mismatch", "ranks": [{"rank": 9, "host": "n3"}]},
        {"event": "planned", "host": "n4"},
        ["no event"],
        {"event": "straggler", "host": 3, "ranks": 4},
    ]
    (run / "events.jsonl").write_text(
        "cut\n" + "".join(json.dumps(event) + "\n" for event in events)
    )
    assert main([str(run), "2", *NODES]) == 0
    assert capsys.readouterr().out == "n2,n4\n"
    assert main([str(run), "3", *NODES]) == 0, "needed after all"
    assert capsys.readouterr().out == "n1,n2,n4\n"


def test_it_needs_nothing_that_python_does_not_bring(run: Path) -> None:
    command = [sys.executable, "-S", "-m", "trainer.slurm.choose_nodes", str(run), "1", "n1"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert (done.returncode, done.stdout) == (0, "n1\n"), done.stderr
