"""Validation sets: fixed sequences of documents that training does not see.

A set of one length is packed as [data] says, in every stage. A set of several lengths has the same
targets at each length, with more context before them:

    sequence of the longest length    a b c d e f g h i j k l        target_tokens 2
    at length 8                               e f g h i j k l        targets: l and the token after it
    at length 4                                       i j k l        the same targets
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from models.batch import IGNORE_INDEX
from models.ranges import concatenated_ranges
from trainer.config.data import PACKING_VERSION, ValidationSetSection
from trainer.data.packing import (
    DocumentFilter,
    PackedDataset,
    Packing,
    PackingPlan,
    load_or_build_plan,
)
from trainer.data.sequences import BlendedDataset
from trainer.data.token_dataset import TokenDataset
from trainer.errors import DataError

# not the seed of the run, so that runs can be compared
SHUFFLE_SEED = 0


@dataclass(frozen=True)
class ValidationSet:
    name: str
    datasets: tuple[BlendedDataset, ...]
    """One per sequence length, ascending."""
    num_sequences: int
    """Sequences to evaluate at each length."""

    @property
    def fingerprint(self) -> str:
        return next(iter(self.datasets[0].fingerprints.values()))


class SuffixDataset(PackedDataset):
    """The last `length` tokens of each sequence of a plan without padding; the last `num_targets`
    have targets.
    """

    def __init__(
        self, dataset: TokenDataset, plan: PackingPlan, *, length: int, num_targets: int
    ) -> None:
        # Each sequence is one full segment, so that a suffix begins later and is shorter.
        starts = plan.starts + plan.seq_len - length
        lengths = plan.lengths - plan.seq_len + length
        super().__init__(
            dataset,
            PackingPlan(length, 1, plan.sequence_offsets, starts, lengths),
            seed=SHUFFLE_SEED,
        )
        self._num_context_tokens = length - num_targets

    def read(self, index: int, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        tokens, labels = super().read(index, starts, lengths)
        labels[concatenated_ranges(starts, lengths) < self._num_context_tokens] = IGNORE_INDEX
        return tokens, labels


def build_validation_set(
    name: str,
    section: ValidationSetSection,
    dataset: TokenDataset,
    *,
    packing: Packing,
    version: int = PACKING_VERSION,
    mask: Literal["document", "none"],
    holdout: float | None,
) -> ValidationSet:
    """A set over the held-out fraction `holdout` of the documents; None: all.

    Raises DataError if no document fits.
    """
    *_, longest = section.seq_len
    multi_length = len(section.seq_len) > 1
    document_filter = DocumentFilter(
        only_holdout=holdout, min_length=longest if multi_length else None
    )
    try:
        plan = load_or_build_plan(
            dataset,
            seq_len=longest,
            packing="single" if multi_length else packing,
            version=version,
            seed=SHUFFLE_SEED,
            document_filter=document_filter,
        )
    except DataError as error:
        raise DataError(f"validation.sets.{name}: {error}") from error
    sources = [PackedDataset(dataset, plan, seed=SHUFFLE_SEED)]
    if multi_length:
        # `single` also gives the shorter rest of each document, which lacks the longest context.
        full = plan.lengths == longest
        starts = plan.starts[full]
        lengths = plan.lengths[full]
        plan = PackingPlan(longest, 1, torch.arange(lengths.numel() + 1), starts, lengths)
        sources = [
            SuffixDataset(dataset, plan, length=length, num_targets=section.target_tokens)
            for length in section.seq_len
        ]
    datasets = tuple(
        BlendedDataset([source], seq_len=length, mask=mask, names=[section.source])
        for source, length in zip(sources, section.seq_len, strict=True)
    )
    return ValidationSet(name, datasets, min(section.rows, plan.num_sequences))
