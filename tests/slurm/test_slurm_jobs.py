"""The batch script on a SLURM of two nodes with two ranks each, with stub ranks that need no
torch.

Scenarios run concurrently, since they mostly wait; each is a test.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from tests.slurm.cluster import GRACE, Cluster
from tests.slurm.job import SIZE, Job

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slurm
STUB = ROOT / "tests" / "slurm" / "stub.py"


Scenario = Callable[[Cluster, Path], None]
Scenarios = dict[Scenario, Future[None]]


def concurrently(scenario: Scenario) -> Callable[[Scenarios], None]:
    """A test that waits for its scenario; all scenarios start together."""

    def test(scenarios: Scenarios) -> None:
        scenarios[scenario].result()

    vars(test).update(scenario=scenario)
    return test


def job_with_plan(cluster: Cluster, folder: Path, plan: dict[str, str]) -> Job:
    """A run whose ranks follow the plan."""
    run = folder / "run"
    python = folder / "python"
    run.mkdir()
    (run / "plan.json").write_text(json.dumps(plan))
    python.write_text(f"#!{sys.executable} -S\n{STUB.read_text()}")
    python.chmod(0o755)
    return Job(cluster, run, "--config", "debug", "--python", str(python))


def actions(job: Job) -> list[str]:
    """The actions of ranks, in order: attempt, rank, action."""
    path = job.folder / "actions.txt"
    return path.read_text().splitlines() if path.exists() else []


def attempts(job: Job) -> list[str]:
    return sorted({line.partition(" ")[0] for line in actions(job)})


def exits(job: Job, attempt: str) -> list[str]:
    """How the ranks of an attempt ended."""
    mine = [
        line.removeprefix(f"{attempt} ") for line in actions(job) if line.startswith(f"{attempt} ")
    ]
    return sorted(line for line in mine if " exited " in line)


def wait_for(job: Job, attempt: str, action: str, *, seconds: float = 30) -> None:
    """Waits until all ranks of an attempt performed the action."""

    def all_did() -> bool:
        return sum(line.startswith(f"{attempt} ") and action in line for line in actions(job)) == 4

    job.cluster.wait_for(all_did, seconds, f"{attempt} {action}")


def checkpoints(job: Job) -> list[str]:
    return sorted(path.name for path in (job.folder / "checkpoints").iterdir())


@concurrently
def test_usr1_saves_and_requeues_until_the_run_is_done(cluster: Cluster, tmp_path: Path) -> None:
    job = job_with_plan(cluster, tmp_path, {"0.0": "train"})
    job.submit()
    wait_for(job, "0.0", "trains")
    job.near_the_limit()
    assert job.ended("COMPLETED") == "0:0"
    assert checkpoints(job) == ["step-10", "step-9"]
    # Every rank was signalled once.
    assert exits(job, "0.0") == [f"rank {rank} exited with 0 after SIGUSR1" for rank in range(4)]
    assert exits(job, "1.0") == [f"rank {rank} exited with 0 after nothing" for rank in range(4)]
    assert [
        "requeue 0, running on n[1-2]" in job.log(),
        "requeue 1, running on n[1-2]" in job.log(),
    ] == [True, True]


@concurrently
def test_crashed_ranks_restart_within_the_job_and_progress_resets_the_count(
    cluster: Cluster, tmp_path: Path
) -> None:
    plan = {"0.0": "intruded", "0.1": "progress", "0.2": "crash", "0.3": "progress"}
    job = job_with_plan(cluster, tmp_path, plan)
    job.submit("--max-stuck", "2")
    assert job.ended("COMPLETED") == "0:0"
    assert attempts(job) == ["0.0", "0.1", "0.2", "0.3", "0.4"]
    assert checkpoints(job) == ["step-10", "step-11", "step-9"]
    # A failed peer leads to SIGTERM, too, but is no preemption.
    assert exits(job, "0.0")[0] == "rank 0 exited with 1 after SIGTERM"
    assert job.log().count("restarting in 1 s") == 2
    places = {line.partition("meets at ")[2] for line in actions(job) if "meets at " in line}
    assert len(places) == 5
    assert all(place.startswith("n1:") for place in places)


@concurrently
def test_launches_without_a_new_checkpoint_are_limited(cluster: Cluster, tmp_path: Path) -> None:
    job = job_with_plan(cluster, tmp_path, {f"0.{attempt}": "crash" for attempt in range(9)})
    job.submit()
    assert job.ended("FAILED") == "1:0"
    assert attempts(job) == ["0.0", "0.1", "0.2"]
    assert "giving up: 3 consecutive launches without a new checkpoint" in job.log()


@pytest.mark.slow
@concurrently
def test_launches_without_a_new_checkpoint_count_across_requeues(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = job_with_plan(cluster, tmp_path, {"0.0": "crash", "1.0": "crash"})
    job.submit("--max-stuck", "2", "--backoff-seconds", "60")
    job.wait_log("restarting in 60 s")
    job.near_the_limit()  # Which also ends the pause.
    assert job.ended("FAILED") == "1:0"
    assert attempts(job) == ["0.0", "1.0"]
    assert "giving up: 2 consecutive launches without a new checkpoint" in job.log()


@concurrently
def test_the_next_stage_starts_without_a_pause(cluster: Cluster, tmp_path: Path) -> None:
    job = job_with_plan(cluster, tmp_path, {"0.0": "stage"})
    job.submit("--max-stuck", "1", "--backoff-seconds", "600")
    assert job.ended("COMPLETED") == "0:0"
    assert attempts(job) == ["0.0", "0.1"]


def fails_permanently(cluster: Cluster, tmp_path: Path, *, action: str, code: str) -> None:
    job = job_with_plan(cluster, tmp_path, {"0.0": action})
    job.submit()
    assert job.ended("FAILED") == code
    assert attempts(job) == ["0.0"]
    assert "a restart cannot help" in job.log()
    assert ('"reason": "the plan"' in job.log()) == (action == "stop")


test_a_stop_marker_ends_the_job = concurrently(
    partial(fails_permanently, action="stop", code="78:0")
)
test_a_refused_configuration_ends_the_job = concurrently(
    partial(fails_permanently, action="refuse", code="2:0")
)


def saves_and_is_not_requeued(cluster: Cluster, tmp_path: Path, *, command: str) -> None:
    job = job_with_plan(cluster, tmp_path, {"0.0": "train"})
    job.submit()
    wait_for(job, "0.0", "trains")
    if command == "scancel":
        cluster.command("scancel", job.number)
    else:
        assert f"job {job.number} cancelled; it was RUNNING on n[1-2]" in job.slurm(
            "cancel", str(job.folder)
        )
    job.ended("CANCELLED")
    wait_for(job, "0.0", "exited with 0 after SIGTERM")
    assert checkpoints(job) == ["step-9"]
    time.sleep(3)
    assert cluster.state(job.number).state == "CANCELLED"
    assert attempts(job) == ["0.0"]
    assert "has no job that is queued or running" in job.slurm("cancel", str(job.folder))


test_a_cancelled_run_saves_and_is_not_requeued = concurrently(
    partial(saves_and_is_not_requeued, command="cancel")
)
test_a_job_after_scancel_saves_and_is_not_requeued = concurrently(
    partial(saves_and_is_not_requeued, command="scancel")
)


@concurrently
def test_requeues_are_limited(cluster: Cluster, tmp_path: Path) -> None:
    job = job_with_plan(cluster, tmp_path, {"0.0": "train"})
    job.submit("--max-requeues", "0")
    wait_for(job, "0.0", "trains")
    job.near_the_limit()
    assert job.ended("FAILED") == "1:0"
    assert checkpoints(job) == ["step-9"]
    assert "already requeued 0 times (slurm.max_requeues)" in job.log()


@concurrently
def test_a_run_done_near_the_time_limit_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    job = job_with_plan(cluster, tmp_path, {"0.0": "last"})
    job.submit()
    wait_for(job, "0.0", "trains")
    job.near_the_limit()
    assert job.ended("COMPLETED") == "0:0"
    assert attempts(job) == ["0.0"]


@concurrently
def test_a_rendered_script_can_be_edited_and_submitted_manually(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = job_with_plan(cluster, tmp_path, {"0.0": "stage"})
    script = job.slurm("render", *job.options, *SIZE)
    (tmp_path / "job.sh").write_text(script.replace('log "done"', 'log "done after editing"'))
    (job.folder / "slurm").mkdir()
    (job.folder / "checkpoints").mkdir()
    job.number = cluster.command("sbatch", "--parsable", str(tmp_path / "job.sh")).strip()
    assert job.ended("COMPLETED") == "0:0"
    assert attempts(job) == ["0.0", "0.1"]
    assert "done after editing" in job.log()


@concurrently
def test_status_follows_a_job(cluster: Cluster, tmp_path: Path) -> None:
    job = job_with_plan(cluster, tmp_path, {"0.0": "train"})
    job.submit()
    wait_for(job, "0.0", "trains")
    assert status(job, str(job.folder))[f"job {job.number}"].startswith(
        "RUNNING on n[1-2] for 00:00:"
    )
    job.near_the_limit()
    job.ended("COMPLETED")
    fields = status(job, *job.options)
    assert fields[f"job {job.number}"] == "COMPLETED, exit code 0:0, requeued 1 time"
    assert fields["newest checkpoint"].startswith("step-10, written ")
    assert fields["DONE"].startswith(f"step 1, reason the plan, attempt {job.number}.1.0, ")


def status(job: Job, *run: str) -> dict[str, str]:
    lines = (line.partition("  ") for line in job.slurm("status", *run).splitlines())
    return {name: text.strip() for name, _, text in lines}


# Not concurrent, since it takes all nodes.
@pytest.mark.slow
def test_a_preempted_job_saves_and_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    job = job_with_plan(cluster, tmp_path, {"0.0": "train"})
    job.submit()
    wait_for(job, "0.0", "trains")
    start = time.monotonic()
    other = cluster.preempt(seconds=3)
    assert job.ended("COMPLETED") == "0:0"
    assert time.monotonic() - start < GRACE  # It exited before it was killed.
    assert exits(job, "0.0")[0] == "rank 0 exited with 0 after SIGTERM"
    assert attempts(job) == ["0.0", "1.0"]
    assert cluster.state(other).state == "COMPLETED"
