"""Sorts what a step allocates and frees into pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from unittest.mock import patch

from torch import Tensor

from models.transformer import Transformer
from parallelisms.activation_offload import HostActivationPool, SavedKind
from parallelisms.mesh.collectives import AsyncHandle
from parallelisms.pipeline import Pipeline, Stage
from parallelisms.pipeline_schedules import Action, Message
from trainer.step.trainer import Trainer
from trainer.trace.operators import OpCounterMode, StorageTracker
from trainer.trace.pieces import (
    FINISH,
    Allocation,
    Arrival,
    Departure,
    Free,
    MessageKey,
    Piece,
    Place,
    Work,
)
from trainer.trace.shorten import ACTIONS, message_places

Start = Callable[[Place], None]
"""Ends the latest piece and starts another."""


class PieceRecorder(StorageTracker):
    """Allocations and their ends by piece, from the first piece on."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = list[Piece]()
        self._num_allocations = 0
        """Allocations of the latest piece so far."""
        self._num_messages = 0
        self._origins: dict[int, tuple[int, int]] = {}
        """Piece and number of everything alive that a piece allocated."""

    def start(self, place: Place, counter: OpCounterMode) -> None:
        """From now on operations belong to this piece; nothing changes if they did already."""
        if self.pieces and self.pieces[-1].place == place:
            return
        self.pieces.append(Piece(place))
        self._num_allocations = 0
        self._continue(counter)

    def _continue(self, counter: OpCounterMode) -> None:
        """Operations from here on follow what is on the timeline so far."""
        counter.work = Work()
        self.pieces[-1].timeline.append(counter.work)

    def note_message(self, counter: OpCounterMode, key: MessageKey, size: float) -> int:
        """A message starts; returns its number."""
        self._num_messages += 1
        self.pieces[-1].timeline.append(Departure(key, size, self._num_messages, counter.times))
        self._continue(counter)
        return self._num_messages

    def note_arrival(self, counter: OpCounterMode, number: int) -> None:
        """Operations from here on need a message."""
        self.pieces[-1].timeline.append(Arrival(number))
        self._continue(counter)

    def on_allocation(self, key: int, allocation: Allocation) -> None:
        if allocation.is_offload_buffer:
            # It counts while it is used.
            return
        self.record_allocation(key, allocation)

    def record_allocation(self, key: int, allocation: Allocation) -> None:
        if self.pieces:
            self._origins[key] = len(self.pieces) - 1, self._num_allocations
            self._num_allocations += 1
            self.pieces[-1].events.append(allocation)

    def on_free(self, key: int) -> None:
        if (origin := self._origins.pop(key, None)) is not None:
            self.pieces[-1].events.append(Free(*origin))


@contextmanager
def recorded_offload(recorder: PieceRecorder) -> Iterator[None]:
    """Records when buffers of the host are used: which of them exist depends on the order of the
    whole step.
    """
    offload = HostActivationPool.offload
    release = HostActivationPool.release

    def recorded(pool: HostActivationPool, x: Tensor, kind: SavedKind) -> list[Tensor]:
        buffers = offload(pool, x, kind)
        for buffer in buffers:
            used = Allocation(
                size=buffer.nbytes,
                on_host=True,
                shape=tuple(buffer.shape),
                dtype="uint8",
                operator=f"offload of {kind}",
            )
            # Negative, so that it is no key of a storage.
            recorder.record_allocation(-id(buffer), used)
        return buffers

    def released(pool: HostActivationPool, buffers: list[Tensor], kind: SavedKind) -> None:
        for buffer in buffers:
            recorder.on_free(-id(buffer))
        release(pool, buffers, kind)

    with (
        patch.object(HostActivationPool, "offload", recorded),
        patch.object(HostActivationPool, "release", released),
    ):
        yield


# ---- messages and copies


@contextmanager
def recorded_messages(recorder: PieceRecorder, counter: OpCounterMode) -> Iterator[None]:
    """Puts messages on the timeline, and their arrivals where the code waits for a handle."""
    # The dispatcher sees a message start; only the handle shows where its result is needed.
    start = AsyncHandle.__init__
    wait = AsyncHandle.wait
    numbers = dict[int, int]()
    latest = 0

    def on_message(key: MessageKey, size: float) -> int:
        nonlocal latest
        latest = recorder.note_message(counter, key, size) if size and recorder.pieces else 0
        return latest

    def started(handle: AsyncHandle, *args: Any) -> None:
        start(handle, *args)
        numbers[id(handle)] = latest

    def waited(handle: AsyncHandle) -> Tensor:
        if number := numbers.pop(id(handle), 0):
            recorder.note_arrival(counter, number)
        return wait(handle)

    counter.on_message = on_message
    counter.on_arrival = partial(recorder.note_arrival, counter)
    with patch.object(AsyncHandle, "__init__", started), patch.object(AsyncHandle, "wait", waited):
        yield


# ---- where pieces start


def mark_pieces(trainer: Trainer, start: Start) -> None:
    """A piece starts where the residual stream enters or leaves a block, and at each message of a
    pipeline.
    """
    for stage, module in trainer.stage_modules.items():
        _mark_passes(module, stage, start, in_pipeline=trainer.pipeline is not None)
    if trainer.pipeline is not None:
        _mark_pipeline(trainer.pipeline, trainer.mesh.coordinate["pp"], start)


def _mark_passes(model: Transformer, stage: int, start: Start, *, in_pipeline: bool) -> None:
    """The forward and backward passes of a stage, each in as many pieces as it has blocks, and two
    more.
    """
    num_blocks = len(model.blocks)
    micro_batch = -1
    boundary = 0

    def on_forward(*_: Any) -> None:
        nonlocal micro_batch, boundary
        micro_batch = micro_batch + 1
        boundary = 0
        start(Place("forward", stage, micro_batch, "embedding"))

    def on_output(*_: Any) -> None:
        start(Place("backward", stage, micro_batch, "head"))

    def on_boundary(x_BSE: Tensor) -> Tensor:
        nonlocal boundary
        start(Place("forward", stage, micro_batch, boundary if boundary < num_blocks else "head"))
        # The gradient at a boundary is complete when the block behind it has run backward.
        ended = Place("backward", stage, micro_batch, boundary - 1 if boundary else "embedding")

        def on_gradient(_: Tensor) -> None:
            hook.remove()
            start(ended)

        hook = x_BSE.register_hook(on_gradient)
        boundary += 1
        return x_BSE

    # Prepended, so that the piece starts before FSDP's hook gathers its weights.
    model.register_forward_pre_hook(on_forward, prepend=True)
    # There the backward pass is an action of its own.
    if not in_pipeline:
        model.register_forward_hook(on_output)
    model.block_boundary_hook = on_boundary


def _mark_pipeline(pipeline: Pipeline, rank: int, start: Start) -> None:
    """Actions of the schedule, messages, and the wait for the last of them."""
    stages = pipeline._stages
    exchange = pipeline._exchange
    transfer = exchange.transfer
    finish = exchange.finish

    def marked_transfer(message: Message) -> None:
        for place in message_places(message, rank):
            start(place)
        transfer(message)

    def marked_finish() -> None:
        start(FINISH)
        finish()

    exchange.transfer = marked_transfer  # type: ignore[method-assign]
    exchange.finish = marked_finish  # type: ignore[method-assign]
    for stage in stages.values():
        _mark_actions(stage, start)


def _mark_actions(stage: Stage, start: Start) -> None:
    run = stage.run

    def marked(action: Action, *args: Any) -> None:
        first = "embedding" if action.kind == "F" else "head"
        start(Place(ACTIONS[action.kind], action.stage, action.micro_batch, first))
        run(action, *args)

    cast(Any, stage).run = marked
