"""Holdout and validation sets: fixed, disjoint from training, the same targets at every length."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.batch import IGNORE_INDEX
from tests.build_datasets import build_blended_dataset, build_validation_sets
from trainer.config import checks
from trainer.config.data import DataSection
from trainer.config.job_config import Config
from trainer.config.source import corpus_spec, corpus_specs
from trainer.data.holdout import ValidationSet
from trainer.data.packing import DocumentFilter, holdout_mask, pack_documents
from trainer.data.prepare import prepare
from trainer.data.sequences import BlendedDataset
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import DataError

Section = Callable[..., DataSection]
DOCUMENTS = 40
# Each character encodes its document and its position in it.
TEXTS = {
    f"{n:02}": "".join(chr(0x100 + n * 8 + at % 8) for at in range(20 + 3 * n))
    for n in range(DOCUMENTS)
}


def config(data: DataSection, **sets: dict[str, Any]) -> Config:
    return Config.model_validate({"data": data.model_dump(), "validation": {"sets": sets}})


def texts(rows: BlendedDataset, count: int) -> list[list[int]]:
    return [rows.read([number]).tokens[0].tolist() for number in range(count)]


def documents_of(rows: BlendedDataset, count: int) -> set[int]:
    """Documents in the first `count` sequences, from complete two-byte characters."""
    found = set()
    for row in texts(rows, count):
        for first, second in pairwise(row):
            if 0xC4 <= first < 0xE0 and 0x80 <= second < 0xC0:
                found.add(((first & 31) << 6 | second & 63) - 0x100 >> 3)
    return found


@pytest.mark.parametrize("packing", ["best_fit", "concat", "single"])
def test_training_and_validation_share_no_document(section: Section, packing: str) -> None:
    data = section(TEXTS, holdout=0.3, packing=packing)
    trained: set[int] = set()
    validated: set[int] = set()
    for seq_len in (16, 50, 400):
        training = build_blended_dataset(data, ByteTokenizer(), seq_len=seq_len, seed=3)
        (validation_set,) = build_validation_sets(
            config(data, one={"seq_len": seq_len, "rows": 1000})
        )
        trained |= documents_of(training, training.sources[0].num_sequences)
        validated |= documents_of(validation_set.datasets[0], validation_set.num_sequences)
    assert not trained & validated
    assert trained | validated == set(range(DOCUMENTS))
    assert 5 < len(validated) < 20
    expected = {
        number for number, is_held in enumerate(holdout_mask(DOCUMENTS, 0.3).tolist()) if is_held
    }
    assert validated == expected


def test_a_larger_holdout_contains_a_smaller_one() -> None:
    masks = [holdout_mask(10_000, fraction) for fraction in (0.01, 0.1, 0.5)]
    assert [round(float(mask.double().mean()), 2) for mask in masks] == [0.01, 0.1, 0.5]
    assert not bool((masks[0] & ~masks[1]).any() | (masks[1] & ~masks[2]).any())
    assert torch.equal(holdout_mask(20_000, 0.1)[:10_000], masks[1]), (
        "a growing corpus keeps its holdout"
    )


@pytest.mark.parametrize(
    ("fraction", "labels_by_first_token"),
    [(0.0001, "holds out none of the 5"), (0.9999, "holds out all of the 5")],
)
def test_a_holdout_of_no_or_all_documents_raises(
    fraction: float, labels_by_first_token: str
) -> None:
    for document_filter in (
        DocumentFilter(only_holdout=fraction),
        DocumentFilter(exclude_holdout=fraction),
    ):
        with pytest.raises(DataError, match=labels_by_first_token):
            pack_documents(
                torch.ones(5, dtype=torch.int64),
                seq_len=4,
                packing="concat",
                document_filter=document_filter,
            )


def test_filters_have_distinct_plan_names() -> None:
    names = {
        str(document_filter)
        for document_filter in (
            DocumentFilter(),
            DocumentFilter(only_holdout=0.1),
            DocumentFilter(exclude_holdout=0.1),
            DocumentFilter(exclude_holdout=0.2),
        )
    }
    assert len(names) == 4


def multi_length_set(section: Section, **options: Any) -> ValidationSet:
    data = section(TEXTS, **options)
    (validation_set,) = build_validation_sets(
        config(data, one={"seq_len": [8, 20, 60], "tail": 5, "rows": 1000})
    )
    return validation_set


def test_longer_sequences_have_the_same_targets_with_more_context(section: Section) -> None:
    validation_set = multi_length_set(section)
    # Full sequences of 60 tokens: two bytes per character, plus BOS and EOS.
    assert validation_set.num_sequences == sum(
        (2 * (20 + 3 * n) + 2) // 60 for n in range(DOCUMENTS)
    )
    for number in range(validation_set.num_sequences):
        short, middle, long = (rows.read([number]) for rows in validation_set.datasets)
        assert [batch.tokens.shape[1] for batch in (short, middle, long)] == [8, 20, 60]
        for batch, length in ((short, 8), (middle, 20)):
            assert torch.equal(batch.tokens[0], long.tokens[0, -length:]), (
                "the end of the sequence, not its start"
            )
            assert torch.equal(batch.labels[0, -5:], long.labels[0, -5:])
        for batch in (short, middle, long):
            assert batch.positions[0].tolist() == [*range(batch.tokens.shape[1])]
            is_target = batch.labels[0] != IGNORE_INDEX
            assert not bool(is_target[:-5].any()) and bool(is_target[-5:-1].all())
            assert torch.equal(batch.labels[0, -5:-1], batch.tokens[0, -4:])


def test_the_last_label_is_the_next_token_unless_the_document_ends(section: Section) -> None:
    data = section({"a": "abcdefghij", "b": "klmnop"})  # 12 and 8 tokens with BOS and EOS.
    (validation_set,) = build_validation_sets(
        config(data, one={"seq_len": [2, 4], "tail": 2, "rows": 99})
    )
    labels_by_first_token = {}
    for number in range(validation_set.num_sequences):
        batch = validation_set.datasets[0].read([number])
        labels_by_first_token[validation_set.datasets[1].read([number]).tokens[0].tolist()[1]] = (
            batch.labels[0].tolist()
        )
    assert labels_by_first_token == {
        ord("a"): [ord("c"), ord("d")],
        ord("e"): [ord("g"), ord("h")],
        ord("i"): [ByteTokenizer.eos, IGNORE_INDEX],
        ord("k"): [ord("m"), ord("n")],
        ord("o"): [ByteTokenizer.eos, IGNORE_INDEX],
    }


def test_a_shard_has_the_labels_of_the_target_tokens_only(section: Section) -> None:
    class Middle:
        seq_len_divisor = 1

        def spans(self, boundaries_D: Tensor) -> tuple[Tensor, Tensor]:
            del boundaries_D
            return torch.tensor([2, 50]), torch.tensor([3, 7])

        def attention_pairs(self, boundaries_BD: Tensor, window: int | None) -> int:
            del boundaries_BD, window
            return 0

    rows = multi_length_set(section).datasets[-1]
    whole = rows.read([1])
    fraction = rows.read([1], Middle())
    at = [2, 3, 4, *range(50, 57)]
    assert torch.equal(fraction.labels[0], whole.labels[0, at])
    assert torch.equal(fraction.tokens[0], whole.tokens[0, at])
    assert int((fraction.labels != IGNORE_INDEX).sum()) == 2


@pytest.mark.parametrize("mask", ["document", "none"])
def test_validation_uses_the_document_mask_of_training(section: Section, mask: str) -> None:
    data = section(TEXTS, holdout=0.3, mask=mask)
    (validation_set,) = build_validation_sets(config(data, one={"seq_len": 100, "rows": 99}))
    batches = [
        validation_set.datasets[0].read([number]) for number in range(validation_set.num_sequences)
    ]
    last_document_id = max(int(batch.document_ids.max()) for batch in batches)
    assert last_document_id > 1, "sequences hold several documents"
    origins = sum(int((batch.positions == 0).sum()) for batch in batches)
    assert (origins > validation_set.num_sequences) == (mask == "document")


def test_sequences_do_not_depend_on_the_seed_and_are_read_once(section: Section) -> None:
    data = section(TEXTS, holdout=0.3)
    sets = {"one": {"seq_len": 30, "rows": 5}, "all": {"seq_len": 30, "rows": 10_000}}
    first, every = build_validation_sets(config(data, **sets))
    other = Config.model_validate({**config(data, **sets).model_dump(), "training": {"seed": 9}})
    again, _ = build_validation_sets(other)
    assert texts(first.datasets[0], 5) == texts(again.datasets[0], 5)
    assert first.num_sequences == 5
    assert every.num_sequences == every.datasets[0].sources[0].num_sequences < 100
    assert (
        len({*map(tuple, texts(every.datasets[0], every.num_sequences))}) == every.num_sequences
    ), "a sequence is repeated"


def test_a_source_outside_training_is_validated_on_in_full(
    section: Section, tmp_path: Path
) -> None:
    data = section(TEXTS, holdout=0.3)
    copied = str(shutil.copytree(data.corpus, tmp_path / "copied"))
    data = DataSection.model_validate(
        {**data.model_dump(), "sources": {"other": {"path": copied}}}
    )
    run_config = config(
        data,
        mine={"seq_len": 50, "rows": 999},
        other={"seq_len": 50, "rows": 999, "source": "other"},
    )
    assert checks.problems(run_config, 1) == []
    mine, other = build_validation_sets(run_config)
    assert documents_of(other.datasets[0], other.num_sequences) == set(range(DOCUMENTS))
    assert len(documents_of(mine.datasets[0], mine.num_sequences)) < 20
    assert [*corpus_specs(run_config)] == ["corpus", "other"]


def test_a_set_longer_than_every_document_raises(section: Section) -> None:
    with pytest.raises(
        DataError,
        match=r"validation\.sets\.one: no document with .*the longest of 40 has 276 tokens",
    ):
        build_validation_sets(config(section(TEXTS), one={"seq_len": [10, 300]}))


def test_holdout_of_a_corpus_prepared_with_max_document_raises(section: Section) -> None:
    data = section(TEXTS, max_document=30)
    run_config = prepare(corpus_spec(data, "corpus"), ByteTokenizer())
    again = DataSection(corpus=str(run_config.folder), holdout=0.3)
    with pytest.raises(
        DataError, match=r"was prepared with data.max_document = 30: data.holdout could hold out"
    ):
        build_blended_dataset(again, ByteTokenizer(), seq_len=16, seed=3)
