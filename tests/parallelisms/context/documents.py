"""Document boundaries: manually written, random, and packed as in training."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

Distribution = Literal[
    "log-normal, mean 2K", "log-normal, mean 16K", "pareto", "half the row", "one document"
]
DISTRIBUTIONS: tuple[Distribution, ...] = (
    "log-normal, mean 2K",
    "log-normal, mean 16K",
    "pareto",
    "half the row",
    "one document",
)
SPREAD = 1.5
# The mean of a log-normal variable is exp(SPREAD**2 / 2) times its median.
MEDIAN_OF_MEAN = 1 / 2.718281828 ** (SPREAD**2 / 2)


def of_lengths(*lengths: int) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


def scattered(tokens: int, seed: int) -> tuple[int, ...]:
    """Random documents, most of them short: some of one token, some with fewer than two tokens per
    rank.
    """
    rng = random.Random(seed)
    starts = rng.sample(range(1, tokens), rng.randrange(1, tokens // 3))
    # Three consecutive documents of one token at a random position.
    single = rng.randrange(1, tokens - 3)
    return (0, *sorted({*starts, single, single + 1, single + 2}), tokens)


def few(tokens: int, seed: int) -> tuple[int, ...]:
    """Up to nine random documents."""
    rng = random.Random(seed)
    return (0, *sorted(rng.sample(range(1, tokens), seed % 9)), tokens)


def small(tokens: int) -> list[tuple[int, ...]]:
    """Sequences short enough to compare every pair."""
    rest = tokens - 1 - 3 - 11
    return [
        (0, tokens),
        of_lengths(1, 3, 11, rest),
        of_lengths(rest, 11, 3, 1),
        of_lengths(tokens // 2, tokens // 2),
        of_lengths(*[3] * (tokens // 3)),
        tuple(range(tokens + 1)),
        *(scattered(tokens, seed) for seed in range(3)),
    ]


def packed(distribution: Distribution, tokens: int, seed: int) -> tuple[int, ...]:
    """Documents drawn until the sequence is full; the last one is truncated."""
    rng = random.Random(seed)
    length: dict[Distribution, Callable[[], float]] = {
        "log-normal, mean 2K": lambda: MEDIAN_OF_MEAN * 2048 * rng.lognormvariate(0, SPREAD),
        "log-normal, mean 16K": lambda: MEDIAN_OF_MEAN * 16384 * rng.lognormvariate(0, SPREAD),
        "pareto": lambda: 512 * rng.paretovariate(1.0),
        "half the row": lambda: rng.uniform(64, 4096),
        "one document": lambda: tokens,
    }
    boundaries = [0]
    if distribution == "half the row":
        boundaries.append(tokens // 2 + rng.randrange(-1000, 1000))
    while boundaries[-1] < tokens:
        boundaries.append(min(tokens, boundaries[-1] + max(1, int(length[distribution]()))))
    return tuple(boundaries)


def document_of(boundaries: tuple[int, ...]) -> Tensor:
    """int64 [tokens]: the document index of each token."""
    lengths = torch.tensor(boundaries).diff()
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


def keys_seen(boundaries: tuple[int, ...]) -> Tensor:
    """int64 [tokens]: the number of keys each token attends to: its position in its document plus
    one.
    """
    starts = torch.tensor(boundaries)
    return torch.arange(boundaries[-1]) - starts[document_of(boundaries)] + 1


def visible(boundaries: tuple[int, ...]) -> Tensor:
    """[tokens, tokens] bool: whether the query attends to the key."""
    documents = document_of(boundaries)
    return (documents[:, None] == documents[None, :]).tril()
