"""Damages, forges and replaces every file that the trainer reads, and runs a command on each:
python -m tests.bad_inputs.

Every case must end within thirty seconds, or on a busy host in ten times what an undisturbed run
takes, with a known exit code and one message, without a traceback, without executing anything and
without losing a checkpoint; a run that continues must train as one that was not disturbed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.artifacts import content
from tests.bad_inputs.cases import cases, quick_cases
from tests.bad_inputs.runs import LEFT, make_folder, problems, undisturbed_run


def run_share(root: Path, share: int, options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Every `options.jobs`-th case, and what went wrong in it."""
    template = root / "template"
    undisturbed = undisturbed_run(template, root / f"undisturbed-{share}")
    every = [*cases(lambda file: content(template / LEFT.get(file, file)))]
    every = (
        quick_cases(every)
        if options.quick
        else [case for case in every if options.only in case.name]
    )
    if options.sample is not None:
        every = random.Random(0).sample(every, options.sample)
    found = []
    for number, case in enumerate(every[share :: options.jobs]):
        wrong = problems(case, template, root / f"case-{share}-{number}", undisturbed)
        found.append((case.name, wrong))
        if wrong:
            sys.stderr.write("".join(f"{line}\n" for line in (f"WRONG {case.name}", *wrong)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--sample", type=int, metavar="N", help="N cases of them, always the same")
    parser.add_argument(
        "--quick", action="store_true", help="sixty cases of every command, most of them quick"
    )
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        make_folder(root / "template")
        with ProcessPoolExecutor(options.jobs) as pool:
            shares = [
                pool.submit(run_share, root, share, options) for share in range(options.jobs)
            ]
            found = [each for share in shares for each in share.result()]
    wrong = [name for name, problem in found if problem]
    sys.stdout.write(f"{len(found)} cases, {len(wrong)} wrong, {time.monotonic() - began:.0f} s\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
