"""Model inputs of one micro-batch.

Shape suffixes: B sequences, S tokens of this rank, T tokens of the full sequence, D document boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """Packed sequences. Labels and positions are computed before sharding, so no rank needs another rank's tokens."""

    tokens: Tensor
    """[B, S] int64."""
    labels: Tensor
    """[B, S] int64: the next token of the same document, already shifted; IGNORE_INDEX where there is none."""
    positions: Tensor
    """[B, S] int64: offset in the document (in the sequence, with `data.mask = "none"`)."""
    document_ids: Tensor
    """[B, S] int64: index of the document in its sequence; the padding at the end is one more document."""
    boundaries: Tensor
    """[B, D] int32, always on the CPU: the document starts in the full sequence, then T, repeated up to a D that is the
    same for all batches of a run. A single document: [0, T]."""
    num_tokens: int
    """Tokens of these sequences, without padding."""
    num_pairs: float
    """(query, key) pairs that the mask allows in these sequences, without padding: the mean over layers."""
    num_computed_pairs: float
    """(query, key) pairs that attention computes on this rank, padding included: the mean over layers."""
    busiest_pairs: float = 0.0
    """(query, key) pairs of all sequences that the busiest data-parallel rank takes in this micro-batch, padding included:
    the mean over layers."""
    mean_pairs: float = 0.0
    """Of all data-parallel ranks."""
    sequence_sources: tuple[tuple[int, int], ...] = ()
    """For each sequence: the index of its data source, and its tokens without padding."""

    def to(self, device: torch.device) -> Batch:
        """Copies the per-token tensors to `device`, asynchronously from pinned memory."""
        return self.map_tokens(lambda x_BS: x_BS.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copies the per-token tensors to pinned memory."""
        return self.map_tokens(Tensor.pin_memory)

    def map_tokens(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Replaces each per-token tensor by the function's value."""
        names = ("tokens", "labels", "positions", "document_ids")
        tensors: dict[str, Any] = {name: function(getattr(self, name)) for name in names}
        return replace(self, **tensors)

    def num_targets(self) -> Tensor:
        """Number of tokens with a label: an int64 scalar on the batch's device."""
        return (self.labels != IGNORE_INDEX).sum()
