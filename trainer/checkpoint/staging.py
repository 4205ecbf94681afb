"""Copies the state into reusable host buffers, so that training can change it while a save writes the copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from parallelisms.collectives import to_local

LocalTensorsGetter = Callable[[], Mapping[str, Tensor]]
"""Waits for the copies and returns this rank's shard of every tensor."""


class HostStaging:
    """Host buffers for this rank's shards, as large as the state, allocated by the first copy.

    For state on a CUDA device the buffers are pinned. The copies run on the current stream, so they precede the next
    change of the state.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copy_done: torch.cuda.Event | None = None

    def start_copy(self, tensors: Mapping[str, Tensor]) -> LocalTensorsGetter:
        """Starts to overwrite the buffers. The returned function raises the error if the copy could not start."""
        try:
            staged = self._copy(tensors)
        except RuntimeError as error:  # Usually out of memory. A failed save must not stop training.
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
        for name, shard in shards.items():
            self._buffer(name, shard).copy_(shard, non_blocking=True)
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
    """The shards themselves, without a copy, for a synchronous save."""
    return lambda: {name: to_local(tensor) for name, tensor in tensors.items()}


class StagedSavePlanner(DefaultSavePlanner):
    """Plans by the placement of the state's tensors and writes the data of their host copies."""

    def __init__(self, local_tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._local_tensors = local_tensors

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._local_tensors[index.fqn]
