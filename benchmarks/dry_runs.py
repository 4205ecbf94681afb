"""Compare the planner's formulas with dry runs of the real trainer, on shipped files.

    python -m benchmarks.dry_runs [NAME]...

For the first and the last rank of a pipeline: predicted and counted bytes at the peak, FLOPs,
bytes sent, and what the dry run took: CPU-seconds of its process, its peak memory, operations that
torch was asked for. Minutes of a core each.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from math import prod

from benchmarks.doc_tables import markdown
from benchmarks.dry_run import dry_run
from trainer.config.parse import load
from trainer.hardware.host import GIB
from trainer.plan.comm_volume import comm_volumes
from trainer.plan.memory_estimate import estimate_memory_per_pp_rank, rank_memory
from trainer.plan.rank_workload import rank_workload

SHIPPED = ("llama3_8b_128k", "llama3_8b_1m", "llama3_70b_128k", "llama3_405b_128k")


def measured(name: str, rank: int) -> dict[str, float]:
    """In a process of its own."""
    config = load(["--config", name])
    found = dry_run(config, prod(config.parallelism.degrees(1).values()), rank=rank)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "peak": found.peak_bytes,
        "flops": sum(found.matmul_flops.values()) + sum(found.attention_flops.values()),
        "sent": sum(message.bytes for message in found.messages),
        "operations": found.num_ops,
        "seconds": used.ru_utime + used.ru_stime,
        "memory": used.ru_maxrss * 1024,
    }


def rows(name: str) -> list[list[str]]:
    config = load(["--config", name])
    size = prod(config.parallelism.degrees(1).values())
    pp = config.parallelism.pp
    stages = estimate_memory_per_pp_rank(config, size, on_cpu=True)
    found = []
    for place in sorted({0, pp - 1}):
        command = [
            sys.executable,
            "-m",
            "benchmarks.dry_runs",
            "--one",
            name,
            str(place * (size // pp)),
        ]
        dry = json.loads(
            subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.splitlines()[-1]
        )
        predicted = stages[place]
        counts = rank_workload(rank_memory(config, size, place))
        on_host = sum(
            line.host_bytes
            for line in predicted.items
            if line.name in ("parameters", "gradients", "optimizer state")
        )
        flops = sum(counts.matmul_flops.values()) + sum(counts.attention_flops.values())
        sent = sum(message.bytes for message in comm_volumes(rank_memory(config, size, place)))
        found.append(
            [
                f"`{name}`", f"{size:,}", f"{place + 1} of {pp}",
                f"{dry['peak'] / GIB:.2f}", apart(predicted.device_bytes + on_host, dry["peak"]),
                f"{dry['flops']:.4g}", apart(flops, dry["flops"]), f"{dry['sent'] / GIB:,.1f}", apart(sent, dry["sent"]),
                f"{dry['operations']:,.0f}", f"{dry['seconds']:.0f}", f"{dry['memory'] / GIB:.2f}",
            ]
        )  # fmt: skip
    return found


def apart(formula: float, counted: float) -> str:
    return f"{100 * (formula / counted - 1):+.1f} %" if counted else ""


def main(names: Sequence[str]) -> None:
    heading = [
        "file",
        "ranks",
        "pipeline rank",
        "GiB",
        "estimate off by",
        "FLOPs",
        "formula",
        "GiB sent",
        "formula",
        "operations",
        "CPU-s",
        "GiB used",
    ]
    found = []
    for name in names or SHIPPED:
        found += rows(name)
        sys.stderr.write(f"{name}\n")
    sys.stdout.write("\n".join(markdown(heading, found)) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        sys.stdout.write(json.dumps(measured(sys.argv[2], int(sys.argv[3]))) + "\n")
    else:
        main(sys.argv[1:])
