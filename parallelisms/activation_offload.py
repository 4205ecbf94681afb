"""What blocks keep for their backward passes, in host memory: copied out while the next block runs, and back in time.

    forward     block 0     block 1     block 2
    copies         0 out       1 out       2 out
    backward    block 2     block 1     block 0
    copies         1 in        0 in

Copies have streams of their own, for which the device waits and the host does not. On a CPU the same code copies at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from math import inf
from typing import Literal

import torch
from torch import Tensor

OffloadTarget = Literal["none", "inputs", "inputs_and_attention"]

MAX_PENDING_OFFLOADS = 4
"""Tensors on their way out at a time, at most."""


SavedKind = Literal["inputs", "attention"]
CopyPairs = list[tuple[Tensor, Tensor]]
"""What is written, and what is read."""


class SavedTensor:
    """A tensor, on the host or, without memory there, where it is."""

    def __init__(self, x: Tensor, pool: HostActivationPool | None = None, kind: SavedKind = "inputs") -> None:
        self._pool, self._kind = pool, kind
        self._shape, self._dtype, self._device = x.shape, x.dtype, x.device
        self._device_tensor: Tensor | None = x if pool is None else None
        self._host_buffers: list[Tensor] = [] if pool is None else pool.offload(x, kind)

    def prefetch(self) -> None:
        """Lets it begin its way back to the device."""
        if self._device_tensor is None and self._pool is not None and self._host_buffers:
            self._device_tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._pool.reload(self._host_buffers, self._device_tensor)

    def read(self) -> Tensor:
        """The tensor, on its device; it stays kept."""
        self.prefetch()
        device_tensor = self._device_tensor
        if device_tensor is None:
            raise RuntimeError("what a block kept for its backward pass has been taken already")
        if self._pool is not None:
            self._pool.wait()
            self._device_tensor = None
        return device_tensor

    def pop(self) -> Tensor:
        """The tensor, on its device, and kept no longer."""
        device_tensor = self.read()
        if self._pool is not None:
            self._pool.release(self._host_buffers, self._kind)
        self._device_tensor, self._host_buffers = None, []
        return device_tensor


class HostActivationPool:
    """Keeps tensors of this rank, up to `budget` bytes.

    `inputs` of blocks are held at a time, at most, and come first: what attention gave has the room that they leave.
    An input that finds none stays on its device; attention is then computed again, on all ranks that share rows alike,
    since their tensors are.
    """

    def __init__(self, *, max_inputs: int, budget: int | None = None) -> None:
        self.used_bytes: Counter[SavedKind] = Counter()
        """Bytes in host memory."""
        self.reserved_bytes = 0
        """Bytes that were got for them, also those that wait for the next tensor."""
        self._max_inputs = max_inputs
        self._budget_bytes = inf if budget is None else budget
        self._streams: OffloadStreams | None = None
        self._free_buffers: dict[int, list[Tensor]] = {}

    def save_input(self, x: Tensor) -> SavedTensor:
        """A block's input."""
        return SavedTensor(
            x, self if self.used_bytes["inputs"] + allocated_size(x.nbytes) <= self._budget_bytes else None
        )

    def has_room(self, outputs: Sequence[Tensor], *, head_groups: int, x: Tensor) -> bool:
        """For so many times what attention gave, beside all inputs, which are like x."""
        required_bytes = head_groups * sum(allocated_size(output.nbytes) for output in outputs)
        return self.used_bytes["attention"] + required_bytes <= self._budget_bytes - self._max_inputs * allocated_size(
            x.nbytes
        )

    def offload(self, x: Tensor, kind: SavedKind) -> list[Tensor]:
        """Pieces of host memory with the bytes of x, or on their way to have them."""
        on_device = x.device.type != "cpu"
        if on_device and self._streams is None:
            self._streams = OffloadStreams(x.device)
        buffers = [self._allocate(size, pinned=on_device) for size in buffer_sizes(x.nbytes)]
        self.used_bytes[kind] += sum(buffer.nbytes for buffer in buffers)
        if self._streams is None:
            _copy(_copy_pairs(buffers, x))
        else:
            self._streams.offload(_copy_pairs(buffers, x))
        return buffers

    def release(self, buffers: list[Tensor], kind: SavedKind) -> None:
        """For the next tensor: pinned memory is slow to get, and stays within the budget only if it is used again."""
        for buffer in buffers:
            self.used_bytes[kind] -= buffer.nbytes
            self._free_buffers.setdefault(buffer.nbytes, []).append(buffer)

    def release_offloaded(self) -> None:
        """Lets go of what has left for the host: the device waits for the copies, the host does not."""
        if self._streams is not None:
            self._streams.release_offloaded()

    def _allocate(self, size: int, *, pinned: bool) -> Tensor:
        if free_buffers := self._free_buffers.get(size):
            return free_buffers.pop()
        self.reserved_bytes += size
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def reload(self, buffers: list[Tensor], x: Tensor) -> None:
        pairs = [(device_bytes, host_bytes) for host_bytes, device_bytes in _copy_pairs(buffers, x)]
        _copy(pairs) if self._streams is None else self._streams.reload(pairs)

    def wait(self) -> None:
        """Until what was copied back is here: the device waits, the host does not."""
        if self._streams is not None:
            self._streams.wait()


class OffloadStreams:
    """Copies between a CUDA device and pinned memory, each way on a stream of its own.

    What leaves is held until the device, not the host, has waited for the copy: its memory may then be used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._offload_stream, self._reload_stream = (torch.cuda.Stream(device) for _ in range(2))
        self._pending_offloads: deque[tuple[torch.cuda.Event, CopyPairs]] = deque()

    def offload(self, pairs: CopyPairs) -> None:
        current = torch.cuda.current_stream(self._device)
        if len(self._pending_offloads) == MAX_PENDING_OFFLOADS:
            oldest_copy, _ = self._pending_offloads.popleft()
            current.wait_event(oldest_copy)
        self._offload_stream.wait_stream(current)
        self._offload_stream.wait_stream(self._reload_stream)  # Which may still read what this is written over.
        with torch.cuda.stream(self._offload_stream):
            _copy(pairs)
        self._pending_offloads.append((self._offload_stream.record_event(), pairs))

    def reload(self, pairs: CopyPairs) -> None:
        # The memory that it goes to was used before, and what was copied out has to be there.
        self._reload_stream.wait_stream(torch.cuda.current_stream(self._device))
        self._reload_stream.wait_stream(self._offload_stream)
        with torch.cuda.stream(self._reload_stream):
            _copy(pairs)

    def wait(self) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._reload_stream)
        self.release_offloaded()

    def release_offloaded(self) -> None:
        current = torch.cuda.current_stream(self._device)
        while self._pending_offloads:
            current.wait_event(self._pending_offloads.popleft()[0])


def buffer_sizes(size: int) -> list[int]:
    """Powers of two that sum up to so many bytes, or at most a sixteenth more, largest first.

    PyTorch rounds every piece of pinned memory up to a power of two, 1.1 GiB to 2.
    """
    sizes, remaining = [], size
    while remaining > 0:
        buffer_size = 1 << (remaining.bit_length() - 1)
        if buffer_size < remaining and 16 * (2 * buffer_size - remaining) <= size:
            buffer_size *= 2
        sizes.append(buffer_size)
        remaining -= buffer_size
    return sizes


def allocated_size(size: int) -> int:
    return sum(buffer_sizes(size))


def _copy_pairs(buffers: list[Tensor], x: Tensor) -> CopyPairs:
    flat = x.reshape(-1).view(torch.uint8)
    pairs, start = [], 0
    for buffer in buffers:
        device_slice = flat[start : start + buffer.nbytes]
        pairs.append((buffer[: device_slice.nbytes], device_slice))
        start += buffer.nbytes
    return pairs


def _copy(pairs: CopyPairs) -> None:
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)
