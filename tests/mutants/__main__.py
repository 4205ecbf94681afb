"""python -m tests.mutants [--jobs N] [NAME]...: breaks the code in each known way; the tests named
for it must fail.

Each `tests/mutants/*.toml` lists mutants of one part of the code: one place of one file, what
stands there instead, and the tests that notice, all of which must pass without mutants. A mutant
is applied to a copy of the working tree. It is caught if its tests fail; tests that pass let it
survive, and tests that cannot be collected prove nothing. Exit status 0 if all are caught, else 1.
`--record` adds the results to `caught.json`, from which docs/mutants.md is written.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from benchmarks.pages import replace_block
from tests.mutants import (
    CAUGHT,
    PAGE,
    ROOT,
    Mutant,
    failed_tests,
    known_mutants,
    read_caught,
    table,
)
from trainer.commands import integer

FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", re.MULTILINE)
"""Or a fixture of it."""
TESTS_FAILED = 1
"""pytest's exit status; others say that tests were not run as they should."""
TIME_LIMIT = 600


def copy_tree(target: Path) -> None:
    """Every file that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@dataclass(frozen=True)
class Outcome:
    """The first test that failed, or what happened instead."""

    test: str = ""
    problem: str = ""


def run_tests(
    tree: Path, *arguments: str, limit: float | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
        check=False,
    )


def run_mutant(mutant: Mutant, tree: Path) -> Outcome:
    path = tree / mutant.file
    original = path.read_text()
    path.write_text(mutant.apply(original))
    try:
        result = run_tests(tree, *mutant.tests, limit=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        return Outcome(problem=f"the tests were not done after {TIME_LIMIT} s")
    finally:
        path.write_text(original)
    if result.returncode == TESTS_FAILED and (failed := FAILED_TEST.search(result.stdout)):
        return Outcome(test=failed[1])
    tail = "\n".join(result.stdout.splitlines()[-5:])
    return Outcome(
        problem="it survives"
        if result.returncode == 0
        else f"pytest ended with {result.returncode}\n{tail}"
    )


def run_all(mutants: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, Outcome]]:
    """Runs and reports every mutant; yields them with their outcomes."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        trees = SimpleQueue[Path]()
        for number in range(jobs):
            copy_tree(Path(folder) / str(number))
            trees.put(Path(folder) / str(number))
        named = {test for mutant in mutants for test in mutant.tests}
        if named and (whole := run_tests(Path(folder) / "0", "-n", str(jobs), *named)).returncode:
            raise SystemExit(f"the tests fail without mutants\n{whole.stdout}")

        def run(mutant: Mutant) -> tuple[Mutant, Outcome, float]:
            started = time.monotonic()
            tree = trees.get()
            try:
                return mutant, run_mutant(mutant, tree), time.monotonic() - started
            finally:
                trees.put(tree)

        for done in as_completed([pool.submit(run, mutant) for mutant in mutants]):
            mutant, outcome, seconds = done.result()
            verdict = "caught" if outcome.test else "MISSED"
            sys.stdout.write(
                f"{verdict} {seconds:5.1f} s  {mutant.name}  {outcome.test or outcome.problem}\n"
            )
            sys.stdout.flush()
            yield mutant, outcome


def record(mutant: Mutant, test: str) -> None:
    """Adds a result to the records, and removes those of mutants that are gone."""
    mutants = known_mutants()
    records = read_caught() | {mutant.name: {"digest": mutant.digest, "test": test}}
    names = {each.name for each in mutants}
    CAUGHT.write_text(
        json.dumps({name: records[name] for name in sorted(names & records.keys())}, indent=1)
        + "\n"
    )
    PAGE.write_text(
        replace_block(PAGE.read_text(), "mutants", table(mutants, failed_tests(mutants)))
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=(__doc__ or "").partition(": ")[2]
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="mutants, or files of mutants; default: all"
    )
    parser.add_argument(
        "--jobs", type=integer(minimum=1), default=2, help="how many run at a time"
    )
    parser.add_argument(
        "--record", action="store_true", help="write the tests that failed to docs/mutants.md"
    )
    parser.add_argument(
        "--new", action="store_true", help="only those that are not recorded as caught"
    )
    options = parser.parse_args()
    mutants = known_mutants()
    if unknown := set(options.names) - {
        key for mutant in mutants for key in (mutant.name, mutant.area)
    }:
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
    caught = failed_tests(mutants) if options.new else {}
    named = [
        mutant
        for mutant in mutants
        if not options.names or {mutant.name, mutant.area} & set(options.names)
    ]
    chosen = [mutant for mutant in named if not caught.get(mutant.name)]
    missed = 0
    for mutant, outcome in run_all(chosen, options.jobs):
        missed += not outcome.test
        if options.record:
            record(mutant, outcome.test)
    sys.stdout.write(f"{len(chosen) - missed} of {len(chosen)} mutants caught\n")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
