"""No token is lost or repeated, for any document lengths, packing, ranks, shards, epochs and
resumes.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from models.batch import IGNORE_INDEX
from models.ranges import concatenated_ranges
from trainer.data.loader import MicroBatchLoader
from trainer.data.packing import DocumentFilter, PackedDataset, Packing, pack_documents
from trainer.data.sequences import BlendedDataset, FullSequence, SequenceShard
from trainer.data.token_dataset import TokenDataset

PADDING = -1
CHUNKS = 4


def corpus(lengths: list[int]) -> TokenDataset:
    """Documents of these lengths; each token is its offset in the stream."""
    stream = torch.arange(sum(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    dataset = SimpleNamespace(
        document_starts=starts,
        document_lengths=starts.diff(),
        eos=PADDING,
        fingerprint="",
        read_ranges=lambda starts, lengths: stream[concatenated_ranges(starts, lengths)],
    )
    return cast(TokenDataset, dataset)


class Chunks(FullSequence):
    """Head-tail shards of 1, 2 or 4 ranks over a sequence of four chunks."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(CHUNKS)
        object.__setattr__(
            self,
            "held",
            {1: [[0, 1, 2, 3]], 2: [[0, 3], [1, 2]], 4: [[0], [1], [2], [3]]}[ranks][rank],
        )

    def spans(self, boundaries_D: Tensor) -> tuple[Tensor, Tensor]:
        size = int(boundaries_D[-1]) // CHUNKS
        chunks = torch.tensor(cast(Any, self).held)
        return chunks * size, torch.full_like(chunks, size)


def shards(ranks: int) -> list[SequenceShard]:
    return [Chunks(rank, ranks) for rank in range(ranks)]


MESHES = some.tuples(some.integers(1, 4), some.sampled_from([1, 2, 4]), some.integers(1, 3))
"""dp_size, ranks that share a sequence, micro-batch size."""


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    lengths=some.lists(some.integers(1, 40), min_size=1, max_size=12),
    seq_len=some.integers(2, 24),
    packing=some.sampled_from(["best_fit", "concat", "single"]),
    max_len=some.none() | some.integers(2, 12),
    mask=some.sampled_from(["document", "none"]),
    global_batch_size=some.integers(1, 7),
    meshes=some.lists(MESHES, min_size=1, max_size=3),
)
def test_every_token_is_read_once_per_epoch_and_is_a_target_unless_it_starts_a_document(
    lengths: list[int],
    seq_len: int,
    packing: Packing,
    max_len: int | None,
    mask: Any,
    global_batch_size: int,
    meshes: list[tuple[int, int, int]],
) -> None:
    """Each mesh resumes at the step where the previous one stopped."""
    prepared = corpus(lengths)
    plan = pack_documents(
        prepared.document_lengths,
        seq_len=seq_len,
        packing=packing,
        document_filter=DocumentFilter(max_len=max_len),
    )
    blended = BlendedDataset([PackedDataset(prepared, plan, seed=1)], seq_len=seq_len, mask=mask)
    num_steps = 2 * plan.num_sequences  # whole epochs
    read_counts = Counter[int]()
    targets = Counter[tuple[int, int]]()
    at = 0
    for number, (ranks, sharing, micro) in enumerate(meshes):
        last = (
            num_steps
            if number + 1 == len(meshes)
            else min(num_steps, at + 1 + num_steps // len(meshes))
        )
        for rank in range(ranks):
            for shard in shards(sharing):
                loader = MicroBatchLoader(
                    blended,
                    dp_rank=rank,
                    dp_size=ranks,
                    global_batch_size=global_batch_size,
                    micro_batch_size=micro,
                    shard=shard,
                )
                steps = range(at * global_batch_size, last * global_batch_size, global_batch_size)
                for part in chain.from_iterable(map(loader.deal, steps)):
                    batch = blended.read(part.indices, shard)
                    tokens = batch.tokens.flatten().tolist()
                    labels = batch.labels.flatten().tolist()
                    read_counts.update(token for token in tokens if token != PADDING)
                    targets.update(
                        pair
                        for pair in zip(tokens, labels, strict=True)
                        if pair[1] != IGNORE_INDEX
                    )
        at = last
    starts = set(prepared.document_starts.tolist())
    epochs_read = num_steps * global_batch_size // plan.num_sequences
    assert read_counts == dict.fromkeys(range(sum(lengths)), epochs_read)
    assert targets == {
        (token - 1, token): epochs_read for token in range(sum(lengths)) if token not in starts
    }
