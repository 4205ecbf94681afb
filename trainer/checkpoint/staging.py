"""The state copied to the host, into buffers that are used again, so that training may change it while it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from parallelisms.collectives import local

Held = Callable[[], Mapping[str, Tensor]]
"""Waits for this rank's part of every tensor."""


class Staging:
    """Buffers on the host for what this rank holds: as much memory again as the state takes, from the first copy on.

    They are pinned where the state lies on a CUDA device, and the copies then run on its current stream, ahead of
    whatever changes the state next.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def begin(self, tensors: Mapping[str, Tensor]) -> Held:
        """Copies, over the copies of before. What is returned waits for them, or raises what went wrong already."""
        try:
            copied = self._copy(tensors)
        except RuntimeError as error:  # No memory, mostly.
            problem = error

            def fail() -> NoReturn:
                raise problem

            return fail

        def held() -> dict[str, Tensor]:
            self._wait()
            return copied

        return held

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        held = {name: local(tensor.detach()) for name, tensor in tensors.items()}
        on_device = [part for part in held.values() if part.device.type == "cuda"]
        for name, part in held.items():
            self._buffer(name, part).copy_(part, non_blocking=True)
        self._copied = torch.cuda.current_stream(on_device[0].device).record_event() if on_device else None
        return {name: self._buffers[name] for name in held}

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def _buffer(self, name: str, part: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (part.shape, part.dtype):
            pinned = part.device.type == "cuda"
            buffer = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=pinned)
            self._buffers[name] = buffer
        return buffer


def in_place(tensors: Mapping[str, Tensor]) -> Held:
    """The parts where they are, for a save that nothing changes them under."""
    return lambda: {name: local(tensor) for name, tensor in tensors.items()}


class Planner(DefaultSavePlanner):
    """Where a tensor stands among those of all ranks is asked of the state, what is written of the copy on the host."""

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._held = held

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._held[index.fqn]
