"""The goldens in `tests/fixtures/trajectories.toml`, and how far a trajectory may be from its
own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli

from tests.trajectories.runs import RUNS, Trajectory

PATH = Path(__file__).resolve().parents[1] / "fixtures" / "trajectories.toml"
GENERATED = "# ---- Written by python -m tests.trajectories --rewrite\n"
SAME_INITIAL_WEIGHTS = ("AVX2", "AVX512")
"""Instruction sets whose normal distribution is bitwise the same in torch."""
EXACT = {"tokens": 0.0, "lr": 1e-12}
"""Relative bounds of what no kernel computes."""


def read(path: Path = PATH) -> dict[str, Any]:
    """`bounds` by dtype, and `runs` by name."""
    return tomli.loads(path.read_text())


def trajectories(document: Mapping[str, Any]) -> dict[str, Trajectory]:
    runs: dict[str, dict[str, Any]] = document.get("runs", {})
    return {
        name: {quantity: values for quantity, values in run.items() if quantity != "made_with"}
        for name, run in runs.items()
    }


def write(runs: Mapping[str, Trajectory], made_with: Mapping[str, str], path: Path = PATH) -> None:
    """Replaces all runs; what stands above them stays."""
    head, _, _ = path.read_text().partition(GENERATED)
    tables = []
    for name, run in runs.items():
        values = "".join(f'"{quantity}" = {numbers!r}\n' for quantity, numbers in run.items())
        tables.append(f'\n[runs."{name}"]\nmade_with = "{made_with[name]}"\n{values}')
    path.write_text(head + GENERATED + "".join(tables))


def bound(
    quantity: str, dtype: str, capability: str, bounds: Mapping[str, Mapping[str, float]]
) -> float:
    """Largest relative difference between a value and its golden; `capability` is the instruction
    set of torch.
    """
    if quantity in EXACT:
        return EXACT[quantity]
    if capability not in SAME_INITIAL_WEIGHTS and dtype != "bfloat16":
        dtype = "other_initial_weights"
    return bounds[dtype]["grad_norm" if quantity == "grad_norm" else "loss"]


def differences(found: Trajectory, golden: Trajectory) -> dict[str, float]:
    """The largest relative difference of each quantity; infinite if it is missing or has another
    length.
    """
    return {
        key: _difference(found.get(key, []), golden.get(key, [])) for key in {**golden, **found}
    }


def _difference(found: list[float], golden: list[float]) -> float:
    if not golden or len(found) != len(golden):
        return math.inf
    relative = [
        abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found, golden, strict=True)
    ]
    # max may pass over NaN.
    return max(relative) if all(map(math.isfinite, relative)) else math.inf


def drift(
    name: str, found: Trajectory, document: Mapping[str, Any], capability: str
) -> dict[str, float]:
    """The differences of a run from its golden that exceed their bounds."""
    dtype = RUNS[name].dtype
    return {
        quantity: difference
        for quantity, difference in differences(
            found, trajectories(document).get(name, {})
        ).items()
        if not difference <= bound(quantity, dtype, capability, document["bounds"])
    }
