"""What holds for every test: one thread of computation, and no garbage collection of what was
imported.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.garbage import freeze_imports

# Before torch is imported. Several tests run at a time, and tiny tensors gain nothing from
# threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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
