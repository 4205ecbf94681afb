"""Training as a SLURM job: after any fault, results equal an uninterrupted run bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.artifacts import content
from tests.slurm.cluster import Cluster
from tests.slurm.job import Job
from tests.slurm.lying_node import lie, may_lie
from tests.system.runs import command_of, digests, forked, metrics, write_run
from trainer.checkpoint.memory_folder import Newest, memory_folder
from trainer.storage.artifact import seal
from trainer.storage.lease import LeaseOwner

pytestmark = pytest.mark.slurm
# of 20 to 500 ms each, so that faults come before the end
STEPS = 44
LONG = 600
OPTIONS = (
    "--checkpoint.interval",
    "4",
    "--parallelism.cp",
    "2",
    "--training.global_batch_size",
    "4",
)
SETUP = '\n[slurm]\nsetup = ["export GLOO_SOCKET_IFNAME=eth0"]\n'
PATIENCE = 240  # seconds
LONG_PATIENCE = 900


@dataclass(frozen=True)
class Uninterrupted:
    """An uninterrupted run of four local processes, and its results."""

    config: Path
    steps: int
    numbers: list[tuple[object, ...]]
    tensors: dict[str, str]


def numbers(folder: Path) -> list[tuple[object, ...]]:
    return metrics(folder, "step", "tokens", "loss", "grad_norm", "lr")


def run_locally(root: Path, steps: int) -> Uninterrupted:
    config = write_run(root)
    folder = root / "run"
    config.write_text(config.read_text() + SETUP)
    done = forked(
        config, folder, *OPTIONS, "--training.steps", str(steps), processes=4, seconds=PATIENCE
    )
    assert done.statuses == [0] * 4, done.said
    return Uninterrupted(
        config, steps, numbers(folder), digests(folder / "checkpoints" / f"step-{steps}")
    )


@pytest.fixture(scope="module")
def uninterrupted(_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    return run_locally(tmp_path_factory.mktemp("uninterrupted"), STEPS)


def training(cluster: Cluster, uninterrupted: Uninterrupted, folder: Path) -> Job:
    steps = ("--training.steps", str(uninterrupted.steps))
    return Job(cluster, folder, "--config", str(uninterrupted.config), *OPTIONS, *steps)


def require_same_results(
    job: Job, uninterrupted: Uninterrupted, *, seconds: float = PATIENCE
) -> None:
    assert job.ended("COMPLETED", seconds=seconds) == "0:0"
    assert numbers(job.folder) == uninterrupted.numbers
    assert (
        digests(job.folder / "checkpoints" / f"step-{uninterrupted.steps}")
        == uninterrupted.tensors
    )


def ranks(cluster: Cluster, node: str) -> list[int]:
    return [pid for pid in cluster.processes(node) if b"train.py" in command_of(pid)]


def kill_a_rank(job: Job) -> None:
    victim = max(ranks(job.cluster, "n2"))
    os.kill(victim, signal.SIGKILL)


@pytest.mark.parametrize("preempted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_rank_a_time_limit_and_preemption_change_nothing(
    cluster: Cluster, uninterrupted: Uninterrupted, tmp_path: Path, *, preempted: bool
) -> None:
    job = training(cluster, uninterrupted, tmp_path / "run")
    job.submit()
    job.wait_progress()
    kill_a_rank(job)
    job.wait_log(f"attempt {job.number}.0.0 exited with ")
    job.wait_progress()
    job.near_the_limit()
    job.wait_log("requeue 1, running on ")
    if preempted:
        job.wait_progress()
        cluster.preempt(seconds=1)
        job.wait_log("requeue 2, running on ")
    require_same_results(job, uninterrupted)
    assert f"attempt {job.number}.0.2" not in job.log()
    assert cluster.state(job.number).requeues == 1 + preempted


def lying_node(uninterrupted: Uninterrupted, folder: Path) -> Path:
    """A configuration with which products of node n1 are wrong."""
    lie(folder, "n1")
    config = folder / "lying.toml"
    setup = uninterrupted.config.read_text()
    config.write_text(setup.replace("setup = [", f"setup = [{may_lie(folder)}, "))
    return config


def test_a_node_that_computes_wrong_products_is_replaced_by_a_spare_one(
    cluster: Cluster, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    config = lying_node(uninterrupted, tmp_path)
    job = training(cluster, replace(uninterrupted, config=config), tmp_path / "run")
    job.submit(
        "--slurm.preflight=true",
        "--nodes",
        "1",
        "--slurm.spare_nodes=1",
        "--processes-per-node",
        "4",
    )
    require_same_results(job, uninterrupted)
    assert "preflight: n1 is left out: product: cpu computes a wrong product" in job.log()
    assert f"job {job.number}: training on n2\n" in job.log()


def test_without_a_spare_node_the_job_ends_with_3_and_says_what_to_exclude(
    cluster: Cluster, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    config = lying_node(uninterrupted, tmp_path)
    job = training(cluster, replace(uninterrupted, config=config), tmp_path / "run")
    job.submit("--slurm.preflight=true")
    assert job.ended("FAILED", seconds=PATIENCE) == "3:0"
    said = 'preflight: 1 of the 2 nodes that train passed; to leave them out, submit again with slurm.exclude = "n1"'
    assert said in job.log()
    assert not (job.folder / "metrics.jsonl").exists()


# ---- slow tests


@pytest.mark.slow
def test_under_torchrun_a_time_limit_changes_nothing(
    cluster: Cluster, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    job = training(cluster, uninterrupted, tmp_path / "run")
    job.submit("--launcher", "torchrun")
    job.wait_progress()
    job.near_the_limit()
    require_same_results(job, uninterrupted)
    assert cluster.state(job.number).requeues == 1
    assert f"attempt {job.number}.0.0 exited with 0" in job.log()
    assert "Traceback" not in job.log()


@pytest.mark.slow
def test_a_real_time_limit_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    uninterrupted = run_locally(tmp_path, LONG)
    job = training(cluster, uninterrupted, tmp_path / "job")
    # SLURM counts in minutes, and signals up to 20 s early; a launch takes up to 20 s.
    job.submit("--time", "00:01:00", "--lead-seconds", "15")
    require_same_results(job, uninterrupted, seconds=LONG_PATIENCE)
    assert cluster.state(job.number).requeues >= 1


@pytest.mark.slow
def test_a_killed_rank_under_torchrun_changes_nothing(
    cluster: Cluster, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    job = training(cluster, uninterrupted, tmp_path / "run")
    job.submit("--launcher", "torchrun")
    job.wait_progress()
    kill_a_rank(job)
    require_same_results(job, uninterrupted)
    assert cluster.state(job.number).requeues == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cable", "power"])
def test_a_node_failure_and_recovery_changes_nothing(
    cluster: Cluster, uninterrupted: Uninterrupted, tmp_path: Path, fault: str
) -> None:
    job = training(cluster, uninterrupted, tmp_path / "run")
    job.submit()
    job.wait_progress()
    if fault == "cable":
        cluster.unplug("n2")
    else:
        cluster.kill_node("n2")
    cluster.wait_for(
        lambda: "down" in cluster.command("sinfo", "-h", "-n", "n2", "-o", "%T"),
        90,
        "n2 to be down",
    )
    if fault == "cable":
        cluster.plug("n2")
    else:
        cluster.start_node("n2")
    require_same_results(job, uninterrupted)
    assert cluster.state(job.number).requeues >= 1


@pytest.mark.slow
def test_a_killed_rank_resumes_from_memory(
    cluster: Cluster, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    job = training(cluster, uninterrupted, tmp_path / "run")
    job.options += ("--checkpoint.interval", "1000", "--checkpoint.memory_interval", "1")
    job.submit()
    cluster.wait_for(
        lambda: Newest.read(job.folder / "checkpoints").in_memory > 4,
        PATIENCE,
        "in-memory checkpoints",
    )
    kill_a_rank(job)
    require_same_results(job, uninterrupted)
    assert "resumed from /dev/shm/longhaul-" in job.log()
    assert not memory_folder(job.folder).exists()


@pytest.mark.slow
def test_the_lease_of_a_dead_node_is_waited_for_and_taken_over(
    cluster: Cluster, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    job = training(cluster, uninterrupted, tmp_path / "run")
    hold_lease_elsewhere(job.folder)
    job.submit()
    require_same_results(job, uninterrupted)
    assert "waiting for the lease of process 7 on lost of job 41" in job.log()
    assert "taking over the lease of process 7 on lost of job 41" in job.log()
    assert f"attempt {job.number}.0.0 exited with 0" in job.log()


@pytest.mark.slow
def test_a_lease_held_elsewhere_is_tried_again_until_its_owner_ends(
    cluster: Cluster, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    job = training(cluster, uninterrupted, tmp_path / "run")
    lease = hold_lease_elsewhere(job.folder)
    job.submit()
    while f"attempt {job.number}.0.0 exited with " not in job.log():
        os.utime(lease)
        time.sleep(0.5)
    assert (
        content(job.folder / "RETRY")["reason"]
        == f"{job.folder} is in use by process 7 on lost of job 41"
    )
    lease.unlink()
    require_same_results(job, uninterrupted)
    assert f"attempt {job.number}.0.0 exited with 1" in job.log()


def hold_lease_elsewhere(folder: Path) -> Path:
    """As a launch on a node that is not there any more."""
    logs = folder / "logs"
    logs.mkdir(parents=True)
    owner = LeaseOwner(
        folder=logs.stat().st_ino,
        host="lost",
        boot="lost",
        pid_namespace="",
        pid=7,
        started="1",
        job="41",
        attempt="",
    )
    (logs / "lease").write_bytes(seal(owner))
    return logs / "lease"


@pytest.mark.slow
def test_a_full_disk_that_is_made_room_on_changes_nothing(
    cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    job = training(cluster, uninterrupted, cluster.small_disk / "run")
    job.submit()
    job.wait_progress()
    filler = cluster.small_disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    kill_a_rank(job)
    time.sleep(15)  # Launches on a full disk.
    filler.unlink()
    require_same_results(job, uninterrupted)
    assert cluster.state(job.number).requeues == 0
    shutil.rmtree(job.folder)
