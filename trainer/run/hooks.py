"""Hooks of extensions, called at points of a run."""

from __future__ import annotations

from typing import Any

from trainer.config import extension
from trainer.config.extension import StepView
from trainer.errors import EXIT_NO_RETRY, RankFailedError
from trainer.metrics.loggers import write_traceback
from trainer.step.trainer import Trainer


def call(hook: str, *arguments: Any) -> None:
    """Calls `on_step`, `on_checkpoint` or `on_end` of every extension that has it.

    Raises RankFailedError.
    """
    for each in extension.installed():
        called = getattr(each.extension, hook)
        if called is None:
            continue
        try:
            called(*arguments)
        # Only this rank may have failed; its peers learn of it from the launcher.
        except Exception as error:
            write_traceback(error)
            problem = (
                extension.describe_error(error) or f'extension "{each.extension.name}": {error}'
            )
            raise RankFailedError(EXIT_NO_RETRY, f"{hook} of {problem}") from error


def view(trainer: Trainer, lr: float) -> StepView:
    world = trainer.world
    return StepView(
        trainer.step, trainer.stage.total_steps, world.rank, world.size, lr, trainer.stage_modules
    )
