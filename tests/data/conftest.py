"""A corpus in a temporary folder, and what is made of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.config import DataSection


@pytest.fixture
def section(tmp_path: Path) -> Callable[..., DataSection]:
    """`[data]` of a folder with these files, whose cache is beside it."""

    def make(files: dict[str, str | bytes], **options: object) -> DataSection:
        for name, content in files.items():
            path = tmp_path / "corpus" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        given = {"corpus": str(tmp_path / "corpus"), "cache_dir": tmp_path / "cache", **options}
        return DataSection.model_validate(given)

    return make
