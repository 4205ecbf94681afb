"""A prepared corpus, packed into rows and shuffled."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from trainer.data.packing import Plan
from trainer.data.shuffle import shuffled
from trainer.data.token_dataset import Prepared


class Packed:
    """The rows of a plan, in another order every epoch; see `RowSource`."""

    def __init__(self, prepared: Prepared, plan: Plan, *, seed: int) -> None:
        self.prepared, self.plan = prepared, plan
        self.num_rows = plan.num_rows
        self.max_pieces = plan.max_pieces
        self.num_padding = plan.num_padding
        self.filled = Fraction(max(1, round(100 * plan.num_tokens / (plan.num_rows * plan.seq_len))), 100)
        """Part of its rows that is no padding, in hundredths: more of emptier rows make as many tokens."""
        self.padding = prepared.eos
        self.fingerprint = prepared.fingerprint
        self._seed = seed
        self._row = lru_cache(maxsize=16)(self._row_of)

    def locate(self, number: int) -> tuple[int, int]:
        """(epoch, row of the plan) of a row."""
        epoch, index = divmod(number, self.num_rows)
        return epoch, shuffled(index, size=self.num_rows, seed=self._seed, epoch=epoch)

    def pieces(self, number: int) -> list[int]:
        return self._row(number)[1]

    def fill(self, number: int, piece: int, start: int, tokens: Tensor, labels: Tensor) -> None:
        """Where a piece ends inside its document, its last label is the document's next token."""
        starts, lengths, continued = self._row(number)
        first, size = starts[piece] + start, tokens.numel()
        goes_on = start + size < lengths[piece] or continued[piece]
        stream = self.prepared.read(first, first + size + goes_on)
        tokens.copy_(stream[:size])
        labels[: stream.numel() - 1] = stream[1:]

    def _row_of(self, number: int) -> tuple[list[int], list[int], list[bool]]:
        """Of each piece: where it starts in the stream of tokens, how long it is, whether its document goes on."""
        _, row = self.locate(number)
        first, last = self.plan.rows[row : row + 2].tolist()
        starts, lengths = self.plan.starts[first:last], self.plan.lengths[first:last]
        documents, ends = self.prepared.starts, starts + lengths
        continued = documents[torch.searchsorted(documents, ends)] != ends
        return starts.tolist(), lengths.tolist(), continued.tolist()
