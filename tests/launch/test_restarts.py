"""Restart policy, with a stub trainer: relaunch until done, permanently failed, or without
progress.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.runs import is_alive, lines, wait_for, write_run
from trainer.config.job_config import Config, TrainingStage
from trainer.config.run_spec import RunSpec
from trainer.config.training_stages import Recipe
from trainer.launch import restarts
from trainer.launch.cluster import LaunchWorld
from trainer.launch.workers import Workers

ROOT = Path(__file__).resolve().parents[2]

LAUNCH = """
import sys
from pathlib import Path
from trainer.config.parse import load
from trainer.launch.cluster import LaunchWorld
from trainer.launch.restarts import run_with_restarts
from trainer.config.run_spec import RunSpec
argv, world = sys.argv[2:], LaunchWorld(nproc_per_node=2)
def prepare(config, world):
    return RunSpec(config=config, datasets={})
reload = lambda: load(argv)
sys.exit(run_with_restarts(prepare(reload(), world), world, Path(sys.argv[1]), reload=reload, prepare=prepare))
"""
# A trainer without torch: counts its launches and runs the test's code in each.
STUB = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from trainer.storage import exit_markers
folder, rank = Path({folder!r}), int(os.environ["RANK"])
counter = folder / f"launches-{{rank}}"
counter.write_text(counter.read_text() + "x" if counter.exists() else "x")
launch = len(counter.read_text())

def commit(step):
    if rank == 0:
        (folder / "checkpoints" / f"step-{{step}}").mkdir(parents=True)

def mark(kind):
    if rank == 0:
        exit_markers.write(folder, kind, attempt=os.environ["LONGHAUL_ATTEMPT"])

{body}
"""


class Run:
    def __init__(self, root: Path, body: str) -> None:
        self.folder = root / "run"
        self.folder.mkdir()
        self.script = root / "stub.py"
        self.script.write_text(STUB.format(root=str(ROOT), folder=str(self.folder), body=body))
        self.config = write_run(root)

    def start(self, *options: str) -> subprocess.Popen[str]:
        argv = ["--config", str(self.config), "--job.output_dir", str(self.folder), *options]
        argv = ["--distributed.restart_seconds", "0", *argv]
        command = [sys.executable, "-c", LAUNCH, str(self.script), *argv]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def finish(self, *options: str) -> tuple[int, str]:
        process = self.start(*options)
        _, stderr = process.communicate(timeout=60)
        return process.returncode, stderr

    @property
    def launches(self) -> int:
        return len((self.folder / "launches-1").read_text())


@pytest.mark.slow
def test_a_crash_restarts_from_the_newest_checkpoint(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        "commit(launch)\nif launch < 3: os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)",
    )
    status, stderr = run.finish()
    assert (status, run.launches) == (0, 3)
    assert stderr.count("error: local rank 1 (pid ") == 2
    assert (
        stderr.count(f"{run.folder}: restarting in 0 s from {run.folder}/checkpoints/step-") == 2
    )
    events = [line for line in lines(run.folder / "events.jsonl") if line["event"] == "restart"]
    assert [event["life"] for event in events] == [1, 2]


def test_a_run_without_a_new_checkpoint_is_given_up(tmp_path: Path) -> None:
    run = Run(tmp_path, "sys.exit(1)")
    status, stderr = run.finish()
    assert (status, run.launches) == (1, 3)
    assert (
        "giving up: 3 consecutive launches without a new checkpoint (distributed.restarts = 2)"
        in stderr
    )
    assert "restarting in 0 s from step 0: there is no checkpoint yet" in stderr


def test_a_new_checkpoint_resets_the_failure_count(tmp_path: Path) -> None:
    run = Run(tmp_path, "if launch == 3: commit(3)\nsys.exit(1)")
    assert run.finish()[0] == 1
    assert run.launches == 6


def test_zero_restarts_disables_restarting(tmp_path: Path) -> None:
    run = Run(tmp_path, "commit(launch); sys.exit(1)")
    assert run.finish("--distributed.restarts", "0")[0] == 1
    assert run.launches == 1


@pytest.mark.parametrize(("code", "status"), [(78, 78), (2, 2)])
def test_conclusive_exit_codes_are_not_retried(tmp_path: Path, code: int, status: int) -> None:
    run = Run(tmp_path, f"sys.exit({code} if rank == 1 else 1)")
    assert run.finish()[0] == status
    assert run.launches == 1


def test_a_preempted_run_is_not_restarted(tmp_path: Path) -> None:
    run = Run(tmp_path, "mark('REQUEUE'); sys.exit(1 if rank == 1 else 0)")
    assert run.finish()[0] == 0
    assert run.launches == 1


def test_a_marker_of_an_earlier_launch_is_ignored(tmp_path: Path) -> None:
    run = Run(tmp_path, "sys.exit(1)")
    (run.folder / "REQUEUE").write_text('{"attempt": "1.0"}')
    assert run.finish("--distributed.restarts", "0")[0] == 1


def test_a_signal_reaches_all_workers_and_prevents_restarts(tmp_path: Path) -> None:
    body = (
        "def stop(*_):\n"
        "    (folder / f'signaled-{rank}').touch()\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGUSR1, stop)\n"
        # The first to stop makes the launcher stop the other.
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "(folder / f'ready-{rank}').touch()\n"
        "time.sleep(60)"
    )
    run = Run(tmp_path, body)
    process = run.start()
    assert wait_for(
        lambda: (run.folder / "ready-0").exists() and (run.folder / "ready-1").exists()
    )
    process.send_signal(signal.SIGUSR1)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, run.launches) == (1, 1)
    assert stderr.count("exited with code 1") == 2
    assert (run.folder / "signaled-0").exists()
    assert (run.folder / "signaled-1").exists()


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_signal_between_two_launches_ends_the_run(tmp_path: Path, *, is_saved: bool) -> None:
    # After a checkpoint the next launch starts at once.
    run = Run(
        tmp_path, "if launch == 1: commit(launch)\nsys.exit(1)" if is_saved else "sys.exit(1)"
    )
    process = run.start("--distributed.restart_seconds", "60")
    events = run.folder / "events.jsonl"
    assert wait_for(lambda: events.exists() and len(lines(events)) == 1 + is_saved)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=10)
    assert (process.returncode, run.launches) == ((0, 2) if is_saved else (1, 1))
    assert (run.folder / "REQUEUE").exists() == is_saved
    assert ("stopping: SIGTERM; the same command resumes from" in stderr) == is_saved


def test_peers_of_a_failed_worker_are_killed(tmp_path: Path) -> None:
    body = (
        "(folder / f'pid-{rank}').write_text(str(os.getpid()))\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(60) if rank == 0 else sys.exit(5)"
    )
    run = Run(tmp_path, body)
    status, stderr = run.finish("--distributed.restarts", "0")
    assert status == 1
    assert stderr.count("error: local rank") == 1
    assert not is_alive(int((run.folder / "pid-0").read_text()))


@pytest.mark.slow
def test_a_worker_writes_its_stack_before_it_is_killed(tmp_path: Path) -> None:
    body = (
        "import torch\n"
        "from trainer.resilience.watchdog import Watchdog\n"
        "def hangs():\n"
        "    time.sleep(60)\n"
        "if rank == 1: time.sleep(1); sys.exit(1)\n"
        "with Watchdog(folder / 'logs' / 'hang', rank=0) as watchdog:\n"
        "    hangs()"
    )
    run = Run(tmp_path, body)
    (run.folder / "logs").mkdir()
    _, stderr = run.finish("--distributed.restarts", "0")
    assert f"{run.folder}: ranks 0 waited in hangs: stacks in {run.folder}/logs/hang\n" in stderr
    assert f"{run.folder}: suspect: rank 1 wrote no stack\n" in stderr


@pytest.mark.parametrize("received", [None, signal.SIGTERM])
def test_a_signal_at_the_end_of_a_stage_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, received: signal.Signals | None
) -> None:
    config = Config.model_validate({"job": {"output_dir": tmp_path}})
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)  # The end of a stage is saved.
    first, second = (
        TrainingStage(config, name=name, index=index, num_stages=2)
        for index, name in enumerate(("first", "second"))
    )
    launches: list[str] = []

    def run_workers(self: Workers, *_: object) -> int:
        launches.append("stage")
        self.received_signal = received
        return 0

    spec = RunSpec(config=Recipe.model_validate(config.model_dump()), datasets={})
    prepared = iter([spec, 0])
    stages = iter([first, second])
    monkeypatch.setattr(Workers, "run", run_workers)
    monkeypatch.setattr(restarts, "next_stage", lambda _: next(stages))
    monkeypatch.setattr(restarts, "_prepare_following_stage", lambda *_: next(prepared))
    world = LaunchWorld(nproc_per_node=2)
    status = restarts.run_with_restarts(
        spec, world, Path("unused"), reload=lambda: spec.config, prepare=lambda *_: spec
    )
    assert status == 0
    assert len(launches) == (2 if received is None else 1)
    assert (tmp_path / "REQUEUE").exists() == (received is not None)
