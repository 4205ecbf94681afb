"""Reading the shard of a rank equals sharding the full sequence, for any documents and layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from models.batch import IGNORE_INDEX, Batch
from models.ranges import cut_ranges
from parallelisms.mesh.context_plan import LAYOUTS_BY_ROTATE_METHOD, ROTATE_METHODS
from tests.build_datasets import build_blended_dataset
from tests.parallelisms.context.cores import build_core
from tests.parallelisms.context.whole_batches import shard_batch
from tests.ranks import run_ranks
from trainer.config.data import DataSection
from trainer.data.sequences import BlendedDataset, FullSequence
from trainer.data.tokenizer import ByteTokenizer

TEXTS = {f"{n:02}": "".join(map(chr, range(33, 33 + 7 * n % 61))) for n in range(40)}
CONFIGURATIONS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    *(
        ((4,), {"method": rotation, "layout": layout})
        for rotation in ROTATE_METHODS
        for layout in LAYOUTS_BY_ROTATE_METHOD[rotation]
    ),
    ((4,), {"method": "ulysses"}),
    *(
        ((2, 2), {"outer_method": rotation, "layout": layout})
        for rotation in ROTATE_METHODS
        for layout in LAYOUTS_BY_ROTATE_METHOD[rotation]
    ),
]
SPANS = some.lists(some.integers(1, 9), min_size=1, max_size=12)


def same(one: Batch, other: Batch) -> list[str]:
    """Names of the fields that differ."""
    pairs = {
        field.name: (getattr(one, field.name), getattr(other, field.name))
        for field in fields(Batch)
    }
    return [
        name
        for name, (a, b) in pairs.items()
        if not (torch.equal(a, b) if hasattr(a, "dim") else a == b)
    ]


def differences(data: DataSection, seq_len: int) -> list[str]:
    """Differences between shards read directly and shards of full sequences, for every method and
    layout.
    """
    result = []
    dataset = build_blended_dataset(data, ByteTokenizer(), seq_len=seq_len, seed=0)
    meshes = {
        shape: init_device_mesh("cpu", shape)
        for shape in sorted({shape for shape, _ in CONFIGURATIONS})
    }
    for shape, options in CONFIGURATIONS:
        core = build_core(meshes[shape], heads=4, kv_heads=2, **options)
        for first in (0, 6):
            indices = [first, None, first + 1]
            whole = shard_batch(
                core, dataset.read(indices, FullSequence(core.plan.seq_len_divisor))
            )
            result += [
                f"{options} rows {indices}: {name}"
                for name in same(dataset.read(indices, core), whole)
            ]
    return result


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("seq_len", "options"),
    [
        (64, {}),
        pytest.param(61, {"mask": "none"}, marks=pytest.mark.slow),
        (67, {"packing": "concat"}),
        (72, {"mix": ({"source": "corpus", "max_len": 5},)}),
    ],
    ids=["best fit", "no mask, padded", "concat, padded", "short segments"],
)
def test_reading_a_shard_equals_sharding_the_full_batch_in_every_layout(
    seq_len: int, options: dict[str, Any], section: Callable[..., DataSection]
) -> None:
    data = section(TEXTS, **options)
    build_blended_dataset(data, ByteTokenizer(), seq_len=seq_len, seed=0)
    assert run_ranks(differences, 4, data, seq_len) == [[]] * 4


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SPANS, SPANS)
def test_ranges_are_cut_at_bounds(segment_lengths: list[int], spans: list[int]) -> None:
    starts = [sum(segment_lengths[:n]) for n in range(len(segment_lengths) + 1)]
    cuts = sorted({min(sum(spans[:n]), starts[-1]) for n in range(len(spans) + 1)})
    held_spans = [(start, end - start) for start, end in pairwise(cuts)][::2]
    expected = [
        (segment, at - starts[segment])
        for start, length in held_spans
        for at in range(start, start + length)
        for segment in range(len(segment_lengths))
        if starts[segment] <= at < starts[segment + 1]
    ]
    starts_M, lengths_M = torch.tensor(held_spans, dtype=torch.int64).view(-1, 2).T.contiguous()
    parts = zip(
        *(x.tolist() for x in cut_ranges(starts_M, lengths_M, torch.tensor(starts))), strict=True
    )
    assert [
        (number, start - starts[number] + n)
        for number, start, length in parts
        for n in range(length)
    ] == expected


class Halves(FullSequence):
    """The first or second half of every sequence."""

    def __init__(self, half: int) -> None:
        self.half = half

    def spans(self, boundaries_D: Tensor) -> tuple[Tensor, Tensor]:
        end = boundaries_D[-1:].long()
        return (end // 2, end - end // 2) if self.half else (0 * end, end // 2)


def targets(dataset: BlendedDataset, indices: range) -> Counter[tuple[int, int]]:
    result: Counter[tuple[int, int]] = Counter()
    for half in range(2):
        batch = dataset.read([*indices], Halves(half))
        result.update(
            zip(batch.tokens.flatten().tolist(), batch.labels.flatten().tolist(), strict=True)
        )
    return Counter({pair: count for pair, count in result.items() if pair[1] != IGNORE_INDEX})


@pytest.mark.parametrize("seq_len", [7, 64])
@pytest.mark.parametrize("packing", ["best_fit", "concat", "single"])
def test_over_an_epoch_of_all_ranks_every_token_but_the_first_of_a_document_is_a_target_once(
    packing: str, seq_len: int, section: Callable[..., DataSection]
) -> None:
    dataset = build_blended_dataset(
        section(TEXTS, packing=packing), ByteTokenizer(), seq_len=seq_len, seed=3
    )
    expected: Counter[tuple[int, int]] = Counter()
    for text in TEXTS.values():
        tokens = [256, *text.encode(), 257]
        expected.update(pairwise(tokens) if text else ())
    count = dataset.sources[0].num_sequences
    assert targets(dataset, range(count)) == targets(dataset, range(count, 2 * count)) == expected


# ---- several sources


def build_mix(
    section: Callable[..., DataSection],
    tmp_path: Any,
    mix: list[dict[str, Any]],
    seq_len: int = 32,
) -> BlendedDataset:
    (tmp_path / "long").mkdir()
    for n in range(6):
        (tmp_path / "long" / f"{n}").write_text(chr(65 + n) * (20 + 30 * n))
    data = section(TEXTS, sources={"long": {"path": str(tmp_path / "long")}}, mix=mix)
    return build_blended_dataset(data, ByteTokenizer(), seq_len=seq_len, seed=5)


def test_sequences_of_a_mix_come_from_their_sources_in_proportion(
    section: Callable[..., DataSection], tmp_path: Any
) -> None:
    dataset = build_mix(
        section,
        tmp_path,
        [{"source": "corpus", "weight": 0.75}, {"source": "long", "weight": 0.25}],
    )
    batch = dataset.read(range(40))
    assert dataset.names == ["corpus", "long"]
    upper = set(range(65, 71))
    for row, (source, tokens) in zip(batch.tokens, batch.sequence_sources, strict=True):
        letters = set(row[:tokens].tolist()) - {256, 257}
        assert (letters <= upper and len(letters) > 0) == (source == 1)
    counts = [[source for source, _ in batch.sequence_sources].count(n) for n in range(2)]
    assert dataset.epochs(40) == [
        count / source.num_sequences for count, source in zip(counts, dataset.sources, strict=True)
    ]
    assert batch.num_tokens == sum(tokens for _, tokens in batch.sequence_sources)


@pytest.mark.parametrize("packing", ["best_fit", "concat", "single"])
def test_weights_are_fractions_of_tokens_at_any_padding(
    packing: str, section: Callable[..., DataSection], tmp_path: Any
) -> None:
    for name, length in (("short", 9), ("long", 30)):
        (tmp_path / name).mkdir()
        for n in range(20):
            (tmp_path / name / f"{n:02}").write_text("x" * length)
    sources = {name: {"path": str(tmp_path / name)} for name in ("short", "long")}
    mix = [{"source": "short", "weight": 1}, {"source": "long", "weight": 3}]
    dataset = build_blended_dataset(
        section({}, sources=sources, mix=mix, packing=packing), ByteTokenizer(), seq_len=32, seed=0
    )
    drawn = dataset.read(range(400)).sequence_sources
    for count in (100, 200, 400):
        tokens = [sum(tokens for source, tokens in drawn[:count] if source == n) for n in range(2)]
        assert tokens[0] / sum(tokens) == pytest.approx(0.25, abs=0.01)


def test_a_mix_selects_long_short_and_cut_documents_of_one_source(
    section: Callable[..., DataSection], tmp_path: Any
) -> None:
    mix = [
        {"source": "long", "min_length": 100},
        {"source": "long", "max_length": 100},
        {"source": "long", "max_len": 8},
    ]
    dataset = build_mix(section, tmp_path, mix)
    assert dataset.names == ["long>=100", "long<100", "long|8"]
    tokens_by_source: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    longest = dict.fromkeys(tokens_by_source, 0)
    for number in range(60):
        batch = dataset.read([number])
        ((source, tokens),) = batch.sequence_sources
        tokens_by_source[source] |= set(batch.tokens[0, :tokens].tolist()) - {256, 257}
        longest[source] = max(longest[source], int(batch.positions[0, :tokens].max()) + 1)
    assert tokens_by_source == {0: {68, 69, 70}, 1: {65, 66, 67}, 2: set(range(65, 71))}
    assert longest[2] == 8 < min(longest[0], longest[1])


def test_stages_and_mix_entries_are_shuffled_differently(
    section: Callable[..., DataSection],
) -> None:
    data = section(TEXTS)
    first, second = (
        build_blended_dataset(data, ByteTokenizer(), seq_len=16, seed=1, stage=stage)
        for stage in range(2)
    )
    assert not torch.equal(first.read(range(12)).tokens, second.read(range(12)).tokens)
    twice = build_blended_dataset(
        section({}, mix=[{"source": "corpus"}, {"source": "corpus", "max_len": 15}]),
        ByteTokenizer(),
        seq_len=16,
        seed=1,
    )
    both = twice.read(range(2))
    assert not torch.equal(both.tokens[0], both.tokens[1])


def test_a_source_of_a_mix_yields_each_sequence_once_per_epoch(
    section: Callable[..., DataSection], tmp_path: Any
) -> None:
    dataset = build_mix(
        section, tmp_path, [{"source": "corpus", "weight": 2}, {"source": "long", "weight": 3}]
    )
    for index, source in enumerate(dataset.sources):
        drawn = [
            number
            for number in range(5 * source.num_sequences)
            if dataset.round_robin.locate(number)[0] == index
        ]
        epoch = dataset.read(drawn[: source.num_sequences])
        unmixed = BlendedDataset([source], seq_len=dataset.seq_len).read(
            range(source.num_sequences)
        )
        assert torch.equal(epoch.tokens, unmixed.tokens)
