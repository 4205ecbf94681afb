"""The copy corpus: sequences repeat random tokens, and every target can be copied from one period
earlier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from benchmarks import memory_grid
from models.batch import IGNORE_INDEX, Batch
from parallelisms.context.batch_layout import BatchLayout
from tests.build_datasets import build_train_dataset
from trainer.config.job_config import Config
from trainer.data.copy_task import CopyDataset
from trainer.data.sequences import BlendedDataset

__ = IGNORE_INDEX


def rows(
    *, vocab_size: int = 64, period: int = 5, seq_len: int = 12, num_rows: int = 3, seed: int = 0
) -> BlendedDataset:
    dataset = CopyDataset(
        vocab_size=vocab_size, period=period, seq_len=seq_len, num_sequences=num_rows, seed=seed
    )
    return BlendedDataset([dataset], seq_len=seq_len)


def configured(**data: object) -> Config:
    training = {"seq_len": 12, "steps": 7, "global_batch_size": 2, "seed": 3}
    return Config.model_validate(
        {"data": {"corpus": "copy", **data}, "training": training, "model": {"vocab_size": 9}}
    )


def same(one: Batch, other: Batch) -> bool:
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.labels, other.labels)


def test_a_batch_matches_manually_written_tensors() -> None:
    batch = rows(period=3, seq_len=8).read([4, None])
    a, b, c = batch.tokens[0, :3].tolist()
    assert batch.tokens.tolist() == [[a, b, c, a, b, c, a, b], [0] * 8]
    assert batch.labels.tolist() == [[__, __, a, b, c, a, b, __], [__] * 8]
    assert batch.positions.tolist() == [list(range(8))] * 2
    assert batch.document_ids.tolist() == [[0] * 8] * 2
    assert batch.boundaries.tolist() == [[0, 8]] * 2
    assert (batch.num_tokens, batch.num_pairs, batch.num_computed_pairs) == (8, 36, 2 * 36)
    assert {
        batch.tokens.dtype,
        batch.labels.dtype,
        batch.positions.dtype,
        batch.document_ids.dtype,
    } == {torch.int64}
    assert batch.boundaries.dtype == torch.int32


def test_a_target_is_the_next_token_and_appears_one_period_earlier() -> None:
    for period in range(1, 12):
        batch = rows(period=period).read(range(20))
        sequence_indices, at = (batch.labels != IGNORE_INDEX).nonzero(as_tuple=True)
        assert torch.equal(
            batch.labels[sequence_indices, at], batch.tokens[sequence_indices, at + 1]
        )
        assert torch.equal(
            batch.labels[sequence_indices, at], batch.tokens[sequence_indices, at + 1 - period]
        )
        assert sorted(set(at.tolist())) == list(range(period - 1, 11))


@pytest.mark.parametrize("period", [1, 3, 5, 11])
def test_read_returns_any_slice_of_a_sequence(period: int) -> None:
    dataset = CopyDataset(vocab_size=64, period=period, seq_len=12, num_sequences=3, seed=0)
    whole = rows(period=period).read([2])
    for start in range(12):
        for end in range(start + 1, 13):
            tokens, labels = dataset.read(2, torch.tensor([start]), torch.tensor([end - start]))
            assert torch.equal(tokens, whole.tokens[0, start:end])
            assert torch.equal(labels, whole.labels[0, start:end])


def test_a_sequence_depends_only_on_its_index_and_the_seed() -> None:
    together = rows().read([0, 1, 10**12])
    single_batches = [rows(num_rows=99).read([number]) for number in (0, 1, 10**12)]
    assert torch.equal(together.tokens, torch.cat([batch.tokens for batch in single_batches]))
    assert not same(rows().read([0]), rows().read([1]))
    assert not same(rows().read([0]), rows(seed=1).read([0]))
    assert not same(rows(seed=1).read([0]), rows().read([1])), (
        "seed and index are not interchangeable"
    )


def test_tokens_are_uniform_over_the_vocabulary() -> None:
    tokens = rows(vocab_size=7, period=1000, seq_len=1001).read(range(7)).tokens[:, :1000]
    counts = tokens.flatten().bincount()
    assert counts.numel() == 7
    assert all(abs(count - 1000) < 5 * math.sqrt(1000) for count in counts.tolist())


def test_tokens_come_from_the_vocabulary_of_the_model() -> None:
    read = build_train_dataset(configured(copy_period=4))
    assert (read.seq_len, read.sources[0].num_sequences, read.fingerprints) == (
        12,
        14,
        {"corpus": "copy-9-4"},
    )
    expected = rows(vocab_size=9, period=4, num_rows=14, seed=3)
    assert same(read.read([5]), expected.read([5]))


def test_stages_read_different_sequences() -> None:
    first, again, second = (
        build_train_dataset(configured(), stage=stage).read([0]) for stage in (0, 0, 1)
    )
    assert same(first, again)
    assert not same(first, second)


def test_the_default_period_is_half_a_sequence() -> None:
    tokens = build_train_dataset(configured()).read([0]).tokens[0]
    assert torch.equal(tokens[:6], tokens[6:])


def test_pairs_are_the_mean_over_layers_with_their_windows() -> None:
    """MFU, HFU and the load balance of mixed layers follow from these."""
    config = memory_grid.configured(
        {
            "data.corpus": "copy",
            "training.seq_len": 12,
            "model.vocab_size": 64,
            "model.num_layers": 3,
            "model.layers": '[{"window":3,"repeat":2},{}]',
        }
    )
    model = config.model.build()
    dataset = build_train_dataset(config)
    whole = dataset.read([0])
    halves = [dataset.read([0], ContiguousHalf(rank)) for rank in (0, 1)]
    full = 12 * 13 // 2
    windowed = 1 + 2 + 10 * 3
    assert whole.num_pairs == whole.num_computed_pairs == (full + 2 * windowed) / 3
    of_attention = model.flops(tokens=0, pairs=whole.num_pairs)
    assert of_attention == 12 * model.num_heads * model.head_dim * (full + 2 * windowed)
    # Without a window the second half has most of the pairs; with one, both have nearly the same.
    assert [half.num_computed_pairs for half in halves] == [(21 + 2 * 15) / 3, (57 + 2 * 18) / 3]
    assert {half.num_pairs for half in halves} == {whole.num_pairs}


@dataclass(frozen=True)
class ContiguousHalf:
    rank: int
    seq_len_divisor: int = 2

    def spans(self, boundaries_D: Tensor) -> tuple[Tensor, Tensor]:
        half = boundaries_D[-1:].long() // 2
        return self.rank * half, half

    def attention_pairs(self, boundaries_BD: Tensor, window: int | None) -> int:
        return BatchLayout("contiguous", 2, boundaries_BD).pairs_per_rank(window)[self.rank]
