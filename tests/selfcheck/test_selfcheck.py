"""Self-check: reports whether a mesh matches one process, and detects mismatches."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import pytest

# The fork server of the other tests, with the same imports.
from tests.ranks import context
from tests.system.runs import ROOT, is_alive, wait_for
from trainer.config.parse import CONFIG_DIR, deep_merge, load
from trainer.errors import RankFailedError
from trainer.selfcheck.__main__ import compare_with_reference, main
from trainer.selfcheck.processes import RankPool
from trainer.selfcheck.shrink import MeshCase, ReducedRun, reduce_run, write_sample_documents

pytestmark = pytest.mark.ranks

ONE_LAYER = ["--model.num_layers", "1"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "trainer.selfcheck", *words]


def reduced_run(folder: Path, *words: str) -> tuple[ReducedRun, MeshCase]:
    write_sample_documents(folder)
    small = reduce_run(load([*ONE_LAYER, *words]).training_stages[0].config, 2, folder)
    return small, small.mesh_cases[0]


def altered(mesh_case: MeshCase, section: str, **values: object) -> MeshCase:
    launch = mesh_case.launch
    config = type(launch.config).model_validate(
        deep_merge(launch.config.model_dump(), {section: values})
    )
    return replace(mesh_case, launch=replace(launch, config=config))


def compare(reduced: ReducedRun, folder: Path) -> int:
    with RankPool() as pool:
        return compare_with_reference(reduced, folder, 2, pool)


@pytest.fixture(autouse=True)
def shared_server() -> None:
    """Starts the fork server of the other tests, unless it runs."""
    assert context
    forkserver.ensure_running()


def test_a_mesh_matches_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--world-size 64 --parallelism.cp 4 --parallelism.dp_replicate 2 --training.global_batch_size 31"
    memory = "--memory.optimizer_placement host --memory.optimizer_dtype bfloat16"
    status, (out, err) = main([*words.split(), *memory.split()]), capsys.readouterr()
    assert (status, err) == (0, "")
    said = out.splitlines()
    assert said[:2] == [
        "a run of 64 processes, reduced:",
        "mesh    dp_replicate 2, dp_shard 8 -> 2, cp 4 -> 2",
    ]
    at = said.index("dp_replicate 2 x dp_shard 2 x cp 2: match")
    assert [line.split()[0] for line in said[at + 1 : at + 6]] == [
        "step",
        "1",
        "2",
        "3",
        "largest:",
    ]
    for line in said[at + 2 : at + 5]:
        _, loss, of_mesh, norm, norm_of_mesh, far = line.split()
        assert float(loss) == pytest.approx(float(of_mesh), rel=1e-11)
        assert float(norm) == pytest.approx(float(norm_of_mesh), rel=1e-11)
        assert float(far) < 1e-11
    assert said[-1].startswith("match (losses and norms within 1e-10")


@pytest.mark.slow
def test_a_different_seed_is_a_mismatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, mesh_case = reduced_run(tmp_path)
    other = altered(mesh_case, "training", seed=1)
    assert (
        compare(
            replace(small, mesh_cases=[mesh_case, replace(other, name="another seed")]), tmp_path
        )
        == 1
    )
    said = capsys.readouterr().out
    assert "dp_shard 2: match\n" in said
    assert "another seed: MISMATCH\n" in said
    assert "MISMATCH: another seed (" in said


def test_the_error_of_a_rank_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, mesh_case = reduced_run(tmp_path)
    lost = altered(mesh_case, "data", corpus=str(tmp_path / "lost"))
    assert compare(replace(small, mesh_cases=[lost]), tmp_path) == 1
    said = capsys.readouterr().out
    assert re.search(
        r"\ndp_shard 2: FAILED: rank [01]: CorpusRefusedError: data.corpus = .*/lost.* \(corpus.py:\d+\)\n",
        said,
    )
    assert "MISMATCH: dp_shard 2 (" in said


def test_a_failed_reference_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, mesh_case = reduced_run(tmp_path)
    lost = altered(mesh_case, "data", corpus=str(tmp_path / "lost"))
    assert compare(replace(small, reference=replace(lost.launch, world_size=1)), tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("one process: FAILED: rank 0: ")


def test_a_timeout_kills_the_ranks(tmp_path: Path) -> None:
    _, mesh_case = reduced_run(tmp_path)
    with (
        pytest.raises(RankFailedError, match="ranks 0, 1 did not finish in 0 s"),
        RankPool(timeout=0) as pool,
    ):
        pool.run(mesh_case.launch, reference=tmp_path / "tensors")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_self_check(number: int, tmp_path: Path) -> None:
    checking = subprocess.Popen(
        command("--config", "copy"),
        cwd=ROOT,
        # A killed process does not remove its temporary folder.
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    children: list[int] = []

    def started() -> bool:
        children[:] = descendants(checking.pid)
        return len(children) > 3

    assert wait_for(started, 60)
    if number == signal.SIGINT:
        os.killpg(checking.pid, number)  # As a terminal does.
    else:
        checking.kill()
    _, said = checking.communicate(timeout=30)
    assert wait_for(lambda: not any(map(is_alive, children)), 10)
    if number == signal.SIGINT:
        assert said.decode() == "error: interrupted\n"


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIG_DIR.glob("*.toml")))
def test_every_shipped_configuration_matches_one_process(name: str) -> None:
    start = time.monotonic()
    done = subprocess.run(
        command("--config", name), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - start < 180
