"""The batch script on a SLURM of two nodes with two ranks each, whose ranks are a stub without torch.

Scenarios run side by side, since they mostly wait; each is a test.
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


def side_by_side(scenario: Scenario) -> Callable[[Scenarios], None]:
    """A test that waits for a scenario, which began together with the others."""

    def test(scenarios: Scenarios) -> None:
        scenarios[scenario].result()

    vars(test).update(scenario=scenario)
    return test


def planned(cluster: Cluster, folder: Path, plan: dict[str, str]) -> Job:
    """A run whose ranks do as the plan says."""
    run, python = folder / "run", folder / "python"
    run.mkdir()
    (run / "plan.json").write_text(json.dumps(plan))
    python.write_text(f"#!{sys.executable} -S\n{STUB.read_text()}")
    python.chmod(0o755)
    return Job(cluster, run, "--config", "debug", "--python", str(python))


def did(job: Job) -> list[str]:
    """What ranks did, in order: attempt, rank, deed."""
    path = job.folder / "did.txt"
    return path.read_text().splitlines() if path.exists() else []


def attempts(job: Job) -> list[str]:
    return sorted({line.partition(" ")[0] for line in did(job)})


def left(job: Job, attempt: str) -> list[str]:
    """How the ranks of an attempt ended."""
    mine = [line.removeprefix(f"{attempt} ") for line in did(job) if line.startswith(f"{attempt} ")]
    return sorted(line for line in mine if " left " in line)


def wait_for(job: Job, attempt: str, deed: str, *, seconds: float = 30) -> None:
    """Waits until all ranks of an attempt did something."""

    def all_did() -> bool:
        return sum(line.startswith(f"{attempt} ") and deed in line for line in did(job)) == 4

    job.cluster.wait_for(all_did, seconds, f"{attempt} {deed}")


def checkpoints(job: Job) -> list[str]:
    return sorted(path.name for path in (job.folder / "checkpoints").iterdir())


@side_by_side
def test_usr1_saves_and_requeues_and_the_run_goes_on_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    job = planned(cluster, tmp_path, {"0.0": "train"})
    job.submit()
    wait_for(job, "0.0", "trains")
    job.near_the_limit()
    assert job.ended("COMPLETED") == "0:0"
    assert checkpoints(job) == ["step-10", "step-9"]
    # Every rank was told once.
    assert left(job, "0.0") == [f"rank {rank} left with 0 after SIGUSR1" for rank in range(4)]
    assert left(job, "1.0") == [f"rank {rank} left with 0 after nothing" for rank in range(4)]
    assert ["life 0 on n[1-2]" in job.log(), "life 1 on n[1-2]" in job.log()] == [True, True]


@side_by_side
def test_ranks_that_crash_are_started_again_in_the_same_life_and_progress_forgives(
    cluster: Cluster, tmp_path: Path
) -> None:
    plan = {"0.0": "intruded", "0.1": "progress", "0.2": "crash", "0.3": "progress"}
    job = planned(cluster, tmp_path, plan)
    job.submit("--max-stuck", "2")
    assert job.ended("COMPLETED") == "0:0"
    assert attempts(job) == ["0.0", "0.1", "0.2", "0.3", "0.4"]
    assert checkpoints(job) == ["step-10", "step-11", "step-9"]
    # The death of a peer is no preemption, though it sounds like one.
    assert left(job, "0.0")[0] == "rank 0 left with 1 after SIGTERM"
    assert job.log().count("starting again in 1 s") == 2
    places = {line.partition("meets at ")[2] for line in did(job) if "meets at " in line}
    assert len(places) == 5
    assert all(place.startswith("n1:") for place in places)


@side_by_side
def test_starts_without_a_new_checkpoint_come_to_an_end(cluster: Cluster, tmp_path: Path) -> None:
    job = planned(cluster, tmp_path, {f"0.{attempt}": "crash" for attempt in range(9)})
    job.submit()
    assert job.ended("FAILED") == "1:0"
    assert attempts(job) == ["0.0", "0.1", "0.2"]
    assert "3 starts in a row without a new checkpoint: giving up" in job.log()


@pytest.mark.slow
@side_by_side
def test_starts_without_a_new_checkpoint_are_counted_over_lives(cluster: Cluster, tmp_path: Path) -> None:
    job = planned(cluster, tmp_path, {"0.0": "crash", "1.0": "crash"})
    job.submit("--max-stuck", "2", "--backoff-seconds", "60")
    job.wait_log("starting again in 60 s")
    job.near_the_limit()  # Which also ends the pause.
    assert job.ended("FAILED") == "1:0"
    assert attempts(job) == ["0.0", "1.0"]
    assert "2 starts in a row without a new checkpoint: giving up" in job.log()


@side_by_side
def test_a_stage_that_ends_is_followed_by_the_next_without_a_pause(cluster: Cluster, tmp_path: Path) -> None:
    job = planned(cluster, tmp_path, {"0.0": "stage"})
    job.submit("--max-stuck", "1", "--backoff-seconds", "600")
    assert job.ended("COMPLETED") == "0:0"
    assert attempts(job) == ["0.0", "0.1"]


def cannot_be_mended(cluster: Cluster, tmp_path: Path, *, action: str, code: str) -> None:
    job = planned(cluster, tmp_path, {"0.0": action})
    job.submit()
    assert job.ended("FAILED") == code
    assert attempts(job) == ["0.0"]
    assert "a retry cannot mend it" in job.log()
    assert ('"reason": "the plan"' in job.log()) == (action == "stop")


test_a_stop_marker_ends_the_job = side_by_side(partial(cannot_be_mended, action="stop", code="78:0"))
test_a_refused_configuration_ends_the_job = side_by_side(partial(cannot_be_mended, action="refuse", code="2:0"))


def saves_and_stays_away(cluster: Cluster, tmp_path: Path, *, command: str) -> None:
    job = planned(cluster, tmp_path, {"0.0": "train"})
    job.submit()
    wait_for(job, "0.0", "trains")
    if command == "scancel":
        cluster.command("scancel", job.number)
    else:
        assert f"job {job.number} cancelled; it was RUNNING on n[1-2]" in job.slurm("cancel", str(job.folder))
    job.ended("CANCELLED")
    wait_for(job, "0.0", "left with 0 after SIGTERM")
    assert checkpoints(job) == ["step-9"]
    time.sleep(3)
    assert cluster.state(job.number).state == "CANCELLED"
    assert attempts(job) == ["0.0"]
    assert "has no job that is queued or running" in job.slurm("cancel", str(job.folder))


test_a_run_that_is_cancelled_saves_and_stays_away = side_by_side(partial(saves_and_stays_away, command="cancel"))
test_a_job_that_is_cancelled_saves_and_stays_away = side_by_side(partial(saves_and_stays_away, command="scancel"))


@side_by_side
def test_requeues_come_to_an_end(cluster: Cluster, tmp_path: Path) -> None:
    job = planned(cluster, tmp_path, {"0.0": "train"})
    job.submit("--max-requeues", "0")
    wait_for(job, "0.0", "trains")
    job.near_the_limit()
    assert job.ended("FAILED") == "1:0"
    assert checkpoints(job) == ["step-9"]
    assert "was requeued 0 times, the most that slurm.max_requeues allows" in job.log()


@side_by_side
def test_a_run_that_is_done_near_the_limit_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    job = planned(cluster, tmp_path, {"0.0": "last"})
    job.submit()
    wait_for(job, "0.0", "trains")
    job.near_the_limit()
    assert job.ended("COMPLETED") == "0:0"
    assert attempts(job) == ["0.0"]


@side_by_side
def test_a_script_can_be_rendered_changed_and_submitted_by_hand(cluster: Cluster, tmp_path: Path) -> None:
    job = planned(cluster, tmp_path, {"0.0": "stage"})
    script = job.slurm("render", *job.options, *SIZE)
    (tmp_path / "job.sh").write_text(script.replace('say "done"', 'say "done by hand"'))
    (job.folder / "slurm").mkdir()
    (job.folder / "checkpoints").mkdir()
    job.number = cluster.command("sbatch", "--parsable", str(tmp_path / "job.sh")).strip()
    assert job.ended("COMPLETED") == "0:0"
    assert attempts(job) == ["0.0", "0.1"]
    assert "done by hand" in job.log()


@side_by_side
def test_status_follows_a_job(cluster: Cluster, tmp_path: Path) -> None:
    job = planned(cluster, tmp_path, {"0.0": "train"})
    job.submit()
    wait_for(job, "0.0", "trains")
    assert status(job, str(job.folder))[f"job {job.number}"].startswith("RUNNING on n[1-2] for 00:00:")
    job.near_the_limit()
    job.ended("COMPLETED")
    told = status(job, *job.options)
    assert told[f"job {job.number}"] == "COMPLETED, exit code 0:0, requeued 1 time"
    assert told["newest checkpoint"].startswith("step-10, written ")
    assert told["DONE"].startswith(f"step 1, reason the plan, attempt {job.number}.1.0, ")


def status(job: Job, *run: str) -> dict[str, str]:
    lines = (line.partition("  ") for line in job.slurm("status", *run).splitlines())
    return {name: told.strip() for name, _, told in lines}


# Alone, since it takes all nodes: after the others.
@pytest.mark.slow
def test_a_job_that_is_preempted_saves_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    job = planned(cluster, tmp_path, {"0.0": "train"})
    job.submit()
    wait_for(job, "0.0", "trains")
    began = time.monotonic()
    other = cluster.preempt(seconds=3)
    assert job.ended("COMPLETED") == "0:0"
    assert time.monotonic() - began < GRACE  # It has left by itself.
    assert left(job, "0.0")[0] == "rank 0 left with 0 after SIGTERM"
    assert attempts(job) == ["0.0", "1.0"]
    assert cluster.state(other).state == "COMPLETED"
