"""The (query, key) pairs of attention: how they are scored, and how many are computed.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

Tokens = TypeVar("Tokens", bound=Any)
"""int, or an int64 tensor."""


class Scores(NamedTuple):
    """How a layer's attention forms scores, besides the scale H ** -0.5.

    Hashable; operators take its fields, in order.
    """

    window: int | None = None
    """Keys that a query sees at most, its own included; None: all of its document up to itself."""
    softcap: float | None = None
    """c of the scores c tanh(score / c); None: they are not capped."""


FULL_SCORES = Scores()
"""Scores without a window and without a cap."""


def causal_pairs(tokens: Tokens, window: int | None = None) -> Tokens:
    """(query, key) pairs of a document of `tokens`, in which a query sees at most `window` keys,
    its own included.
    """
    pairs: Tokens = tokens * (tokens + 1) // 2
    if window is None:
        return pairs
    # Token i sees min(i, window) keys: the full triangle, less that of the tokens beyond the
    # window.
    beyond = (tokens - window) * (tokens > window)
    return cast(Tokens, pairs - beyond * (beyond + 1) // 2)


Windows = Mapping[int | None, int]
"""Number of layers with each window; None: without one."""
FULL_ATTENTION: Windows = {None: 1}


def mean_pairs(windows: Windows, pairs: Callable[[int | None], float]) -> float:
    """The mean over such layers of what `pairs` gives for a window."""
    return sum(layers * pairs(window) for window, layers in windows.items()) / sum(
        windows.values()
    )
