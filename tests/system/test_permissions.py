"""No stranger can write to what a run creates, whatever the umask is that it is started with."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.runs import launched, write_run
from trainer.storage.durable_io import keep_others_from_writing

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def writable_by_others(folder: Path) -> list[str]:
    found = [path for path in (folder, *folder.rglob("*")) if path.lstat().st_mode & stat.S_IWOTH]
    return [path.name for path in found if not path.is_symlink()]


@pytest.mark.parametrize(
    ("before", "after"), [(0, 0o002), (0o002, 0o002), (0o027, 0o027), (0o077, 0o077)]
)
@pytest.mark.usefixtures("open_umask")
def test_a_umask_is_only_made_stricter(before: int, after: int) -> None:
    os.umask(before)
    keep_others_from_writing()
    assert os.umask(0) == after


@pytest.mark.ranks
@pytest.mark.usefixtures("open_umask")
def test_nobody_else_can_write_to_a_run_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("--checkpoint.memory_interval", "1", "--metrics.tensorboard", "true")
    done = launched(write_run(tmp_path), folder, *options, processes=1)
    assert done.statuses == [0], done.said
    assert {"metrics.jsonl", "config.toml", "DONE", "checkpoints", "logs", "tensorboard"} <= {
        path.name for path in folder.iterdir()
    }
    assert writable_by_others(folder) == []


def test_nobody_else_can_write_to_a_prepared_corpus(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("a text")
    command = [sys.executable, "-m", "trainer.data.prepare", "--corpus", str(tmp_path / "text")]
    subprocess.run(
        [*command, "--output", str(tmp_path / "made")],
        cwd=ROOT,
        check=True,
        capture_output=True,
        umask=0,
    )
    assert writable_by_others(tmp_path / "made") == []
