"""The torchrun agent of a node: exit status, signals, and a world of several nodes."""

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
LAUNCH = """
import logging, sys
from pathlib import Path
from trainer.launch.cluster import LaunchWorld
from trainer.slurm.torchrun_agent import launch_agent
logging.disable(logging.ERROR)
script, nodes, processes, endpoint, *argv = sys.argv[1:]
world = LaunchWorld(nproc_per_node=int(processes), num_nodes=int(nodes))
sys.exit(launch_agent(Path(script), argv, world, rdzv_endpoint=endpoint, rdzv_id="1.0.0"))
"""
pytestmark = pytest.mark.ranks


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def agent(
    folder: Path, body: str, *, nodes: int = 1, processes: int = 2, endpoint: str
) -> subprocess.Popen[str]:
    script = folder / "rank.py"
    script.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{body}\n")
    command = [
        sys.executable,
        "-c",
        LAUNCH,
        str(script),
        str(nodes),
        str(processes),
        endpoint,
        "--a",
        "b c",
    ]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        pytest.param(
            "sys.exit(0 if sys.argv[1:] == ['--a', 'b c'] else 1)", 0, "", marks=pytest.mark.slow
        ),
        ("sys.exit(78 if rank == 1 else 0)", 78, "error: local rank 1 (pid "),
        pytest.param(
            "rank == 0 and os.kill(os.getpid(), signal.SIGKILL)",
            1,
            "was killed by SIGKILL",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_agent_exits_with_the_status_of_its_ranks(
    tmp_path: Path, body: str, status: int, message: str
) -> None:
    node = agent(tmp_path, body, endpoint=free_endpoint())
    errors = node.communicate(timeout=120)[1]
    assert node.returncode == status, errors
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_signalled_ranks_may_finish_saving(tmp_path: Path, number: signal.Signals) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    body = (
        f"signal.signal({int(number)}, lambda *_: (time.sleep(1), sys.exit(0)))\n"
        f"open(f'{ready}/{{rank}}', 'w').close()\n"
        "time.sleep(60); sys.exit(1)"
    )
    node = agent(tmp_path, body, endpoint=free_endpoint())
    assert wait_for(lambda: len([*ready.iterdir()]) == 2)
    node.send_signal(number)
    errors = node.communicate(timeout=60)[1]
    assert (node.returncode, errors) == (0, "")


@pytest.mark.slow
def test_agents_of_two_nodes_form_one_world(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    body = "print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['LOCAL_WORLD_SIZE'])"
    nodes = [agent(tmp_path, body, nodes=2, processes=1, endpoint=endpoint) for _ in range(2)]
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert sorted("".join(outputs).splitlines()) == ["0 2 1", "1 2 1"]


def test_only_the_first_node_reports_a_wrong_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--nodes",
        "2",
        "--processes",
        "4",
        "--meet",
        "n1:20000",
        "--id",
        "1",
        "--parallelism.cp",
        "3",
    ]
    for node, message in (("0", "but the world size is 8 ("), ("1", "")):
        monkeypatch.setenv("SLURM_NODEID", node)
        assert main(words) == 2
        errors = capsys.readouterr().err
        assert message in errors
        assert bool(errors) == bool(message)
