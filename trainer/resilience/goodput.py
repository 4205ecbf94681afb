"""Goodput: the part of the time since a run first began in which it did updates that it kept."""

from __future__ import annotations

import time
from typing import Any


class Goodput:
    """Counts over all lives of a run: what a life did after its newest checkpoint is lost with it, and not counted."""

    def __init__(self) -> None:
        self._began, self._productive = time.time(), 0.0

    def add(self, seconds: float) -> None:
        """An update took so long."""
        self._productive += seconds

    def percent(self) -> float:
        return 100 * self._productive / max(time.time() - self._began, 1e-9)

    def state(self) -> dict[str, Any]:
        return {"began": self._began, "productive_seconds": self._productive}

    def restore(self, state: dict[str, Any]) -> None:
        self._began, self._productive = state["began"], state["productive_seconds"]
