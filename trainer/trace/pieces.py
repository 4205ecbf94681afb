"""A recorded step: pieces in the order in which they ran, and what each allocates, frees, computes
and sends. No torch.

A piece is one pass of one block, embedding or head for one micro-batch, a message of a pipeline,
or what is left of a step: its begin, its end and the optimizer. A piece lasts until the next one
starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

Unit = int | str
"""A block, counted within its stage, or "embedding", "head", "message", "step"."""


class Place(NamedTuple):
    """The work of a piece: an action of a unit on a micro-batch."""

    action: str
    """ "forward" or "backward"; "send forward", "receive backward", ...; or a name of a moment of
    the step.
    """
    stage: int = 0
    micro_batch: int = 0
    unit: Unit = "step"

    def __str__(self) -> str:
        return (
            self.short_name
            if self.unit == "step"
            else f"{self.short_name}, micro-batch {self.micro_batch}"
        )

    @property
    def short_name(self) -> str:
        """Without the micro-batch."""
        if self.unit == "step":
            return self.action
        unit = f"block {self.unit}" if isinstance(self.unit, int) else self.unit
        return (
            f"{self.action} pass of {unit}"
            if self.action in PASSES
            else f"{self.action} of {unit}"
        )


PASSES = ("forward", "backward")
BEGIN = Place("begin")
FINISH = Place("finish")
OPTIMIZER = Place("optimizer")
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
    line: str = ""
    """The line of the engine that calls the operator."""
    fsdp: str = ""
    """The tensors that FSDP handles there: "weights", "gradients" or ""."""

    @property
    def is_offload_buffer(self) -> bool:
        """Whether it is a buffer for offloaded activations."""
        return self.on_host and self.dtype == "uint8"


class Free(NamedTuple):
    """The end of an allocation."""

    piece: int
    """Index of the piece that allocated it."""
    number: int
    """Number among the allocations of that piece."""


Event = Allocation | Free
HOST = "host"
"""Stands for the channel of a message that is a copy between device and host."""
COPY = "copy"
WEIGHTS = "weights"
"""A copy to the device that FSDP makes before it gathers."""
GRADIENTS = "gradients"
"""A copy to the host that follows a reduction."""
MessageKey = tuple[str, str, str]
"""(channel, collective, phase)."""


class AttentionKey(NamedTuple):
    """Key of an attention kernel's rate."""

    phase: str
    kernel: str
    """Name of the kernel in `training.attention`."""
    keys: int
    """Keys that the last query sees."""
    head_dim: int


class ProductKey(NamedTuple):
    """Key of a matrix product's rate."""

    phase: str
    narrowest: int
    """The smallest of its three dimensions."""
    is_grouped: bool = False
    """Whether groups of rows have matrices of their own."""


@dataclass
class Work:
    """Work of a rank between two messages.

    Phases are "forward", "backward" with recomputation, "head" for both passes of the loss head,
    and "step" for the rest; forward attention kernels of the backward pass are "recompute".
    """

    products: Counter[ProductKey] = field(default_factory=Counter)
    """FLOPs of matrix products."""
    attention: Counter[AttentionKey] = field(default_factory=Counter)
    """FLOPs of attention kernels."""
    moved_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that all other kernels read and write, by phase."""
    kernels: Counter[str] = field(default_factory=Counter)
    """How many are launched, by phase."""
    calls: Counter[MessageKey] = field(default_factory=Counter)
    sent_bytes: Counter[MessageKey] = field(default_factory=Counter)

    def add(self, other: Work, times: int = 1) -> None:
        for name, total in vars(self).items():
            for key, amount in getattr(other, name).items():
                total[key] += times * amount

    @property
    def matmul_flops(self) -> Counter[str]:
        """By phase."""
        return _by_phase(self.products)

    @property
    def attention_flops(self) -> Counter[str]:
        """By phase."""
        return _by_phase(self.attention)


def _by_phase(flops: Mapping[Any, int]) -> Counter[str]:
    found = Counter[str]()
    for key, count in flops.items():
        found[key.phase] += count
    return found


class Departure(NamedTuple):
    """The start of a message."""

    key: MessageKey
    size: float
    """Bytes that this rank sends, in all its calls."""
    number: int
    """Number among the messages of the step."""
    calls: int = 1

    @property
    def channel(self) -> str:
        return self.key[0]


class Arrival(NamedTuple):
    """The moment from which on kernels need what a message brings."""

    number: int


Timeline = list[Work | Departure | Arrival]
"""Work, between messages."""


@dataclass
class Piece:
    place: Place
    events: list[Event] = field(default_factory=list)
    timeline: Timeline = field(default_factory=list)

    @property
    def work(self) -> Work:
        total = Work()
        for each in self.timeline:
            if isinstance(each, Work):
                total.add(each)
        return total


class State(NamedTuple):
    """A tensor that exists before the step."""

    kind: str
    """ "parameters", "optimizer state" or "buffers"."""
    name: str
    """Without the number of its block."""
    size: int
    """Bytes."""
    shape: tuple[int, ...]
    dtype: str
    block: tuple[int, int] | None = None
    """(stage, recorded block)."""


@dataclass(frozen=True)
class Trace:
    """A recorded step of one rank."""

    pieces: tuple[Piece, ...]
    states: tuple[State, ...]
    other_states: int = 0
    """Bytes of everything else that existed before the step."""

    @property
    def state_bytes(self) -> int:
        return self.other_states + sum(state.size for state in self.states)


def renumbered(trace: Trace, stages: Mapping[int, int]) -> Trace:
    """The trace of a pipeline rank whose stages have other numbers."""
    pieces = (
        piece
        if piece.place.unit == "step"
        else replace(piece, place=piece.place._replace(stage=stages[piece.place.stage]))
        for piece in trace.pieces
    )
    states = (
        state
        if state.block is None
        else state._replace(block=(stages[state.block[0]], state.block[1]))
        for state in trace.states
    )
    return replace(trace, pieces=tuple(pieces), states=tuple(states))
