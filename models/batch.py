"""What a model eats.

Shape suffixes: B rows, S tokens on this rank, T tokens of the whole row, D document starts and the row's end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, with everything per token beside them, so that no later step needs a neighbour's token."""

    tokens: Tensor
    """[B, S] int64."""
    labels: Tensor
    """[B, S] int64: the next token of the same document, already shifted; IGNORE where there is none."""
    positions: Tensor
    """[B, S] int64: offset in the document (in the row, when documents are not masked)."""
    document_ids: Tensor
    """[B, S] int64: number of the document in its row; padding at the end of a row is one more document."""
    boundaries: Tensor
    """[B, D] int32, always on the host: starts of the documents that attention must not cross, in the whole row, then T,
    repeated to a length that is the same for all batches of a run. One document: [0, T]."""
    num_tokens: int
    """Tokens of these rows, padding left out."""
    num_pairs: int
    """(query, key) pairs that the mask allows in these rows, padding left out."""
    num_computed_pairs: int
    """(query, key) pairs that attention computes on this rank in these rows, padding's included: its share of the work."""
    sequence_sources: tuple[tuple[int, int], ...] = ()
    """Of each row: from which of a run's sources it is, and its tokens, padding left out."""

    def to(self, device: torch.device) -> Batch:
        """The same batch with its per-token tensors on `device`; the copy is asynchronous from pinned memory."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            document_ids=self.document_ids.to(device, non_blocking=True),
        )

    def num_targets(self) -> Tensor:
        """Tokens that have a label: an int64 scalar on the batch's device."""
        return (self.labels != IGNORE_INDEX).sum()


def pad_batch(batch: Batch, multiple: int) -> Batch:
    """Rows whose length is a multiple, made so by one more document at their end, which has no labels."""
    batch_size, seq_len = batch.tokens.shape
    num_padding = -seq_len % multiple
    if not num_padding:
        return batch
    padding_id = batch.document_ids[:, -1:] + 1
    new_end = torch.full_like(batch.boundaries[:, :1], seq_len + num_padding)
    return replace(
        batch,
        tokens=F.pad(batch.tokens, (0, num_padding)),
        labels=F.pad(batch.labels, (0, num_padding), value=IGNORE_INDEX),
        positions=torch.cat([batch.positions, torch.arange(num_padding).expand(batch_size, -1)], dim=1),
        document_ids=torch.cat([batch.document_ids, padding_id.expand(-1, num_padding)], dim=1),
        boundaries=torch.cat([batch.boundaries, new_end], dim=1),
        num_computed_pairs=batch.num_computed_pairs + batch_size * num_padding * (num_padding + 1) // 2,
    )
