"""A run opens no door: its sockets are on loopback, its ranks meet in a file that no other user can
open, and no rank unpickles what it is sent.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from parallelisms.mesh import collectives
from tests.launch.sockets import listening, sockets_of
from tests.other_user import as_nobody
from tests.system.runs import (
    SETS,
    forked,
    launch,
    lines,
    steps,
    train_rank,
    wait_for,
    workers,
    write_run,
)
from trainer.config.run_spec import STORE_FILE_ENV
from trainer.hardware.host import loopback_environment
from trainer.launch.cluster import LaunchWorld
from trainer.launch.workers import Workers

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def environment_of(pid: int) -> dict[str, str]:
    content = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(entry.split("=", 1) for entry in content.split("\0") if "=" in entry)


def store_file(pid: int) -> Path:
    """The store of a rank, as other processes reach it."""
    return Path(f"/proc/{pid}/fd/{environment_of(pid)[STORE_FILE_ENV]}")


@pytest.mark.ranks
def test_ranks_of_one_node_listen_on_loopback_alone_and_meet_in_a_file_that_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No port is the store's, so none can be taken or reached, whatever MASTER_PORT says."""
    config = write_run(tmp_path)
    folder = tmp_path / "run"
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        launcher = launch(
            config,
            folder,
            "--training.steps",
            "100000",
            "--checkpoint.interval",
            "100000",
            processes=2,
        )
        try:
            assert wait_for(
                lambda: (folder / "metrics.jsonl").exists() and lines(folder / "metrics.jsonl")
            )
            ranks = workers(launcher.pid)
            interfaces = {environment_of(pid)[name] for pid in ranks for name in INTERFACES}
            held = {inode for pid in (launcher.pid, *ranks) for inode in sockets_of(pid)}
            addresses = [each.address for each in listening(launcher.pid) if each.inode in held]
            stores = [store_file(pid) for pid in ranks]
            store, *others = [(path.stat().st_ino, path.read_bytes()) for path in stores]
            read_by_others = (
                [as_nobody(path.read_bytes) for path in stores] if os.geteuid() == 0 else []
            )
        finally:
            launcher.send_signal(signal.SIGKILL)
            launcher.wait()
    assert {*addresses} == {"127.0.0.1"}
    assert len(addresses) >= 2, "gloo on each rank"
    assert others == [store], "all ranks have the same"
    assert b"longhaul/present/1" in store[1]
    assert not any(read_by_others)
    assert interfaces == {"lo"}, (
        "where the host's name is that of loopback, gloo listens there anyway"
    )


MEETING = f"""
import os, sys, time
descriptor = int(os.environ["{STORE_FILE_ENV}"])
if os.environ["RANK"] == "1":
    os.write(descriptor, sys.argv[1].encode())
    sys.exit()
while not (found := os.pread(descriptor, 99, 0)):
    time.sleep(0.01)
sys.exit(found.decode() != sys.argv[1])
"""


def test_launches_of_the_same_moment_each_find_their_own_rank_zero(tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(MEETING)

    def meet(number: int) -> int:
        return Workers().run(script, [f"launch {number}"], LaunchWorld(nproc_per_node=2))

    with ThreadPoolExecutor(6) as launchers:
        assert [*launchers.map(meet, range(12))] == [0] * 12


def test_the_interface_that_the_user_chose_stays() -> None:
    assert loopback_environment({}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert loopback_environment({"GLOO_SOCKET_IFNAME": "eth1"}) == {"NCCL_SOCKET_IFNAME": "lo"}


# ---- pickles


class UnpickledError(Exception):
    pass


def refuse(*_: object) -> None:
    raise UnpickledError


def train_without_pickles(argv: list[str]) -> int:
    """Trains where neither pickle nor torch.distributed can make or read one, but for files that
    are read class by class.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load", "loads", "dumps", "Unpickler"):
            patch.setattr(pickle, name, refuse)
        for name in ("_tensor_to_object", "_object_to_tensor", "_pickler", "_unpickler"):
            patch.setattr(distributed_c10d, name, refuse)
        return train_rank(argv)


EVERYTHING = (
    "--checkpoint.memory_interval=1",
    "--health.replica_check_interval=2",
    "--validation.interval=2",
)


@pytest.mark.ranks
def test_ranks_send_each_other_no_pickles(tmp_path: Path) -> None:
    """A pipeline, validation, saves, in-memory checkpoints, resuming on another mesh, and checks
    of what tp copies.
    """
    config = write_run(tmp_path)
    folder = tmp_path / "run"
    config.write_text(config.read_text() + SETS)
    for options in (
        ("--parallelism.pp=2", "--training.steps=3"),
        ("--parallelism.tp=2", "--checkpoint.async=false"),
    ):
        done = forked(
            config,
            folder,
            *EVERYTHING,
            *options,
            processes=2,
            seconds=180,
            train=train_without_pickles,
        )
        assert done.statuses == [0, 0], done.said
    assert steps(folder) == [1, 2, 3, 4, 5, 6]


class Hostile:
    """Creates a file where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("unpickled"),)


def train_beside_a_stranger(argv: list[str]) -> int:
    """Rank 1 sends a pickle that runs a command wherever ranks exchange values."""

    def send(value: object) -> bytes:
        del value
        return pickle.dumps(Hostile())

    if os.environ["RANK"] == "1":
        collectives.encode = send  # type: ignore[attr-defined]
    os.chdir(Path(argv[argv.index("--config") + 1]).parent)
    return train_rank(argv)


@pytest.mark.ranks
def test_a_stranger_in_a_run_ends_it_with_one_line_and_runs_nothing(tmp_path: Path) -> None:
    done = forked(
        write_run(tmp_path), tmp_path / "run", processes=2, train=train_beside_a_stranger
    )
    assert done.statuses == [1, 1]
    assert [line.partition(": '")[0] for line in done.said.splitlines() if "error" in line] == [
        "error: what rank 1 sent is not JSON"
    ]
    assert "Traceback" not in done.said
    assert not (tmp_path / "unpickled").exists()
