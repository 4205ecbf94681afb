"""A disk that is full, or a folder that is gone, does not end a run: what cannot be written waits, and is told once."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.system.runs import lines, steps, write_run
from tests.trainer.inside import configured, run_here
from trainer.files import Lines


def test_lines_wait_for_a_disk_that_is_full_and_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, written = tmp_path / "x.jsonl", Lines(tmp_path / "x.jsonl")
    written.append("first")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        written.append("second")
        written.append("third")
        assert path.read_text() == "first\n", "what was written in part is taken back"
    written.append("fourth")
    assert path.read_text() == "first\nsecond\nthird\nfourth\n"
    assert caplog.text.count(f"{path} cannot be written to, its lines wait: No space left on device") == 1


def test_lines_wait_for_a_folder_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    written = Lines(folder / "x.jsonl")
    written.append("first")
    folder.mkdir()
    written.append("second")
    assert (folder / "x.jsonl").read_text() == "first\nsecond\n"


def test_a_line_follows_a_torn_one_on_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("whole\nto")
    Lines(tmp_path / "x.jsonl").append("next")
    assert (tmp_path / "x.jsonl").read_text() == "whole\nto\nnext\n"


@pytest.mark.ranks
def test_a_run_outlives_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))
    real = Lines._write

    def sometimes(self: Lines, file: BinaryIO) -> None:
        if 3 <= next(calls) < 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, file)

    monkeypatch.setattr(Lines, "_write", sometimes)
    run_here(configured(write_run(tmp_path), tmp_path / "run"))
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    assert [event["event"] for event in lines(tmp_path / "run" / "events.jsonl")][-1] == "end"


@pytest.mark.ranks
def test_a_run_outlives_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trainer.trainer import Trainer

    real, folder = Trainer.train_step, tmp_path / "run"

    def train_step(self: Trainer, *given: object) -> object:
        if self.step == 4:
            shutil.rmtree(folder, ignore_errors=True)  # The watchdog may write meanwhile.
        return real(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "train_step", train_step)
    with caplog.at_level(logging.WARNING):
        run_here(configured(write_run(tmp_path), folder, "--checkpoint.interval", "100"))
    assert "metrics.jsonl cannot be written to, its lines wait" in caplog.text
    assert "done: all 6 updates" in caplog.text or (folder / "checkpoints" / "step-6").is_dir()
