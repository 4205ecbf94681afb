"""The state copied to the host, into buffers that are used again, so that training may change it while it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from parallelisms.collectives import to_local

LocalTensorsGetter = Callable[[], Mapping[str, Tensor]]
"""Waits for this rank's part of every tensor."""


class HostStaging:
    """Buffers on the host for what this rank holds: as much memory again as the state takes, from the first copy on.

    They are pinned where the state lies on a CUDA device, and the copies then run on its current stream, ahead of
    whatever changes the state next.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copy_done: torch.cuda.Event | None = None

    def start_copy(self, tensors: Mapping[str, Tensor]) -> LocalTensorsGetter:
        """Copies, over the copies of before. What is returned waits for them, or raises what went wrong already."""
        try:
            staged = self._copy(tensors)
        except RuntimeError as error:  # No memory, mostly.
            failure = error

            def fail() -> NoReturn:
                raise failure

            return fail

        def wait_for_copy() -> dict[str, Tensor]:
            self._wait()
            return staged

        return wait_for_copy

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shards = {name: to_local(tensor.detach()) for name, tensor in tensors.items()}
        on_device = [shard for shard in shards.values() if shard.device.type == "cuda"]
        for name, part in shards.items():
            self._buffer(name, part).copy_(part, non_blocking=True)
        self._copy_done = torch.cuda.current_stream(on_device[0].device).record_event() if on_device else None
        return {name: self._buffers[name] for name in shards}

    def _wait(self) -> None:
        if self._copy_done is not None:
            self._copy_done.synchronize()

    def _buffer(self, name: str, shard: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (shard.shape, shard.dtype):
            pinned = shard.device.type == "cuda"
            buffer = torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=pinned)
            self._buffers[name] = buffer
        return buffer


def without_staging(tensors: Mapping[str, Tensor]) -> LocalTensorsGetter:
    """The parts where they are, for a save that nothing changes them under."""
    return lambda: {name: to_local(tensor) for name, tensor in tensors.items()}


class StagedSavePlanner(DefaultSavePlanner):
    """Where a tensor stands among those of all ranks is asked of the state, what is written of the copy on the host."""

    def __init__(self, local_tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._local_tensors = local_tensors

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._local_tensors[index.fqn]
