"""python -m tests.trajectories [--rewrite] [NAME]...: compares the runs with their goldens, or
rewrites those that drifted.

Prints the largest relative difference of each quantity. A run within its bounds keeps its golden,
so a rewrite on another machine changes nothing else. Exit status 1 if a run drifted and was not
rewritten.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.trajectories import goldens
from tests.trajectories.runs import RUNS, trajectory, write_corpus


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.trajectories", description=(__doc__ or "").partition(": ")[2]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs; default: all")
    parser.add_argument(
        "--rewrite", action="store_true", help="rewrite the goldens of runs that drifted"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(RUNS):
        parser.error(f"no such runs: {', '.join(sorted(unknown))}")
    capability = torch.backends.cpu.get_cpu_capability()
    if options.rewrite and capability not in goldens.SAME_INITIAL_WEIGHTS:
        parser.error(
            f"goldens are made with {' or '.join(goldens.SAME_INITIAL_WEIGHTS)}, and this is {capability}"
        )
    document = goldens.read()
    old = goldens.trajectories(document)
    new = dict(old)
    made_with = {name: document["runs"][name]["made_with"] for name in old}
    drifted = 0
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        for name in options.names or RUNS:
            found = trajectory(name, Path(folder))
            drift = goldens.drift(name, found, document, capability)
            if drift:
                new[name] = found
                made_with[name] = f"torch {torch.__version__}, {capability}"
            drifted += bool(drift)
            state = "new" if name not in old else "drifted" if drift else "kept"
            differences = goldens.differences(found, old[name]) if name in old else {}
            values = "  ".join(
                f"{quantity} {difference:.1e}" for quantity, difference in differences.items()
            )
            sys.stdout.write(f"{state:8}{name:32}{values}\n")
            sys.stdout.flush()
    for name in old.keys() - RUNS.keys():
        sys.stdout.write(f"removed {name}\n")
    if options.rewrite:
        goldens.write({name: new[name] for name in RUNS if name in new}, made_with)
        sys.stdout.write(
            f"{drifted} of {len(RUNS)} goldens rewritten; the commit must say why\n"
            * (drifted > 0)
        )
        return 0
    return int(drifted > 0)


if __name__ == "__main__":
    sys.exit(main())
