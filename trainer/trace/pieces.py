"""A recorded step: pieces in the order in which they ran, and what each allocates, frees, computes and sends. No torch.

A piece is one pass of one block, embedding or head for one micro-batch, a message of a pipeline, or what is left of a
step: its begin, its end and the optimizer. A piece lasts until the next one starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

Unit = int | str
"""A block, counted within its stage, or "embedding", "head", "message", "step"."""


class Place(NamedTuple):
    """The work of a piece: an action of a unit on a micro-batch."""

    action: str
    """ "forward" or "backward"; "send forward", "receive backward", ...; or a name of a moment of the step."""
    stage: int = 0
    micro_batch: int = 0
    unit: Unit = "step"

    def __str__(self) -> str:
        unit = f"block {self.unit}" if isinstance(self.unit, int) else self.unit
        return self.action if unit == "step" else f"{self.action} of {unit}, micro-batch {self.micro_batch}"


PASSES = ("forward", "backward")
BEGIN, FINISH, OPTIMIZER = Place("begin"), Place("finish"), Place("optimizer")
MOMENTS = {place.action for place in (BEGIN, FINISH, OPTIMIZER)}
"""Actions that happen once in a step."""


class Allocation(NamedTuple):
    """A tensor's memory."""

    size: int
    """Bytes."""
    on_host: bool
    shape: tuple[int, ...]
    dtype: str
    operator: str
    """The operator that allocates it."""


class Free(NamedTuple):
    """The end of an allocation."""

    piece: int
    """Index of the piece that allocated it."""
    number: int
    """Among the allocations of that piece."""


Event = Allocation | Free
MessageKey = tuple[str, str, str]
"""(channel, collective, phase)."""


@dataclass
class Work:
    """FLOPs by phase, and calls and bytes sent by (channel, collective, phase)."""

    matmul_flops: Counter[str] = field(default_factory=Counter)
    attention_flops: Counter[str] = field(default_factory=Counter)
    calls: Counter[MessageKey] = field(default_factory=Counter)
    sent_bytes: Counter[MessageKey] = field(default_factory=Counter)

    def add(self, other: Work, times: int = 1) -> None:
        for name, total in vars(self).items():
            for key, amount in getattr(other, name).items():
                total[key] += times * amount


@dataclass
class Piece:
    place: Place
    events: list[Event] = field(default_factory=list)
    work: Work = field(default_factory=Work)


@dataclass(frozen=True)
class Trace:
    """A recorded step of one rank."""

    pieces: tuple[Piece, ...]
    block_states: dict[tuple[int, int], int]
    """Bytes of parameters, buffers and optimizer state by (stage, recorded block)."""
    other_states: int
    """Bytes of everything else that existed before the step."""


def renumbered(trace: Trace, stages: Mapping[int, int]) -> Trace:
    """The trace of a pipeline rank whose stages have other numbers."""
    pieces = (
        piece
        if piece.place.unit == "step"
        else replace(piece, place=piece.place._replace(stage=stages[piece.place.stage]))
        for piece in trace.pieces
    )
    block_states = {(stages[stage], block): size for (stage, block), size in trace.block_states.items()}
    return replace(trace, pieces=tuple(pieces), block_states=block_states)
