"""Three nodes train and a fourth is spare: nodes that lie or fail are left out, and results equal
an uninterrupted run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.job import Job
from tests.slurm.lying_node import lie, may_lie
from tests.slurm.test_slurm_training import numbers
from tests.system.runs import digests, forked, write_run
from trainer.checkpoint.memory_folder import Newest

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
STEPS = 60
PATIENCE = 400  # seconds
OPTIONS = (
    "--checkpoint.interval",
    "4",
    "--training.global_batch_size",
    "3",
    "--training.steps",
    str(STEPS),
)
SIZE = (
    "--slurm.preflight=true",
    "--nodes",
    "3",
    "--slurm.spare_nodes=1",
    "--processes-per-node",
    "1",
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    config = write_run(tmp_path)
    setup = f'"export GLOO_SOCKET_IFNAME=eth0", {may_lie(tmp_path)}'
    config.write_text(f"{config.read_text()}\n[slurm]\nsetup = [{setup}]\n")
    return config


def require_the_results_of_three_local_ranks(job: Job, config: Path) -> None:
    assert job.ended("COMPLETED", seconds=PATIENCE) == "0:0"
    whole = config.parent / "whole"
    done = forked(config, whole, *OPTIONS, processes=3, seconds=PATIENCE)
    assert done.statuses == [0] * 3, done.said
    assert numbers(job.folder) == numbers(whole)
    assert digests(job.folder / "checkpoints" / f"step-{STEPS}") == digests(
        whole / "checkpoints" / f"step-{STEPS}"
    )


def test_of_four_nodes_the_one_that_lies_is_left_out_and_named(
    four_nodes: Cluster, config: Path
) -> None:
    folder = config.parent
    lie(folder, "n2")
    job = Job(four_nodes, folder / "run", "--config", str(config), *OPTIONS)
    job.submit(*SIZE)
    require_the_results_of_three_local_ranks(job, config)
    assert "preflight: n2 is left out: product: cpu computes a wrong product" in job.log()
    assert f"job {job.number}: training on n1,n3,n4\n" in job.log()
    assert job.log().count("is left out") == 1


def test_two_nodes_that_lie_are_more_than_one_spare_replaces(
    four_nodes: Cluster, config: Path
) -> None:
    folder = config.parent
    lie(folder, "n2")
    lie(folder, "n4")
    job = Job(four_nodes, folder / "run", "--config", str(config), *OPTIONS)
    job.submit(*SIZE)
    assert job.ended("FAILED", seconds=PATIENCE) == "3:0"
    said = 'preflight: 2 of the 3 nodes that train passed; to leave them out, submit again with slurm.exclude = "n2,n4"'
    assert said in job.log()
    assert not (job.folder / "metrics.jsonl").exists()


def test_a_node_that_loses_power_and_then_lies_is_replaced_and_the_run_resumes_from_memory(
    four_nodes: Cluster, config: Path
) -> None:
    """The two nodes behind it train other ranks than before, whose in-memory checkpoints are on
    other nodes.
    """
    folder = config.parent
    options = (
        "--training.global_batch_size",
        "24",
        "--training.seq_len",
        "256",
        "--checkpoint.interval",
        "1000",
    )
    job = Job(four_nodes, folder / "run", "--config", str(config), *OPTIONS, *options)
    job.options += ("--checkpoint.memory_interval", "1")
    job.submit(*SIZE)
    newest = lambda: Newest.read(job.folder / "checkpoints").in_memory  # noqa: E731
    four_nodes.wait_for(lambda: newest() > 4, PATIENCE, "in-memory checkpoints")
    lie(folder, "n2")
    four_nodes.kill_node("n2")
    four_nodes.wait_for(
        lambda: "down" in four_nodes.command("sinfo", "-h", "-n", "n2", "-o", "%T"),
        90,
        "n2 to be down",
    )
    four_nodes.start_node("n2")
    assert job.ended("COMPLETED", seconds=PATIENCE) == "0:0"
    assert f"job {job.number}: training on n1,n2,n3\n" in job.log()
    assert f"job {job.number}: training on n1,n3,n4\n" in job.log()
    assert "of ranks [2] is restored from the memory of other ranks" in job.log()
    assert "resumed from /dev/shm/longhaul-" in job.log()
    whole = folder / "whole"
    done = forked(config, whole, *OPTIONS, *options, processes=3, seconds=PATIENCE)
    assert done.statuses == [0] * 3, done.said
    assert numbers(job.folder) == numbers(whole)
    assert digests(job.folder / "checkpoints" / f"step-{STEPS}") == digests(
        whole / "checkpoints" / f"step-{STEPS}"
    )
