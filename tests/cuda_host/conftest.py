"""The stand-in CUDA runtime, built once per process of tests; without torch's CUDA build, the
reason to skip.
"""

from __future__ import annotations

import pytest

from tests.cuda_host import build


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process on the stand-in runtime."""
    if reason := build.missing():
        pytest.skip(reason)
    return build.build(tmp_path_factory.mktemp("cuda_host"))
