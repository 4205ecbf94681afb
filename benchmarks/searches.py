"""Seconds of `longhaul plan search`: with no trace known, and once all are.

    python -m benchmarks.searches [FILE:GPUS ...]

Prints a table: seconds of the command, layouts that were estimated, layouts that were traced. Takes
a minute for the default searches on two cores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

DEVICE = "h100-80gb"
DEFAULT = (
    "llama3_8b_1m:32",
    "llama3_70b_128k:32",
    "gpt_oss_20b_128k:32",
    "qwen3_30b_a3b_1m:32",
    "llama3_8b_1m:512",
)
ROOT = Path(__file__).resolve().parents[1]
COUNTS = re.compile(r"([\d,]+) layouts estimated, (\d+) traced")


def main(words: Sequence[str]) -> int:
    say("| file | GPUs | layouts estimated | traced | s, no trace known | s, all known |")
    say("|---|---:|---:|---:|---:|---:|")
    for search in words or DEFAULT:
        name, gpus = search.split(":")
        with TemporaryDirectory() as folder:
            seconds, counts = run(name, gpus, folder)
            again, _ = run(name, gpus, folder)
        say(f"| `{name}` | {gpus} | {' | '.join(counts)} | {seconds:.1f} | {again:.1f} |")
    return 0


def run(name: str, gpus: str, cache: str) -> tuple[float, tuple[str, ...]]:
    """Seconds, and what the report counts."""
    command = [sys.executable, "-m", "trainer.plan", "search", "--config", name]
    begin = time.perf_counter()
    done = subprocess.run(
        [*command, "--gpus", gpus, "--device", DEVICE],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.perf_counter() - begin
    found = COUNTS.search(done.stdout)
    if found is None:
        raise SystemExit(done.stdout)
    return seconds, found.groups()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
