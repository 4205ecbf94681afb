"""Training itself as a job of SLURM: whatever happens to it, it ends bit by bit as if nothing had."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.job import Job
from tests.system.runs import command_of, digests, forked, metrics, write_run

pytestmark = pytest.mark.slurm
STEPS = 80  # of 20 to 500 ms, so that what happens comes before the end
LONG = 600
OPTIONS = ("--checkpoint.interval", "4", "--parallelism.cp", "2", "--training.global_batch_size", "4")
SETUP = '\n[slurm]\nsetup = ["export GLOO_SOCKET_IFNAME=eth0"]\n'
PATIENCE = 240  # seconds
LONG_PATIENCE = 900


@dataclass(frozen=True)
class Undisturbed:
    """A run of four processes on this machine, and how it ended."""

    config: Path
    steps: int
    numbers: list[tuple[object, ...]]
    tensors: dict[str, str]


def numbers(folder: Path) -> list[tuple[object, ...]]:
    return metrics(folder, "step", "tokens", "loss", "grad_norm", "lr")


def alone(root: Path, steps: int) -> Undisturbed:
    config, folder = write_run(root), root / "run"
    config.write_text(config.read_text() + SETUP)
    done = forked(config, folder, *OPTIONS, "--training.steps", str(steps), processes=4, seconds=PATIENCE)
    assert done.statuses == [0] * 4, done.said
    return Undisturbed(config, steps, numbers(folder), digests(folder / "checkpoints" / f"step-{steps}"))


@pytest.fixture(scope="module")
def undisturbed(_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return alone(tmp_path_factory.mktemp("undisturbed"), STEPS)


def training(cluster: Cluster, undisturbed: Undisturbed, folder: Path) -> Job:
    steps = ("--training.steps", str(undisturbed.steps))
    return Job(cluster, folder, "--config", str(undisturbed.config), *OPTIONS, *steps)


def ends_the_same(job: Job, undisturbed: Undisturbed, *, seconds: float = PATIENCE) -> None:
    assert job.ended("COMPLETED", seconds=seconds) == "0:0"
    assert numbers(job.folder) == undisturbed.numbers
    assert digests(job.folder / "checkpoints" / f"step-{undisturbed.steps}") == undisturbed.tensors


def ranks(cluster: Cluster, node: str) -> list[int]:
    return [pid for pid in cluster.processes(node) if b"train.py" in command_of(pid)]


def kill_a_rank(job: Job) -> None:
    victim = max(ranks(job.cluster, "n2"))
    os.kill(victim, signal.SIGKILL)


def test_a_killed_rank_a_time_limit_and_preemption_change_nothing(
    cluster: Cluster, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = training(cluster, undisturbed, tmp_path / "run")
    job.submit()
    job.wait_progress()
    kill_a_rank(job)
    job.wait_log(f"attempt {job.number}.0.0 ended with ")
    job.wait_progress()
    job.near_the_limit()
    job.wait_log("life 1 on ")
    job.wait_progress()
    cluster.preempt(seconds=1)
    job.wait_log("life 2 on ")
    ends_the_same(job, undisturbed)
    assert f"attempt {job.number}.0.2" not in job.log()
    assert cluster.state(job.number).requeues == 2


def test_under_torchrun_a_time_limit_changes_nothing(
    cluster: Cluster, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = training(cluster, undisturbed, tmp_path / "run")
    job.submit("--launcher", "torchrun")
    job.wait_progress()
    job.near_the_limit()
    ends_the_same(job, undisturbed)
    assert cluster.state(job.number).requeues == 1
    assert f"attempt {job.number}.0.0 ended with 0" in job.log()
    assert "Traceback" not in job.log()


# ---- what takes minutes


@pytest.mark.slow
def test_a_real_time_limit_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    undisturbed = alone(tmp_path, LONG)
    job = training(cluster, undisturbed, tmp_path / "job")
    # SLURM counts in minutes, and warns up to 20 s too early; a start takes up to 20 s.
    job.submit("--time", "00:01:00", "--lead-seconds", "15")
    ends_the_same(job, undisturbed, seconds=LONG_PATIENCE)
    assert cluster.state(job.number).requeues >= 1


@pytest.mark.slow
def test_a_killed_rank_under_torchrun_changes_nothing(
    cluster: Cluster, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = training(cluster, undisturbed, tmp_path / "run")
    job.submit("--launcher", "torchrun")
    job.wait_progress()
    kill_a_rank(job)
    ends_the_same(job, undisturbed)
    assert cluster.state(job.number).requeues == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cable", "power"])
def test_a_node_that_is_lost_and_comes_back_changes_nothing(
    cluster: Cluster, undisturbed: Undisturbed, tmp_path: Path, fault: str
) -> None:
    job = training(cluster, undisturbed, tmp_path / "run")
    job.submit()
    job.wait_progress()
    if fault == "cable":
        cluster.unplug("n2")
    else:
        cluster.kill_node("n2")
    cluster.wait_for(lambda: "down" in cluster.command("sinfo", "-h", "-n", "n2", "-o", "%T"), 90, "n2 to be down")
    if fault == "cable":
        cluster.plug("n2")
    else:
        cluster.start_node("n2")
    ends_the_same(job, undisturbed)
    assert cluster.state(job.number).requeues >= 1
