"""What was predicted of an update beside what is measured, once a run is under way. Without torch."""

from __future__ import annotations

from statistics import median

from trainer.config.job_config import Config
from trainer.hardware.device_specs import DeviceSpec

MEASURED_STEPS = 3
"""Updates that are measured, after the first, which compiles, allocates and connects."""


class PredictedVsMeasured:
    """Of one start of a run. Where no device is known, nothing is predicted."""

    def __init__(self, config: Config, world_size: int, device: DeviceSpec | None) -> None:
        self._device, self._predicted_seconds = device, 0.0
        self._step_seconds: list[float] = []
        self._num_steps = 0
        if device is not None:
            from trainer.plan.critical_path import predict_step_time

            self._predicted_seconds = predict_step_time(config, world_size, device).seconds

    def record_step(self, seconds: float) -> dict[str, float | str] | None:
        """Of the next update. Once, when there are enough: what was planned, and the median of what was measured."""
        self._num_steps += 1
        if self._device is None or self._num_steps == 1 or self._num_steps > MEASURED_STEPS + 1:
            return None
        self._step_seconds.append(seconds)
        if len(self._step_seconds) < MEASURED_STEPS:
            return None
        measured = median(self._step_seconds)
        return {"device": self._device.name, "predicted_seconds": self._predicted_seconds, "measured_seconds": measured}
