"""A corpus that is made up: random tokens, over and over, so that a loss near zero needs attention over a distance.

    period 3, 8 tokens    tokens    a b c a b c a b
                          labels    - - a b c a b -

Shape suffixes: B rows, T tokens of a row, P tokens of the period.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.batch import IGNORE, Batch
from trainer.data.shuffle import mix


class CopyRows:
    """Rows without end, each a function of seed and number: `period` tokens, uniform over the vocabulary, repeated.

    What repeats is a target and nothing else is; a row is one document. `num_rows` is how many of them a run takes.
    """

    def __init__(self, *, vocab_size: int, period: int, seq_len: int, num_rows: int, seed: int) -> None:
        self.seq_len = seq_len
        self.num_rows = num_rows
        self.fingerprint = f"copy-{vocab_size}-{period}"
        self._vocab_size = vocab_size
        self._period = period
        self._seed = seed

    def read(self, numbers: Sequence[int | None]) -> Batch:
        """The rows with these global numbers, on the host; None is a row of padding."""
        rows, length = len(numbers), self.seq_len
        tokens_BT = torch.zeros((rows, length), dtype=torch.int64)
        labels_BT = torch.full_like(tokens_BT, IGNORE)
        for index, number in enumerate(numbers):
            if number is not None:
                tokens_BT[index] = self._tokens(number)
                labels_BT[index, self._period - 1 : -1] = tokens_BT[index, self._period :]
        positions_BT = torch.arange(length).repeat(rows, 1)
        boundaries_BD = torch.tensor([0, length], dtype=torch.int32).repeat(rows, 1)
        filled, pairs = rows - list(numbers).count(None), length * (length + 1) // 2
        return Batch(
            tokens=tokens_BT,
            labels=labels_BT,
            positions=positions_BT,
            documents=torch.zeros_like(tokens_BT),
            boundaries=boundaries_BD,
            num_tokens=filled * length,
            num_pairs=filled * pairs,
            attended=rows * pairs,
        )

    def _tokens(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(mix(mix(self._seed) ^ number))
        tokens_P = torch.randint(self._vocab_size, (self._period,), generator=generator)
        return tokens_P.repeat(-(-self.seq_len // self._period))[: self.seq_len]
