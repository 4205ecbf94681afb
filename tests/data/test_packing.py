import hashlib
import os
from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.artifacts import forge
from trainer.config.source import CorpusSpec
from trainer.data.packing import (
    OLDER_MAGIC,
    DocumentFilter,
    Packing,
    PackingPlan,
    load_or_build_plan,
    load_plan,
    pack_documents,
    store_plan,
)
from trainer.data.prepare import prepare
from trainer.data.token_dataset import TokenDataset
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import DataError

PACKINGS: tuple[Packing, ...] = get_args(Packing)


def lengths_of(seed: int, documents: int = 200) -> Tensor:
    """Short and long documents, some of one token."""
    drawn = torch.empty(documents).log_normal_(
        2.5, 1.5, generator=torch.Generator().manual_seed(seed)
    )
    return drawn.long() + 1


def segments_by_sequence(plan: PackingPlan) -> list[list[tuple[int, int]]]:
    segments = list(zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True))
    offsets = plan.sequence_offsets.tolist()
    return [segments[first:last] for first, last in pairwise(offsets)]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("seq_len", [2, 16, 33, 100_000])
@pytest.mark.parametrize("seed", range(3))
def test_every_token_is_in_exactly_one_segment_of_one_document(
    packing: Packing, seq_len: int, seed: int
) -> None:
    lengths = lengths_of(seed)
    plan = pack_documents(lengths, seq_len=seq_len, packing=packing)
    document = torch.repeat_interleave(lengths)
    covered = torch.zeros_like(document)
    for start, length in zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True):
        covered[start : start + length] += 1
        assert document[start] == document[start + length - 1]
    assert bool((covered == 1).all())


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("seq_len", [2, 16, 33])
@pytest.mark.parametrize("seed", range(3))
def test_sequences_have_1_to_seq_len_tokens(packing: Packing, seq_len: int, seed: int) -> None:
    plan = pack_documents(lengths_of(seed), seq_len=seq_len, packing=packing)
    sequences = segments_by_sequence(plan)
    sizes = [sum(length for _, length in sequence) for sequence in sequences]
    assert 0 < min(sizes) <= max(sizes) <= seq_len
    assert plan.max_segments == max(map(len, sequences))
    assert plan.num_padding_tokens == sum(seq_len - size for size in sizes)
    assert all(sequence == sorted(sequence) for sequence in sequences)


def test_version_1_puts_remainders_into_the_smallest_gap_that_fits() -> None:
    plan = pack_documents(
        torch.tensor([3, 14, 5, 7, 2, 10]), seq_len=10, packing="best_fit", version=1
    )
    # Full: 10 of the 14, the 10. Remainders: 7 + 3, 5 + 4, 2.
    assert segments_by_sequence(plan) == [
        [(3, 10)],
        [(31, 10)],
        [(0, 3), (22, 7)],
        [(13, 4), (17, 5)],
        [(29, 2)],
    ]

    plan = pack_documents(torch.tensor([7, 4, 3, 3, 3]), seq_len=10, packing="best_fit", version=1)
    assert segments_by_sequence(plan) == [[(0, 7), (11, 3)], [(7, 4), (14, 3), (17, 3)]]


def test_concat_cuts_the_stream_and_pads_only_its_last_sequence() -> None:
    plan = pack_documents(torch.tensor([3, 14, 5]), seq_len=10, packing="concat")
    assert segments_by_sequence(plan) == [[(0, 3), (3, 7)], [(10, 7), (17, 3)], [(20, 2)]]
    assert plan.num_padding_tokens == 8


def test_single_gives_every_segment_a_sequence() -> None:
    plan = pack_documents(torch.tensor([3, 14, 20]), seq_len=10, packing="single")
    assert segments_by_sequence(plan) == [[(0, 3)], [(3, 10)], [(13, 4)], [(17, 10)], [(27, 10)]]
    assert plan.max_segments == 1


def test_best_fit_of_many_short_documents_has_almost_no_padding() -> None:
    lengths = lengths_of(0, documents=50_000)
    assert pack_documents(
        lengths, seq_len=4096, packing="best_fit"
    ).num_padding_tokens < 0.002 * int(lengths.sum())


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_plan_is_deterministic_and_survives_a_file(packing: Packing, tmp_path: Path) -> None:
    first, second = (pack_documents(lengths_of(3), seq_len=32, packing=packing) for _ in range(2))
    stored = store_plan(first, tmp_path / "plan", made_from="corpus")
    path = tmp_path / "plan"
    for other in (
        second,
        stored,
        load_plan(path, seq_len=32, made_from="corpus", stream_tokens=int(lengths_of(3).sum())),
    ):
        assert segments_by_sequence(other) == segments_by_sequence(first)
        assert (other.seq_len, other.max_segments) == (first.seq_len, first.max_segments)
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]


def test_a_plan_is_stored_with_the_shards_and_raises_when_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    dataset = prepare(
        CorpusSpec(corpus=str(tmp_path / "a.txt"), cache_dir=tmp_path), ByteTokenizer()
    )
    first = load_or_build_plan(dataset, seq_len=8, packing="concat")
    path = dataset.folder / "concat-8.plan"
    written = path.stat().st_mtime_ns
    assert segments_by_sequence(
        load_or_build_plan(dataset, seq_len=8, packing="concat")
    ) == segments_by_sequence(first)
    assert path.stat().st_mtime_ns == written
    path.unlink()
    store_plan(
        pack_documents(torch.tensor([3]), seq_len=8, packing="concat"), path, made_from="another"
    )
    with pytest.raises(
        DataError,
        match=f"is the plan of another corpus .*; to make it again: rm {path}, then the same",
    ):
        load_or_build_plan(dataset, seq_len=8, packing="concat")


def test_every_flipped_bit_of_a_plan_is_found(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    store_plan(
        pack_documents(torch.tensor([3, 9, 4]), seq_len=8, packing="best_fit"),
        path,
        made_from="corpus",
    )
    content = path.read_bytes()
    # A line break, which may become another kind of space.
    for offset in {*range(len(content))} - {4095}:
        path.write_bytes(
            content[:offset] + bytes([content[offset] ^ (1 << offset % 8)]) + content[offset + 1 :]
        )
        with pytest.raises(DataError, match=r"plan is damaged: .*; to make it again: rm "):
            load_plan(path, seq_len=8, made_from="corpus", stream_tokens=16)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-8]),
        lambda path: path.write_bytes(path.read_bytes() + bytes(8)),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: path.unlink() or os.mkfifo(path),  # type: ignore[func-returns-value]
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    ],
    ids=["empty", "cut", "longer", "zeros", "folder", "pipe", "device"],
)
def test_a_damaged_plan_is_named_with_its_remedy(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    (tmp_path / "a.txt").write_text("some text")
    dataset = prepare(
        CorpusSpec(corpus=str(tmp_path / "a.txt"), cache_dir=tmp_path), ByteTokenizer()
    )
    load_or_build_plan(dataset, seq_len=8, packing="concat")
    path = dataset.folder / "concat-8.plan"
    damage(path)
    with pytest.raises(
        DataError,
        match=rf"{path} is damaged: .*; to make it again: rm {path}, then the same command",
    ):
        load_or_build_plan(dataset, seq_len=8, packing="concat")


# Of two sequences, [0, 5) + [5, 8) and [8, 16), in a corpus of 16 tokens.
FORGED = {
    "an offset that runs backwards": ([0, 2, 1], [0, 5, 8], [5, 3, 8], 2),
    "a first offset": ([1, 2, 3], [0, 5, 8], [5, 3, 8], 2),
    "a last offset": ([0, 2, 4], [0, 5, 8], [5, 3, 8], 2),
    "a sequence without segments": ([0, 0, 3], [0, 5, 8], [5, 3, 8], 3),
    "the most segments": ([0, 2, 3], [0, 5, 8], [5, 3, 8], 1),
    "a length of 0": ([0, 2, 3], [0, 5, 8], [5, 0, 8], 2),
    "a negative length": ([0, 2, 3], [0, 5, 8], [5, -3, 8], 2),
    "a segment longer than a sequence": ([0, 2, 3], [0, 5, 0], [5, 3, 9], 2),
    "a negative start": ([0, 2, 3], [0, -5, 8], [5, 3, 8], 2),
    "a segment beyond the corpus": ([0, 2, 3], [0, 5, 9], [5, 3, 8], 2),
    "a huge start": ([0, 2, 3], [0, 5, (1 << 63) - 1], [5, 3, 8], 2),
    "an overfull sequence": ([0, 2, 3], [0, 5, 8], [5, 4, 8], 2),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_plan_that_breaks_a_rule_is_refused_though_its_hash_fits(
    tmp_path: Path, name: str
) -> None:
    *numbers, most = FORGED[name]
    offsets, starts, lengths = map(torch.tensor, numbers)
    store_plan(
        PackingPlan(8, most, offsets, starts, lengths), tmp_path / "plan", made_from="corpus"
    )
    with pytest.raises(DataError, match=r"plan is damaged: .*; to make it again: rm "):
        load_plan(tmp_path / "plan", seq_len=8, made_from="corpus", stream_tokens=16)


@pytest.mark.parametrize(
    "index",
    [[0, 4, 3, 9], [1, 4, 9], [0, 4, 8], [0, 4, 4, 9], [0, -(1 << 63), 9], [0, 9]],
    ids=str,
)
def test_an_index_that_breaks_a_rule_is_refused_though_its_hash_fits(
    tmp_path: Path, index: list[int]
) -> None:
    (tmp_path / "text").mkdir()
    # With the bounds of documents, 4 and 5 tokens.
    for name, text in {"a": "23", "b": "678"}.items():
        (tmp_path / "text" / name).with_suffix(".txt").write_text(text)
    dataset = prepare(
        CorpusSpec(corpus=str(tmp_path / "text"), cache_dir=tmp_path), ByteTokenizer()
    )
    assert dataset.document_starts.tolist() == [0, 4, 9]
    path = next(dataset.folder.glob("*.idx"))
    path.write_bytes(array("q", index).tobytes())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    forge(
        dataset.folder / "meta.json",
        lambda content: content["shards"][0].update(idx_sha256=digest),
    )
    with pytest.raises(
        DataError, match=r"idx is damaged: it must ascend from 0 to 9 in 2 documents"
    ):
        TokenDataset(dataset.folder)


def test_a_renamed_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    dataset = prepare(
        CorpusSpec(corpus=str(tmp_path / "a.txt"), cache_dir=tmp_path), ByteTokenizer()
    )
    load_or_build_plan(dataset, seq_len=8, packing="concat")
    (dataset.folder / "concat-8.plan").rename(dataset.folder / "single-8.plan")
    with pytest.raises(
        DataError, match=r"is the plan of another corpus or packing \(concat-8.plan\)"
    ):
        load_or_build_plan(dataset, seq_len=8, packing="single")


def test_a_plan_of_before_files_were_sealed_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    dataset = prepare(
        CorpusSpec(corpus=str(tmp_path / "a.txt"), cache_dir=tmp_path), ByteTokenizer()
    )
    plan = load_or_build_plan(dataset, seq_len=8, packing="concat")
    path = dataset.folder / "concat-8.plan"
    path.write_bytes(OLDER_MAGIC + array("q", [10, 8, 2, 3, 2, 0, 1, 2, 0, 8, 8, 2]).tobytes())
    assert load_or_build_plan(dataset, seq_len=8, packing="concat").fingerprint == plan.fingerprint
    stored = load_plan(
        path, seq_len=8, made_from=dataset.fingerprint, stream_tokens=dataset.num_tokens
    )
    assert stored.fingerprint == plan.fingerprint


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    ("document_filter", "expected_lengths"),
    [
        (DocumentFilter(min_length=5), [5, 8, 6]),
        (DocumentFilter(max_length=6), [5, 3]),
        (DocumentFilter(min_length=3, max_length=8), [5, 3, 6]),
        (DocumentFilter(min_length=8, max_length=9), [8]),
        (DocumentFilter(max_len=2), [5, 8, 3, 6]),
        (DocumentFilter(max_length=8, max_len=4), [5, 3, 6]),
    ],
    ids=str,
)
def test_segments_cover_exactly_the_filtered_documents(
    packing: Packing, document_filter: DocumentFilter, expected_lengths: list[int]
) -> None:
    lengths = [5, 8, 3, 6]
    plan = pack_documents(
        torch.tensor(lengths), seq_len=7, packing=packing, document_filter=document_filter
    )
    firsts = [sum(lengths[:n]) for n in range(4)]
    document_of = {
        first + n: first
        for first, length in zip(firsts, lengths, strict=True)
        for n in range(length)
    }
    seen: list[int] = []
    for start, length in zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True):
        assert 0 < length <= min(7, document_filter.max_len or 7)
        assert len({document_of[token] for token in range(start, start + length)}) == 1
        seen += range(start, start + length)
    chosen = [
        (first, length)
        for first, length in zip(firsts, lengths, strict=True)
        if length in expected_lengths
    ]
    assert sorted(seen) == [
        token for first, length in chosen for token in range(first, first + length)
    ]


def test_a_filter_that_leaves_no_document_raises() -> None:
    with pytest.raises(
        DataError, match=r"no document with .*min_length.*9.*: the longest of 2 has 8 tokens"
    ):
        pack_documents(
            torch.tensor([5, 8]),
            seq_len=4,
            packing="best_fit",
            document_filter=DocumentFilter(min_length=9),
        )
