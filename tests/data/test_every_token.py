"""No token is lost or seen twice: over documents of any length, packings, ranks, parts of rows, epochs and resumes."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from models.batch import IGNORE_INDEX
from trainer.data.loader import MicroBatchLoader
from trainer.data.packing import DocumentFilter, PackedDataset, Packing, pack_documents
from trainer.data.sequences import BlendedDataset, FullSequence, SequenceShard
from trainer.data.token_dataset import TokenDataset

PADDING = -1
CHUNKS = 4


def corpus(lengths: list[int]) -> TokenDataset:
    """Documents of these lengths, in which every token is its place in the stream."""
    stream = torch.arange(sum(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    dataset = SimpleNamespace(
        document_starts=starts,
        document_lengths=starts.diff(),
        eos=PADDING,
        fingerprint="",
        read=lambda start, stop: stream[start:stop],
    )
    return cast(TokenDataset, dataset)


class Chunks(FullSequence):
    """Of a row in four chunks, the ones that a rank of one, two or four holds: first and last, then those between."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(CHUNKS)
        object.__setattr__(self, "held", {1: [[0, 1, 2, 3]], 2: [[0, 3], [1, 2]], 4: [[0], [1], [2], [3]]}[ranks][rank])

    def spans(self, boundaries: tuple[int, ...]) -> list[tuple[int, int]]:
        size = boundaries[-1] // CHUNKS
        held: list[int] = cast(Any, self).held
        return [(chunk * size, size) for chunk in held]


def shares(ranks: int) -> list[SequenceShard]:
    return [Chunks(rank, ranks) for rank in range(ranks)]


MESHES = some.tuples(some.integers(1, 4), some.sampled_from([1, 2, 4]), some.integers(1, 3))
"""Data ranks, ranks that share a row, rows of a micro-batch."""


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=some.lists(some.integers(1, 40), min_size=1, max_size=25),
    seq_len=some.integers(2, 24),
    packing=some.sampled_from(["best_fit", "concat", "single"]),
    max_len=some.none() | some.integers(2, 12),
    mask=some.sampled_from(["document", "none"]),
    rows_an_update=some.integers(1, 7),
    meshes=some.lists(MESHES, min_size=1, max_size=3),
)
def test_every_token_is_read_once_per_epoch_and_is_a_target_unless_it_starts_a_document(
    lengths: list[int],
    seq_len: int,
    packing: Packing,
    max_len: int | None,
    mask: Any,
    rows_an_update: int,
    meshes: list[tuple[int, int, int]],
) -> None:
    """Updates are taken by one mesh after the other, each of which goes on at the row where the one before stopped."""
    prepared = corpus(lengths)
    made = pack_documents(
        prepared.document_lengths, seq_len=seq_len, packing=packing, document_filter=DocumentFilter(max_len=max_len)
    )
    rows = BlendedDataset([PackedDataset(prepared, made, seed=1)], seq_len=seq_len, mask=mask)
    updates = 2 * made.num_sequences  # of so many rows: whole epochs
    seen, targets, at = Counter[int](), Counter[tuple[int, int]](), 0
    for number, (ranks, sharing, micro) in enumerate(meshes):
        last = updates if number + 1 == len(meshes) else min(updates, at + 1 + updates // len(meshes))
        for rank in range(ranks):
            for share in shares(sharing):
                loader = MicroBatchLoader(
                    rows,
                    dp_rank=rank,
                    dp_size=ranks,
                    global_batch_size=rows_an_update,
                    micro_batch_size=micro,
                    shard=share,
                )
                every = -(-rows_an_update // (ranks * micro))
                for numbers in islice(loader._micro_batch_indices(at * rows_an_update), (last - at) * every):
                    batch = rows.read(numbers, share)
                    tokens, labels = batch.tokens.flatten().tolist(), batch.labels.flatten().tolist()
                    seen.update(token for token in tokens if token != PADDING)
                    targets.update(pair for pair in zip(tokens, labels, strict=True) if pair[1] != IGNORE_INDEX)
        at = last
    starts = set(prepared.document_starts.tolist())
    times = updates * rows_an_update // made.num_sequences
    assert seen == dict.fromkeys(range(sum(lengths)), times)
    assert targets == {(token - 1, token): times for token in range(sum(lengths)) if token not in starts}
