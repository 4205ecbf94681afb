"""The batch script on a SLURM of two nodes with two ranks each, whose ranks are a stub without torch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import GRACE, Cluster

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slurm
SIZE = ("--nodes", "2", "--gpus-per-node", "0", "--processes-per-node", "2")


class Run:
    """A run folder, and the job that was submitted for it."""

    def __init__(self, cluster: Cluster, folder: Path, plan: dict[str, str]) -> None:
        self.cluster = cluster
        self.folder = folder / "run"
        self.folder.mkdir()
        (self.folder / "plan.json").write_text(json.dumps(plan))
        self.job = ""
        self.python = folder / "python"
        self.python.write_text(f"#!{sys.executable} -S\n" + (ROOT / "tests/slurm/stub.py").read_text())
        self.python.chmod(0o755)

    def submit(self, *options: str) -> str:
        quick = ("--backoff-seconds", "1", "--python", str(self.python))
        told = self.slurm("submit", "--config", "debug", "--job.output_dir", str(self.folder), *SIZE, *quick, *options)
        self.job = told.split()[1]
        return told

    def slurm(self, *words: str) -> str:
        return self.cluster.command(sys.executable, "-m", "trainer.slurm", *words)

    def ended(self, state: str, *, seconds: float = 60) -> str:
        """Waits for the end, which must be this one; returns the exit code."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        found = self.cluster.wait_state(self.job, *over, seconds=seconds)
        assert found.state == state, f"{found}\n{self.log()}"
        return found.exit_code

    def did(self) -> list[str]:
        path = self.folder / "did.txt"
        return path.read_text().splitlines() if path.exists() else []

    def left(self, attempt: str) -> list[str]:
        """How the ranks of an attempt ended."""
        return sorted(
            line.removeprefix(f"{attempt} ") for line in self.did() if f"{attempt} " in line and " left " in line
        )

    def attempts(self) -> list[str]:
        return sorted({line.partition(" ")[0] for line in self.did()})

    def wait_for(self, attempt: str, what: str, *, ranks: int = 4, seconds: float = 30) -> None:
        """Waits until so many ranks of an attempt did something."""

        def count() -> bool:
            return sum(line.startswith(f"{attempt} ") and what in line for line in self.did()) >= ranks

        self.cluster.wait_for(count, seconds, f"{attempt} {what}")

    def log(self) -> str:
        return (self.folder / "slurm" / f"job-{self.job}.log").read_text()

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())


def signal_near_the_limit(run: Run) -> None:
    """What `--signal=B:USR1@...` does when the time comes."""
    run.cluster.command("scancel", "--batch", "--signal=USR1", run.job)


def test_usr1_saves_and_requeues_and_the_run_goes_on_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, {"0.0": "train"})
    run.submit()
    run.wait_for("0.0", "trains")
    signal_near_the_limit(run)
    assert run.ended("COMPLETED") == "0:0"
    assert run.checkpoints() == ["step-1", "step-2"]
    # Every rank was told once.
    assert run.left("0.0") == [f"rank {rank} left with 0 after SIGUSR1" for rank in range(4)]
    assert run.left("1.0") == [f"rank {rank} left with 0 after nothing" for rank in range(4)]
    assert ["life 0 on n[1-2]" in run.log(), "life 1 on n[1-2]" in run.log()] == [True, True]


def test_ranks_that_crash_are_started_again_in_the_same_life_and_progress_forgives(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = Run(cluster, tmp_path, {"0.0": "crash", "0.1": "progress", "0.2": "crash"})
    run.submit("--max-stuck", "2")
    assert run.ended("COMPLETED") == "0:0"
    assert run.attempts() == ["0.0", "0.1", "0.2", "0.3"]
    assert run.checkpoints() == ["step-1", "step-2"]
    # The death of a peer is no preemption, though it sounds like one.
    assert run.left("0.0")[0] == "rank 0 left with 1 after SIGTERM"
    assert run.log().count("starting again in 1 s") == 2


def test_starts_without_a_new_checkpoint_come_to_an_end(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, {f"0.{attempt}": "crash" for attempt in range(9)})
    run.submit()
    assert run.ended("FAILED") == "1:0"
    assert run.attempts() == ["0.0", "0.1", "0.2"]
    assert "3 starts in a row without a new checkpoint: giving up" in run.log()


def test_starts_without_a_new_checkpoint_are_counted_over_lives(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, {"0.0": "crash", "1.0": "crash"})
    run.submit("--max-stuck", "2", "--backoff-seconds", "60")
    run.wait_for("0.0", "left with 1")
    cluster.wait_for(lambda: "starting again in 60 s" in run.log(), 20, "the pause")
    signal_near_the_limit(run)  # Which also ends the pause.
    assert run.ended("FAILED") == "1:0"
    assert run.attempts() == ["0.0", "1.0"]
    assert "2 starts in a row without a new checkpoint: giving up" in run.log()


def test_a_stage_that_ends_is_followed_by_the_next_without_a_pause(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, {"0.0": "stage"})
    run.submit("--max-stuck", "1", "--backoff-seconds", "600")
    assert run.ended("COMPLETED") == "0:0"
    assert run.attempts() == ["0.0", "0.1"]


@pytest.mark.parametrize(("action", "code"), [("stop", "78:0"), ("refuse", "2:0")])
def test_what_a_retry_cannot_mend_ends_the_job(cluster: Cluster, tmp_path: Path, action: str, code: str) -> None:
    run = Run(cluster, tmp_path, {"0.0": action})
    run.submit()
    assert run.ended("FAILED") == code
    assert run.attempts() == ["0.0"]
    assert "a retry cannot mend it" in run.log()
    assert ('"reason": "the plan"' in run.log()) == (action == "stop")


def test_a_job_that_is_cancelled_saves_and_stays_away(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, {"0.0": "train"})
    run.submit()
    run.wait_for("0.0", "trains")
    assert f"job {run.job} cancelled; it was RUNNING on n[1-2]" in run.slurm("cancel", str(run.folder))
    run.ended("CANCELLED")
    run.wait_for("0.0", "left with 0 after SIGTERM")
    assert run.checkpoints() == ["step-1"]
    time.sleep(3)
    assert cluster.state(run.job).state == "CANCELLED"
    assert run.attempts() == ["0.0"]
    assert "has no job that is queued or running" in run.slurm("cancel", str(run.folder))


def test_a_job_that_is_preempted_saves_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, {"0.0": "train"})
    run.submit()
    run.wait_for("0.0", "trains")
    began = time.monotonic()
    other = cluster.preempt(seconds=3)
    assert run.ended("COMPLETED") == "0:0"
    assert time.monotonic() - began < GRACE  # It has left by itself.
    assert run.left("0.0")[0] == "rank 0 left with 0 after SIGTERM"
    assert run.attempts() == ["0.0", "1.0"]
    assert cluster.state(other).state == "COMPLETED"


def test_requeues_come_to_an_end(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, {"0.0": "train"})
    run.submit("--max-requeues", "0")
    run.wait_for("0.0", "trains")
    signal_near_the_limit(run)
    assert run.ended("FAILED") == "1:0"
    assert run.checkpoints() == ["step-1"]
    assert "was requeued 0 times, the most that slurm.max_requeues allows" in run.log()


def test_a_run_that_is_done_near_the_limit_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, {"0.0": "last"})
    run.submit()
    run.wait_for("0.0", "trains")
    signal_near_the_limit(run)
    assert run.ended("COMPLETED") == "0:0"
    assert run.attempts() == ["0.0"]
