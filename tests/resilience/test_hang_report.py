"""A rank that does not get on says where it is and ends; the next start names the suspects."""

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
from trainer.checkpoint.run_dir import RunDir
from trainer.resilience import exit_markers
from trainer.resilience.hang_report import summarize_hang
from trainer.resilience.watchdog import Watchdog, dump_collectives

ROOT = Path(__file__).resolve().parents[2]

HANG = """
import sys, time, torch
from pathlib import Path
from trainer.resilience.watchdog import Watchdog

def waits_for_a_peer():
    {wait}

with Watchdog(Path(sys.argv[1]), rank=int(sys.argv[2])) as watchdog:
    watchdog.arm("update 7", 3.0)
    waits_for_a_peer()
"""
SLEEP, LOCKED = "time.sleep(60)", "import ctypes; ctypes.PyDLL(None).sleep(60)"


def hang(folder: Path, rank: int, wait: str = SLEEP) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HANG.format(wait=wait), str(folder), str(rank)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("wait", [SLEEP, LOCKED], ids=["waiting", "holding the interpreter's lock"])
def test_a_rank_that_hangs_ends_and_says_where_it_was(tmp_path: Path, wait: str) -> None:
    process = hang(tmp_path, 0, wait)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "in waits_for_a_peer" in (tmp_path / "rank-0.txt").read_text()
    if wait == SLEEP:
        assert f"update 7 takes too long; about to end, with all stacks in {tmp_path}" in said
        assert (tmp_path / "rank-0-collectives.jsonl").read_text().startswith('{"')
    (told,) = summarize_hang(tmp_path, 1)
    assert told.startswith("ranks 0 waited in waits_for_a_peer")
    assert summarize_hang(tmp_path, 1) == []


def test_what_happens_in_time_leaves_nothing(tmp_path: Path) -> None:
    with Watchdog(tmp_path, rank=0) as watchdog:
        for number in range(3):
            watchdog.arm(f"update {number}", 0.6)
            time.sleep(0.3)
    time.sleep(0.7)
    assert [*tmp_path.iterdir()] == []


def recorded() -> str:
    from torch import distributed, ones

    distributed.all_reduce(ones(3))
    return dump_collectives()


@pytest.mark.ranks
def test_torch_still_says_which_collectives_there_were() -> None:
    for told in run_ranks(recorded, 2):
        entries = [entry for line in told.splitlines() for entry in json.loads(line).get("entries", [])]
        assert any("all_reduce" in entry["profiling_name"] for entry in entries)


def stack(*frames: tuple[str, str]) -> str:
    main = "".join(f'  File "{file}", line {number} in {name}\n' for number, (file, name) in enumerate(frames, 1))
    other = 'Thread 0x01 (most recent call first):\n  File "/usr/lib/threading.py", line 3 in wait\n\n'
    return f"Timeout (0:01:00)!\n{other}Thread 0x02 (most recent call first):\n{main}"


OURS = str(ROOT / "trainer" / "trainer.py")
WAITING = stack(("/site-packages/torch/c10d.py", "all_reduce"), (OURS, "train_step"))
READING = stack((str(ROOT / "trainer" / "data" / "loader.py"), "updates"))


def test_the_rank_that_is_elsewhere_is_the_suspect(tmp_path: Path) -> None:
    for rank, text in enumerate((WAITING, WAITING, READING, WAITING)):
        (tmp_path / f"rank-{rank}.txt").write_text(text)
    assert summarize_hang(tmp_path, 4) == [
        f"ranks 0, 1, 3 waited in all_reduce below train_step (trainer.py:2): stacks in {tmp_path}",
        "suspect: rank 2 was in updates below updates (loader.py:1)",
    ]


def test_the_rank_that_says_nothing_is_the_suspect(tmp_path: Path) -> None:
    for rank, text in enumerate((WAITING, "", WAITING[:20])):
        (tmp_path / f"rank-{rank}.txt").write_text(text)
    assert summarize_hang(tmp_path, 4)[1:] == ["suspect: rank 1, 2, 3 did not say where it was"]


def test_the_next_start_tells_the_suspects_whoever_began_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunDir(tmp_path)
    folder.hangs_dir.mkdir(parents=True)
    for rank, text in enumerate((WAITING, READING, WAITING)):
        (folder.hangs_dir / f"rank-{rank}.txt").write_text(text)
    exit_markers.write(tmp_path, "REQUEUE")
    for _ in range(2):
        train.report_previous_hang(folder, 3)
    assert caplog.text.count("the previous launch hung: suspect: rank 1 was in updates") == 1
    assert not (tmp_path / "REQUEUE").exists()


def test_a_start_that_failed_otherwise_has_no_suspects(tmp_path: Path) -> None:
    assert summarize_hang(tmp_path / "absent", 2) == []
    (tmp_path / "rank-0.txt").write_text("")
    assert summarize_hang(tmp_path, 2) == []


def test_a_stopped_rank_is_the_one_that_says_nothing(tmp_path: Path) -> None:
    stopped, waiting = hang(tmp_path, 0), hang(tmp_path, 1)
    while not (tmp_path / "rank-0.txt").exists():
        time.sleep(0.01)
    os.kill(stopped.pid, signal.SIGSTOP)
    waiting.communicate(timeout=60)
    assert waiting.returncode == 1
    assert summarize_hang(tmp_path, 2)[1:] == ["suspect: rank 0 did not say where it was"]
    stopped.kill()
    stopped.communicate()
