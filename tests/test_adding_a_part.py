"""docs/adding_a_part.md, followed to the letter in a copy of the sources."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from tests.followed_pages import ROOT, copy_of_sources, copy_rooms, follow, run

PAGE = "adding_a_part.md"
ROOMS = ("config", "data", "metrics", "run", "step")


def test_every_change_of_the_page_has_its_place(tmp_path: Path) -> None:
    copy_rooms([f"trainer/{room}" for room in ROOMS], tmp_path)
    assert len(follow(PAGE, tmp_path)) == 1


def test_a_part_takes_at_most_two_files() -> None:
    text = (ROOT / "docs" / PAGE).read_text()
    parts = {
        part.partition("\n")[0]: {*re.findall(r"^--- (.*)$", part, re.MULTILINE)}
        for part in text.split("\n## ")[1:]
    }
    assert [*parts] == ["An optimizer", "A corpus format", "A metric", "Try them"]
    assert max(map(len, parts.values())) == 2


@pytest.mark.slow
@pytest.mark.ranks
def test_the_page_adds_parts_that_train(tmp_path: Path) -> None:
    clone = copy_of_sources(tmp_path)
    with (clone / "table.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, ["title", "text"])
        rows.writeheader()
        rows.writerows(
            {"title": "x", "text": f'a "text",\n{number}' * 50} for number in range(300)
        )
    (command,) = follow(PAGE, clone)
    said = run(command, clone)
    assert "300 texts" in said or "300 documents" in said
    lines = [
        json.loads(line) for line in (clone / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["steps_left"] for line in lines] == [3, 2, 1, 0]
    losses = [line["loss"] for line in lines]
    assert losses == sorted(losses, reverse=True)
    states = (clone / "run" / "checkpoints" / "step-4" / ".metadata").read_bytes()
    assert b"exp_avg" in states
    assert b"exp_avg_sq" not in states
