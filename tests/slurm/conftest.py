"""One cluster of two nodes for all SLURM tests, on which independent scenarios run concurrently,
and one of four.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.slurm.cluster import JOBS, Cluster, missing

Scenario = Callable[[Cluster, Path], None]


def cluster_of(num_nodes: int) -> Iterator[Cluster]:
    if reason := missing():
        if os.environ.get("REQUIRE_SLURM") == "1":
            pytest.fail(f"REQUIRE_SLURM=1, but SLURM is missing: {reason}")
        pytest.skip(f"no SLURM: {reason}")
    with Cluster(num_nodes) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Cluster]:
    yield from cluster_of(2)


@pytest.fixture
def four_nodes() -> Iterator[Cluster]:
    yield from cluster_of(4)


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, cleared of jobs after the test."""
    yield _cluster
    _cluster.clear()


@pytest.fixture(scope="module")
def scenarios(
    request: pytest.FixtureRequest, _cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Scenario, Future[None]]]:
    """Starts every selected scenario of the module in its own folder."""
    selected = [
        item.obj.scenario  # type: ignore[attr-defined]
        for item in request.session.items
        if hasattr(getattr(item, "obj", None), "scenario")
    ]
    with ThreadPoolExecutor(JOBS) as threads:
        yield {
            one: threads.submit(one, _cluster, tmp_path_factory.mktemp("scenario"))
            for one in selected
        }
    _cluster.clear()
