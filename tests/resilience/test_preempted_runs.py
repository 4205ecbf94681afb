"""A signalled run saves once, after a step that all ranks agree on, and its resumption is bitwise
identical.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.artifacts import content
from tests.system.runs import (
    ROOT,
    arguments,
    checkpoints,
    digests,
    end,
    fork,
    forked,
    is_alive,
    kill_launcher,
    launch,
    launched,
    lines,
    metrics,
    steps,
    train_rank,
    wait_for,
    workers,
    write_run,
)
from trainer.resilience.signals import SignalHandler
from trainer.storage import exit_markers

EXACT = ("step", "loss", "grad_norm")
STEPS = 20
LONG = (
    "--training.steps",
    str(STEPS),
    "--checkpoint.interval",
    "1000",
    "--training.dtype",
    "float64",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run.toml`, and in `whole` an uninterrupted run of two ranks."""
    root = tmp_path_factory.mktemp("whole")
    assert forked(write_run(root), root / "whole", *LONG, processes=2).statuses == [0, 0]
    return root


def marker(folder: Path, kind: str) -> dict[str, Any]:
    return content(folder / kind)


def num_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def require_same_results(folder: Path, whole: Path) -> None:
    assert steps(folder) == list(range(1, STEPS + 1))
    assert metrics(folder, *EXACT) == metrics(whole / "whole", *EXACT)
    assert digests(folder / "checkpoints" / f"step-{STEPS}") == digests(
        whole / "whole" / "checkpoints" / f"step-{STEPS}"
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "of"),
    [
        pytest.param(signal.SIGTERM, (0, 1), id="TERM to all"),
        pytest.param(signal.SIGUSR1, (1,), id="USR1 to one", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, (0,), id="INT to the first", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, (0, 1), id="USR2 to all", marks=pytest.mark.slow),
    ],
)
def test_repeated_signals_save_once_and_the_resumed_run_is_bitwise_identical(
    whole: Path, tmp_path: Path, number: signal.Signals, of: tuple[int, ...]
) -> None:
    folder = tmp_path / "run"
    ranks = fork(whole / "run.toml", folder, *LONG, processes=2)
    assert wait_for(lambda: num_steps(folder) >= 5)
    for rank in of * 4:
        os.kill(ranks[rank].pid or 0, number)
    assert wait_for(lambda: not any(rank.is_alive() for rank in ranks))
    end(ranks)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    (left,) = [event for event in lines(folder / "events.jsonl") if event["event"] == "preempted"]
    assert left["reason"] == number.name
    assert checkpoints(folder) == [f"step-{left['step']}"]
    assert marker(folder, "REQUEUE")["reason"] == number.name
    assert steps(folder)[-1] == left["step"] < STEPS
    assert forked(whole / "run.toml", folder, *LONG, processes=2).statuses == [0, 0]
    assert marker(folder, "DONE")
    require_same_results(folder, whole)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_signalled_launcher_exits_with_0_and_does_not_restart(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    launcher = launch(whole / "run.toml", folder, *LONG, processes=2)
    assert wait_for(lambda: num_steps(folder) >= 3)
    for _ in range(3):
        launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 0
    assert [event["event"] for event in lines(folder / "events.jsonl")] == [
        "start",
        "checkpoint",
        "preempted",
    ]
    assert (
        f"run the same command to resume from {folder}/checkpoints/step-"
        in folder.with_suffix(".log").read_text()
    )
    assert launched(whole / "run.toml", folder, *LONG, processes=2).statuses == [0]
    require_same_results(folder, whole)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_whose_data_is_read_by_processes_saves_and_resumes_and_takes_them_along(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    launcher = launch(whole / "run.toml", folder, *LONG, "--data.workers", "2", processes=2)
    assert wait_for(lambda: num_steps(folder) >= 3)
    pids = workers(launcher.pid)
    assert len(pids) == 2 + 2 * 2, "two ranks, and two processes that read for each"
    for pid in pids:
        # As a scheduler signals every process of a job.
        os.kill(pid, signal.SIGTERM)
    assert launcher.wait(60) == 0
    assert not any(map(is_alive, pids))
    assert marker(folder, "REQUEUE")["reason"] == "SIGTERM"
    second = launch(whole / "run.toml", folder, *LONG, "--data.workers", "1", processes=2)
    assert wait_for(lambda: len(workers(second.pid)) == 2 + 2 * 1)
    assert kill_launcher(second) == []
    assert launched(whole / "run.toml", folder, *LONG, processes=2).statuses == [0]
    require_same_results(folder, whole)


@pytest.mark.ranks
def test_a_run_stops_before_its_time_limit(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start = time.monotonic()
    done = forked(
        whole / "run.toml",
        folder,
        *LONG,
        "--training.steps",
        "100000",
        "--job.max_minutes",
        "0.08",
    )
    assert done.statuses == [0]
    # 100,000 steps take longer; the limit itself is five seconds.
    assert time.monotonic() - start < 60
    (left,) = [event for event in lines(folder / "events.jsonl") if event["event"] == "preempted"]
    assert left["reason"] == "time limit reached"
    assert checkpoints(folder) == [f"step-{left['step']}"]


@pytest.mark.ranks
def test_a_run_without_checkpoints_fails_at_its_time_limit(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = (
        *LONG,
        "--training.steps",
        "100000",
        "--job.max_minutes",
        "0.05",
        "--checkpoint.enabled",
        "false",
    )
    done = forked(whole / "run.toml", folder, *options)
    assert done.statuses == [78]
    assert (
        "error: time limit reached: stopped without a checkpoint, because checkpoint.enabled = false"
        in done.said
    )
    assert "checkpoint.enabled" in marker(folder, "STOP")["reason"]


def test_a_signal_before_the_first_step_stops_at_once_without_a_marker(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker would make a crash look like a saved run: srun sends TERM to the peers of a crashed
    rank.
    """
    monkeypatch.setattr(
        "trainer.metrics.loggers.configure_logging",
        lambda _: None,
        # The logging setup would outlive the test.
    )
    signals = SignalHandler()
    folder = tmp_path / "run"
    signals.signal = signal.SIGTERM
    folder.mkdir()
    assert train_rank(arguments(whole / "run.toml", folder, *LONG), signals) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "error: signalled before the first step"
    assert not any((folder / marker).exists() for marker in exit_markers.EXIT_MARKERS)


@pytest.mark.parametrize(("local_rank", "reports"), [("0", True), ("3", False)])
def test_one_rank_per_node_reports_the_problems_of_its_node(
    whole: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    local_rank: str,
    *,
    reports: bool,
) -> None:
    monkeypatch.setattr("trainer.metrics.loggers.configure_logging", lambda _: None)
    for key, value in {
        "RANK": str(8 + int(local_rank)),
        "WORLD_SIZE": "16",
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": "8",
    }.items():
        monkeypatch.setenv(key, value)
    argv = arguments(
        whole / "run.toml", tmp_path / "run", *LONG, "--data.corpus", str(tmp_path / "absent")
    )
    assert train_rank(
        [*argv, "--parallelism.dp_shard", "2", "--parallelism.cp", "8"], SignalHandler()
    ) in (2, 78)
    assert capfd.readouterr().err.startswith("error: [rank 8] ") == reports


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True], ids=["shell", "nohup"])
def test_a_closed_terminal_stops_the_run_unless_nohup(
    whole: Path, tmp_path: Path, *, ignored: bool
) -> None:
    folder = tmp_path / "run"
    command = [
        sys.executable,
        "-P",
        "-m",
        "trainer.launch",
        *arguments(whole / "run.toml", folder, *LONG),
    ]
    environment = os.environ | {
        "NGPU": "2" if ignored else "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    ignore = (lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) if ignored else None
    with folder.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=ignore,
        )
    assert wait_for(lambda: num_steps(folder) >= 3)
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(60) == 0, folder.with_suffix(".log").read_text()
    if ignored:
        require_same_results(folder, whole)
    else:
        assert marker(folder, "REQUEUE")["reason"] == "SIGHUP"
        assert checkpoints(folder) == [f"step-{steps(folder)[-1]}"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("processes", "faults"),
    [
        pytest.param(
            2, (("save", 0, signal.SIGKILL), ("step", 1, signal.SIGSTOP)), marks=pytest.mark.slow
        ),
        pytest.param(4, None, marks=pytest.mark.slow),
    ],
    ids=["one killed during a save, another stopped", "ten random kills of four ranks"],
)
def test_killed_and_stopped_ranks_are_restarted_and_results_are_bitwise_identical(
    whole: Path,
    tmp_path: Path,
    processes: int,
    faults: tuple[tuple[str, int, signal.Signals], ...] | None,
) -> None:
    folder = tmp_path / "run"
    draw = random.Random(0)
    total_steps = str(STEPS)
    restarts = ["--distributed.restart_seconds", "0", "--distributed.restarts", "20"]
    uninterrupted = whole / "whole"
    options = [*LONG, "--checkpoint.interval", "4", "--checkpoint.keep", "1000"]
    if faults:
        restarts += ["--distributed.hang_minutes", "0.05"]
    else:
        faults = tuple(
            (draw.choice(("save", "step")), draw.randrange(processes), signal.SIGKILL)
            for _ in range(10)
        )
        total_steps = "400"
        uninterrupted = tmp_path / "whole"
        options += ["--training.steps", total_steps]
        assert (
            forked(
                whole / "run.toml", uninterrupted, *options, processes=processes, seconds=300
            ).statuses
            == [0] * 4
        )
    launcher = launch(whole / "run.toml", folder, *options, *restarts, processes=processes)
    log = folder.with_suffix(".log")
    for moment, rank, fault in faults:
        before = num_steps(folder)
        running = partial(is_under_way, folder, launcher.pid, processes, moment, before)
        assert wait_for(running, 120), log.read_text()
        time.sleep(draw.uniform(0, 0.05))
        os.kill(victim := pid_of_rank(launcher.pid, rank), fault)
        assert wait_for(lambda victim=victim: victim not in workers(launcher.pid), 120), (  # type: ignore[misc]
            log.read_text()
        )
    assert launcher.wait(240) == 0, log.read_text()
    assert [event["event"] for event in lines(folder / "events.jsonl")].count("restart") == len(
        faults
    )
    if signal.SIGSTOP in [fault for _, _, fault in faults]:
        assert f"{folder}: suspect: rank 1 wrote no stack\n" in log.read_text()
        assert "takes too long; exiting soon, stacks of all threads in" in log.read_text()
    assert metrics(folder, *EXACT) == metrics(uninterrupted, *EXACT)
    last = Path("checkpoints") / f"step-{total_steps}"
    assert digests(folder / last) == digests(uninterrupted / last)


def is_under_way(folder: Path, launcher: int, processes: int, moment: str, before: int) -> bool:
    """Whether all ranks run, have trained more than `before` steps, and are in a save or step as
    requested.
    """
    if len(workers(launcher)) < processes or num_steps(folder) <= before:
        return False
    return moment == "step" or any((folder / "checkpoints").glob(".tmp-*"))


def pid_of_rank(launcher: int, rank: int) -> int:
    """The process id of a rank."""
    variable = f"RANK={rank}".encode()
    return next(
        pid
        for pid in workers(launcher)
        if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
