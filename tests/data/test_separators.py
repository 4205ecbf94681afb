"""Separators between documents, and their labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from models.batch import IGNORE_INDEX
from tests.build_datasets import build_blended_dataset
from trainer.config.data import DataSection
from trainer.config.source import CorpusSpec
from trainer.data.prepare import prepare
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import DataError

A = 97
B = 98
C = 99
BOS = 256
EOS = 257
SPECIAL = 259
__ = IGNORE_INDEX

Section = Callable[..., DataSection]


@pytest.mark.parametrize(
    ("separators", "tokens", "labels"),
    [
        ("bos_eos", [BOS, A, B, EOS, BOS, C, EOS], [A, B, EOS, __, C, EOS, __]),
        ("eos", [A, B, EOS, C, EOS, EOS, EOS], [B, EOS, __, EOS, __, __, __]),
        ("none", [A, B, C, EOS, EOS, EOS, EOS], [B, __, __, __, __, __, __]),
        (
            "<|reserved_special_token_1|>",
            [A, B, SPECIAL, C, SPECIAL, EOS, EOS],
            [B, SPECIAL, __, SPECIAL, __, __, __],
        ),
    ],
)
@pytest.mark.parametrize("mask", ["document", "none"])
def test_documents_are_enclosed_in_the_configured_separators(
    separators: str, tokens: list[int], labels: list[int], mask: str, section: Section
) -> None:
    data = section({"1": "ab", "2": "c"}, separators=separators, mask=mask)
    batch = build_blended_dataset(data, ByteTokenizer(), seq_len=7, seed=0).read([0])
    assert batch.tokens.tolist() == [tokens]
    assert batch.labels.tolist() == [labels]


@pytest.mark.parametrize(("separators", "num_segments"), [("bos_eos", 4), ("eos", 3), ("none", 2)])
def test_max_document_includes_separators(
    separators: str, num_segments: int, section: Section
) -> None:
    data = section({"1": "abcdefgh"}, separators=separators, max_document=4)
    dataset = build_blended_dataset(data, ByteTokenizer(), seq_len=16, seed=0)
    assert len(dataset.sources[0].segment_lengths(0)) == num_segments


def test_an_unknown_separator_raises_before_any_file_is_read(
    section: Section, tmp_path: Path
) -> None:
    data = section({"1": "ab"}, separators="<|sep|>")
    with pytest.raises(
        DataError,
        match=r'data.separators = "<\|sep\|>" is not a special token of the tokenizer; it has <',
    ):
        build_blended_dataset(data, ByteTokenizer(), seq_len=7, seed=0)
    assert not (tmp_path / "cache").exists()


def test_a_long_document_without_separators_is_stored_whole(
    source: Callable[..., CorpusSpec],
) -> None:
    dataset = prepare(source({"1": "x" * (1 << 20)}, separators="none"), ByteTokenizer())
    assert dataset.document_lengths.tolist() == [1 << 20]
