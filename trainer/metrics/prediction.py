"""What the launcher predicted of a step, and how it compares with what is measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

MEASURED_STEPS = 3
"""Steps that are measured, after the first, which compiles, allocates and connects."""


@dataclass
class Prediction:
    """The fields of `prediction.json`; all absent where nothing was predicted."""

    device: str | None = None
    step_seconds: float | None = None
    device_bytes: float | None = None
    memory_summary: str | None = None
    summary: Sequence[str] = ()
    warnings: Sequence[str] = ()
    out_of_memory_advice: Sequence[str] = ()
    _measured: list[float] = field(default_factory=list)

    def compare(self, seconds: float) -> dict[str, float | str] | None:
        """Takes the seconds of each step; returns predicted and median measured seconds once there are enough."""
        if self.device is None or self.step_seconds is None or len(self._measured) > MEASURED_STEPS:
            return None
        self._measured.append(seconds)
        if len(self._measured) <= MEASURED_STEPS:
            return None
        measured = median(self._measured[1:])
        return {"device": self.device, "predicted_seconds": self.step_seconds, "measured_seconds": measured}


def read_prediction(path: Path) -> Prediction:
    """What the launcher wrote there; nothing where it cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        return Prediction(**json.loads(path.read_text()))
    return Prediction()
