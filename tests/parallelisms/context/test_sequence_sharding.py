"""Sharding and gathering of sequences: all per-token tensors use one permutation, which is
invertible.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from models.batch import IGNORE_INDEX, Batch
from models.ranges import concatenated_ranges
from parallelisms.context.context_parallel import ContextParallel
from parallelisms.mesh.context_plan import LAYOUTS_BY_ROTATE_METHOD, ROTATE_METHODS
from tests.models.small_models import packed, starts
from tests.parallelisms.context.cores import build_core
from tests.parallelisms.context.documents import small
from tests.parallelisms.context.whole_batches import shard_batch
from tests.ranks import run_ranks

PER_TOKEN = ("tokens", "labels", "positions", "document_ids")
Options = dict[str, Any]


def core_of(shape: tuple[int, ...], options: Options) -> ContextParallel:
    return build_core(init_device_mesh("cpu", shape), heads=4, kv_heads=2, **options)


def numbered(*rows: list[int]) -> Batch:
    """Sequences with tokens 0, 1, 2, ... and documents of these lengths."""
    batch = packed(*rows)
    tokens = torch.arange(batch.tokens.numel()).view(batch.tokens.shape)
    return replace(
        batch,
        tokens=tokens,
        labels=torch.where(batch.labels == IGNORE_INDEX, IGNORE_INDEX, tokens + 1),
    )


def cut(shape: tuple[int, ...], options: list[Options], batches: list[Batch]) -> list[list[Batch]]:
    """Shards every batch for this rank, by plan."""
    cores = [core_of(shape, one) for one in options]
    return [[shard_batch(core, batch) for batch in batches] for core in cores]


def shards_by_plan(
    shape: tuple[int, ...], options: list[Options], batches: list[Batch]
) -> list[list[list[Batch]]]:
    """[options][batch][rank]."""
    by_rank = run_ranks(cut, torch.Size(shape).numel(), shape, options, batches)
    return [
        [[ranks[index][number] for ranks in by_rank] for number in range(len(batches))]
        for index in range(len(options))
    ]


def all_plans(ranks: int) -> list[tuple[tuple[int, ...], list[Options]]]:
    """Every method and layout, by mesh."""
    alone = [
        {"method": rotation, "layout": layout}
        for rotation in ROTATE_METHODS
        for layout in LAYOUTS_BY_ROTATE_METHOD[rotation]
    ]
    both = [
        {"outer_method": rotation, "layout": layout}
        for rotation in ROTATE_METHODS
        for layout in LAYOUTS_BY_ROTATE_METHOD[rotation]
    ]
    return [((ranks,), [*alone, {"method": "ulysses"}]), ((ranks // 2, 2), both)]


# ---- tables


@pytest.mark.ranks
def test_labels_and_positions_are_those_of_the_full_sequence() -> None:
    ids = torch.arange(1, 9)[None]
    labels = torch.tensor([[2, 3, 4, 5, 6, 7, 8, IGNORE_INDEX]])
    one = replace(numbered([8]), tokens=ids, labels=labels)
    options = [
        {"method": "ring", "layout": "contiguous"},
        {"method": "ring", "layout": "headtail"},
        {"method": "ring", "layout": "doc_headtail"},
    ]
    contiguous, headtail, doc_headtail = shards_by_plan((2,), options, [one, numbered([8, 4])])
    assert [part.tokens.tolist() for part in contiguous[0]] == [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]
    assert [part.labels.tolist() for part in contiguous[0]] == [
        [[2, 3, 4, 5]],
        [[6, 7, 8, IGNORE_INDEX]],
    ]
    assert [part.positions.tolist() for part in contiguous[0]] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    for kind in (headtail, doc_headtail):
        assert [part.tokens.tolist() for part in kind[0]] == [[[1, 2, 7, 8]], [[3, 4, 5, 6]]]
        assert [part.labels.tolist() for part in kind[0]] == [
            [[2, 3, 8, IGNORE_INDEX]],
            [[4, 5, 6, 7]],
        ]
        assert [part.positions.tolist() for part in kind[0]] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    first, second = doc_headtail[1]
    assert first.tokens.tolist() == [[0, 1, 6, 7, 8, 11]]
    assert first.labels.tolist() == [[1, 2, 7, IGNORE_INDEX, 9, IGNORE_INDEX]]
    assert first.positions.tolist() == [[0, 1, 6, 7, 0, 3]]
    assert first.document_ids.tolist() == [[0, 0, 0, 0, 1, 1]]
    assert second.tokens.tolist() == [[2, 3, 4, 5, 9, 10]]
    assert second.labels.tolist() == [[3, 4, 5, 6, 10, 11]]
    assert second.positions.tolist() == [[2, 3, 4, 5, 1, 2]]
    assert second.document_ids.tolist() == [[0, 0, 0, 0, 1, 1]]


@pytest.mark.ranks
def test_ulysses_ranks_hold_adjacent_halves_of_a_ring_shard() -> None:
    headtail = {"outer_method": "ring", "layout": "headtail"}
    ((parts,),) = shards_by_plan((2, 2), [headtail], [numbered([16])])
    held = [part.tokens[0].tolist() for part in parts]
    assert held == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]


def spans_give_the_shard(shape: tuple[int, ...], options: Options) -> bool:
    """Whether the tokens of this rank's spans, which the data loader reads, are those of its
    shard.
    """
    core = core_of(shape, options)
    batch = numbered([5, 11], [16])
    read = [
        row[concatenated_ranges(*core.spans(boundaries))]
        for row, boundaries in zip(batch.tokens, batch.boundaries, strict=True)
    ]
    return torch.equal(torch.stack(read), shard_batch(core, batch).tokens)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shape", "options"), [((2, 2), {"outer_method": "ring"}), ((2,), {"method": "ulysses"})]
)
def test_spans_are_the_tokens_of_the_shard(shape: tuple[int, ...], options: Options) -> None:
    assert all(run_ranks(spans_give_the_shard, torch.Size(shape).numel(), shape, options))


# ---- properties for any documents


def lengths(boundaries: tuple[int, ...]) -> list[int]:
    return [end - start for start, end in pairwise(boundaries)]


def batches(tokens: int) -> list[Batch]:
    """Batches of one and of two sequences with different documents."""
    rows = [lengths(boundaries) for boundaries in small(tokens)]
    return [
        *(numbered(row) for row in rows),
        *(numbered(first, second) for first, second in pairwise(rows)),
    ]


def pairs(batch: Batch) -> int:
    """(query, key) pairs of all documents, padding included."""
    sizes = batch.boundaries.diff(dim=1)
    return int((sizes * (sizes + 1) // 2).sum())


def assert_sharded_alike(parts: list[Batch], whole: Batch, *, ulysses: int) -> None:
    """Every token is on one rank with its label and position, and the ranks' pairs sum to the
    sequence's.
    """
    joined = {
        name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in PER_TOKEN
    }
    for row, order in enumerate(joined["tokens"].argsort(dim=1)):
        for name in PER_TOKEN:
            assert torch.equal(joined[name][row, order], getattr(whole, name)[row]), name
    assert len({part.tokens.shape for part in parts}) == 1
    others = {field.name for field in fields(Batch)} - {
        *PER_TOKEN,
        "num_computed_pairs",
        "boundaries",
    }
    for part in parts:
        assert torch.equal(part.boundaries, whole.boundaries)
        assert (part.boundaries.dtype, part.boundaries.device.type) == (torch.int32, "cpu")
        assert all(getattr(part, name) == getattr(whole, name) for name in others)
    assert sum(int(part.num_targets()) for part in parts) == int(whole.num_targets())
    # Ulysses ranks compute the same pairs, each for a shard of the heads.
    shares = [part.num_computed_pairs for part in parts]
    assert all(len(set(same)) == 1 for same in zip(*[iter(shares)] * ulysses, strict=True))
    assert 0 <= pairs(whole) - sum(shares) < len(parts)


@pytest.mark.slow
@pytest.mark.ranks
def test_all_per_token_tensors_are_sharded_alike() -> None:
    given = batches(48)
    for shape, options in all_plans(4):
        for one, cuts in zip(options, shards_by_plan(shape, options, given), strict=True):
            ulysses = 4 if one.get("method") == "ulysses" else len(shape)
            for whole, parts in zip(given, cuts, strict=True):
                assert_sharded_alike(parts, whole, ulysses=ulysses)


@pytest.mark.ranks
def test_computed_pairs_count_the_rank_s_own_queries() -> None:
    options: list[Options] = [{"method": "ring", "layout": "contiguous"}, {"method": "ulysses"}]
    given = [numbered([8]), numbered([3, 5]), numbered([8], [3, 5]), numbered([1] * 7 + [1])]
    ring, ulysses = shards_by_plan((2,), options, given)
    assert [[part.num_computed_pairs for part in parts] for parts in ring] == [
        [10, 26],
        [7, 14],
        [17, 40],
        [4, 4],
    ]
    assert [[part.num_computed_pairs for part in parts] for parts in ulysses] == [
        [18, 18],
        [10, 10],
        [28, 28],
        [4, 4],
    ]


# ---- padding


def padded(whole: Batch, multiple: int) -> Batch:
    """Reference padding: one more document at the end of every sequence, token by token."""
    rows, tokens = whole.tokens.shape
    more = -tokens % multiple
    at_end = {
        "tokens": [0] * more,
        "labels": [IGNORE_INDEX] * more,
        "positions": list(range(more)),
    }
    joined: dict[str, Any] = {
        name: torch.tensor([[*row, *at_end[name]] for row in getattr(whole, name).tolist()])
        for name in at_end
    }
    documents = [[*row, *[row[-1] + 1] * more] for row in whole.document_ids.tolist()]
    ends = torch.full((rows, 1), tokens + more, dtype=torch.int32)
    boundaries = torch.cat([whole.boundaries, ends], dim=1) if more else whole.boundaries
    return replace(whole, **joined, document_ids=torch.tensor(documents), boundaries=boundaries)


def plus_one(batch: Batch) -> Batch:
    """Tokens from 1, because padding is token 0."""
    return replace(
        batch,
        tokens=batch.tokens + 1,
        labels=batch.labels.where(batch.labels == IGNORE_INDEX, batch.labels + 1),
    )


@pytest.mark.ranks
def test_indivisible_sequence_is_padded_with_an_unlabelled_document() -> None:
    rows = [
        rows
        for size in (37, 45, 46, 47, 48)
        for rows in ([[size]], [[size - 4, 3, 1], [1, 2, size - 3]])
    ]
    given = [plus_one(numbered(*lengths)) for lengths in rows]
    for shape, options in all_plans(4):
        for one, cuts in zip(options, shards_by_plan(shape, options, given), strict=True):
            contiguous = one.get("layout") == "contiguous" or one.get("method") == "ulysses"
            for whole, parts in zip(given, cuts, strict=True):
                assert_padded(parts, whole, padded(whole, 4 if contiguous else 8))


def assert_padded(parts: list[Batch], whole: Batch, expected: Batch) -> None:
    joined = {
        name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in PER_TOKEN
    }
    for row in range(len(expected.tokens)):
        ours, right = (
            sorted(zip(*(tensors[name][row].tolist() for name in PER_TOKEN), strict=True))
            for tensors in (joined, vars(expected))
        )
        assert ours == right
    assert all(torch.equal(part.boundaries, expected.boundaries) for part in parts)
    assert 0 <= pairs(expected) - sum(part.num_computed_pairs for part in parts) < len(parts)
    assert {(part.num_tokens, part.num_pairs) for part in parts} == {
        (whole.num_tokens, whole.num_pairs)
    }


# ---- round trip


def round_trip_failures(
    shape: tuple[int, ...], options: list[Options]
) -> tuple[list[str], list[Tensor]]:
    """The plans whose round trip failed, and for each plan the gradient of a sharded sequence."""
    wrong = []
    gradients = []
    rows = starts([3, 1, 44], [48])
    weights = torch.arange(96.0).view(2, 48)
    for one in options:
        core = core_of(shape, one)
        for width in ((), (4, 3), (2, 2, 2)):
            x = torch.randn(2, 48, *width)
            distributed.broadcast(x, 0)
            for boundaries_BD in (None, rows):
                part = core.shard(x, boundaries_BD)
                back = core.gather(part.requires_grad_(), boundaries_BD)
                if (
                    part.shape != (2, 48 // core.plan.cp, *width)
                    or not torch.equal(back, x)
                    or back.requires_grad
                ):
                    wrong.append(f"{one}, {width}")
        row = torch.zeros(2, 48, requires_grad=True)
        gradients.append(
            torch.autograd.grad(core.shard(row, rows), row, core.shard(weights, rows))[0]
        )
    return wrong, gradients


@pytest.mark.ranks
@pytest.mark.slow
def test_gather_inverts_shard_and_shard_is_differentiable() -> None:
    for shape, options in [
        *all_plans(4),
        ((3,), [{"method": "ring"}]),
        ((3, 2), [{"outer_method": "ring"}]),
    ]:
        by_rank = run_ranks(round_trip_failures, torch.Size(shape).numel(), shape, options)
        assert [wrong for wrong, _ in by_rank] == [[]] * len(by_rank)
        for parts in zip(*(gradients for _, gradients in by_rank), strict=True):
            assert torch.equal(torch.stack(parts).sum(0), torch.arange(96.0).view(2, 48))
            assert ((torch.stack(parts) != 0).sum(0) <= 1).all(), "a token is on one rank"


def sequences_differ() -> list[bool]:
    core = core_of((2,), {"method": "ring"})
    rows = starts([5, 19], [24], [1, 23])
    x = torch.randn(3, 24, 2)
    together = core.shard(x, rows)
    return [
        torch.equal(together[row], core.shard(x[row : row + 1], rows[row : row + 1])[0])
        for row in range(3)
    ]


@pytest.mark.ranks
def test_each_sequence_is_sharded_by_its_own_documents() -> None:
    assert run_ranks(sequences_differ, 2) == [[True] * 3] * 2
