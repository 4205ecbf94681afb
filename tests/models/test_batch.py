"""`Batch`: model inputs."""

from __future__ import annotations

import torch

from models.batch import IGNORE_INDEX
from tests.models.small_models import packed, starts
from tests.parallelisms.context.whole_batches import pad_batch


def test_num_targets_counts_labelled_tokens() -> None:
    batch = packed([3, 1, 4], [8])
    assert (batch.labels != IGNORE_INDEX).sum() == 2 + 0 + 3 + 7
    assert int(batch.num_targets()) == 12
    assert batch.num_targets().dtype == torch.int64
    assert int(packed([8], targets=0).num_targets()) == 0


def test_batch_to_device_leaves_boundaries_on_cpu() -> None:
    batch = packed([3, 1, 4], [8])
    moved = batch.to(torch.device("meta"))
    per_token = (moved.tokens, moved.labels, moved.positions, moved.document_ids)
    assert {tensor.device.type for tensor in per_token} == {"meta"}
    assert moved.boundaries is batch.boundaries
    assert (moved.num_tokens, moved.num_pairs, moved.num_computed_pairs) == (
        16,
        6 + 1 + 10 + 36,
        6 + 1 + 10 + 36,
    )


def test_starts_helper_matches_manual_boundaries() -> None:
    assert starts([3, 1, 4], [8], width=5).tolist() == [[0, 3, 4, 8, 8], [0, 8, 8, 8, 8]]


def test_padding_is_a_document_of_its_own_without_labels() -> None:
    batch = packed([4, 3])
    padded = pad_batch(batch, 4)
    assert padded.document_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2]]
    assert padded.boundaries[0, -2:].tolist() == [7, 8]
    assert padded.labels[0, -1] == IGNORE_INDEX
    assert padded.num_computed_pairs == batch.num_computed_pairs + 1
