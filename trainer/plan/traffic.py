"""What a rank sends in an update, in closed formulas: bytes by channel, kind and phase. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config import Config

Phase = Literal["forward", "backward", "again", "update"]
"""`again` is recomputation within the backward pass, `update` once in an update, beside the passes."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """What a rank sends of one kind in an update."""

    channel: str
    """A name of `parallelisms.topology.channels`, or `world`."""
    kind: str
    """As `sent` knows it."""
    phase: Phase
    what: str
    """In words."""
    bytes: float
    """Sent by this rank in the whole update."""
    calls: float
    """Collective calls in the whole update."""


def sent(kind: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends in one call of a group of `ranks`.

    `size` is its own part for all_gather, the part that is left to it for reduce_scatter, the whole tensor for
    all_reduce, its input, evenly spread, for all_to_all, and the message for send. Raises ValueError for another kind.
    """
    if kind not in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"):
        raise ValueError(f'"{kind}" is no kind of message: all_gather, reduce_scatter, all_reduce, all_to_all, send')
    if kind in ("all_gather", "reduce_scatter"):
        return size * (ranks - 1)
    if kind == "all_reduce":
        return 2 * size * (ranks - 1) / ranks
    return size * (ranks - 1) / ranks if kind == "all_to_all" else size


def traffic(config: Config, world_size: int, place: int) -> list[Message]:
    """Of the fullest rank at that place of the pipeline. The configuration must have no problems."""
    raise NotImplementedError
