"""A self-check says that a mesh computes what one process computes, and notices when it does not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks import context  # The server of the other tests, which has what these need too.
from tests.system.runs import ROOT, is_alive, wait_for
from trainer.config.parse import CONFIG_DIR, deep_merge, load
from trainer.errors import RankFailedError
from trainer.selfcheck import processes
from trainer.selfcheck.__main__ import compare_with_reference
from trainer.selfcheck.shrink import MeshCase, ReducedRun, reduce_run, write_sample_documents

pytestmark = pytest.mark.ranks

ONE_LAYER = ["--model.num_layers", "1"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "trainer.selfcheck", *words]


def made_small(folder: Path, *words: str) -> tuple[ReducedRun, MeshCase]:
    write_sample_documents(folder)
    small = reduce_run(load([*ONE_LAYER, *words]).training_stages[0].config, 2, folder)
    return small, small.mesh_cases[0]


def altered(pairing: MeshCase, section: str, **values: object) -> MeshCase:
    config = type(pairing.config).model_validate(deep_merge(pairing.config.model_dump(), {section: values}))
    return replace(pairing, config=config)


def test_a_mesh_is_the_same_as_one_process() -> None:
    words = "--world-size 64 --parallelism.cp 4 --parallelism.dp_replicate 2 --training.global_batch_size 31"
    memory = "--memory.optimizer_placement host --memory.optimizer_dtype bfloat16"
    called = command(*words.split(), *memory.split())
    done = subprocess.run(called, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert said[:2] == ["a run of 64 processes, made small:", "mesh    dp_replicate 2, dp_shard 8 -> 2, cp 4 -> 2"]
    at = said.index("dp_replicate 2 x dp_shard 2 x cp 2: the same")
    assert [line.split()[0] for line in said[at + 1 : at + 6]] == ["update", "1", "2", "3", "farthest:"]
    for line in said[at + 2 : at + 5]:
        _, loss, of_mesh, norm, norm_of_mesh, far = line.split()
        assert float(loss) == pytest.approx(float(of_mesh), rel=1e-11)
        assert float(norm) == pytest.approx(float(norm_of_mesh), rel=1e-11)
        assert float(far) < 1e-11
    assert said[-1].startswith("the same (numbers within 1e-10")


def test_other_weights_are_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert context
    small, pairing = made_small(tmp_path)
    other = altered(pairing, "training", seed=1)
    assert (
        compare_with_reference(replace(small, mesh_cases=[pairing, replace(other, name="another seed")]), tmp_path, 2)
        == 1
    )
    said = capsys.readouterr().out
    assert "dp_shard 2: the same\n" in said
    assert "another seed: DIFFERENT\n" in said
    assert "NOT the same: another seed (" in said


def test_a_rank_that_raises_is_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, pairing = made_small(tmp_path)
    lost = altered(pairing, "data", corpus=str(tmp_path / "lost"))
    assert compare_with_reference(replace(small, mesh_cases=[lost]), tmp_path, 2) == 1
    said = capsys.readouterr().out
    assert re.search(r"\ndp_shard 2: FAILED: rank [01]: DataError: data.corpus = .*/lost \(corpus.py:\d+\)\n", said)
    assert "NOT the same: dp_shard 2 (" in said


def test_nothing_is_the_same_as_a_process_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, pairing = made_small(tmp_path)
    lost = altered(pairing, "data", corpus=str(tmp_path / "lost"))
    assert compare_with_reference(replace(small, reference=lost.config), tmp_path, 2) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("one process: FAILED: rank 0: ")


def test_ranks_that_take_too_long_are_ended(tmp_path: Path) -> None:
    _, pairing = made_small(tmp_path)
    with pytest.raises(RankFailedError, match="ranks 0, 1 were not done in 0 s"):
        processes.run_ranks(pairing.config, 2, tmp_path / "slow", reference=tmp_path / "reference.pt", timeout=0)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_no_process_outlives_it(number: int, tmp_path: Path) -> None:
    checking = subprocess.Popen(
        command("--config", "copy"),
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # One that is killed leaves its folder.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    below: list[int] = []

    def started() -> bool:
        below[:] = descendants(checking.pid)
        return len(below) > 3

    assert wait_for(started, 60)
    if number == signal.SIGINT:
        os.killpg(checking.pid, number)  # As a terminal does.
    else:
        checking.kill()
    _, said = checking.communicate(timeout=30)
    assert wait_for(lambda: not any(map(is_alive, below)), 10)
    assert said.decode() == ("error: interrupted\n" if number == signal.SIGINT else "")


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            below = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        for child in below:
            found += [child, *descendants(child)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIG_DIR.glob("*.toml")))
def test_every_shipped_run_is_the_same_on_its_mesh(name: str) -> None:
    began = time.monotonic()
    done = subprocess.run(command("--config", name), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 180
