"""Progress of long work: bars that fit their terminal, and log lines without one."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.metrics.test_metrics import RECORD
from trainer.metrics.loggers import ConsoleLogger
from trainer.storage import progress

MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    return caplog


@contextmanager
def terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Standard error is a terminal of this width; yields what it shows, line by line, once it is
    closed.
    """
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    received = list[bytes]()

    def receive() -> None:
        # The other end is closed: Linux answers with an error.
        try:
            while part := os.read(reader, 1 << 16):
                received.append(part)
        except OSError:
            pass

    thread = threading.Thread(target=receive)
    thread.start()
    lines = list[str]()
    saved = os.dup(2)
    # rich asks the descriptor for the width.
    os.dup2(writer, 2)
    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        try:
            yield lines
        finally:
            monkeypatch.undo()
            os.dup2(saved, 2)
            os.close(saved)
    thread.join()
    os.close(reader)
    text = MOVES.sub("", b"".join(received).decode())
    lines += [line for line in re.split(r"[\r\n]+", text) if line.strip()]


def show_bytes() -> None:
    with progress.progress("verifying a/very/long [name] of a checkpoint", total=1 << 40) as shown:
        shown.advance(123 << 30)


def show_files() -> None:
    with progress.progress("checking a model", total=191, unit="files") as shown:
        shown.advance(12)


def show_tokens() -> None:
    with progress.progress("tokenizing corpus", total=45 << 30) as shown:
        shown.advance(12 << 30, 3_000_000_000)


def show_steps() -> None:
    logger = ConsoleLogger(100_000, num_token_ranks=1)
    logger.write(RECORD | {"step_seconds": 1.0})
    logger.close()


@pytest.mark.parametrize("columns", [40, 60, 120])
@pytest.mark.parametrize(
    ("work", "shown"),
    [
        (show_bytes, "0.1/1.0 TiB"),
        (show_files, "12/191"),
        (show_tokens, "12.0/45.0 GiB"),
        (show_steps, "20/100000"),
    ],
)
def test_a_bar_is_one_line_of_its_terminal(
    work: Callable[[], None], shown: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(columns, monkeypatch) as lines:
        work()
    bars = [line for line in lines if shown in line]
    assert bars, lines
    assert all(len(line) <= columns for line in lines)
    # A bar of at least four characters, and a title.
    assert all(re.search("[━╸╺]{4}", line) and re.match(r"\w", line) for line in bars)
    assert any("/s" in line for line in bars) == (columns == 120 and work is not show_steps)


def test_lines_for_a_file_stay_out_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (
        (tmp_path / "out").open("w") as stdout,
        terminal(60, monkeypatch) as lines,
    ):
        monkeypatch.setattr(sys, "stdout", stdout)
        with progress.progress("exporting", total=100) as shown:
            shown.advance(50)
            sys.stdout.write("a file is written\n")
    assert (tmp_path / "out").read_text() == "a file is written\n"
    assert not any("is written" in line for line in lines)


def test_a_log_line_has_percentage_throughput_and_eta(log: pytest.LogCaptureFixture) -> None:
    with progress.progress("tokenizing", total=400) as shown:
        shown.advance(100, 30)
        shown.advance(100, 30)
    lines = [record.getMessage().split(", ") for record in log.records]
    assert [line[0] for line in lines] == ["tokenizing: 25 %", "tokenizing: 50 %"]
    assert all(line[1].endswith(" tokens/s") and line[2].startswith("eta ") for line in lines)


def test_without_a_total_a_log_line_has_tokens_and_no_percentage(
    log: pytest.LogCaptureFixture,
) -> None:
    with progress.progress("tokenizing", total=0) as shown:
        shown.advance(100, 1030)
    assert [record.getMessage().split(",")[:2] for record in log.records] == [
        ["tokenizing: 1", "030 tokens"]
    ]


def test_what_is_sent_twice_does_not_exceed_the_total(log: pytest.LogCaptureFixture) -> None:
    with progress.progress("uploading", total=0) as shown:
        shown.show(0, 0)
        shown.show(3 << 20, 2 << 20)
    first, second = (record.getMessage() for record in log.records)
    assert first.startswith("uploading: 0 B, ")
    assert second.startswith("uploading: 100 %, ")


def test_log_lines_are_few(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 1000.0)
    with progress.progress("verifying", total=400) as shown:
        for _ in range(100):
            shown.advance(4)
    assert log.records == []
