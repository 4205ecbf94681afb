"""Rows as a pure function of their number: which documents, which labels, which boundaries.

Shape suffixes: B rows, T tokens of a row, D document starts and the row's end, P pieces of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from models.batch import IGNORE, Batch
from trainer.data.packing import Plan
from trainer.data.prepared import Prepared
from trainer.data.shuffle import shuffled


class Rows:
    """An endless sequence of rows: every epoch holds each row of the plan once, in an order of its own."""

    def __init__(self, prepared: Prepared, plan: Plan, *, mask: Literal["document", "none"], seed: int) -> None:
        self.prepared = prepared
        self.plan = plan
        self.seq_len = plan.seq_len
        self.num_rows = plan.num_rows
        self.fingerprint = prepared.fingerprint
        self._masked = mask == "document"
        self._seed = seed
        one_each = not self._masked or (plan.max_pieces == 1 and plan.num_padding == 0)
        self._num_boundaries = 2 if one_each else plan.max_pieces + 2

    def locate(self, number: int) -> tuple[int, int]:
        """(epoch, row of the plan) of a global row number."""
        epoch, index = divmod(number, self.num_rows)
        return epoch, shuffled(index, size=self.num_rows, seed=self._seed, epoch=epoch)

    def read(self, numbers: Sequence[int | None]) -> Batch:
        """The rows with these global numbers, on the host; None is a row of padding."""
        shape = (len(numbers), self.seq_len)
        tokens_BT = torch.full(shape, self.prepared.eos)
        labels_BT = torch.full(shape, IGNORE)
        positions_BT = torch.arange(self.seq_len).repeat(len(numbers), 1)
        documents_BT = torch.zeros(shape, dtype=torch.int64)
        boundaries_BD = torch.full((len(numbers), self._num_boundaries), self.seq_len, dtype=torch.int32)
        boundaries_BD[:, 0] = 0
        num_tokens = num_pairs = 0
        for index, number in enumerate(numbers):
            if number is None:
                continue
            starts_P, lengths_P = self._pieces(number)
            self._fill(tokens_BT[index], labels_BT[index], starts_P, lengths_P)
            length = int(lengths_P.sum())
            # Padding is one more piece, which may be empty.
            sizes = torch.cat([lengths_P, torch.tensor([self.seq_len - length])])
            ends = sizes.cumsum(0)
            documents_BT[index] = torch.repeat_interleave(sizes, output_size=self.seq_len)
            if self._masked:
                positions_BT[index] -= (ends - sizes)[documents_BT[index]]
                boundaries_BD[index, 1 : ends.numel() + 1] = ends[: self._num_boundaries - 1]
            num_tokens += length
            num_pairs += _pairs(lengths_P if self._masked else lengths_P.sum())
        return Batch(
            tokens=tokens_BT,
            labels=labels_BT,
            positions=positions_BT,
            documents=documents_BT,
            boundaries=boundaries_BD,
            num_tokens=num_tokens,
            num_pairs=num_pairs,
            attended=_pairs(boundaries_BD.diff().long()),
        )

    def _pieces(self, number: int) -> tuple[Tensor, Tensor]:
        _, row = self.locate(number)
        first, last = self.plan.rows[row : row + 2].tolist()
        return self.plan.starts[first:last], self.plan.lengths[first:last]

    def _fill(self, tokens_T: Tensor, labels_T: Tensor, starts_P: Tensor, lengths_P: Tensor) -> None:
        """Where a piece ends inside its document, its last label is the document's next token."""
        ends_P = starts_P + lengths_P
        documents = self.prepared.starts
        continued_P = documents[torch.searchsorted(documents, ends_P)] != ends_P
        at = 0
        for start, end, continued in zip(starts_P.tolist(), ends_P.tolist(), continued_P.tolist(), strict=True):
            stream = self.prepared.read(start, end + continued)
            length = end - start
            tokens_T[at : at + length] = stream[:length]
            labels_T[at : at + stream.numel() - 1] = stream[1:]
            at += length


def _pairs(lengths: Tensor) -> int:
    """(query, key) pairs inside documents of these lengths, int64."""
    return int((lengths * (lengths + 1) // 2).sum())
