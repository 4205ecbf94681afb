"""The learning rate as a pure function of the update: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from trainer.config.job_config import ScheduleSection, Stage


def learning_rate(stage: Stage, step: int) -> float:
    """Of update `step` of the run, which is one of this stage's."""
    schedule = stage.config.schedule
    first, steps = (0, stage.total) if schedule.over == "run" else (stage.first_step, stage.config.training.steps)
    return stage.config.optimizer.lr * factor(schedule, step=step - first, steps=steps)


def factor(schedule: ScheduleSection, *, step: int, steps: int) -> float:
    """Learning rate of update `step` (the first is 1) of `steps`, as a fraction of the highest."""
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    start = schedule.warmup_steps
    if schedule.kind == "wsd":
        start = max(start, steps - (schedule.decay_steps or max(1, steps // 10)))
    if step <= start:
        return 1.0
    progress = min(1.0, (step - start) / max(1, steps - start))
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return schedule.final + (1 - schedule.final) * shape
