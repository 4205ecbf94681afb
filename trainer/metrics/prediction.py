"""The launcher's prediction of step time and memory, and the comparison with measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

MEASURED_STEPS = 3
"""Steps to measure, after the first, which compiles, allocates and connects."""


@dataclass
class Prediction:
    """The fields of `prediction.json`; None where the launcher predicted nothing."""

    device: str | None = None
    step_seconds: float | None = None
    device_bytes: float | None = None
    seconds_per_token: float | None = None
    seconds_per_pair: float | None = None
    """Of a (query, key) pair of a sequence; the mean over layers."""
    memory_summary: str | None = None
    summary: Sequence[str] = ()
    warnings: Sequence[str] = ()
    out_of_memory_advice: Sequence[str] = ()
    _measured: list[float] = field(default_factory=list)

    def compare(self, seconds: float) -> dict[str, float | str | None] | None:
        """Records the seconds of a step; returns predicted and median measured seconds once, after enough steps."""
        if self.step_seconds is None or len(self._measured) > MEASURED_STEPS:
            return None
        self._measured.append(seconds)
        if len(self._measured) <= MEASURED_STEPS:
            return None
        measured = median(self._measured[1:])
        return {"device": self.device, "predicted_seconds": self.step_seconds, "measured_seconds": measured}


def read_prediction(path: Path) -> Prediction:
    """The launcher's prediction; an empty one if the file is missing or unreadable."""
    with suppress(OSError, ValueError, TypeError):
        return Prediction(**json.loads(path.read_text()))
    return Prediction()
