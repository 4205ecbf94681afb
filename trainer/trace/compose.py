"""The whole step from the pieces of a short one. Imports no torch.

Every piece of the whole step is a copy of a recorded piece. What a recorded piece frees is named
by its distance from there, for instance "allocated by the forward pass of the block before, for
the same micro-batch", so a copy frees what its own neighbours allocated. A copy that looks for a
tensor which nothing allocated shows that the recorded step was too short: see
`ComposedStep.is_closed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainer.trace.pieces import (
    BEGIN,
    FINISH,
    MOMENTS,
    PASSES,
    Allocation,
    Free,
    Piece,
    Place,
    State,
    Trace,
    Work,
)


@dataclass(frozen=True, eq=False)
class TensorName:
    """One of the tensors of a piece that outlive it, by what it is and how many like it came
    before. Pieces have the names in common, so that they are compared by identity.
    """

    allocation: Allocation
    number: int


class Transient(NamedTuple):
    """Largest set of tensors that live only within this piece, until its next change."""

    size: int
    alive: tuple[Allocation, ...]
    """The latest one last."""


class Birth(NamedTuple):
    name: TensorName


class Death(NamedTuple):
    origin: int
    """Index of the recorded piece that allocated it."""
    name: TensorName


Change = Transient | Birth | Death
Key = tuple[Place, TensorName]
"""A tensor, by the piece that allocates it and its name there."""
Buffer = tuple[int, str]
"""Size and dtype of buffers of the host, which serve each other's tensors."""
Target = Callable[[Place], int]
"""The pipeline rank that a piece sends its message to."""


@dataclass(frozen=True)
class Correspondence:
    """Which recorded piece every piece of the whole step is like."""

    blocks: Mapping[int, tuple[int, ...]]
    """The recorded block for every block of a stage."""
    micro_batches: int
    recorded_micro_batches: int

    def copied_states(self, states: Iterable[State]) -> Counter[State]:
        """How often the whole step has a state; those of a block without the place of the
        block.
        """
        blocks = Counter(
            (stage, block) for stage, originals in self.blocks.items() for block in originals
        )
        copies = Counter[State]()
        for state in states:
            copies[state._replace(block=None)] += 1 if state.block is None else blocks[state.block]
        return copies

    def original(self, place: Place) -> Place:
        action, stage, number, unit = place
        original = self.blocks[stage][unit] if isinstance(unit, int) else unit
        return Place(action, stage, self._original_micro_batch(number), original)

    def _original_micro_batch(self, number: int) -> int:
        """The recorded one that it is like: the last recorded one stands for all others, or the one
        before it where the last one has an original of its own.
        """
        recorded = self.recorded_micro_batches
        has_last = recorded > 2
        if has_last and number == self.micro_batches - 1:
            return recorded - 1
        return min(number, recorded - (2 if has_last else 1))

    def allocated_by(self, origin: Place, here: Place, copy: Place) -> Iterator[Place]:
        """The pieces whose tensors `copy` frees, if the recorded `here`, which it is like, frees
        what `origin` allocated.
        """
        # A block frees what a neighbour allocated, at the distance that was recorded.
        action, stage, _, unit = origin
        number = self._micro_batch(origin, here, copy)
        if not isinstance(unit, int):
            yield Place(action, stage, number, unit)
        elif isinstance(here.unit, int) and isinstance(copy.unit, int) and here.stage == stage:
            yield Place(action, stage, number, unit + copy.unit - here.unit)
        else:
            # A piece outside of the blocks frees tensors of all blocks that are like the recorded
            # one.
            for block, recorded in enumerate(self.blocks[stage]):
                if recorded == unit:
                    yield Place(action, stage, number, block)

    def _micro_batch(self, origin: Place, here: Place, copy: Place) -> int:
        if origin.action in MOMENTS:
            return 0
        if here.action in MOMENTS:
            is_last = 0 < origin.micro_batch == self.recorded_micro_batches - 1
            return self.micro_batches - 1 if is_last else origin.micro_batch
        distance = here.micro_batch - origin.micro_batch
        # Tensors pass to the next micro-batch at most; older ones belong to a fixed one, such as
        # the first.
        return copy.micro_batch - distance if distance in (0, 1) else origin.micro_batch


@dataclass
class Memory:
    """Tensors that are alive while pieces run one after the other."""

    device_bytes: int
    live: set[Key] = field(default_factory=set)
    changes: list[Key] = field(default_factory=list)
    """Tensors in the order in which they were allocated and freed."""
    used_buffers: Counter[Buffer] = field(default_factory=Counter)
    """Buffers of the host in use."""
    host_buffers: Counter[Buffer] = field(default_factory=Counter)
    """Buffers that exist: a free one is used again for a tensor of its size, and none is given
    back.
    """
    first_use: dict[Buffer, Allocation] = field(default_factory=dict)
    """First allocation of each kind of buffer, which names it."""

    def allocate(self, place: Place, name: TensorName) -> None:
        self.live.add((place, name))
        self.changes.append((place, name))
        self._add(name.allocation, 1)

    def free(self, place: Place, name: TensorName) -> bool:
        """Frees a tensor; False if there is no such tensor."""
        key = place, name
        if key not in self.live:
            return False
        self.live.remove(key)
        self.changes.append(key)
        self._add(name.allocation, -1)
        return True

    def live_after(self, num_changes: int) -> list[Key]:
        """Tensors that were alive after the first changes."""
        counts = Counter(self.changes[:num_changes])
        return [key for key, count in counts.items() if count % 2]

    def _add(self, allocation: Allocation, sign: int) -> None:
        if not allocation.on_host:
            self.device_bytes += sign * allocation.size
            return
        buffer = allocation.size, allocation.dtype
        self.first_use.setdefault(buffer, allocation)
        self.used_buffers[buffer] += sign
        # The union of counters is their maximum: a buffer is reused, and never given back.
        self.host_buffers |= Counter({buffer: self.used_buffers[buffer]})

    @property
    def host_bytes(self) -> int:
        return sum(size * count for (size, _), count in self.host_buffers.items())


class Peak(NamedTuple):
    size: int
    num_changes: int
    """Lasting changes before it."""
    place: Place
    transients: tuple[Allocation, ...] = ()
    """Tensors alive at the peak that live only within its piece."""

    @property
    def operator(self) -> str:
        """The one that reaches the peak."""
        return self.transients[-1].operator if self.transients else ""


class LiveTensor(NamedTuple):
    """Tensors of the whole step that are alive at its peak and alike."""

    allocation: Allocation
    made_in: Place
    """The recorded piece that they are copies of."""
    freed_in: Place | None
    """The recorded piece that frees it; None: the next step."""
    copies: int = 1

    @property
    def size(self) -> int:
        return self.copies * self.allocation.size


class ComposedStep(NamedTuple):
    """One rank's whole step."""

    order: tuple[int, ...]
    """Its pieces, as indices of recorded ones."""
    peak: Peak
    """Peak of the device."""
    host_bytes: int
    """Bytes of buffers for offloaded activations, and of gradients for an optimizer there."""
    work: Work
    states: Counter[State]
    """How many there are of each, with no place in a block."""
    other_states: int
    """Bytes of everything else that existed before the step."""
    live: list[LiveTensor]
    """Tensors alive at the device's peak, without the states, and on the host at the end."""
    missing: Counter[tuple[Place, Place, TensorName]]
    """Tensors that copies of a piece should have freed and did not find: (recorded piece, its
    origin, name).
    """
    left: Counter[Key]
    """Recorded tensors that no copy freed, unlike the recorded step."""

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of buffers for offloaded activations."""
        return sum(each.size for each in self.live if each.allocation.is_offload_buffer)

    @property
    def needs_micro_batches(self) -> bool:
        """Whether what a micro-batch leaves to the next does so from a later one on."""
        return bool(self.left) and not self.missing

    @property
    def is_closed(self) -> bool:
        """Whether every tensor has its end, so that the recorded step was long enough."""
        return not self.missing and not self.left


def compose(
    trace: Trace, order: Iterable[Place], like: Correspondence, target: Target | None = None
) -> ComposedStep:
    """The whole step in this `order` of pieces. `target` is needed if some send messages."""
    run = Composition(trace, like, target)
    peak = run.run(order)
    live = [*run.live(peak), *run.transients(peak), *run.host_buffers()]
    return ComposedStep(
        tuple(run.order),
        peak,
        run.memory.host_bytes,
        run.work(),
        run.states,
        trace.other_states,
        live,
        run.missing,
        run.left(),
    )


class Composition:
    """Runs the copies of recorded pieces."""

    def __init__(self, trace: Trace, like: Correspondence, target: Target | None) -> None:
        self._trace = trace
        self._like = like
        self._target = target
        self._index = {piece.place: index for index, piece in enumerate(trace.pieces)}
        self._changes = lasting_changes(trace.pieces)
        self._ends: dict[Key, Place] = {
            (trace.pieces[change.origin].place, change.name): piece.place
            for piece, changes in zip(trace.pieces, self._changes, strict=True)
            for change in changes
            if isinstance(change, Death)
        }
        """Where recorded tensors are freed."""
        self.order: list[int] = []
        """Recorded pieces whose copies ran so far."""
        self.states = like.copied_states(trace.states)
        states = sum(state.size * count for state, count in self.states.items())
        self.memory = Memory(states + trace.other_states)
        self.missing = Counter[tuple[Place, Place, TensorName]]()
        self._sent_tensors = self._find_sent_tensors()
        self._latest_sent: dict[int, Place] = {}

    def run(self, order: Iterable[Place]) -> Peak:
        """Runs copies in this order, and finds the peak of the device."""
        peak = Peak(-1, 0, BEGIN)
        for place in order:
            index = self._index[self._like.original(place)]
            self.order.append(index)
            if "send" in place.action or place == FINISH:
                self._free_sent(place)
            for change in self._changes[index]:
                if isinstance(change, Birth):
                    self.memory.allocate(place, change.name)
                elif isinstance(change, Death):
                    self._free(change, index, place)
                elif (size := self.memory.device_bytes + change.size) > peak.size:
                    peak = Peak(size, len(self.memory.changes), place, change.alive)
        return peak

    def live(self, peak: Peak) -> list[LiveTensor]:
        """Tensors on the device at the peak that outlive their piece."""
        live = self.memory.live_after(peak.num_changes)
        alike = Counter(self._recorded(*key) for key in live if not key[1].allocation.on_host)
        return [
            LiveTensor(name.allocation, place, self._ends.get((place, name)), count)
            for (place, name), count in alike.items()
        ]

    def transients(self, peak: Peak) -> list[LiveTensor]:
        """Tensors of the peak that live only within its piece."""
        place = self._like.original(peak.place)
        return [LiveTensor(allocation, place, place) for allocation in peak.transients]

    def host_buffers(self) -> list[LiveTensor]:
        """Buffers of the host, used and free."""
        first_use = self.memory.first_use
        return [
            LiveTensor(first_use[buffer], BEGIN, None, count)
            for buffer, count in self.memory.host_buffers.items()
        ]

    def work(self) -> Work:
        """Work of all copies so far."""
        total = Work()
        for index, times in Counter(self.order).items():
            total.add(self._trace.pieces[index].work, times)
        return total

    def _free(self, death: Death, index: int, copy: Place) -> None:
        origin = self._trace.pieces[death.origin].place
        here = self._trace.pieces[index].place
        if "send" in here.action or here == FINISH:
            return  # What it sent before; see `_free_sent`.
        for place in self._like.allocated_by(origin, here, copy):
            # Batches live until the next one is loaded, and the last one until the end of its
            # backward pass.
            if not self.memory.free(place, death.name) and origin.action in PASSES:
                self.missing[here, origin, death.name] += 1

    def left(self) -> Counter[Key]:
        """Tensors of passes that are alive although the recorded step freed them."""
        alive = (self._recorded(*key) for key in self.memory.live if key[0].action in PASSES)
        return Counter(each for each in alive if each in self._ends)

    def _recorded(self, place: Place, name: TensorName) -> Key:
        """The recorded tensor that one of the whole step is like."""
        return self._like.original(place), name

    # ---- messages of a pipeline: what is sent lives until the next message to the same rank

    def _find_sent_tensors(self) -> dict[tuple[str, int], Key]:
        """The recorded tensor that each pass of a stage sends."""
        found: dict[tuple[str, int], Key] = {}
        for (origin, name), end in self._ends.items():
            if "send" in end.action or end == FINISH:
                found.setdefault((origin.action, origin.stage), (origin, name))
        return found

    def _free_sent(self, place: Place) -> None:
        if self._target is None:
            return
        if place == FINISH:
            latest = [*self._latest_sent.values()]
        else:
            target = self._target(place)
            latest = [self._latest_sent[target]] if target in self._latest_sent else []
            self._latest_sent[target] = place
        for message in latest:
            action = message.action.removeprefix("send ")
            if (sent := self._sent_tensors.get((action, message.stage))) is None:
                continue
            origin, name = sent
            here = origin._replace(unit="head" if action == "forward" else "embedding")
            copy = here._replace(micro_batch=message.micro_batch)
            for source in self._like.allocated_by(origin, here, copy):
                if not self.memory.free(source, name):
                    self.missing[place, origin, name] += 1


def lasting_changes(pieces: Sequence[Piece]) -> list[list[Change]]:
    """Changes of each piece: allocations for others, frees of others, and the peaks of the rest
    between them.
    """
    ends = {
        (event.piece, event.number): index
        for index, piece in enumerate(pieces)
        for event in piece.events
        if isinstance(event, Free)
    }
    known: dict[tuple[Allocation, int], TensorName] = {}
    names: dict[tuple[int, int], TensorName] = {}
    for index, piece in enumerate(pieces):
        alike = Counter[Allocation]()
        allocations = (event for event in piece.events if isinstance(event, Allocation))
        for number, allocation in enumerate(allocations):
            # Host buffers always last, because which of them exist depends on the order of the
            # whole step.
            if allocation.size and (allocation.on_host or ends.get((index, number)) != index):
                name = allocation, alike[allocation]
                names[index, number] = known.setdefault(name, TensorName(*name))
                alike[allocation] += 1
    return [_lasting_changes(index, piece, names) for index, piece in enumerate(pieces)]


def _lasting_changes(
    index: int, piece: Piece, names: Mapping[tuple[int, int], TensorName]
) -> list[Change]:
    changes: list[Change] = []
    inner: dict[int, Allocation] = {}
    live = 0
    number = 0
    highest = Transient(0, ())
    for event in piece.events:
        if isinstance(event, Allocation):
            if (name := names.get((index, number))) is None:
                inner[number] = event
                live += event.size
                if live > highest.size:
                    highest = Transient(live, tuple(inner.values()))
            else:
                # What lives within the piece is largest just before each lasting change or at the
                # end.
                changes += [highest, Birth(name)]
                highest = Transient(live, tuple(inner.values()))
            number += 1
        elif event.piece == index and event.number in inner:
            live -= inner.pop(event.number).size
        elif (name := names.get((event.piece, event.number))) is not None:
            changes += [highest, Death(event.piece, name)]
            highest = Transient(live, tuple(inner.values()))
    return [*changes, highest]
