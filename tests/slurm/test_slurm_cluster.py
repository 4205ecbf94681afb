"""The SLURM cluster of the tests is removed completely, even after a kill."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, sweep
from tests.system.runs import command_of, is_alive, wait_for

ROOT = Path(__file__).resolve().parents[2]
KILLED = """
import os, signal
from tests.slurm.cluster import Cluster
cluster = Cluster()
cluster.__enter__()
print(cluster.name, *cluster.processes("ctl"), *cluster.processes("n1"), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slurm
def test_sweep_removes_only_the_cluster_of_a_killed_process(cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    name, *pids = done.stdout.split()
    folder = Path(tempfile.gettempdir()) / name
    munge = int((folder / "munge" / "pid").read_text())
    assert len(pids) >= 2
    assert all(is_alive(int(pid)) for pid in pids)
    assert str(folder).encode() in command_of(munge)
    sweep()
    assert not any(is_alive(int(pid)) for pid in pids)
    assert not folder.exists()
    assert not [*Path("/run/netns").glob(f"{name}-*")]
    assert wait_for(lambda: str(folder).encode() not in command_of(munge), 5)
    assert cluster.command("hostname") == "ctl\n"
