"""Round numbers along an axis, and where values lie between its ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, isfinite, log, log2, log10

KIBI = 1 << 10
MAX_LABELS, MAX_LABEL_CHARACTERS = 9, 45  # labels of an axis, and what they consist of


@dataclass(frozen=True, kw_only=True)
class Axis:
    low: float
    high: float
    log: bool
    ticks: Sequence[float]
    labels: Sequence[str]

    def position(self, value: float) -> float | None:
        """Between 0 and 1 for what the axis spans; None for what it cannot show."""
        if not isfinite(value) or (self.log and value <= 0):
            return None
        if self.log:
            return log(value / self.low) / log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def make_axis(values: Sequence[float], *, logarithmic: bool) -> Axis:
    """Spans all finite values, and 0 unless it is logarithmic; its ends are round."""
    shown = [value for value in values if isfinite(value) and (value > 0 or not logarithmic)] or [1.0]
    if logarithmic:
        return _log2_axis(shown) if _is_binary(shown) else _log10_axis(shown)
    ticks = round_ticks(max(*shown, 0.0))
    if ticks[-1] < max(shown):
        ticks.append(ticks[-1] + ticks[1])
    return Axis(low=0, high=ticks[-1], log=False, ticks=ticks, labels=tick_labels(ticks))


def round_ticks(top: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from 0 to at most `top`: three to six of them."""
    if top <= 0:
        return [0.0, 1.0]
    power = 10.0 ** floor(log10(top / 5))
    step = power * next(factor for factor in (1, 2, 5, 10) if top / (power * factor) < 5.5)
    return [step * count for count in range(floor(top / step * (1 + 1e-9)) + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """With as many decimals as tell them apart."""
    step = min((after - before for before, after in pairwise(ticks)), default=1.0)
    decimals = max(0, -floor(log10(step) + 1e-9))
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def format_tokens(value: float) -> str:
    """8192 is 8K, and 1.5M is 1536K, as people say of tokens; numbers that are no multiple of 1024 are written out."""
    if value < KIBI or value % KIBI:
        return f"{value:,.10g}"
    is_mega = value >= KIBI**2 and value % (KIBI**2 / 8) == 0
    return f"{value / KIBI**2:,g}M" if is_mega else f"{value / KIBI:,.10g}K"


def _is_binary(values: Sequence[float]) -> bool:
    return all(value % KIBI == 0 for value in values) or all(log2(value).is_integer() for value in values)


def _log2_axis(values: Sequence[float]) -> Axis:
    """Powers of two; labels skip as many as leave no more than MOST."""
    first, last = floor(log2(min(values))), ceil(log2(max(values)))
    last = max(last, first + 1)
    stride = -(-(last - first + 1) // MAX_LABELS)
    ticks = [2.0**power for power in range(first, last + 1) if (last - power) % stride == 0]
    return Axis(low=2.0**first, high=2.0**last, log=True, ticks=ticks, labels=[format_tokens(tick) for tick in ticks])


def _log10_axis(values: Sequence[float]) -> Axis:
    """Powers of ten, and between few of them 2 and 5 times each."""
    low, high = min(values), max(values)
    fine = [factor * 10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1) for factor in (1, 2, 5)]
    first = max(tick for tick in fine if tick <= low * (1 + 1e-9))
    last = min(tick for tick in fine if tick >= high * (1 - 1e-9) and tick > first)
    within = [tick for tick in fine if first <= tick <= last]
    powers = [tick for tick in within if log10(tick).is_integer()]
    has_room = len(within) <= MAX_LABELS and sum(len(f"{tick:,.10g}") for tick in within) <= MAX_LABEL_CHARACTERS
    ticks = within if has_room or not powers else powers[:: -(-len(powers) // MAX_LABELS)]
    return Axis(low=first, high=last, log=True, ticks=ticks, labels=[f"{tick:,.10g}" for tick in ticks])
