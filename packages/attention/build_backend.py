"""Builds the distribution from the checkout's own sources, so that there is one copy of each.

`longhaul_attention` imports `models` and `parallelisms`. Their files that it reaches, and no
others, become packages inside it, and their operators get its namespace: it collides with no
`models` of anybody's, nor with Longhaul in one process. A source distribution holds the result,
and builds as it is.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import build_meta

NAME = "longhaul_attention"
HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
SHARED = ("models", "parallelisms")
ALLOWED = {*sys.stdlib_module_names, NAME, "torch", "transformers", "accelerate"}
"""The last two are imported in functions only: not everybody has them."""
COPIED = ("pyproject.toml", "README.md", "build_backend.py", "MANIFEST.in")


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
    if (HERE / NAME / SHARED[0]).is_dir():  # A source distribution.
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
    """Writes complete sources.

    Raises ImportError for an import of what the distribution does not need.
    """
    for name in COPIED:
        shutil.copy(HERE / name, folder)
    shutil.copy(CHECKOUT / "LICENSE", folder)
    shutil.copytree(HERE / NAME, folder / NAME, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / NAME).rglob("*.py"):
        path.write_text(renamed(path.read_text()))
    for name in reached(HERE / NAME):
        path = folder / NAME / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in path.relative_to(folder).parents:
            (folder / package / "__init__.py").touch() if package.parts else None
        path.write_text(renamed(source(name).read_text()))
    for path in (folder / NAME).rglob("*.py"):
        if foreign := {name.partition(".")[0] for name in imports(path)} - ALLOWED:
            raise ImportError(f"{path.relative_to(folder)} imports {', '.join(sorted(foreign))}")


def reached(package: Path) -> set[str]:
    """The shared modules that the package's files import, and those that they import."""
    found = set[str]()
    waiting = [name for path in package.rglob("*.py") for name in imports(path)]
    while waiting:
        name = waiting.pop()
        if name.partition(".")[0] in SHARED and name not in found and source(name).is_file():
            found.add(name)
            waiting += imports(source(name))
    return found


def source(name: str) -> Path:
    return CHECKOUT / f"{name.replace('.', '/')}.py"


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports; `from a import b` gives both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def renamed(text: str) -> str:
    """A file's text with shared modules, and files named in docstrings, inside the package."""
    shared = "|".join(SHARED)
    text = re.sub(rf"(?<![\w./])({shared})(?=\.[a-z_])", rf"{NAME}.\1", text)
    text = re.sub(rf"(?<![\w./])({shared})(?=/[a-z_])", rf"{NAME}/\1", text)
    text = re.sub(rf"^(\s*from )({shared})(?= import )", rf"\1{NAME}.\2", text, flags=re.MULTILINE)
    return text.replace("longhaul::", f"{NAME}::")
