"""torchrun's agent on a node: it leaves as its ranks do, and agents of several nodes make one world."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.runs import wait_for
from trainer.slurm.torchrun_agent import main

ROOT = Path(__file__).resolve().parents[2]
START = """
import logging, sys
from pathlib import Path
from trainer.launch.cluster import LaunchWorld
from trainer.slurm.torchrun_agent import launch_agent
logging.disable(logging.ERROR)
script, nodes, processes, meet, *argv = sys.argv[1:]
world = LaunchWorld(nproc_per_node=int(processes), num_nodes=int(nodes))
sys.exit(launch_agent(Path(script), argv, world, rdzv_endpoint=meet, rdzv_id="1.0.0"))
"""
pytestmark = pytest.mark.ranks


def meeting() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def agent(folder: Path, body: str, *, nodes: int = 1, processes: int = 2, meet: str) -> subprocess.Popen[str]:
    script = folder / "rank.py"
    script.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{body}\n")
    command = [sys.executable, "-c", START, str(script), str(nodes), str(processes), meet, "--a", "b c"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        pytest.param("sys.exit(0 if sys.argv[1:] == ['--a', 'b c'] else 1)", 0, "", marks=pytest.mark.slow),
        ("sys.exit(78 if rank == 1 else 0)", 78, "error: local rank 1 (pid "),
        pytest.param(
            "rank == 0 and os.kill(os.getpid(), signal.SIGKILL)", 1, "was killed by SIGKILL", marks=pytest.mark.slow
        ),
    ],
)
def test_an_agent_leaves_as_its_ranks_do(tmp_path: Path, body: str, status: int, told: str) -> None:
    node = agent(tmp_path, body, meet=meeting())
    errors = node.communicate(timeout=120)[1]
    assert node.returncode == status, errors
    assert told in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ranks_that_are_asked_to_stop_take_their_time(tmp_path: Path, number: signal.Signals) -> None:
    here = tmp_path / "here"
    here.mkdir()
    body = (
        f"signal.signal({int(number)}, lambda *_: (time.sleep(1), sys.exit(0)))\n"
        f"open(f'{here}/{{rank}}', 'w').close()\n"
        "time.sleep(60); sys.exit(1)"
    )
    node = agent(tmp_path, body, meet=meeting())
    assert wait_for(lambda: len([*here.iterdir()]) == 2)
    node.send_signal(number)
    errors = node.communicate(timeout=60)[1]
    assert (node.returncode, errors) == (0, "")


@pytest.mark.slow
def test_agents_of_two_nodes_make_one_world(tmp_path: Path) -> None:
    meet = meeting()
    body = "print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['LOCAL_WORLD_SIZE'])"
    nodes = [agent(tmp_path, body, nodes=2, processes=1, meet=meet) for _ in range(2)]
    told = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert sorted("".join(told).splitlines()) == ["0 2 1", "1 2 1"]


def test_a_wrong_configuration_is_told_by_one_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--nodes", "2", "--processes", "4", "--meet", "n1:20000", "--id", "1", "--parallelism.cp", "3"]
    for node, told in (("0", "but the world size is 8 ("), ("1", "")):
        monkeypatch.setenv("SLURM_NODEID", node)
        assert main(words) == 2
        errors = capsys.readouterr().err
        assert told in errors
        assert bool(errors) == bool(told)
