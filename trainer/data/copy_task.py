"""A synthetic corpus: sequences that repeat random tokens. A loss near zero needs attention over
one period.

    period 3, 8 tokens    tokens    a b c a b c a b
                          labels    - - a b c a b -

Shape suffixes: T tokens of a sequence, P tokens of a period.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from models.batch import IGNORE_INDEX
from models.ranges import concatenated_ranges
from trainer.data.shuffle import splitmix64


class CopyDataset:
    """An unlimited `SequenceSource`: sequence `index` repeats `period` tokens, uniform over the
    vocabulary.

    Only repeated tokens are targets. A sequence is one document. An epoch is the `num_sequences`
    of a run.
    """

    max_segments = 1
    num_padding_tokens = 0
    pad_token_id = 0

    def __init__(
        self, *, vocab_size: int, period: int, seq_len: int, num_sequences: int, seed: int
    ) -> None:
        self.num_sequences = num_sequences
        self.fingerprint = f"copy-{vocab_size}-{period}"
        self.plan_fingerprint = ""
        self._vocab_size = vocab_size
        self._period = period
        self._seq_len = seq_len
        self.seed = seed
        self._sequence = lru_cache(maxsize=4)(self._generate_sequence)

    def segment_lengths(self, index: int) -> Tensor:
        del index
        return torch.tensor([self._seq_len])

    def read(self, index: int, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        sequence_T = self._sequence(index)
        places = concatenated_ranges(starts, lengths)
        # The label of place p is token p + 1. The first period is random, and the last token has
        # no successor.
        has_target = (places >= self._period - 1) & (places < self._seq_len - 1)
        labels = torch.full_like(places, IGNORE_INDEX)
        labels[has_target] = sequence_T[places[has_target] + 1]
        return sequence_T[places], labels

    def _generate_sequence(self, index: int) -> Tensor:
        # Seeded for each sequence, so that any rank makes any sequence without those before it.
        generator = torch.Generator().manual_seed(splitmix64(splitmix64(self.seed) ^ index))
        tokens_P = torch.randint(self._vocab_size, (self._period,), generator=generator)
        return tokens_P.repeat(-(-self._seq_len // self._period))[: self._seq_len]
