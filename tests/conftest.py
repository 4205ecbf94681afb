"""What holds for every test: one thread of computation, and no garbage collection of what was
imported.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.garbage import freeze_imports

if TYPE_CHECKING:
    from tests.object_server import Proxy

# Before torch is imported. Several tests run at a time, and tiny tensors gain nothing from
# threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def object_store() -> Iterator[Proxy]:
    """A server of S3 that tests share, one after the other."""
    from tests.object_server import object_server

    with object_server() as proxy:
        yield proxy


@pytest.fixture
def proxy(object_store: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Proxy:
    """The store, empty and without faults; the environment names it and its credentials."""
    from tests.object_server import empty, point_environment_at

    empty(object_store)
    point_environment_at(object_store, monkeypatch)
    # Tokenizers are kept below the home.
    monkeypatch.setenv("HOME", str(tmp_path))
    return object_store


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order-seed",
        type=int,
        metavar="N",
        help="run the tests in a random order, drawn with this seed",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--order-seed")
    if seed is not None:
        random.Random(seed).shuffle(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    del session
    freeze_imports()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests report as their property `summary`, such as the seed of random cases."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    for report in reports:
        for name, text in getattr(report, "user_properties", ()):
            if name == "summary" and report.when == "call":
                terminalreporter.write_line(str(text))
