"""Test files alone and in a random order: which files, and that every process of a run draws the
same order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests import alone, conftest


def shuffled(seed: int | None) -> list[Any]:
    config: Any = SimpleNamespace(getoption=lambda _: seed)
    items: list[Any] = [*range(50)]
    conftest.pytest_collection_modifyitems(config, items)
    return items


def test_an_order_is_that_of_its_seed() -> None:
    assert shuffled(None) == [*range(50)]
    assert shuffled(1) == shuffled(1) != shuffled(2)
    assert sorted(shuffled(1)) == [*range(50)]


def test_folders_stand_for_their_files() -> None:
    folder = alone.ROOT / "tests" / "optim"
    assert alone.files(["tests/optim", "tests/test_alone.py"]) == [
        alone.ROOT / "tests" / "test_alone.py",
        *sorted(folder.glob("test_*.py")),
    ]
