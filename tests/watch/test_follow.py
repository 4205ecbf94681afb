"""Reading a run's files as they grow: each byte once, in bounded memory, whatever they hold."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.watch.invented_runs import EVENTS, record, write_lines
from trainer.storage.artifact import parse_object
from trainer.watch import follow
from trainer.watch.follow import MAX_POINTS, Curve, LineFile, RunHistory, number


def steps_of(history: RunHistory) -> list[int]:
    return [step for step, _ in history.steps.points]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every line that is parsed, in order."""
    lines = list[bytes]()

    def parse(line: bytes) -> dict[str, Any]:
        lines.append(line)
        return parse_object(line)

    monkeypatch.setattr(follow, "parse_object", parse)
    return lines


def test_a_refresh_reads_only_what_was_added(tmp_path: Path, parsed: list[bytes]) -> None:
    history = RunHistory(tmp_path)
    history.refresh()
    assert steps_of(history) == []
    write_lines(tmp_path / "metrics.jsonl", map(record, range(1, 101)))
    history.refresh()
    assert len(parsed) == 100
    history.refresh()
    write_lines(tmp_path / "metrics.jsonl", map(record, range(101, 104)))
    history.refresh()
    assert [json.loads(line)["step"] for line in parsed[100:]] == [101, 102, 103]
    assert steps_of(history) == [*range(1, 104)]
    assert history.newest["step"] == 103


def test_a_half_written_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = RunHistory(tmp_path)
    text = json.dumps(record(1)) + "\n" + json.dumps(record(2)) + "\n"
    for end in (len(text) - 40, len(text) - 1, len(text)):
        path.write_text(text[:end])
        history.refresh()
        assert steps_of(history) == ([1, 2] if end == len(text) else [1])
    assert history.problems == []


@pytest.mark.parametrize("keeps_inode", [True, False])
def test_a_file_that_a_resume_cut_is_read_again(tmp_path: Path, *, keeps_inode: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, map(record, range(1, 11)))
    history = RunHistory(tmp_path)
    history.refresh()
    other = path if keeps_inode else tmp_path / "other"
    # Longer than before: its size alone does not show that it is another one.
    write_lines(other, [record(step) | {"loss": 1.0} for step in range(6, 40)], mode="w")
    other.rename(path)
    history.refresh()
    assert steps_of(history) == [*range(6, 40)]
    path.unlink()
    history.refresh()
    assert steps_of(history) == []


def test_a_long_file_is_sampled_from_its_beginning_to_its_end(
    tmp_path: Path, parsed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "MAX_READ_BYTES", 1 << 16)
    monkeypatch.setattr(follow, "TAIL_BYTES", 1 << 12)
    path = tmp_path / "metrics.jsonl"
    write_lines(path, map(record, range(1, 5001)))
    history = RunHistory(tmp_path)
    history.refresh()
    assert sum(map(len, parsed)) < (1 << 16) + (1 << 12)
    seen = steps_of(history)
    assert (seen[0], seen[-1]) == (1, 5000)
    assert max(after - before for before, after in pairwise(seen)) < 500
    assert history.problems == ["metrics.jsonl is long: a part of it is shown by samples"]
    count = len(parsed)
    write_lines(path, [record(5001)])
    history.refresh()
    assert [json.loads(line)["step"] for line in parsed[count:]] == [5001]


def test_a_line_without_end_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"[" * 5000)
    file = LineFile(path)
    assert file.read() == (False, [])
    assert any("more than 1,000 bytes" in problem for problem in file.problems)
    with path.open("ab") as lines:
        lines.write(b'\n{"step": 7}\n')
    assert file.read() == (False, [{"step": 7}])


def test_a_curve_of_many_steps_has_few_points_at_equal_distances() -> None:
    curve = Curve()
    for step in range(1, 100_001):
        curve.add(step, {"loss": float(step)})
    steps = [step for step, _ in curve.points]
    assert MAX_POINTS / 2 < len(steps) <= 2 * MAX_POINTS + 1
    assert (steps[0], steps[-1]) == (1, 100_000)
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) <= 2 * 100_000 / MAX_POINTS


def test_steps_that_are_repeated_replace_those_before() -> None:
    curve = Curve()
    for step in (1, 2, 3, 4, 3, 5):
        curve.add(step, {"at": step})
    assert [step for step, _ in curve.points] == [1, 2, 3, 5]


def test_a_resume_voids_the_validations_after_it(tmp_path: Path) -> None:
    events = [*EVENTS, {"event": "validation", "step": 260, "set": "held_out", "loss": 3.0}]
    write_lines(tmp_path / "events.jsonl", events)
    history = RunHistory(tmp_path)
    history.refresh()
    assert [step for step, _ in history.validations["held_out"].points] == [0, 100, 200, 260]
    write_lines(tmp_path / "events.jsonl", [{**EVENTS[0], "step": 100, "resumed": "step-100"}])
    history.refresh()
    assert [step for step, _ in history.validations["held_out"].points] == [0, 100]
    assert history.counts == {"start": 3, "spike": 1, "rolled_back": 1, "straggler": 1}
    assert [*history.checkpoints] == [100, 200]


def test_only_finite_numbers_are_drawn() -> None:
    assert [number(each) for each in (1, 0.5, True, None, "1", 10**400, 1e200, [1])] == [
        *(1.0, 0.5, None, None, None, None, None, None)
    ]


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    history = RunHistory(tmp_path)
    history.refresh()
    assert history.problems == ["metrics.jsonl cannot be read: it is not a regular file"]
