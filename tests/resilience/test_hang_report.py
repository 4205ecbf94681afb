"""A hung rank writes its stacks and exits; the next launch names the suspects."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from tests.ranks import run_ranks
from tests.system.in_process import configured, run_here
from tests.system.runs import write_run
from trainer.resilience.watchdog import Watchdog, dump_collectives, summarize_hang
from trainer.storage import exit_markers
from trainer.storage.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]

HANG = """
import sys, time, torch
from pathlib import Path
from trainer.resilience.watchdog import Watchdog

def wait_for_peer():
    {wait}

with Watchdog(Path(sys.argv[1]), rank=int(sys.argv[2])) as watchdog:
    watchdog.arm("step 7", 3.0)
    wait_for_peer()
"""
SLEEP = "time.sleep(60)"
LOCKED = "import ctypes; ctypes.PyDLL(None).sleep(60)"


def hang(folder: Path, rank: int, wait: str = SLEEP) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HANG.format(wait=wait), str(folder), str(rank)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(SLEEP, id="sleeping", marks=pytest.mark.slow),
        pytest.param(LOCKED, id="holding the GIL"),
    ],
)
def test_a_hung_rank_writes_its_stacks_and_exits(tmp_path: Path, wait: str) -> None:
    process = hang(tmp_path, 0, wait)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "in wait_for_peer" in (tmp_path / "rank-0.txt").read_text()
    if wait == SLEEP:
        assert f"step 7 takes too long; exiting soon, stacks of all threads in {tmp_path}" in said
        assert (tmp_path / "rank-0-collectives.jsonl").read_text().startswith('{"')
    (line,) = summarize_hang(tmp_path, 1)
    assert line.startswith("ranks 0 waited in wait_for_peer")
    assert summarize_hang(tmp_path, 1) == []


def test_a_phase_within_its_timeout_leaves_no_files(tmp_path: Path) -> None:
    with Watchdog(tmp_path, rank=0) as watchdog:
        for number in range(3):
            watchdog.arm(f"step {number}", 0.6)
            time.sleep(0.3)
    time.sleep(0.7)
    assert [*tmp_path.iterdir()] == []


def record_all_reduce() -> str:
    from torch import distributed, ones

    distributed.all_reduce(ones(3))
    return dump_collectives()


@pytest.mark.ranks
def test_torch_dumps_recorded_collectives() -> None:
    for dump in run_ranks(record_all_reduce, 2):
        entries = [
            entry for line in dump.splitlines() for entry in json.loads(line).get("entries", [])
        ]
        assert any("all_reduce" in entry["profiling_name"] for entry in entries)


def stack(*frames: tuple[str, str]) -> str:
    main = "".join(
        f'  File "{file}", line {number} in {name}\n'
        for number, (file, name) in enumerate(frames, 1)
    )
    other = (
        'Thread 0x01 (most recent call first):\n  File "/usr/lib/threading.py", line 3 in wait\n\n'
    )
    return f"Timeout (0:01:00)!\n{other}Thread 0x02 (most recent call first):\n{main}"


PROJECT_FILE = str(ROOT / "trainer" / "trainer.py")
WAITING = stack(("/site-packages/torch/c10d.py", "all_reduce"), (PROJECT_FILE, "train_step"))
READING = stack((str(ROOT / "trainer" / "data" / "loader.py"), "steps"))


def test_the_rank_in_another_function_is_the_suspect(tmp_path: Path) -> None:
    for rank, text in enumerate((WAITING, WAITING, READING, WAITING)):
        (tmp_path / f"rank-{rank}.txt").write_text(text)
    assert summarize_hang(tmp_path, 4) == [
        f"ranks 0, 1, 3 waited in all_reduce below train_step (trainer.py:2): stacks in {tmp_path}",
        "suspect: rank 2 was in steps below steps (loader.py:1)",
    ]


def test_a_rank_without_a_stack_is_a_suspect(tmp_path: Path) -> None:
    for rank, text in enumerate((WAITING, "", WAITING[:20])):
        (tmp_path / f"rank-{rank}.txt").write_text(text)
    assert summarize_hang(tmp_path, 4)[1:] == ["suspect: rank 1, 2, 3 wrote no stack"]


def test_the_next_launch_reports_the_suspects_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunDir(tmp_path)
    folder.hangs_dir.mkdir(parents=True)
    for rank, text in enumerate((WAITING, READING, WAITING)):
        (folder.hangs_dir / f"rank-{rank}.txt").write_text(text)
    exit_markers.write(tmp_path, "REQUEUE")
    for _ in range(2):
        train.report_previous_hang(folder, 3)
    assert caplog.text.count("the previous launch hung: suspect: rank 1 was in steps") == 1
    assert not (tmp_path / "REQUEUE").exists()


def test_a_launch_that_did_not_hang_has_no_suspects(tmp_path: Path) -> None:
    assert summarize_hang(tmp_path / "absent", 2) == []
    (tmp_path / "rank-0.txt").write_text("")
    assert summarize_hang(tmp_path, 2) == []


@pytest.mark.slow
def test_a_sigstopped_rank_is_the_suspect(tmp_path: Path) -> None:
    stopped = hang(tmp_path, 0)
    waiting = hang(tmp_path, 1)
    while not (tmp_path / "rank-0.txt").exists():
        time.sleep(0.01)
    os.kill(stopped.pid, signal.SIGSTOP)
    waiting.communicate(timeout=60)
    assert waiting.returncode == 1
    assert summarize_hang(tmp_path, 2)[1:] == ["suspect: rank 0 wrote no stack"]
    stopped.kill()
    stopped.communicate()


def test_every_phase_between_two_steps_is_limited_as_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that is lost in a save or in the comparison of replicas before it ends the run as
    soon as one that is lost in a step.
    """
    armed = dict[str, float]()
    monkeypatch.setattr(Watchdog, "arm", lambda _, phase, seconds: armed.update({phase: seconds}))
    words = ("--training.steps=6", "--checkpoint.interval=2", "--distributed.hang_minutes=3")
    run_here(configured(write_run(tmp_path), tmp_path / "run", *words))
    short = {f"{phase} {step}" for phase in ("step", "work after step") for step in range(2, 6)}
    assert {*short, "a checkpoint", "the last checkpoint"} <= armed.keys()
    assert {armed[phase] for phase in short} == {180.0}
    # The last of each: by then, a save has ended.
    assert armed["a checkpoint"] == armed["the last checkpoint"] == 180.0
