"""docs/adding_a_model.md, followed to the letter in a copy of the sources."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.followed_pages import copy_of_sources, copy_rooms, follow, run

pytestmark = pytest.mark.ranks

PAGE = "adding_a_model.md"


def test_every_change_of_the_page_has_its_place(tmp_path: Path) -> None:
    copy_rooms(("models", "tests/models", "trainer/config"), tmp_path)
    assert follow(PAGE, tmp_path)


@pytest.mark.slow
def test_the_page_adds_a_model_that_trains(tmp_path: Path) -> None:
    clone = copy_of_sources(tmp_path)
    (command,) = follow(PAGE, clone)
    assert re.search(r"\n\d+ passed", run(command, clone))
    lines = (clone / "outputs" / "toy" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))
