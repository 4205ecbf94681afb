"""What a start leaves for whoever started it."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.resilience import exit_markers


def test_a_start_reads_what_it_left_and_nothing_of_another(tmp_path: Path) -> None:
    exit_markers.write(tmp_path, "REQUEUE", attempt="a", step=3)
    assert exit_markers.read(tmp_path, "a") == "REQUEUE"
    assert exit_markers.read(tmp_path, "b") is None
    facts = json.loads((tmp_path / "REQUEUE").read_text())
    assert (facts["step"], facts["attempt"]) == (3, "a")
    assert facts["time"] > 1e9
    exit_markers.write(tmp_path, "DONE", attempt="a")
    assert [path.name for path in tmp_path.iterdir()] == ["DONE"], "a run ended one way"
    exit_markers.clear(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_what_is_no_marker_says_nothing(tmp_path: Path) -> None:
    for torn in ("", "{", "[]", "null", '{"attempt": "b"}'):
        (tmp_path / "DONE").write_text(torn)
        assert exit_markers.read(tmp_path, "a") is None


def test_a_start_that_finds_nothing_to_do_changes_nothing(tmp_path: Path) -> None:
    exit_markers.write_if_absent(tmp_path, "DONE", attempt="a")
    before = (tmp_path / "DONE").read_bytes()
    exit_markers.write_if_absent(tmp_path, "DONE", attempt="b")
    assert (tmp_path / "DONE").read_bytes() == before
