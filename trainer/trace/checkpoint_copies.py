"""Copies of weights and optimizer state that checkpoints keep on the host. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.checkpoint.memory_folder import FILES_PER_RANK
from trainer.config.sections import CheckpointSection


@dataclass(frozen=True)
class CheckpointCopies:
    line: str
    """The line of a plan's table that they belong to."""
    source: str
    """The code that allocates them."""
    lifetime: str
    number: int
    """Copies of what a rank saves."""


def checkpoint_copies(section: CheckpointSection, num_nodes: int) -> CheckpointCopies:
    """The copies that a rank holds: in-memory checkpoints, or else the staging of saves."""
    if section.memory_interval is not None:
        return CheckpointCopies(
            "in-memory checkpoints",
            "trainer/checkpoint/in_memory.py: InMemoryCheckpoints",
            "the run",
            # With several nodes, also of a rank of the previous one.
            FILES_PER_RANK * min(num_nodes, 2),
        )
    return CheckpointCopies(
        "async-checkpoint staging",
        "trainer/checkpoint/manager.py: CheckpointManager.save",
        "while a checkpoint is written",
        int(section.enabled and section.asynchronous),
    )
