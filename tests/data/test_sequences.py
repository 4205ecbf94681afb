import hashlib
from array import array
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch

from models.batch import IGNORE_INDEX
from models.score_pairs import Windows
from trainer.config.data import DataSection
from trainer.config.source import corpus_spec
from trainer.data.packing import PackedDataset, Packing, load_or_build_plan, pack_documents
from trainer.data.prepare import prepare
from trainer.data.sequences import BlendedDataset
from trainer.data.token_dataset import TokenDataset, TokenDatasetMeta, TokenShard
from trainer.data.tokenizer import ByteTokenizer
from trainer.storage.artifact import write_artifact

Section = Callable[..., DataSection]
PACKINGS: tuple[Packing, ...] = get_args(Packing)
__ = IGNORE_INDEX
BOS = 256
EOS = 257


class Plain(ByteTokenizer):
    """Bytes without BOS, so that a document can be a single EOS."""

    bos = None  # type: ignore[assignment]
    fingerprint = "plain"


def dataset_of(data: DataSection, *, seq_len: int, shard_tokens: int = 1 << 20) -> BlendedDataset:
    prepared = prepare(corpus_spec(data, "corpus"), Plain(), shard_tokens=shard_tokens)
    plan = load_or_build_plan(
        prepared, seq_len=seq_len, packing=data.packing, version=data.packing_version or 2
    )
    return BlendedDataset([PackedDataset(prepared, plan, seed=0)], seq_len=seq_len, mask=data.mask)


def packed(dataset: BlendedDataset) -> PackedDataset:
    assert isinstance(dataset.sources[0], PackedDataset)
    return dataset.sources[0]


def in_plan_order(dataset: BlendedDataset) -> list[int]:
    """Global indices of the first epoch, in the order of the plan."""
    return sorted(
        range(packed(dataset).num_sequences), key=lambda number: packed(dataset).locate(number)[1]
    )


A = 97
B = 98
C = 99
TINY = {"1": "abcabc", "2": "b", "3": "cc"}


def test_a_batch_matches_manually_written_tensors(section: Section) -> None:
    dataset = dataset_of(section(TINY, packing_version=1), seq_len=5)
    #  stream   a b c a b | c E | b E | c c E     segments of 5 + 2, 2, 3: sequences [5], [2 + 3], [2]
    batch = dataset.read(in_plan_order(dataset))
    assert batch.tokens.tolist() == [[A, B, C, A, B], [C, EOS, C, C, EOS], [B, EOS, EOS, EOS, EOS]]
    assert batch.labels.tolist() == [[B, C, A, B, C], [EOS, __, C, EOS, __], [EOS, __, __, __, __]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2], [0, 1, 0, 1, 2]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert batch.boundaries.tolist() == [[0, 5, 5, 5], [0, 2, 5, 5], [0, 2, 5, 5]]
    assert (batch.num_tokens, batch.num_pairs) == (12, 15 + 3 + 6 + 3)
    assert batch.num_computed_pairs == 15 + (3 + 6) + (3 + 6)
    assert {
        batch.tokens.dtype,
        batch.labels.dtype,
        batch.positions.dtype,
        batch.document_ids.dtype,
    } == {torch.int64}
    assert batch.boundaries.dtype == torch.int32


def test_without_a_document_mask_positions_continue_and_labels_stay(section: Section) -> None:
    data = section(TINY, packing_version=1)
    masked = dataset_of(data, seq_len=5)
    dataset = dataset_of(data.model_copy(update={"mask": "none"}), seq_len=5)
    batch = dataset.read(in_plan_order(dataset))
    other = masked.read(in_plan_order(masked))
    assert torch.equal(batch.tokens, other.tokens)
    assert torch.equal(batch.labels, other.labels)
    assert torch.equal(batch.document_ids, other.document_ids)
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert batch.boundaries.tolist() == [[0, 5]] * 3
    assert (batch.num_tokens, batch.num_pairs, batch.num_computed_pairs) == (
        12,
        15 + 15 + 3,
        15 + 15 + 15,
    )


def test_a_segment_of_one_token_has_no_target(section: Section) -> None:
    dataset = dataset_of(section({"1": "ab", "2": "c"}, packing="single"), seq_len=2)
    #  stream   a b | E | c E
    batch = dataset.read(in_plan_order(dataset))
    assert batch.tokens.tolist() == [[A, B], [EOS, EOS], [C, EOS]]
    assert batch.labels.tolist() == [[B, EOS], [__, __], [EOS, __]]
    assert batch.boundaries.tolist() == [[0, 2, 2], [0, 1, 2], [0, 2, 2]]
    assert (batch.num_tokens, batch.num_pairs, batch.num_computed_pairs) == (
        5,
        3 + 1 + 3,
        3 + (1 + 1) + 3,
    )


def test_a_document_of_one_token_is_never_a_target(tmp_path: Path) -> None:
    tokens = array("H", [EOS, A, EOS, EOS]).tobytes()
    (tmp_path / "shard-00000.bin").write_bytes(tokens)
    starts = array("q", [0, 1, 3, 4]).tobytes()
    (tmp_path / "shard-00000.idx").write_bytes(starts)
    idx_sha256 = hashlib.sha256(starts).hexdigest()
    hashes = {"bin_sha256": hashlib.sha256(tokens).hexdigest(), "idx_sha256": idx_sha256}
    shard = TokenShard(name="shard-00000", tokens=4, documents=3, **hashes)
    fields: dict[str, Any] = {
        "vocab_size": 264,
        "bos": None,
        "eos": EOS,
        "longest": 2,
        "tokenizer": "",
    }
    fields |= {
        "dtype": "uint16",
        "separators": "eos",
        "max_document": None,
        "block_bytes": None,
        "counts": None,
    }
    meta = TokenDatasetMeta(tokens=4, documents=3, files=1, skipped=0, shards=[shard], **fields)
    write_artifact(tmp_path / "meta.json", meta)
    prepared = TokenDataset(tmp_path)
    plan = pack_documents(prepared.document_lengths, seq_len=6, packing="best_fit")
    dataset = BlendedDataset([PackedDataset(prepared, plan, seed=0)], seq_len=6)
    batch = dataset.read([0])
    assert batch.labels.tolist() == [[__, EOS, __, __, __, __]]
    assert batch.positions.tolist() == [[0, 0, 1, 0, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 1, 1, 2, 3, 3]]
    assert batch.boundaries.tolist() == [[0, 1, 3, 4, 6]]


def test_full_sequences_of_one_segment_have_two_boundaries(section: Section) -> None:
    dataset = dataset_of(section({"1": "abcdefg"}, packing="single"), seq_len=4)
    assert dataset.read([0, 1, None]).boundaries.tolist() == [[0, 4]] * 3


@pytest.mark.parametrize("mask", ["document", "none"])
def test_an_empty_sequence_is_padding_without_targets(mask: str, section: Section) -> None:
    dataset = dataset_of(section(TINY, mask=mask), seq_len=5)
    batch = dataset.read([None, 0])
    full = dataset.read([0])
    assert batch.tokens[0].tolist() == [EOS] * 5
    assert batch.labels[0].tolist() == [__] * 5
    # Into as many documents as a sequence may have, which cost least.
    is_split = mask == "document"
    assert batch.positions[0].tolist() == ([0, 1, 2, 0, 1] if is_split else [0, 1, 2, 3, 4])
    assert batch.document_ids[0].tolist() == ([0, 0, 0, 1, 1] if is_split else [0] * 5)
    assert batch.boundaries[0].tolist() == ([0, 3, 5, 5] if is_split else [0, 5])
    assert torch.equal(batch.tokens[1:], full.tokens)
    assert torch.equal(batch.boundaries[1:], full.boundaries)
    assert (batch.num_tokens, batch.num_pairs) == (full.num_tokens, full.num_pairs)
    assert dataset.read([None]).num_tokens == dataset.read([None]).num_pairs == 0
    pairs = 6 + 3 if is_split else 15
    assert (dataset.read([None]).num_computed_pairs, batch.num_computed_pairs) == (
        pairs,
        pairs + full.num_computed_pairs,
    )


@pytest.mark.parametrize("mask", ["document", "none"])
@pytest.mark.parametrize("seq_len", [5, 64])
def test_the_work_of_a_sequence_is_known_without_reading_it(
    mask: Literal["document", "none"], seq_len: int, section: Section
) -> None:
    windows: Windows = {None: 1, 3: 2}
    dataset = BlendedDataset(
        dataset_of(section(LETTERS, mask=mask), seq_len=seq_len).sources,
        seq_len=seq_len,
        mask=mask,
        windows=windows,
    )
    for index in (*range(dataset.sources[0].num_sequences), None):
        assert dataset.computed_pairs(index) == dataset.read([index]).num_computed_pairs


@pytest.mark.parametrize("mask", ["document", "none"])
def test_attention_pairs_of_a_long_sequence_are_exact(mask: str, section: Section) -> None:
    dataset = dataset_of(
        section(TINY | {"long": "a" * 100_001}, mask=mask, packing="single"), seq_len=100_003
    )
    pairs = [
        dataset.read([index]).num_computed_pairs
        for index in range(dataset.sources[0].num_sequences)
    ]
    assert max(pairs) == 100_003 * 100_004 // 2 - (100_002 if mask == "document" else 0) > 2**32


# No character repeats, so a token identifies its document and position.
LETTERS = {
    f"{n:02}": "".join(map(chr, range(33 + 7 * n, 33 + 7 * n + n * n % 23 + 1))) for n in range(12)
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("mask", ["document", "none"])
@pytest.mark.parametrize("seq_len", [3, 8, 64])
def test_over_an_epoch_every_token_but_the_first_of_a_document_is_a_target_once(
    packing: Packing, mask: str, seq_len: int, section: Section
) -> None:
    dataset = dataset_of(
        section(LETTERS, packing=packing, mask=mask), seq_len=seq_len, shard_tokens=30
    )
    assert len(packed(dataset).token_dataset.meta.shards) > 2
    expected: Counter[tuple[int, int]] = Counter()
    for text in LETTERS.values():
        tokens = [*text.encode(), EOS]
        expected.update(pairwise(tokens))
    for epoch in range(2):
        batch = dataset.read(
            range(
                epoch * packed(dataset).num_sequences, (epoch + 1) * packed(dataset).num_sequences
            )
        )
        found = Counter(
            zip(batch.tokens.flatten().tolist(), batch.labels.flatten().tolist(), strict=True)
        )
        assert {
            pair: count for pair, count in found.items() if pair[1] != IGNORE_INDEX
        } == expected
        assert batch.num_tokens == packed(dataset).token_dataset.num_tokens


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("mask", ["document", "none"])
def test_boundaries_documents_positions_and_pairs_agree(
    packing: Packing, mask: str, section: Section
) -> None:
    dataset = dataset_of(section(LETTERS, packing=packing, mask=mask), seq_len=16)
    pairs = 0.0
    for number in range(packed(dataset).num_sequences):
        batch = dataset.read([number])
        starts = batch.boundaries[0, :-1].unique().tolist()
        attended = torch.bucketize(
            torch.arange(16), torch.tensor([start for start in starts if start < 16]), right=True
        )
        allowed = (attended[:, None] == attended[None, :]).tril()
        pairs += batch.num_pairs
        real = batch.num_tokens
        assert int(allowed[:real, :real].sum()) == batch.num_pairs
        assert int(allowed.sum()) == batch.num_computed_pairs
        offsets = torch.tensor([allowed[at].nonzero()[0].item() for at in range(16)])
        assert torch.equal(batch.positions[0], torch.arange(16) - offsets)
        if mask == "document":
            assert torch.equal(batch.document_ids[0], attended - 1)
    assert pairs == dataset.read(range(packed(dataset).num_sequences)).num_pairs


def test_each_epoch_holds_the_same_sequences_in_another_order(section: Section) -> None:
    dataset = dataset_of(section(LETTERS), seq_len=4)
    epochs = [
        [
            packed(dataset).locate(number)
            for number in range(
                n * packed(dataset).num_sequences, (n + 1) * packed(dataset).num_sequences
            )
        ]
        for n in range(3)
    ]
    orders = [[row for _, row in epoch] for epoch in epochs]
    assert [{epoch for epoch, _ in each} for each in epochs] == [{0}, {1}, {2}]
    assert all(sorted(order) == list(range(packed(dataset).num_sequences)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_summary_states_the_share_of_each_source(section: Section) -> None:
    one = dataset_of(section(TINY), seq_len=5)
    both = BlendedDataset([packed(one), packed(one)], seq_len=5, weights=(2, 1), names=("a", "b"))
    assert both.summary(9) == [
        "a: 3 sequences of 5 tokens; 6 of 9 drawn (2.00 epochs), 20.00% padding",
        "b: 3 sequences of 5 tokens; 3 of 9 drawn (1.00 epochs), 20.00% padding",
    ]
