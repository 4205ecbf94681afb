"""A full disk or a missing folder does not end a run: lines are buffered, and one warning is
logged.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path

import pytest

from tests.system.in_process import configured, run_here
from tests.system.runs import (
    checkpoints,
    digests,
    end,
    fork,
    forked,
    lines,
    metrics,
    mounted,
    read_only,
    steps,
    wait_for,
    write_run,
)
from trainer.errors import EXIT_NO_RETRY, LostMetricsError
from trainer.storage import manifest
from trainer.storage.durable_io import LineAppender

EXACT = ("step", "loss", "grad_norm")
LAST = "step-28"
LONG = ("--training.steps", "28", "--checkpoint.interval", "4", "--checkpoint.keep", "2")


def test_lines_are_buffered_on_a_full_disk_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.jsonl"
    written = LineAppender(tmp_path / "x.jsonl")
    written.append("first")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        written.append("second")
        written.append("third")
        assert path.read_text() == "first\n", "a partial write is undone"
    written.append("fourth")
    assert path.read_text() == "first\nsecond\nthird\nfourth\n"
    assert (
        caplog.text.count(
            f"{path} cannot be written, its lines are buffered: No space left on device"
        )
        == 1
    )


def test_lines_are_buffered_while_the_folder_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    written = LineAppender(folder / "x.jsonl")
    written.append("first")
    folder.mkdir()
    written.append("second")
    assert (folder / "x.jsonl").read_text() == "first\nsecond\n"


def test_a_line_after_a_torn_one_starts_on_a_new_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("whole\nto")
    LineAppender(tmp_path / "x.jsonl").append("next")
    assert (tmp_path / "x.jsonl").read_text() == "whole\nto\nnext\n"


@pytest.mark.ranks
def test_a_run_survives_a_temporarily_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1000))
    real = LineAppender._write_pending

    def fail_sometimes(self: LineAppender, file: FileIO) -> None:
        if 3 <= next(calls) < 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, file)

    monkeypatch.setattr(LineAppender, "_write_pending", fail_sometimes)
    run_here(configured(write_run(tmp_path), tmp_path / "run"))
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    assert [event["event"] for event in lines(tmp_path / "run" / "events.jsonl")][-1] == "end"


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_run_whose_lines_are_lost_says_so_and_stops(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = LineAppender._write_pending
    folder = tmp_path / "run"

    def fail_from_step_5(self: LineAppender, file: FileIO) -> None:
        if self._path.name == name and (folder / "metrics.jsonl").read_bytes().count(b"\n") >= 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, file)

    monkeypatch.setattr(LineAppender, "_write_pending", fail_from_step_5)
    with pytest.raises(
        LostMetricsError, match=rf"{name} lacks its last \d lines: No space left on device"
    ) as caught:
        run_here(configured(write_run(tmp_path), folder))
    assert caught.value.status == EXIT_NO_RETRY
    assert f"{name} cannot be written, its lines are buffered" in caplog.text
    assert (folder / "checkpoints" / "step-6").is_dir()


@pytest.mark.ranks
def test_a_disk_that_stays_full_ends_a_run_with_78_and_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=8k", "tmpfs"):
        (tmp_path / "small" / "ballast").write_bytes(bytes(4096))
        (tmp_path / "small" / "lines").touch()
        (folder / "metrics.jsonl").symlink_to(tmp_path / "small" / "lines")
        done = forked(write_run(tmp_path), folder)
    assert done.statuses == [EXIT_NO_RETRY], done.said
    assert "metrics.jsonl lacks its last" in done.said
    assert "Traceback" not in done.said
    assert json.loads((folder / "STOP").read_text())["content"]["reason"].endswith(
        "No space left on device"
    )
    assert manifest.read_intact(folder / "checkpoints" / "step-6", check_hashes=True).step == 6


@pytest.mark.ranks
def test_a_run_survives_the_removal_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trainer.step.trainer import Trainer

    real = Trainer.train_step
    folder = tmp_path / "run"

    def train_step(self: Trainer, *args: object) -> object:
        if self.step == 4:
            # The watchdog may write at the same time.
            shutil.rmtree(folder, ignore_errors=True)
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "train_step", train_step)
    with caplog.at_level(logging.WARNING):
        run_here(configured(write_run(tmp_path), folder, "--checkpoint.interval", "100"))
    assert "metrics.jsonl cannot be written, its lines are buffered" in caplog.text
    assert "done: all 6 updates" in caplog.text or (folder / "checkpoints" / "step-6").is_dir()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run.toml`, and in `whole` an uninterrupted run."""
    root = tmp_path_factory.mktemp("uninterrupted")
    assert forked(write_run(root), root / "whole", *LONG, processes=2).statuses == [0, 0]
    return root


@contextmanager
def filled(folder: Path) -> Iterator[Callable[[], None]]:
    """Keeps the file system of `folder` full; yields a function that fills space that became
    free.
    """
    ballast = folder / "ballast"

    def fill() -> None:
        with suppress(OSError), ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    fill()
    yield fill
    ballast.unlink()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "in_memory", [(), ("--checkpoint.memory_interval", "1")], ids=["", "in memory"]
)
@pytest.mark.parametrize(
    ("broken", "message"),
    [(filled, "disk full: "), (read_only, "Read-only file system")],
    ids=["full", "read-only"],
)
def test_results_on_a_failing_disk_are_bitwise_identical(
    uninterrupted: Path,
    tmp_path: Path,
    broken: Callable[[Path], AbstractContextManager[Callable[[], None] | None]],
    message: str,
    in_memory: tuple[str, ...],
) -> None:
    folder = tmp_path / "run"
    with mounted(folder, "-t", "tmpfs", "-o", "size=16m", "tmpfs"):
        ranks = fork(uninterrupted / "run.toml", folder, *LONG, *in_memory, processes=2)
        log = folder.with_suffix(".log")
        assert wait_for(
            lambda: (folder / "metrics.jsonl").exists() and len(checkpoints(folder)) > 1
        )
        with broken(folder) as refill:
            assert wait_for(partial(is_reported, log, message, refill)), log.read_text()
            assert all(rank.is_alive() for rank in ranks), log.read_text()
        assert wait_for(lambda: not any(rank.is_alive() for rank in ranks)), log.read_text()
        end(ranks)
        assert [rank.exitcode for rank in ranks] == [0, 0], log.read_text()
        assert metrics(folder, *EXACT) == metrics(uninterrupted / "whole", *EXACT)
        assert digests(folder / "checkpoints" / LAST) == digests(
            uninterrupted / "whole" / "checkpoints" / LAST
        )
        assert not [
            name
            for name in checkpoints(folder)
            if not name.startswith("step-") and name != "newest"
        ]


def is_reported(log: Path, message: str, refill: Callable[[], None] | None) -> bool:
    """Whether the log reports two failed saves and buffered lines; keeps the disk full."""
    if refill is not None:
        refill()
    text = log.read_text()
    return text.count(message) > 1 and "its lines are buffered" in text


@pytest.mark.ranks
def test_a_read_only_run_folder_is_rejected_at_launch(tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    with read_only(folder):
        done = forked(write_run(tmp_path), folder)
    assert done.statuses == [2]
    assert (
        f"error: job.output_dir = {folder} cannot be used: {folder} is not writable" in done.said
    )
