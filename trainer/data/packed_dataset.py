"""A prepared corpus, packed into rows and shuffled."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from trainer.data.packing import PackingPlan
from trainer.data.shuffle import shuffled_index
from trainer.data.token_dataset import TokenDataset


class PackedDataset:
    """The rows of a plan, in another order every epoch; see `RowSource`."""

    def __init__(self, token_dataset: TokenDataset, plan: PackingPlan, *, seed: int) -> None:
        self.token_dataset, self.plan = token_dataset, plan
        self.num_sequences = plan.num_sequences
        self.max_segments = plan.max_segments
        self.num_padding_tokens = plan.num_padding_tokens
        self.fill_ratio = Fraction(max(1, round(100 * plan.num_tokens / (plan.num_sequences * plan.seq_len))), 100)
        """Part of its rows that is no padding, in hundredths: more of emptier rows make as many tokens."""
        self.pad_token_id = token_dataset.eos
        self.fingerprint = token_dataset.fingerprint
        self._seed = seed
        self._segments = lru_cache(maxsize=16)(self._load_segments)

    def locate(self, index_in_epoch: int) -> tuple[int, int]:
        """(epoch, row of the plan) of a row."""
        epoch, index_in_epoch = divmod(index_in_epoch, self.num_sequences)
        return epoch, shuffled_index(index_in_epoch, size=self.num_sequences, seed=self._seed, epoch=epoch)

    def segment_lengths(self, index: int) -> list[int]:
        return self._segments(index)[1]

    def fill(self, index: int, segment: int, start: int, tokens: Tensor, labels: Tensor) -> None:
        """Where a piece ends inside its document, its last label is the document's next token."""
        starts, lengths, continued = self._segments(index)
        first, size = starts[segment] + start, tokens.numel()
        has_next_token = start + size < lengths[segment] or continued[segment]
        stream = self.token_dataset.read(first, first + size + has_next_token)
        tokens.copy_(stream[:size])
        labels[: stream.numel() - 1] = stream[1:]

    def _load_segments(self, index: int) -> tuple[list[int], list[int], list[bool]]:
        """Of each piece: where it starts in the stream of tokens, how long it is, whether its document goes on."""
        _, sequence = self.locate(index)
        first, last = self.plan.sequence_offsets[sequence : sequence + 2].tolist()
        starts, lengths = self.plan.starts[first:last], self.plan.lengths[first:last]
        document_starts, ends = self.token_dataset.document_starts, starts + lengths
        continued = document_starts[torch.searchsorted(document_starts, ends)] != ends
        return starts.tolist(), lengths.tolist(), continued.tolist()
