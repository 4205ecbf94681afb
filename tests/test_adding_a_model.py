"""docs/adding_a_model.md, followed to the letter in a copy of the sources."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "adding_a_model.md").read_text()


def follow(root: Path) -> list[str]:
    """Does what the blocks of the page say, but for commands, which are returned."""
    commands = []
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        first, _, rest = block.partition("\n")
        if kind == "sh":
            commands.append(block)
        elif kind == "python":
            (root / first.removeprefix("# ")).write_text(rest)
        else:
            changed = root / first.removeprefix("--- ")
            old, new = (
                "".join(f"{line[1:]}\n" for line in rest.splitlines() if line[0] in signs)
                for signs in (" -", " +")
            )
            assert changed.read_text().count(old) == 1, block
            changed.write_text(changed.read_text().replace(old, new))
    return commands


def test_every_change_of_the_page_has_its_place(tmp_path: Path) -> None:
    for room in ("models", "tests/models", "trainer/config"):
        (tmp_path / room).mkdir(parents=True)
        for file in (ROOT / room).glob("*.py"):
            shutil.copy(file, tmp_path / room)
    assert follow(tmp_path)


@pytest.mark.slow
def test_the_page_adds_a_model_that_trains(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(
        ROOT,
        clone,
        ignore=shutil.ignore_patterns(".*", "outputs", "prepared", "docs", "__pycache__"),
    )
    commands = follow(clone)
    assert len(commands) == 1
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    # The second command uses what the first compiled.
    environment["PYTHONDONTWRITEBYTECODE"] = ""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands[0]],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\n\d+ passed", done.stdout)
    lines = (clone / "outputs" / "toy" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))
