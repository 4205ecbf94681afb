"""The learning rate as a pure function of the step: a checkpoint needs no scheduler state."""

from __future__ import annotations

import math

from trainer.config.job_config import TrainingStage
from trainer.config.sections import ScheduleSection


def learning_rate(stage: TrainingStage, step: int) -> float:
    """The learning rate of `step`, counted over the run, which must be in this training stage."""
    schedule = stage.config.schedule
    first_step, num_steps = (
        (0, stage.total_steps)
        if schedule.over == "run"
        else (stage.start_step, stage.config.training.steps)
    )
    return stage.config.optimizer.lr * lr_factor(
        schedule, step=step - first_step, num_steps=num_steps
    )


def lr_factor(schedule: ScheduleSection, *, step: int, num_steps: int) -> float:
    """The learning rate of `step` (the first is 1) of `num_steps`, as a fraction of the peak."""
    # The first step is 1: its learning rate is not 0, and without warmup nothing is divided by 0.
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    decay_start = schedule.warmup_steps
    if schedule.kind == "wsd":
        # wsd: constant up to the last decay_steps, by default a tenth of the steps.
        decay_start = max(
            decay_start, num_steps - (schedule.decay_steps or max(1, num_steps // 10))
        )
    if step <= decay_start:
        return 1.0
    progress = min(1.0, (step - decay_start) / max(1, num_steps - decay_start))
    decay = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * decay
