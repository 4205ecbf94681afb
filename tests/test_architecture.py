"""docs/architecture.md names files, functions and classes that exist, and every use of private
torch.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import distributed

from tests.build_datasets import build_train_dataset
from tests.ranks import run_ranks
from trainer.config.parse import load
from trainer.step.process_group import World
from trainer.step.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w./]+\.py)(?:: ([\w.]+))?`", PAGE)))


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Dotted names of functions, classes, methods, constants, and attributes that `__init__`
    sets.
    """
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
        path: set(definitions(ast.parse((ROOT / path).read_text()).body))
        if (ROOT / path).is_file()
        else None
        for path, _ in NAMED
    }
    missing = [
        (path, name)
        for path, name in NAMED
        if (names := defined[path]) is None or (name and name not in names)
    ]
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
        r"|\bgroup\._(?!_)\w+"
    )
    found = set()
    for file in [
        ROOT / "train.py",
        *(
            file
            for room in ("models", "parallelisms", "trainer")
            for file in (ROOT / room).rglob("*.py")
        ),
    ]:
        code = "\n".join(
            line
            for line in file.read_text().splitlines()
            if not line.strip().startswith(("#", '"'))
        )
        if private.search(code):
            found.add(str(file.relative_to(ROOT)))
    assert found == listed


def entered() -> set[str]:
    """Files of the project with a function that the second step of a run calls, backward pass
    included.
    """
    files = set[str]()

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (path := Path(frame.f_code.co_filename)).is_relative_to(ROOT):
            files.add(str(path.relative_to(ROOT)))

    config = load(
        [
            "--data.corpus=copy",
            "--parallelism.cp=2",
            "--parallelism.cp_method=ring",
            "--training.steps=2",
        ]
    )
    world = World(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))
    trainer = Trainer(config, world, build_train_dataset(config))
    with closing(trainer.train_steps()) as steps:
        next(steps)
        sys.setprofile(see)
        next(steps)
        sys.setprofile(None)
    return {file for file in files if file.startswith(("models/", "parallelisms/", "trainer/"))}


@pytest.mark.slow
@pytest.mark.ranks
def test_a_step_of_two_ranks_can_be_read_in_30_files() -> None:
    """From the batch that the loader hands over to the updated weights, in one thread or the
    other.
    """
    for files in run_ranks(entered, 2):
        assert {
            "parallelisms/context/ring.py",
            "trainer/step/optimizer.py",
            "models/loss_head.py",
        } <= files
        assert len(files) <= 30, sorted(files)
