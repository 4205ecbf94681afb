"""One launch of a run that the self-check compares. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config.job_config import Config


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Steps of one training stage on some ranks; with `checkpoint.enabled` it resumes from the launch before."""

    config: Config
    """That of the whole run."""
    world_size: int
    last_step: int
    """Of the run."""
    stage: int = 0
    compared_steps: Sequence[int] = ()
    """The steps after which weights and moments are compared."""
    is_reference: bool = False
    """Whether it writes them instead, for other launches to compare theirs with."""
