"""One launch at a time holds a run folder, whatever became of the one before."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from tests.artifacts import content, forge
from trainer.errors import (
    ConfigError,
    RunFailedError,
    RunFolderHeldElsewhereError,
    RunFolderInUseError,
)
from trainer.storage import lease as lease_module
from trainer.storage import manifest
from trainer.storage.lease import Lease

# Children have the short times of the tests, too.
context = multiprocessing.get_context("fork")
ELSEWHERE = {"boot": "another kernel", "host": "node-7", "job": "42"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        "HEARTBEAT": 0.1,
        "LEASE": 1.0,
        "SETTLE": 0.1,
        "ENDING": 0.3,
        "POLL": 0.02,
    }.items():
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
            assert (content(folder / "lease")["job"], content(folder / "lease")["attempt"]) == (
                "9",
                "a",
            )
        assert [*folder.iterdir()] == []


def test_a_living_owner_on_this_host_is_named(folder: Path) -> None:
    with (
        Lease(folder),
        pytest.raises(
            RunFolderInUseError, match=rf"{folder.parent} is in use by process {os.getpid()} on "
        ),
    ):
        Lease(folder).__enter__()


@pytest.mark.parametrize(
    "changed",
    [{"folder": 1}, {"pid": 1 << 30}, {"started": "1"}, {"folder": 1, **ELSEWHERE}],
    ids=[
        "a copied folder",
        "an ended process",
        "another process of that number",
        "copied from elsewhere",
    ],
)
def test_an_owner_that_cannot_write_is_replaced_at_once(
    folder: Path, changed: dict[str, object]
) -> None:
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
    with pytest.raises(
        RunFolderHeldElsewhereError,
        match=rf"is in use by process {os.getpid()} on node-7 of job 42",
    ):
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
def test_a_lease_that_says_nothing_is_replaced(
    folder: Path, damage: Callable[[Path], object]
) -> None:
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


def test_an_owner_whose_clock_stood_still_notices_before_its_next_touch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 60.0)
    with Lease(folder) as first:
        first.require()
        (folder / "lease").unlink()
        with pytest.raises(RunFailedError, match="another one took the run over"):
            first.require()


def test_an_owner_whose_lease_is_put_back_still_holds_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 60.0)
    with Lease(folder) as first:
        (folder / "lease").rename(folder / "aside")
        timer = Timer(0.03, lambda: os.link(folder / "aside", folder / "lease"))
        timer.start()
        first.require()
        timer.join()


# ---- file systems that fail

FAILURES = [
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENAMETOOLONG,
]
CALLS = ["link", "open", "lstat", "stat", "fstat", "utime", "unlink", "rename", "fsync"]


class Failing:
    """A function of `os` that fails with an error the first times that it is called with a path of
    a lease.
    """

    def __init__(self, function: Callable[..., Any], number: int, times: float) -> None:
        self._function = function
        self._number = number
        self._left = times

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._left > 0 and any("lease" in str(each) for each in args):
            self._left -= 1
            raise OSError(self._number, os.strerror(self._number))
        return self._function(*args, **options)


@pytest.mark.parametrize("times", [1, float("inf")], ids=["once", "always"])
@pytest.mark.parametrize("number", FAILURES, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("left", [None, {"pid": 1 << 30}], ids=["free", "left"])
def test_an_error_of_the_file_system_has_a_class_and_never_two_owners(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    left: dict[str, Any] | None,
    call: str,
    number: int,
    times: float,
) -> None:
    if left:
        held_by(folder, **left)
    monkeypatch.setattr(lease_module, "LEASE_SECONDS", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "RETRY_DELAY_SECONDS", 0.0)
        patch.setattr(os, call, Failing(getattr(os, call), number, times))
        with suppress(ConfigError, RunFailedError), Lease(folder) as lease:
            lease.require()
            assert content(folder / "lease")["pid"] == os.getpid(), "it was held"
    assert seconds_to_hold(folder) < 3, "and can be held afterwards"


def test_a_link_whose_reply_was_lost_is_our_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def link_twice(*args: Any) -> None:
        link(*args)
        link(*args)

    monkeypatch.setattr(os, "link", link_twice)
    assert seconds_to_hold(folder) < 0.2


def test_a_socket_or_an_impossible_process_in_its_place_is_replaced(folder: Path) -> None:
    held_by(folder, pid=1 << 40)
    assert seconds_to_hold(folder) < 0.8
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "lease"))
        assert seconds_to_hold(folder) < 0.8


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
