"""Packing that mixes: nothing lost, hardly more padding than best-fit decreasing, and sequences
that resemble each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.data import best_fit
from trainer.data.best_fit import best_fit_decreasing, mixed_best_fit
from trainer.data.packing import Packing, pack_documents
from trainer.data.packing_stats import between_sequences

SEQ_LEN = 4096
PACKED: list[tuple[Packing, int]] = [("best_fit", 2), ("best_fit", 1), ("concat", 2)]


def lognormal(count: int, generator: torch.Generator) -> Tensor:
    return (torch.randn(count, generator=generator) * 1.6 + 4).exp()


def pareto(count: int, generator: torch.Generator) -> Tensor:
    return 20 * torch.rand(count, generator=generator).pow(-1 / 1.2)


def half_a_sequence(count: int, generator: torch.Generator) -> Tensor:
    return SEQ_LEN * torch.rand(count, generator=generator)


def two_lengths(count: int, generator: torch.Generator) -> Tensor:
    return torch.where(torch.rand(count, generator=generator) < 0.01, SEQ_LEN / 2, 30.0)


DRAWN: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    each.__name__: each for each in (lognormal, pareto, half_a_sequence, two_lengths)
}


def drawn(name: str, count: int, seed: int = 0) -> Tensor:
    """Lengths of segments that are no full sequence."""
    return DRAWN[name](count, torch.Generator().manual_seed(seed)).clamp(1, SEQ_LEN - 1).long()


def used(sequence_of: Tensor, lengths: Tensor) -> Tensor:
    return torch.zeros(int(sequence_of.max()) + 1, dtype=torch.int64).index_add_(
        0, sequence_of, lengths
    )


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("count", [1, 2, 7, 400, 40_000])
@pytest.mark.parametrize("window", [2, 16, 256])
def test_every_segment_is_in_one_sequence_that_has_room(
    name: str, count: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_fit, "WINDOW_SEQUENCES", window)
    monkeypatch.setattr(best_fit, "WINDOW_SEGMENTS", 8)
    lengths = drawn(name, count)
    tokens = used(mixed_best_fit(lengths, SEQ_LEN, seed=3), lengths)
    assert 0 < tokens.min() <= tokens.max() <= SEQ_LEN


@pytest.mark.parametrize("name", DRAWN)
def test_padding_is_at_most_half_a_percent_more(name: str) -> None:
    lengths = drawn(name, 60_000)
    mixed, decreasing = (
        used(packed, lengths).numel()
        for packed in (
            mixed_best_fit(lengths, SEQ_LEN, seed=0),
            best_fit_decreasing(lengths, SEQ_LEN),
        )
    )
    assert (mixed - decreasing) * SEQ_LEN <= 0.005 * int(lengths.sum())


@pytest.mark.parametrize("name", DRAWN)
def test_lengths_vary_between_sequences_nearly_as_little_as_with_concat(name: str) -> None:
    lengths = drawn(name, 60_000)
    mixed, decreasing, concat = (
        between_sequences(
            pack_documents(lengths, seq_len=SEQ_LEN, packing=packing, version=version)
        )
        for packing, version in PACKED
    )
    assert mixed <= concat + 0.1
    assert decreasing > 0.85 or name == "half_a_sequence"


def test_the_order_is_a_pure_function_of_the_seed_and_its_version() -> None:
    """If this fails, packing has changed: keep the old one under its number, and raise
    PACKING_VERSION.
    """

    def digest(version: int, seed: int) -> str:
        lengths = torch.cat([drawn(name, 3000, seed=7) for name in DRAWN])
        plan = pack_documents(
            lengths, seq_len=SEQ_LEN, packing="best_fit", version=version, seed=seed
        )
        numbers = torch.cat((plan.sequence_offsets, plan.starts, plan.lengths)).tolist()
        return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]

    assert digest(1, 0) == digest(1, 5) == "aedc28658f344c0a"
    assert (digest(2, 0), digest(2, 5)) == ("7d2eeb3f6e742169", "9530440b8db2c25c")
