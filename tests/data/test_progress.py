import logging

import pytest

from trainer.data import progress


def test_a_log_gets_lines_with_share_rate_and_time_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    with progress.progress("tokenizing", total_bytes=400) as advance:
        advance(100, 30)
        advance(100, 30)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["tokenizing: 25 %", "tokenizing: 50 %"]
    assert "tokens/s" in caplog.text


def test_without_a_size_a_log_gets_no_share(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    with progress.progress("tokenizing", total_bytes=0) as advance:
        advance(100, 1030)
    assert [record.getMessage().split(",")[:2] for record in caplog.records] == [["tokenizing: 1", "030 tokens"]]


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress.progress_bar("tokenizing", 400) as advance:
        advance(100, 30)
    shown = capsys.readouterr().err
    assert "tokenizing" in shown
    assert "tokens/s" in shown
