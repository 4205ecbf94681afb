"""Builds wheel and source distribution from the checkout: the rooms, `train.py` and the
configurations go into `longhaul`, so that one name and no other is installed. A source
distribution holds the result, and builds as it is. An editable installation finds the checkout.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import build_editable as build_editable
from setuptools.build_meta import (
    get_requires_for_build_editable as get_requires_for_build_editable,
)
from setuptools.build_meta import get_requires_for_build_sdist as get_requires_for_build_sdist
from setuptools.build_meta import get_requires_for_build_wheel as get_requires_for_build_wheel

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
PACKAGE = Path("packages", "longhaul", "longhaul")
ROOMS = ("models", "parallelisms", "trainer", "train_configs")
COPIED = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "trainer/__init__.py")
"""The last has the version."""


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    with sources():
        return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    with sources():
        return str(build_meta.build_sdist(sdist_directory, config_settings))


@contextmanager
def sources() -> Iterator[None]:
    """The working folder is then that of complete sources."""
    if (HERE / "longhaul" / ROOMS[0]).is_dir():  # A source distribution.
        yield
        return
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        gather(Path(folder))
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def gather(folder: Path) -> None:
    """Writes complete sources."""
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, folder / name)
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(HERE, folder / PACKAGE.parent, ignore=left_out)
    for room in ROOMS:
        shutil.copytree(CHECKOUT / room, folder / PACKAGE / room, ignore=left_out)
    shutil.copy(CHECKOUT / "train.py", folder / PACKAGE)
