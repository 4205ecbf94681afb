"""One launch of a run that the self-check compares. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.config.job_config import Config

PLAIN: dict[str, Any] = {"parallelism": {"dp_shard": 1}, "memory": {"recompute": "none"}}
"""Sections of a run in one process, with nothing recomputed and nothing offloaded."""


def reference_values(values: dict[str, Any]) -> dict[str, Any]:
    """The configuration values of the same steps in one process, not compiled, a step's whole
    batch at once.
    """
    training = values["training"]
    return (
        values
        | PLAIN
        | {
            "training": {
                **training,
                "compile": False,
                # One forward pass over the whole batch: nothing is accumulated, split or
                # exchanged.
                "micro_batch_size": training["global_batch_size"],
            }
        }
    )


EXPORT = "exported"
"""Folder of an export in the folder of its run."""
Finish = Literal["none", "export", "export MXFP4", "evaluate", "generate"]
"""The use that a launch makes of its last checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Steps of one training stage on some ranks; with `checkpoint.enabled` it resumes from the
    launch before.
    """

    config: Config
    """Configuration of the whole run, all stages included."""
    world_size: int
    last_step: int
    """Last step of this launch, counted over the run."""
    stage: int = 0
    compared_steps: Sequence[int] = ()
    """The steps after which weights and moments are compared."""
    is_reference: bool = False
    """Whether it writes them instead, for other launches to compare theirs with."""
    weights: Path | None = None
    """State of a reference, whose weights this launch starts from; None: as the configuration
    says.
    """
    takes_loads: bool = True
    """Whether it takes the loads of routers from there as well, which no Hugging Face folder
    has.
    """
    finish: Finish = "none"


def state_path(reference: Path, step: int) -> Path:
    """File of a reference's weights and moments after a step."""
    return reference / f"{step}.pt"
