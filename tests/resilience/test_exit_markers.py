"""Exit markers."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainer.errors
from tests.artifacts import content
from trainer.errors import (
    CONCLUSIVE_EXIT_CODES,
    ENDINGS,
    DoesNotFitError,
    RunError,
    failure_ending,
)
from trainer.storage import exit_markers


def test_a_marker_is_read_only_by_its_own_launch(tmp_path: Path) -> None:
    exit_markers.write(tmp_path, "REQUEUE", attempt="a", reason="SIGTERM")
    assert exit_markers.read(tmp_path, "a") == "REQUEUE"
    assert exit_markers.read(tmp_path, "b") is None
    fields = content(tmp_path / "REQUEUE")
    assert (fields["reason"], fields["attempt"]) == ("SIGTERM", "a")
    assert fields["time"] > 1e9
    exit_markers.write(tmp_path, "DONE", attempt="a")
    assert [path.name for path in tmp_path.iterdir()] == ["DONE"], "only the last marker remains"
    exit_markers.clear(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_the_marker_of_a_refused_launch_leaves_those_of_the_running_one(tmp_path: Path) -> None:
    exit_markers.write(tmp_path, "REQUEUE", attempt="a")
    exit_markers.write(tmp_path, "RETRY", attempt="b", clears_others=False)
    assert (exit_markers.read(tmp_path, "a"), exit_markers.read(tmp_path, "b")) == (
        "REQUEUE",
        "RETRY",
    )


@pytest.mark.parametrize("code", range(1, 256))
def test_every_failure_has_one_ending(code: int) -> None:
    ending = failure_ending(code)
    assert ending.marker in ("RETRY", "STOP")
    assert (ending.marker == "STOP") == (code in CONCLUSIVE_EXIT_CODES)


def test_every_error_ends_as_the_table_says() -> None:
    errors = [
        each
        for each in vars(trainer.errors).values()
        # A plan that does not fit ends a command before there is a run.
        if isinstance(each, type) and issubclass(each, RunError) and each is not DoesNotFitError
    ]
    assert {each.status for each in errors} == {
        ending.exit_code for ending in ENDINGS if ending.exit_code
    }


def test_a_torn_marker_is_ignored(tmp_path: Path) -> None:
    for torn in ("", "{", "[]", "null", '{"attempt": "b"}'):
        (tmp_path / "DONE").write_text(torn)
        assert exit_markers.read(tmp_path, "a") is None


def test_write_if_absent_keeps_an_existing_marker(tmp_path: Path) -> None:
    exit_markers.write_if_absent(tmp_path, "DONE", attempt="a")
    before = (tmp_path / "DONE").read_bytes()
    exit_markers.write_if_absent(tmp_path, "DONE", attempt="b")
    assert (tmp_path / "DONE").read_bytes() == before
