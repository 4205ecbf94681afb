"""`longhaul runs [FOLDER]`: the runs of a folder as a tree of branches. Imports no torch."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trainer.command_table import typed
from trainer.commands import CommandParser, local_path, print_table, run_command
from trainer.config.parse import load
from trainer.errors import ConfigError, RunError
from trainer.storage import exit_markers, lineage
from trainer.storage.lease import LEASE_SECONDS
from trainer.storage.lineage import Lineage
from trainer.storage.run_dir import RunDir

DESCRIPTION = """\
Lists the runs in FOLDER, each below the run that it branched from: step of the newest checkpoint, steps of the run,
how its last launch ended, and the checkpoint that a branch starts from."""
MAX_REASON_CHARS = 60
MAX_INDENTS = 20
"""Depth to which the list is indented: a record of a stranger may be the end of a long chain."""


@dataclass(frozen=True)
class ListedRun:
    """A run, as the list shows it."""

    path: Path
    steps: str
    state: str
    lineage: Lineage | None
    problem: str = ""
    """Why the lineage cannot be read."""

    @cached_property
    def parent(self) -> Path | None:
        if self.lineage is None:
            return None
        # Path.resolve raises for a loop of links.
        return Path(os.path.realpath(self.path / self.lineage.parent))

    def row(self, depth: int) -> tuple[str, ...]:
        branched = ""
        if self.lineage is not None:
            # A path that a command takes here.
            parent = os.path.normpath(self.path / self.lineage.parent)
            here = parent.removeprefix(f"{Path.cwd()}/")
            branched = f"{here}@{self.lineage.step}, {self.lineage.describe_parts()}"
        indent = "  " * min(depth, MAX_INDENTS)
        return (indent + self.path.name, self.steps, self.state, self.problem or branched)


def main(argv: Sequence[str]) -> int:
    return run_command(argv, build_parser())


def build_parser() -> CommandParser:
    parser = CommandParser(typed("runs"), DESCRIPTION, run=list_runs)
    parser.add_argument(
        "folder",
        nargs="?",
        type=local_path,
        default=Path("outputs"),
        metavar="FOLDER",
        help="folder of run folders, or a run folder; default: outputs",
    )
    return parser


def list_runs(options: Namespace, overrides: list[str]) -> None:
    """Prints a line for each run."""
    del overrides
    if not options.folder.is_dir():
        raise ConfigError([f"{options.folder} is not a folder"])
    paths = [options.folder, *sorted(options.folder.iterdir())]
    runs = {path.resolve(): _listed(path.resolve()) for path in paths if is_run(path)}
    if not runs:
        raise ConfigError([f"{options.folder} has no run folder"])
    rows = [run.row(depth) for depth, run in _in_tree_order(runs)]
    print_table(("run", "steps", "state", "branch of"), *rows)


def is_run(path: Path) -> bool:
    """Whether a folder is one of a run."""
    with suppress(OSError):
        run_dir = RunDir(path)
        return run_dir.config_path.is_file() or run_dir.checkpoints_dir.is_dir()
    return False


def _in_tree_order(runs: Mapping[Path, ListedRun]) -> Iterator[tuple[int, ListedRun]]:
    """Every run once with its depth, below its parent if that is listed."""
    children = defaultdict[Path | None, list[Path]](list)
    for path, run in runs.items():
        children[run.parent].append(path)
    roots = [path for path, run in runs.items() if run.parent not in runs]
    listed = set[Path]()
    # Records of strangers may name each other as parents; such runs follow the others.
    for root in (*roots, *runs):
        pending = [(0, root)]
        while pending:
            depth, path = pending.pop()
            if path not in listed:
                listed.add(path)
                yield depth, runs[path]
                pending += [(depth + 1, child) for child in reversed(children[path])]


def _listed(path: Path) -> ListedRun:
    run_dir = RunDir(path)
    committed = run_dir.committed_checkpoints()
    step = committed[-1][0] if committed else 0
    total: int | None = None
    with suppress(RunError):
        config = load(["--config", str(run_dir.config_path)], imports_extensions=False)
        total = config.training_stages[-1].end_step
    found: Lineage | None = None
    problem = ""
    try:
        found = lineage.read(path)
    except RunError as error:
        problem = str(error)
    steps = f"{step:,} of {'?' if total is None else f'{total:,}'}"
    state, reason = state_of(path, is_done=total is not None and 0 < total <= step)
    short = reason if len(reason) <= MAX_REASON_CHARS else f"{reason[:MAX_REASON_CHARS]}..."
    return ListedRun(path, steps, f"{state}: {short}" if short else state, found, problem)


def state_of(path: Path, *, is_done: bool) -> tuple[str, str]:
    """(state, reason): how the last launch of a run ended, by its marker, or that one is running.

    `is_done`: the newest checkpoint has all steps.
    """
    if is_done:
        return "done", ""
    with suppress(OSError):
        touched = (RunDir(path).logs_dir / "lease").lstat().st_mtime
        if time.time() - touched < LEASE_SECONDS:
            return "running", ""
    for name in exit_markers.EXIT_MARKERS:
        marker = exit_markers.content_of(path, name)
        # Whether a run is done depends on its checkpoints; the marker is of before it was
        # extended.
        if marker is not None and name != "DONE":
            return name, marker.reason.partition("\n")[0]
    return ("interrupted" if RunDir(path).events_path.exists() else "not started"), ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
