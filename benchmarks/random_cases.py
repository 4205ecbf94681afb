"""Random configurations beside one process, in float64: python -m benchmarks.random_cases --cases
1000 --seed 1.

Appends what it ran to `docs/random_cases.json`, from which `--table` writes the table of
docs/numerics.md. A seed draws the same cases again, so pairs of settings are counted from it; a
hash of the cases notices a changed table of factors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.pages import replace_block
from trainer.selfcheck.processes import RankPool
from trainer.selfcheck.random_check import RandomCheck
from trainer.selfcheck.random_configs import Pair, all_pairs, draw_cases, format_case, pairs
from trainer.selfcheck.shrink import write_sample_documents

PAGE = Path(__file__).parents[1] / "docs" / "numerics.md"
RECORDS = PAGE.with_name("random_cases.json")


def read_records(path: Path = RECORDS) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return records


def drawn_again(record: dict[str, Any]) -> list[dict[str, str]]:
    """The cases of a record; none if today's factors draw others."""
    cases = [
        *islice(draw_cases(record["seed"], max_processes=record["max_processes"]), record["cases"])
    ]
    return cases if digest(cases) == record["digest"] else []


def digest(cases: list[dict[str, str]]) -> str:
    return hashlib.sha256("\n".join(map(format_case, cases)).encode()).hexdigest()[:16]


def table(records: list[dict[str, Any]]) -> list[str]:
    """Markdown: one row per run, then the pairs."""
    kinds = [*records[0]["largest_errors"]]
    heading = f"| commit | seed | processes | cases | failed | pairs met: median times | {' | '.join(kinds)} |"
    lines = [heading, "|---" * (6 + len(kinds)) + "|"]
    for record in records:
        errors = " | ".join(f"{record['largest_errors'][kind]:.1e}" for kind in kinds)
        cells = (
            record["commit"],
            record["seed"],
            f"up to {record['max_processes']}",
            f"{record['cases']:,}",
        )
        times = "{met:,} of {of:,}: {median:.0f}".format_map(record["pairs"])
        lines.append(
            f"| {' | '.join(map(str, cells))} | {len(record['failed'])} | {times} | {errors} |"
        )
    total = sum(record["cases"] for record in records)
    lines += ["", f"In all {total:,} cases."]
    if cases := [case for record in records for case in drawn_again(record)]:
        met = Counter[Pair](pair for case in cases for pair in pairs(case))
        counts = [met[pair] for pair in all_pairs()]
        lines[-1] += (
            f" {len(cases):,} were drawn from today's factors: of {len(counts):,} pairs of settings they met "
            f"{sum(number > 0 for number in counts):,}, {median(counts):.0f} times in the median and "
            f"{quantiles(counts, n=20)[0]:.0f} times at the 5th percentile."
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.random_cases", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-processes", type=int, default=4)
    parser.add_argument("--minutes", type=float, help="time limit")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument(
        "--table", action="store_true", help="only rewrite the table in docs/numerics.md"
    )
    options = parser.parse_args()
    if options.table:
        PAGE.write_text(replace_block(PAGE.read_text(), "random", table(read_records())))
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder, RankPool() as pool:
        write_sample_documents(Path(folder))
        check = RandomCheck(pool, Path(folder))
        cases = draw_cases(options.seed, max_processes=options.max_processes)
        check.run(cases, total=options.cases, max_seconds=options.minutes and 60 * options.minutes)
    counts = [check.met[pair] for pair in all_pairs()]
    record = {
        "commit": commit.strip(),
        "torch": torch.__version__,
        "seed": options.seed,
        "max_processes": options.max_processes,
        "cases": check.num_cases,
        "pairs": {
            "met": sum(number > 0 for number in counts),
            "of": len(counts),
            "median": median(counts),
        },
        "digest": digest(
            [
                *islice(
                    draw_cases(options.seed, max_processes=options.max_processes), check.num_cases
                )
            ]
        ),
        "failed": [format_case(case) for case in check.failed],
        "seconds": round(check.seconds),
        "largest_errors": check.largest_errors,
    }
    options.records.write_text(
        json.dumps([*read_records(options.records), record], indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
