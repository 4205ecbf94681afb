"""Steps on one GPU as they were measured, beside plans by traces.

    python -m benchmarks.traced_rows FILE

FILE: rows of `python -m benchmarks.gpu`. Left out are those of packed documents and of other
libraries. Of rows with equal options the newest counts. The table is in docs/planning.md.
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
from benchmarks.measured import newest
from trainer.hardware.device_specs import load_device
from trainer.hardware.host import GIB
from trainer.plan.run_plan import plan_stage

HEADER = (
    *("model", "tokens", "options"),
    *("measured GiB", "traced", "off by"),
    *("measured s", "traced", "off by"),
)
CHUNK = "--memory.loss_chunk_mib"


def is_step(row: Mapping[str, Any]) -> bool:
    return bool(row.get("options")) and "peak_gib" in row and not row.get("document")


def compared(row: Mapping[str, Any]) -> list[str]:
    # Rows from before the head's chunks were chosen have chunks of 256 MiB. Defaults may have
    # changed since the others.
    options = (
        row["options"]
        if CHUNK in row["options"]
        else f"{row['options']} {CHUNK} {row.get('loss_chunk_mib', 256)}"
    )
    config = StepCase(row["model"], row["tokens"], options).config()
    plan = plan_stage(config, 1, load_device("h200"))
    gib = plan.peak_memory.device_bytes / GIB
    return [
        row["model"],
        f"{row['tokens'] // K}K",
        row["options"].replace("--", "").replace("memory.", ""),
        *_beside(row["peak_gib"], gib, "{:.2f}"),
        *_beside(row["s_step"], plan.step_seconds, "{:.4g}"),
    ]


def _beside(measured: float, found: float, form: str) -> list[str]:
    return [form.format(measured), form.format(found), f"{found / measured - 1:+.1%}"]


def main(argv: Sequence[str]) -> int:
    rows = [json.loads(line) for line in Path(argv[0]).read_text().splitlines()]
    table = [compared(row) for row in newest(filter(is_step, rows), "model", "tokens", "options")]
    sys.stdout.write("\n".join(markdown(list(HEADER), table)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
