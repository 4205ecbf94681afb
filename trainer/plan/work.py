"""What a rank computes in an update, in closed formulas: FLOPs, and bytes that operations move. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config import Config


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of a rank at a place of the pipeline, in a whole update."""

    matmul: Mapping[str, float]
    """FLOPs of matrix products: "forward", "backward", "again" (recomputation), "head" (both passes of the head)."""
    attention: Mapping[str, float]
    """FLOPs that kernels of attention carry out: "forward", "backward", "again"."""
    moved: Mapping[str, float]
    """Bytes that memory-bound operations read and write: "forward", "backward", "again", "head"."""
    offloaded: float
    """Bytes copied to the host; as many come back."""
    optimizer: float
    """Bytes that the optimizer reads and writes."""
    on_host: bool
    """Where it does."""
    tokens: float
    """Of the whole global batch, without padding."""
    pairs: float
    """(query, key) pairs of the whole global batch that the mask allows, one document per row."""


def work(config: Config, world_size: int, place: int) -> Work:
    """Of the fullest rank at that place of the pipeline. The configuration must have no problems."""
    raise NotImplementedError
