"""Which table of `specs/` describes a device, and its peak FLOP/s: all that training reads of the
tables. No torch.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import tomli

TABLES_DIR = Path(__file__).parent / "specs"


@cache
def find_table(torch_name: str) -> str | None:
    """The table with the longest name in `torch.cuda.get_device_name()`; None if unknown or a MIG
    slice.
    """
    # Whole words only, and the longest: A10 is no A100, and an H100 NVL is not the common H100.
    matches = [
        (len(part), path.stem)
        for path in sorted(TABLES_DIR.glob("*.toml"))
        for part in _read(path.stem).get("names", ())
        if "MIG" not in torch_name
        and re.search(rf"(?<![A-Za-z0-9]){re.escape(part)}(?![A-Za-z0-9])", torch_name)
    ]
    return max(matches, default=(0, None))[1]


def table_peak_flops(table: str) -> float:
    """Dense bfloat16 FLOP/s.

    A table that does not state them has those of the table it extends.
    """
    values = _read(table)
    stated = values.get("device", {}).get("peak_tflops")
    if stated is None:
        return table_peak_flops(values["extends"])
    return 1e12 * float(stated["value"] if isinstance(stated, dict) else stated)


def table_attention_rates(table: str) -> dict[str, dict[int, tuple[float, float]]]:
    """(forward, backward) TFLOP/s by attention kernel and head dimension; of the table it extends
    where it states none.
    """
    values = _read(table)
    rates = table_attention_rates(values["extends"]) if "extends" in values else {}
    for kernel, widths in values.get("attention", {}).items():
        of_widths = {
            int(key.removeprefix("width_")): (each["forward"], each["backward"])
            for key, each in widths.items()
        }
        rates[kernel] = rates.get(kernel, {}) | of_widths
    return rates


@cache
def _read(table: str) -> dict[str, Any]:
    return tomli.loads((TABLES_DIR / f"{table}.toml").read_text())
