"""One cluster for all tests that need SLURM."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Cluster]:
    if reason := missing():
        if os.environ.get("REQUIRE_SLURM") == "1":
            pytest.fail(f"REQUIRE_SLURM=1, but there is no SLURM: {reason}")
        pytest.skip(f"no SLURM: {reason}")
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    """Without jobs."""
    yield _cluster
    _cluster.clear()
