"""Copies of weights and optimizer state that checkpoints keep on the host. Imports no torch."""

from __future__ import annotations

from trainer.checkpoint.memory_folder import FILES_PER_RANK
from trainer.config.sections import CheckpointSection


def checkpoint_copies(section: CheckpointSection, num_nodes: int) -> tuple[int, int]:
    """(staging of saves, in-memory checkpoints): a rank's copies."""
    # With several nodes, also of a rank of the previous one.
    if section.memory_interval is not None:
        return 0, FILES_PER_RANK * min(num_nodes, 2)
    return int(section.enabled and section.asynchronous), 0
