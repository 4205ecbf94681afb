"""CPU-seconds that plans of shipped files take while no trace is known, for H100.

    python -m benchmarks.traced_plans [NAME]...

Seconds leave out the import of torch. The table is in docs/planning.md.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from math import prod
from tempfile import TemporaryDirectory

import torch  # noqa: F401 - not timed

from benchmarks.doc_tables import markdown
from benchmarks.plans import names
from trainer.config.parse import load
from trainer.hardware.device_specs import load_device
from trainer.hardware.host import GIB
from trainer.plan.run_plan import plan_stage

HEADER = ("file", "ranks", "GiB", "host GiB", "s / step", "CPU-s")


def planned(name: str) -> list[str]:
    """The first stage."""
    config = load(["--config", name]).training_stages[0].config
    ranks = prod(config.parallelism.degrees(1).values())
    begin = time.process_time()
    plan = plan_stage(config, ranks, load_device("h100-80gb"))
    device = plan.peak_memory.device_bytes
    seconds = time.process_time() - begin
    return [
        f"`{name}`",
        f"{ranks:,}",
        f"{device / GIB:.2f}",
        f"{plan.peak_host_memory.host_bytes / GIB:.2f}",
        f"{plan.step_seconds:.4g}",
        f"{seconds:.1f}",
    ]


def main(argv: Sequence[str]) -> int:
    with TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        table = [planned(name) for name in argv or names()]
    sys.stdout.write("\n".join(markdown(list(HEADER), table)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
