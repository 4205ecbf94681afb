"""Steps on one GPU as they were measured, beside plans by traces and by formulas.

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
from trainer.plan.plan import plan_stage
from trainer.plan.traced_plan import traced

HEADER = (
    *("model", "tokens", "options", "measured GiB", "traced", "off by", "estimated", "off by"),
    *("measured s", "traced", "off by", "estimated", "off by"),
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
    formulas = plan_stage(
        StepCase(row["model"], row["tokens"], options).config(), 1, load_device("h200")
    )
    plan = traced(formulas)
    gib = [each.peak_memory.device_bytes / GIB for each in (plan, formulas)]
    seconds = [each.step_seconds for each in (plan, formulas)]
    cells = [
        row["model"],
        f"{row['tokens'] // K}K",
        row["options"].replace("--", "").replace("memory.", ""),
    ]
    return (
        cells + _beside(row["peak_gib"], gib, "{:.2f}") + _beside(row["s_step"], seconds, "{:.4g}")
    )


def _beside(measured: float, found: Sequence[float], form: str) -> list[str]:
    return [form.format(measured)] + [
        cell for each in found for cell in (form.format(each), f"{each / measured - 1:+.1%}")
    ]


def main(argv: Sequence[str]) -> int:
    rows = [json.loads(line) for line in Path(argv[0]).read_text().splitlines()]
    table = [compared(row) for row in newest(filter(is_step, rows), "model", "tokens", "options")]
    sys.stdout.write("\n".join(markdown(list(HEADER), table)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
