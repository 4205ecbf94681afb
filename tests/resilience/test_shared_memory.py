"""Shared memory is open to every user of a host: what lies there by the name of a run's folder is
left alone, and waits for nobody.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from trainer.checkpoint import memory_folder as memory
from trainer.errors import RunFailedError

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="gives a folder to another user, which needs root"
)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(memory, "SHARED_MEMORY", folder)
    return folder


def name_of(name: str) -> str:
    return f"longhaul-{os.geteuid()}-{name}"


def is_over(function: Callable[[], object]) -> bool:
    """Whether the function ends by itself.

    A daemon thread, so that one that does not is left behind.
    """
    thread = Thread(target=function, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def make_old(path: Path) -> None:
    hours_ago = time.time() - 2 * memory.ABANDONED_SECONDS
    os.utime(path, (hours_ago, hours_ago), follow_symlinks=False)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # A socket's path is short.
        server.bind(path.name)
        os.chdir(here)


def make_link(path: Path) -> None:
    target = path.parent / "linked"
    target.mkdir()
    (target / "rank-0.0").write_text("kept")
    make_old(target)
    path.symlink_to(target)


def make_foreign(path: Path) -> None:
    path.mkdir(mode=0o777)
    (path / "rank-0.0").write_text("kept")
    os.chown(path, 65534, 65534)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "Not a directory"),
    "socket": (make_socket, "Not a directory"),
    "file": (Path.touch, "Not a directory"),
    "link": (make_link, "Not a directory"),
    "foreign": (make_foreign, "it is of another user"),
}
each_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs_root if kind == "foreign" else ()) for kind in KINDS]
)


@each_kind
def test_what_is_no_folder_of_this_user_is_left_alone_with_a_line(
    shared: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = KINDS[kind]
    path = shared / name_of("x")
    make(path)
    make_old(path)
    (shared / name_of("y")).mkdir()
    make_old(shared / name_of("y"))
    with caplog.at_level(logging.INFO, "trainer"):
        assert is_over(memory.remove_abandoned)
    assert caplog.messages == [f"{path} is left alone: {reason}"]
    assert os.path.lexists(path)
    assert not (shared / name_of("y")).exists()
    assert [each.read_text() for each in shared.rglob("rank-0.0")] == ["kept"] * (
        kind in ("link", "foreign")
    )


@each_kind
def test_a_run_neither_removes_nor_uses_what_lies_in_place_of_its_folder(
    shared: Path, kind: str
) -> None:
    make, _ = KINDS[kind]
    path = shared / name_of("own")
    make(path)
    assert is_over(lambda: memory.remove_memory_folder(path))
    assert os.path.lexists(path)
    with pytest.raises(OSError, match=r"another user|Not a directory|symbolic"):
        memory.hold(path)
    with pytest.raises(
        RunFailedError, match=r"cannot be created: File exists|is not a folder that only this user"
    ):
        memory.create_memory_folder(path)


def test_a_folder_that_a_run_holds_is_not_removed_and_an_abandoned_one_is(shared: Path) -> None:
    path = shared / name_of("own")
    memory.create_memory_folder(path)
    (path / "rank-0.0").touch()
    make_old(path)
    descriptor = memory.hold(path)
    memory.remove_abandoned()
    assert path.exists()
    os.close(descriptor)
    memory.remove_abandoned()
    assert not path.exists()
