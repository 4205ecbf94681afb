"""What was predicted of an update beside what is measured, once a run is under way. Without torch."""

from __future__ import annotations

from statistics import median

from trainer.config.job_config import Config
from trainer.hardware.device_specs import Device

SETTLED = 3
"""Updates that are measured, after the first, which compiles, allocates and connects."""


class Beside:
    """Of one start of a run. Where no device is known, nothing is predicted."""

    def __init__(self, config: Config, world_size: int, device: Device | None) -> None:
        self._device, self._predicted = device, 0.0
        self._seconds: list[float] = []
        self._updates = 0
        if device is not None:
            from trainer.plan.critical_path import times

            self._predicted = times(config, world_size, device).update

    def take(self, seconds: float) -> dict[str, float | str] | None:
        """Of the next update. Once, when there are enough: what was planned, and the median of what was measured."""
        self._updates += 1
        if self._device is None or self._updates == 1 or self._updates > SETTLED + 1:
            return None
        self._seconds.append(seconds)
        if len(self._seconds) < SETTLED:
            return None
        measured = median(self._seconds)
        return {"device": self._device.name, "predicted_seconds": self._predicted, "measured_seconds": measured}
