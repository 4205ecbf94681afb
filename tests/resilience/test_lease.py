"""One launch at a time holds a run folder, whatever became of the one before."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.artifacts import content, forge
from trainer.errors import RunFailedError, RunFolderHeldElsewhereError, RunFolderInUseError
from trainer.storage import lease as lease_module
from trainer.storage.lease import Lease

context = multiprocessing.get_context("fork")  # Children have the short times of the tests, too.
ELSEWHERE = {"boot": "another kernel", "host": "node-7", "job": "42"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"HEARTBEAT": 0.1, "LEASE": 1.0, "SETTLE": 0.1, "ENDING": 0.3, "POLL": 0.02}.items():
        monkeypatch.setattr(lease_module, f"{name}_SECONDS", seconds)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run" / "logs"
    made.mkdir(parents=True)
    return made


def held_by(folder: Path, /, **changed: object) -> Path:
    """A lease that its owner left behind, with other facts about it."""
    with Lease(folder):
        shutil.copy(folder / "lease", folder / "left")
    path = (folder / "left").rename(folder / "lease")
    forge(path, lambda values: values.update(changed))
    return path


def seconds_to_hold(folder: Path) -> float:
    began = time.monotonic()
    with Lease(folder) as lease:
        lease.require()
        return time.monotonic() - began


def test_a_lease_is_released(folder: Path) -> None:
    for _ in range(2):
        with Lease(folder, job="9", attempt="a") as lease:
            lease.require()
            assert (content(folder / "lease")["job"], content(folder / "lease")["attempt"]) == ("9", "a")
        assert [*folder.iterdir()] == []


def test_a_living_owner_on_this_host_is_named(folder: Path) -> None:
    with (
        Lease(folder),
        pytest.raises(RunFolderInUseError, match=rf"{folder.parent} is in use by process {os.getpid()} on "),
    ):
        Lease(folder).__enter__()


@pytest.mark.parametrize(
    "changed",
    [{"folder": 1}, {"pid": 1 << 30}, {"started": "1"}, {"folder": 1, **ELSEWHERE}],
    ids=["a copied folder", "an ended process", "another process of that number", "copied from elsewhere"],
)
def test_an_owner_that_cannot_write_is_replaced_at_once(folder: Path, changed: dict[str, object]) -> None:
    held_by(folder, **changed)
    assert seconds_to_hold(folder) < 0.8


def test_a_killed_owner_is_replaced_at_once(folder: Path) -> None:
    def hold() -> None:
        with Lease(folder):
            time.sleep(60)

    process = context.Process(target=hold)
    process.start()
    while not (folder / "lease").exists():
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert seconds_to_hold(folder) < 0.8
    process.join()


def test_a_dead_node_is_waited_for(folder: Path) -> None:
    held_by(folder, **ELSEWHERE)
    assert 1 <= seconds_to_hold(folder) < 3


def test_a_living_owner_elsewhere_is_named(folder: Path) -> None:
    path = held_by(folder, **ELSEWHERE)

    def touch() -> None:
        for _ in range(30):
            time.sleep(0.1)
            os.utime(path)

    process = context.Process(target=touch)
    process.start()
    with pytest.raises(RunFolderHeldElsewhereError, match=rf"is in use by process {os.getpid()} on node-7 of job 42"):
        Lease(folder).__enter__()
    process.kill()
    process.join()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\0" * 100),
        lambda path: path.write_text("process 1 on elsewhere\n"),
    ],
    ids=["empty", "zeros", "of an earlier version"],
)
def test_a_lease_that_says_nothing_is_replaced(folder: Path, damage: Callable[[Path], object]) -> None:
    damage(held_by(folder))
    assert seconds_to_hold(folder) < 0.8


@pytest.mark.parametrize("kind", ["folder", "pipe", "/dev/zero", "nowhere", "lease"])
def test_what_is_no_file_is_replaced(folder: Path, kind: str) -> None:
    path = folder / "lease"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(kind)
    assert seconds_to_hold(folder) < 0.8


def test_an_owner_that_was_stopped_notices_that_it_was_replaced(folder: Path) -> None:
    with Lease(folder) as first:
        shutil.copy(folder / "lease", folder / "next")
        (folder / "next").replace(folder / "lease")
        time.sleep(0.5)
        with pytest.raises(RunFailedError, match="another one took the run over"):
            first.require()


def test_a_stopped_owner_notices_before_its_next_touch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 60.0)
    with Lease(folder) as first:
        (folder / "lease").unlink()
        first.require()
        time.sleep(0.6)  # More than half the lease.
        with pytest.raises(RunFailedError, match="another one took the run over"):
            first.require()


def contend(folder: Path, number: int) -> None:
    with Lease(folder):
        holder = folder / "holder"
        with holder.open("x"):  # Raises if another launch holds it.
            time.sleep(0.05)
        holder.unlink()
        with (folder / "order").open("a") as file:
            file.write(f"{number}\n")


@pytest.mark.parametrize("has_links", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("left", [{"pid": 1 << 30}, ELSEWHERE], ids=["here", "elsewhere"])
def test_of_many_launches_one_at_a_time_takes_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, left: dict[str, Any], *, has_links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(lease_module, "ENDING_SECONDS", 60.0)
    held_by(folder, **left)
    processes = [context.Process(target=contend, args=(folder, number)) for number in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 6
    assert sorted((folder / "order").read_text().split()) == [*map(str, range(6))]
