import logging
import sys

import pytest

from trainer.data import progress


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    return caplog


def test_a_log_line_has_percentage_throughput_and_eta(log: pytest.LogCaptureFixture) -> None:
    with progress.progress("tokenizing", total_bytes=400) as advance:
        advance(100, 30)
        advance(100, 30)
    lines = [record.getMessage().split(", ") for record in log.records]
    assert [line[0] for line in lines] == ["tokenizing: 25 %", "tokenizing: 50 %"]
    assert all(line[1].endswith(" tokens/s") and line[2].startswith("eta ") for line in lines)


def test_without_a_total_a_log_line_has_tokens_and_no_percentage(
    log: pytest.LogCaptureFixture,
) -> None:
    with progress.progress("tokenizing", total_bytes=0) as advance:
        advance(100, 1030)
    assert [record.getMessage().split(",")[:2] for record in log.records] == [
        ["tokenizing: 1", "030 tokens"]
    ]


def test_a_terminal_shows_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.progress("tokenizing", total_bytes=400) as advance:
        advance(100, 30)
    err = capsys.readouterr().err
    assert "tokenizing" in err
    assert "tokens/s" in err
