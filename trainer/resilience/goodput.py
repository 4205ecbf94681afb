"""Goodput: the part of the time since a run first began in which it did updates that it kept."""

from __future__ import annotations

import time
from typing import Any


class Goodput:
    """Counts over all lives of a run: what a life did after its newest checkpoint is lost with it, and not counted."""

    def __init__(self) -> None:
        self._start_time, self._productive_seconds = time.time(), 0.0

    def add_step(self, seconds: float) -> None:
        """An update took so long."""
        self._productive_seconds += seconds

    def percent(self) -> float:
        return 100 * self._productive_seconds / max(time.time() - self._start_time, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        return {"began": self._start_time, "productive_seconds": self._productive_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._start_time, self._productive_seconds = state_dict["began"], state_dict["productive_seconds"]
