"""A killed run resumes and ends bitwise like an uninterrupted one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.system.runs import (
    checkpoints,
    digests,
    end,
    fork,
    forked,
    kill_launcher,
    launch,
    lines,
    metrics,
    state,
    steps,
    tensors,
    timeless,
    wait_for,
    workers,
    write_run,
)

pytestmark = pytest.mark.ranks

HOST = ("--memory.optimizer_placement", "host", "--memory.optimizer_dtype", "bfloat16")
REPLICAS = ("--parallelism.dp_replicate", "2", "--parallelism.dp_shard", "2")
EXACT = ("step", "tokens", "loss", "grad_norm", "lr")


@pytest.mark.parametrize(
    ("processes", "batch_size", "options"),
    [
        pytest.param(1, 24, (), marks=pytest.mark.slow),
        pytest.param(2, 24, ("--memory.recompute", "full"), marks=pytest.mark.slow),
        pytest.param(4, 12, ("--training.deterministic", "true"), marks=pytest.mark.slow),
        pytest.param(4, 12, (*REPLICAS, "--model.tie_embeddings", "true"), marks=pytest.mark.slow),
        pytest.param(2, 24, HOST, marks=pytest.mark.slow),
    ],
    ids=["1", "2", "4", "2x2", "2, moments in bfloat16 on the host"],
)
def test_a_run_killed_after_three_steps_resumes_bitwise(
    tmp_path: Path, processes: int, batch_size: int, options: tuple[str, ...]
) -> None:
    config = write_run(tmp_path)
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    options = (
        *options,
        "--training.global_batch_size",
        str(batch_size),
        # Steps are long enough to kill the run within one.
    )
    assert forked(config, whole, *options, processes=processes).statuses == [0] * processes

    victim = launch(config, killed, *options, processes=processes)
    assert wait_for((killed / "checkpoints" / "step-3").exists)
    assert len(workers(victim.pid)) == processes
    assert kill_launcher(victim) == []
    assert checkpoints(killed) == ["step-3"], "the kill came too late for this test"

    resumed = forked(config, killed, *options, processes=processes)
    assert resumed.statuses == [0] * processes
    assert (
        f"resumed from {killed}/checkpoints/step-3: continuing with step 4, sequence {3 * batch_size}"
        in resumed.said
    )
    assert metrics(killed, *EXACT) == metrics(whole, *EXACT)
    assert steps(killed) == [1, 2, 3, 4, 5, 6]
    for step in ("step-3", "step-6"):
        assert digests(killed / "checkpoints" / step) == digests(whole / "checkpoints" / step)
    assert timeless(killed / "checkpoints" / "step-6") == timeless(
        whole / "checkpoints" / "step-6"
    )
    assert [
        line["step"] for line in lines(killed / "events.jsonl") if line["event"] == "start"
    ] == [0, 3]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_workers_die_with_their_launcher_during_imports(tmp_path: Path, processes: int) -> None:
    victim = launch(write_run(tmp_path), tmp_path / "run", processes=processes)
    assert wait_for(lambda: len(workers(victim.pid)) == processes)
    assert kill_launcher(victim) == []


# ---- repeated kills


@pytest.mark.parametrize(
    ("how", "kills", "num_steps"),
    [
        # The storm kills in the default check.
        pytest.param("forked", 2, 12, marks=pytest.mark.slow),
        pytest.param("launched", 4, 24, marks=pytest.mark.slow),
        pytest.param("forked", 20, 200, marks=pytest.mark.slow),
    ],
)
def test_a_repeatedly_killed_run_ends_bitwise_like_an_uninterrupted_one(
    tmp_path: Path, how: str, kills: int, num_steps: int
) -> None:
    """Every step is saved, so most kills interrupt a save."""
    config = write_run(tmp_path)
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    options = (
        "--training.steps",
        str(num_steps),
        "--checkpoint.interval",
        "1",
        "--checkpoint.keep",
        "2",
    )
    assert forked(config, whole, *options, processes=2).statuses == [0, 0]

    draw = random.Random(0)
    for _ in range(kills):
        before = newest(killed)
        launcher = launch(config, killed, *options, processes=2) if how == "launched" else None
        ranks = [] if launcher else fork(config, killed, *options, processes=2)
        assert wait_for(lambda before=before: newest(killed) > before)  # type: ignore[misc]
        wait_for(lambda: False, draw.uniform(0, 0.3))
        end(ranks)
        assert launcher is None or kill_launcher(launcher) == []
        assert 0 < newest(killed) < num_steps, "the kill came too late for this test"
        assert_checkpoint_and_metrics_complete(killed)

    resumed_step = newest(killed)
    last_step = f"step-{num_steps}"
    last = forked(config, killed, *options, processes=2)
    assert last.statuses == [0, 0]
    assert metrics(killed, *EXACT) == metrics(whole, *EXACT)
    assert {*checkpoints(killed)} == {
        f"step-{step}" for step in (num_steps - 1, num_steps, resumed_step)
    }, "the newest two and the resumed one"
    assert digests(killed / "checkpoints" / last_step) == digests(
        whole / "checkpoints" / last_step
    )
    assert timeless(killed / "checkpoints" / last_step) == timeless(
        whole / "checkpoints" / last_step
    )


def newest(folder: Path) -> int:
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")), default=0)


def assert_checkpoint_and_metrics_complete(folder: Path) -> None:
    """The newest checkpoint is complete, and metrics.jsonl has all steps up to it."""
    step = newest(folder)
    *whole_lines, _ = (folder / "metrics.jsonl").read_text().split("\n")
    assert [f'"step": {number},' in line for number, line in enumerate(whole_lines[:step], 1)] == [
        True
    ] * step
    assert state(folder / "checkpoints" / f"step-{step}")["step"] == step
    # 21 parameters and their Adam state.
    assert len(tensors(folder / "checkpoints" / f"step-{step}")) == 4 * 21


def test_leftovers_of_a_killed_save_are_ignored_and_removed(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    folder = tmp_path / "run"
    assert forked(
        config, folder, "--training.steps", "3", "--schedule.kind", "constant"
    ).statuses == [0]
    for name in (".tmp-step-6", ".tmp-old-step-1", ".tmp-step-9"):
        shutil.copytree(folder / "checkpoints" / "step-3", folder / "checkpoints" / name)
    resumed = forked(config, folder, "--schedule.kind", "constant")
    assert resumed.statuses == [0]
    assert "checkpoints/step-3: continuing with step 4" in resumed.said
    assert checkpoints(folder) == ["step-3", "step-6"]


def test_keep_retains_the_newest_checkpoints(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    folder = tmp_path / "run"
    options = ("--training.steps", "13", "--checkpoint.interval", "2", "--checkpoint.keep", "3")
    assert forked(config, folder, *options).statuses == [0]
    assert checkpoints(folder) == ["step-10", "step-12", "step-13"]
