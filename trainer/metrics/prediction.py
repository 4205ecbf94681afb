"""The launcher's prediction of step time and memory, and the comparison with measurements."""

from __future__ import annotations

import logging
from pathlib import Path
from statistics import median
from typing import ClassVar

from pydantic import PrivateAttr

from trainer.errors import ResumeError
from trainer.storage.artifact import Artifact, DamageError, read_artifact, write_artifact

log = logging.getLogger("trainer")

MEASURED_STEPS = 3
"""Steps to measure, after the first, which compiles, allocates and connects."""


class Prediction(Artifact):
    """`prediction.json`; None where the launcher predicted nothing."""

    kind: ClassVar[str] = "prediction"
    device: str | None = None
    step_seconds: float | None = None
    device_bytes: float | None = None
    seconds_per_token: float | None = None
    seconds_per_pair: float | None = None
    """Predicted seconds of a (query, key) pair of a sequence, the mean over layers."""
    memory_summary: str | None = None
    summary: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    out_of_memory_advice: tuple[str, ...] = ()
    _measured: list[float] = PrivateAttr(default_factory=list)

    def compare(self, seconds: float) -> dict[str, float | str | None] | None:
        """Records the seconds of a step; returns predicted and median measured seconds once, after
        enough steps.
        """
        if self.step_seconds is None or len(self._measured) > MEASURED_STEPS:
            return None
        self._measured.append(seconds)
        if len(self._measured) <= MEASURED_STEPS:
            return None
        measured = median(self._measured[1:])
        return {
            "device": self.device,
            "predicted_seconds": self.step_seconds,
            "measured_seconds": measured,
        }


def write_prediction(path: Path, prediction: Prediction) -> None:
    """Replaces what an earlier launch predicted; a file that cannot be written is logged."""
    try:
        write_artifact(path, prediction)
    except OSError as error:
        log.warning("%s cannot be written, so nothing is predicted: %s", path, error.strerror)


def read_prediction(path: Path) -> Prediction:
    """The launcher's prediction; an empty one, and a warning, if the file cannot be read."""
    try:
        return read_artifact(path, Prediction)
    except FileNotFoundError:
        return Prediction()
    except (OSError, DamageError, ResumeError) as error:
        log.warning("%s cannot be read, so nothing is predicted: %s", path, error)
        return Prediction()
