"""Pages of docs/ that are followed to the letter in a copy of the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def follow(page: str, root: Path) -> list[str]:
    """Does what the blocks of the page say, but for commands, which are returned."""
    text = (ROOT / "docs" / page).read_text()
    commands = []
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
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


def copy_rooms(rooms: Sequence[str], root: Path) -> None:
    """The files of some rooms, for changes that are only looked at."""
    for room in rooms:
        (root / room).mkdir(parents=True)
        for file in (ROOT / room).glob("*.py"):
            shutil.copy(file, root / room)


def copy_of_sources(folder: Path) -> Path:
    """A folder in which a page's commands run."""
    unused = shutil.ignore_patterns(".*", "outputs", "prepared", "docs", "__pycache__")
    return Path(shutil.copytree(ROOT, folder / "clone", ignore=unused))


def run(command: str, clone: Path) -> str:
    """What the command says; it must succeed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        # The second command uses what the first compiled.
        "PYTHONDONTWRITEBYTECODE": "",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
