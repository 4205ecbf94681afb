"""Plans of shipped files by traces, beside those by formulas, for H100.

    python -m benchmarks.traced_plans [NAME]...

Seconds leave out the import of torch. The table is in docs/planning.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from math import prod

import torch  # noqa: F401 - not timed

from benchmarks.doc_tables import markdown
from benchmarks.plans import names
from trainer.config.parse import load
from trainer.hardware.device_specs import load_device
from trainer.hardware.host import GIB
from trainer.plan.plan import plan_stage
from trainer.plan.traced_plan import traced

HEADER = ("file", "ranks", "GiB", "off", "host GiB", "off", "s / step", "off", "seconds")


def compared(name: str) -> list[str]:
    """The first stage."""
    config = load(["--config", name]).training_stages[0].config
    ranks = prod(config.parallelism.degrees(1).values())
    formulas = plan_stage(config, ranks, load_device("h100-80gb"))
    begin = time.perf_counter()
    plan = traced(formulas)
    seconds = time.perf_counter() - begin
    host = plan.peak_host_memory.host_bytes
    host_by_formulas = formulas.peak_host_memory.host_bytes
    device = plan.peak_memory.device_bytes
    device_by_formulas = formulas.peak_memory.device_bytes
    return [
        f"`{name}`",
        f"{ranks:,}",
        f"{device / GIB:.2f}",
        f"{device / device_by_formulas - 1:+.1%}",
        f"{host / GIB:.2f}",
        f"{host / host_by_formulas - 1:+.1%}",
        f"{plan.step_seconds:.4g}",
        f"{plan.step_seconds / formulas.step_seconds - 1:+.1%}",
        f"{seconds:.1f}",
    ]


def main(argv: Sequence[str]) -> int:
    table = [compared(name) for name in argv or names()]
    sys.stdout.write("\n".join(markdown(list(HEADER), table)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
