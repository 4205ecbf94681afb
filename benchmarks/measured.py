"""Rows that a GPU measured, and the pages that show them.

    python -m benchmarks.measured            rewrite the tables of README.md and docs/benchmarks.md
    python -m benchmarks.measured --check    exit 1 if a page differs from what would be written

benchmarks/measured/*.jsonl holds the rows of a day, as benchmarks/gpu.py writes them: each has its
date, commit, card and torch release. A table shows the rows of one card only; beside other
libraries, the newest of each kind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.doc_tables import markdown
from benchmarks.gpu_steps import StepCase
from benchmarks.pages import replace_block
from trainer.hardware.device_specs import match_device
from trainer.hardware.host import GIB
from trainer.plan.plan import TrainingPlan
from trainer.plan.run_plan import plan_stage

ROOT = Path(__file__).resolve().parents[1]
DAYS = sorted((Path(__file__).parent / "measured").glob("*-h200.jsonl"), reverse=True)
"""Files of rows, the newest first."""
BESIDE = "1.24B"
"""The model of which other libraries run steps, too."""
PROVENANCE = ("date", "commit", "sources", "device", "torch", "clocks")
"""Columns that say what a row was measured with."""
K = 1 << 10
Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Rows of a file, none if there is no such file; a line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def steps(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "s_step" in row]


def newest(rows: Iterable[Row], *columns: str) -> list[Row]:
    """Of rows that have equal values in these columns the newest; that with fewer options, of one
    day.
    """
    ordered = sorted(rows, key=lambda row: row["date"], reverse=True)
    ordered.sort(key=lambda row: len(row.get("options", "")))
    ordered.sort(key=lambda row: row["date"][:10], reverse=True)
    return [*{tuple(row.get(name) for name in columns): row for row in reversed(ordered)}.values()]


def is_beside(row: Row) -> bool:
    """Whether it is a step of the model that other libraries run, on one document."""
    return row["model"] == BESIDE and not row.get("document")


def case(row: Row) -> StepCase:
    return StepCase(row["model"], row["tokens"], row.get("options", ""), row.get("document"))


def planned(row: Row) -> TrainingPlan | None:
    """What `longhaul plan` says of a step of ours; None for other libraries, packed documents and
    unknown cards.
    """
    device = match_device(row["device"])
    if device is None or "system" in row or row.get("document"):
        return None
    return plan_stage(case(row).config(), 1, device)


def mfu(row: Row) -> float | None:
    """Of a step, by the same FLOPs for every library: those of our model, whose head is tied."""
    device = match_device(row["device"])
    if row.get("mfu") is not None or device is None:
        return row.get("mfu")
    model = case(row).config().model.build()
    flops = model.flops(tokens=row["tokens"], pairs=model.mean_pairs(row["tokens"]))
    return float(flops / row["s_step"] / device.peak_flops)


def fastest_rival(row: Row, rows: Iterable[Row]) -> Row | None:
    """The fastest step of another library on the same model and tokens."""
    if "system" in row or not is_beside(row):
        return None
    others = [each for each in steps(rows) if "system" in each and each["tokens"] == row["tokens"]]
    return min(others, key=lambda each: each["s_step"], default=None)


# ---- the page at the end of a call


def page(rows: Sequence[Row], left: Sequence[str]) -> str:
    """Steps beside the planner and other libraries, all other results, what failed, and what did
    not run.
    """
    table = []
    for row in steps(rows):
        plan = planned(row)
        rival = fastest_rival(row, rows)
        table.append(
            [
                row["job"] if "system" in row else case(row).name,
                _numbers(row["s_step"], mfu(row), row.get("peak_gib")),
                ""
                if plan is None
                else _numbers(plan.step_seconds, plan.mfu, plan.peak_memory.device_bytes / GIB),
                ""
                if rival is None
                else f"{rival['job']}: {_numbers(rival['s_step'], mfu(rival), rival['peak_gib'])}",
                "" if rival is None else f"{rival['s_step'] / row['s_step']:.2f}",
            ]
        )
    heading = [
        "step",
        "measured",
        "predicted by the planner",
        "fastest rival",
        "rival's seconds over ours",
    ]
    lines = [f"# {rows[0]['device']}, torch {rows[0]['torch']}"] if rows else []
    lines += ["", *markdown(heading, table), ""]
    lines += [
        f"- {row['job']}: {_cells_of(row)}"
        for row in rows
        if "s_step" not in row and "state" not in row
    ]
    known = {row["job"] for row in rows if row.get("state") == "measured"}
    failed = [row for row in rows if row.get("state") == "failed" and row["job"] not in known]
    lines += [f"- {row['job']}: FAILED: {row['result']}" for row in failed]
    lines += [f"- did not run: {name}" for name in left]
    return "\n".join(lines) + "\n"


def _cells_of(row: Row) -> str:
    """What a row of another kind than steps says, without what it was measured with."""
    if "what" in row:
        return f"{row['what']}: {row['result']}"
    cells = {
        name: value
        for name, value in row.items()
        if name not in ("job", *PROVENANCE) and value is not None
    }
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in cells.items()
    )


def _numbers(seconds: float, share: float | None, gib: float | None) -> str:
    parts = [
        f"{seconds:.4g} s",
        f"{100 * share:.1f} %" if share else "",
        f"{gib:.1f} GiB" if gib else "",
    ]
    return ", ".join(filter(None, parts))


# ---- tables of pages


def system(row: Row) -> str:
    return str(row.get("system", "Longhaul"))


def beside_others(rows: Sequence[Row]) -> list[str]:
    """Steps of one model by every library, at the lengths that several have run."""
    found = newest(filter(is_beside, steps(rows)), "system", "tokens", "recompute", "compile")
    shared = {row["tokens"] for row in found if "system" in row}
    chosen = sorted(
        (row for row in found if row["tokens"] in shared),
        key=lambda row: (row["tokens"], row["s_step"]),
    )
    heading = [
        "tokens",
        "",
        "recomputation",
        "compiled",
        "head",
        "s per step",
        "MFU, %",
        "peak GiB",
    ]
    return markdown(heading, [[f"{row['tokens'] // K}K", *_cells(row)] for row in chosen])


def _cells(row: Row) -> list[str]:
    return [
        f"**{system(row)}**" if "system" not in row else system(row),
        f"`{row['recompute']}`",
        "yes" if row["compile"] else "no",
        row["head"],
        f"{row['s_step']:.3f}",
        f"{100 * (mfu(row) or 0):.1f}",
        f"{row['peak_gib']:.1f}",
    ]


def own_steps(rows: Sequence[Row]) -> list[str]:
    """All steps of ours."""
    table = []
    for row in steps(rows):
        if "system" not in row:
            documents = f", documents of {row['document'] // K}K" if row.get("document") else ""
            table.append(
                [
                    row["model"],
                    f"{row['tokens'] // K}K{documents}",
                    " ".join(f"`{word}`" for word in _options(row["options"])),
                    row["kernel"],
                    f"{row['s_step']:.4g} ({row['n']})",
                    f"{100 * (mfu(row) or 0):.1f}",
                    f"{row['peak_gib']:.1f}",
                    row["date"][:10],
                ]
            )
    return markdown(
        ["model", "tokens", "options", "kernel", "s per step (n)", "MFU, %", "peak GiB", "day"],
        table,
    )


def _options(text: str) -> list[str]:
    """`--memory.recompute none` as `recompute none`."""
    return [part.partition(".")[2].strip() for part in text.split("--") if part]


def kernel_rates(rows: Sequence[Row]) -> list[str]:
    found = newest((row for row in rows if "forward_tflops" in row), "kernel", "heads")
    table = [
        [
            row["kernel"],
            row["heads"],
            f"{row['forward_tflops']:.0f}",
            f"{row['backward_tflops']:.0f}",
        ]
        for row in found
    ]
    return markdown(["kernel", "heads", "forward, TFLOP/s", "backward, TFLOP/s"], table)


BLOCKS = {
    "README.md": {"gpu": beside_others},
    "docs/benchmarks.md": {"gpu_steps": own_steps, "gpu_kernels": kernel_rates},
}


def regenerated(name: str) -> str:
    """The page with its tables of measured rows made again."""
    text = (ROOT / name).read_text()
    rows = [row for day in DAYS for row in read_rows(day)]
    for block, make in BLOCKS[name].items():
        text = replace_block(text, block, ["", *make(rows), ""])
    return text


def main(argv: Sequence[str]) -> int:
    stale = {
        name: text for name in BLOCKS if (text := regenerated(name)) != (ROOT / name).read_text()
    }
    for name, text in stale.items():
        if "--check" not in argv:
            (ROOT / name).write_text(text)
        sys.stdout.write(f"{name} {'differs' if '--check' in argv else 'rewritten'}\n")
    return int("--check" in argv and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
