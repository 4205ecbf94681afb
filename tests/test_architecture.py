"""docs/architecture.md names files, functions and classes that exist, and every use of private torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w./]+\.py)(?:: ([\w.]+))?`", PAGE)))


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Dotted names of functions, classes, methods, constants, and attributes that `__init__` sets."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield prefix + inner.attr
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                yield prefix + target.id


def test_what_the_page_names_exists() -> None:
    defined = {
        path: set(definitions(ast.parse((ROOT / path).read_text()).body)) if (ROOT / path).is_file() else None
        for path, _ in NAMED
    }
    missing = [(path, name) for path, name in NAMED if (names := defined[path]) is None or (name and name not in names)]
    assert missing == []


def test_the_page_walks_through_files_of_every_layer() -> None:
    layers = {path.partition("/")[0] for path, name in NAMED if name}
    assert layers >= {"models", "parallelisms", "trainer", "train.py"}
    assert len(NAMED) > 60


def test_the_page_lists_every_use_of_private_torch() -> None:
    paragraph = PAGE[PAGE.index("**Private torch**") :].partition("\n\n")[0]
    listed = set(re.findall(r"`([\w/]+\.py)`", paragraph))
    private = re.compile(
        r"(from|import) torch[\w.]*\._\w+|\btorch\.(\w+\.)*_(?!_)\w+|import _\w+\b.*$|from torch[\w.]* import _\w+"
    )
    found = set()
    for file in [
        ROOT / "train.py",
        *(file for room in ("models", "parallelisms", "trainer") for file in (ROOT / room).rglob("*.py")),
    ]:
        code = "\n".join(line for line in file.read_text().splitlines() if not line.strip().startswith(("#", '"')))
        if private.search(code):
            found.add(str(file.relative_to(ROOT)))
    assert found == listed
