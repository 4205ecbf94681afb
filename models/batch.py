"""What a model eats.

Shape suffixes: B rows, S tokens on this rank, T tokens of the whole row, D document starts and the row's end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, with everything per token beside them, so that no later step needs a neighbour's token."""

    tokens: Tensor
    """[B, S] int64."""
    labels: Tensor
    """[B, S] int64: the next token of the same document, already shifted; IGNORE where there is none."""
    positions: Tensor
    """[B, S] int64: offset in the document (in the row, when documents are not masked)."""
    documents: Tensor
    """[B, S] int64: number of the document in its row; padding at the end of a row is one more document."""
    boundaries: Tensor
    """[B, D] int32, always on the host: starts of the documents that attention must not cross, in the whole row, then T,
    repeated to a length that is the same for all batches of a run. One document: [0, T]."""
    num_tokens: int
    """Tokens of these rows, padding left out."""
    num_pairs: int
    """(query, key) pairs that the mask allows in these rows, padding left out."""
    attended: int
    """(query, key) pairs that attention computes on this rank in these rows, padding's included: its share of the work."""
    sources: tuple[tuple[int, int], ...] = ()
    """Of each row: from which of a run's sources it is, and its tokens, padding left out."""

    def to(self, device: torch.device) -> Batch:
        """The same batch with its per-token tensors on `device`; the copy is asynchronous from pinned memory."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            documents=self.documents.to(device, non_blocking=True),
        )

    def num_targets(self) -> Tensor:
        """Tokens that have a label: an int64 scalar on the batch's device."""
        return (self.labels != IGNORE).sum()


def padded(batch: Batch, multiple: int) -> Batch:
    """Rows whose length is a multiple, made so by one more document at their end, which has no labels."""
    rows, tokens = batch.tokens.shape
    missing = -tokens % multiple
    if not missing:
        return batch
    last = batch.documents[:, -1:] + 1
    ends = torch.full_like(batch.boundaries[:, :1], tokens + missing)
    return replace(
        batch,
        tokens=F.pad(batch.tokens, (0, missing)),
        labels=F.pad(batch.labels, (0, missing), value=IGNORE),
        positions=torch.cat([batch.positions, torch.arange(missing).expand(rows, -1)], dim=1),
        documents=torch.cat([batch.documents, last.expand(-1, missing)], dim=1),
        boundaries=torch.cat([batch.boundaries, ends], dim=1),
        attended=batch.attended + rows * missing * (missing + 1) // 2,
    )
