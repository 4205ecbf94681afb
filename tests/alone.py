"""python -m tests.alone [--seed N] [PATH]...: every test file in a process of its own; all of them
must be green.

No file may need what another leaves behind: an import, a registered type, a cache, a working
folder. With `--seed`, files and the tests in them run in a random order. Exit status 0 if all
files are green, else 1.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

from trainer.commands import integer

ROOT = Path(__file__).resolve().parents[1]
GREEN = {0, 5}
"""pytest's exit status if all tests passed, and if the file has only slow ones."""


def files(paths: list[str]) -> list[Path]:
    """The files among `paths`, and those below its folders."""
    given = [ROOT / path for path in paths]
    inside = [file for path in given for file in sorted(path.rglob("test_*.py"))]
    return [path for path in given if path.is_file()] + inside


def run_file(file: Path, order: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            *order,
            str(file),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.alone", description=(__doc__ or "").partition(": ")[2]
    )
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        default=["tests"],
        help="files or folders; default: tests",
    )
    parser.add_argument(
        "--seed",
        type=integer(minimum=0),
        help="run files, and the tests in each, in a random order",
    )
    options = parser.parse_args()
    chosen = files(options.paths)
    order = []
    if options.seed is not None:
        random.Random(options.seed).shuffle(chosen)
        order = [f"--order-seed={options.seed}"]
    red = []
    for file in chosen:
        started = time.monotonic()
        result = run_file(file, order)
        green = result.returncode in GREEN
        seconds = time.monotonic() - started
        sys.stdout.write(
            f"{'green' if green else 'RED  '} {seconds:5.1f} s  {file.relative_to(ROOT)}\n"
        )
        if not green:
            red.append(file)
            sys.stdout.write(result.stdout)
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - len(red)} of {len(chosen)} files are green alone\n")
    return int(bool(red))


if __name__ == "__main__":
    sys.exit(main())
