"""Peaks of one GPU, measured, beside those of traces and of the estimate.

    python -m benchmarks.traced_rows FILE

FILE: rows of `python -m benchmarks.gpu`. Left out are those of packed documents and of other libraries. The table is in
docs/planning.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.doc_tables import markdown
from benchmarks.gpu_bench import K
from benchmarks.gpu_steps import StepCase
from trainer.hardware.host import GIB
from trainer.memory.estimator import estimate_memory
from trainer.memory.tensors import CUBLAS_HANDLES, CUBLAS_WORKSPACE
from trainer.trace.record import trace_step

HEADER = ("model", "tokens", "recomputation", "compiled", "measured GiB", "traced", "off by", "estimated", "off by")


def is_step(row: Mapping[str, Any]) -> bool:
    return bool(row.get("options")) and "peak_gib" in row and not row.get("document")


def compared(row: Mapping[str, Any]) -> list[str]:
    # Rows from before the head's chunks were chosen have chunks of 256 MiB.
    options = row["options"] if "loss_chunk_mib" in row["options"] else f"{row['options']} --memory.loss_chunk_mib 256"
    config = StepCase(row["model"], row["tokens"], options).config()
    traced = trace_step(config, 1, kernel=row["kernel"], compiled=bool(row["compile"])).whole.peak.size
    found = (traced + CUBLAS_HANDLES * CUBLAS_WORKSPACE) / GIB  # No trace sees its workspaces.
    estimated, measured = estimate_memory(config, 1).device_bytes / GIB, row["peak_gib"]
    return [
        row["model"],
        f"{row['tokens'] // K}K",
        f"`{row['recompute']}`",
        "yes" if row["compile"] else "",
        f"{measured:.2f}",
        f"{found:.2f}",
        f"{found / measured - 1:+.1%}",
        f"{estimated:.2f}",
        f"{estimated / measured - 1:+.1%}",
    ]


def main(argv: Sequence[str]) -> int:
    rows = [json.loads(line) for line in Path(argv[0]).read_text().splitlines()]
    table = [compared(row) for row in rows if is_step(row)]
    sys.stdout.write("\n".join(markdown(list(HEADER), table)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
