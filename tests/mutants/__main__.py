"""python -m tests.mutants [--jobs N] [NAME]...: breaks the code in each known way; the tests named for it must fail.

Each `tests/mutants/*.toml` lists mutants of one part of the code: one place of one file, what stands there instead, and
the tests that notice. A mutant is applied to a copy of the working tree. It is caught if its tests fail; tests that pass
let it survive, and tests that cannot be collected prove nothing. Exit status 0 if all are caught, else 1.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from tests.mutants import ROOT, Mutant, known_mutants

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


def run_mutant(mutant: Mutant, tree: Path) -> str:
    """Empty if the tests notice the mutant, else what happened instead."""
    path = tree / mutant.file
    original = path.read_text()
    path.write_text(mutant.apply(original))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
    try:
        result = subprocess.run(
            command,
            cwd=tree,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the tests were not done after {TIME_LIMIT} s"
    finally:
        path.write_text(original)
    if result.returncode == TESTS_FAILED:
        return ""
    tail = "\n".join(result.stdout.splitlines()[-5:])
    return "it survives" if result.returncode == 0 else f"pytest ended with {result.returncode}\n{tail}"


def run_all(mutants: list[Mutant], jobs: int) -> int:
    """Runs and reports every mutant; returns how many were not caught."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        trees = SimpleQueue[Path]()
        for number in range(jobs):
            copy_tree(Path(folder) / str(number))
            trees.put(Path(folder) / str(number))

        def run(mutant: Mutant) -> tuple[Mutant, str, float]:
            started, tree = time.monotonic(), trees.get()
            try:
                return mutant, run_mutant(mutant, tree), time.monotonic() - started
            finally:
                trees.put(tree)

        missed = 0
        for done in as_completed([pool.submit(run, mutant) for mutant in mutants]):
            mutant, problem, seconds = done.result()
            missed += bool(problem)
            sys.stdout.write(f"{'MISSED' if problem else 'caught'} {seconds:5.1f} s  {mutant.name}  {problem}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(mutants) - missed} of {len(mutants)} mutants caught\n")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants, or files of mutants; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time")
    options = parser.parse_args()
    mutants = known_mutants()
    if unknown := set(options.names) - {key for mutant in mutants for key in (mutant.name, mutant.area)}:
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in mutants if not options.names or {mutant.name, mutant.area} & set(options.names)]
    return int(run_all(chosen, options.jobs) > 0)


if __name__ == "__main__":
    sys.exit(main())
