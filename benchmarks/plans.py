"""The plans of all shipped files, as `docs/plans` has them: what `longhaul plan` says of each, for
H100.

    python -m benchmarks.plans [--folder docs/plans] [NAME]...

Nothing is timed. A plan and its suggestions take some seconds until their traces are known. A test
compares them with what the planner says now, so that a change of cost is seen in review.
"""

from __future__ import annotations

import argparse
import sys
from io import StringIO
from math import prod
from pathlib import Path

from rich.console import Console

from trainer.config.parse import load
from trainer.hardware.device_specs import DEFAULT_DEVICE, load_device
from trainer.plan.console import MAX_WIDTH, show
from trainer.plan.report import plan_report
from trainer.plan.run_plan import plan_run

ROOT = Path(__file__).resolve().parents[1]
PLANS = ROOT / "docs" / "plans"


def names() -> list[str]:
    return sorted(path.stem for path in (ROOT / "train_configs").glob("*.toml"))


def told(name: str) -> str:
    """The plan of a shipped file, on as many devices as its mesh needs."""
    config = load(["--config", name])
    size = max(
        prod(stage.config.parallelism.degrees(1).values()) for stage in config.training_stages
    )
    text = StringIO()
    found = plan_run(config, size, load_device(config.plan.device or DEFAULT_DEVICE))
    show(plan_report(found), Console(file=text, width=MAX_WIDTH))
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=PLANS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or names():
        path = options.folder / f"{name}.txt"
        path.write_text(told(name))
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
