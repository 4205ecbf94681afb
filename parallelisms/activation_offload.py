"""Activation offload to pinned host memory, overlapped with compute.

    forward     block 0     block 1     block 2
    copies         0 out       1 out       2 out
    backward    block 2     block 1     block 0
    copies         1 in        0 in

Copies run on separate CUDA streams; the device waits for them, the host never does. On a CPU they
are synchronous.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from math import inf
from typing import Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from models.device_paths import runs_as_on_gpu

MAX_PENDING_OFFLOADS = 4
"""Device tensors that may wait for their copy to the host at a time."""
OFFLOAD_RANGE = "activation_offload"
"""The profiler range around allocating host memory and starting the copy to it."""

SavedKind = Literal["inputs", "attention"]
CopyPairs = list[tuple[Tensor, Tensor]]
"""(destination, source) byte tensors."""


class SavedTensor:
    """A tensor saved for backward: in host memory with a `pool`, else on its device."""

    def __init__(
        self, x: Tensor, pool: HostActivationPool | None = None, kind: SavedKind = "inputs"
    ) -> None:
        self._pool = pool
        self._kind = kind
        self._shape = x.shape
        self._dtype = x.dtype
        self._device = x.device
        self._device_tensor: Tensor | None = x if pool is None else None
        self._host_buffers: list[Tensor] = [] if pool is None else pool.offload(x, kind)

    def prefetch(self) -> None:
        """Starts the copy to the device, if the tensor is on the host."""
        if self._device_tensor is None and self._pool is not None and self._host_buffers:
            self._device_tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._pool.reload(self._host_buffers, self._device_tensor)

    def read(self) -> Tensor:
        """The tensor on its device; it stays saved."""
        self.prefetch()
        device_tensor = self._device_tensor
        if device_tensor is None:
            raise RuntimeError(
                "the saved activations of this block were already used by a backward pass"
            )
        if self._pool is not None:
            self._pool.wait()
            # Only the caller holds the device copy from here on, and so decides when it is freed.
            self._device_tensor = None
        return device_tensor

    def pop(self) -> Tensor:
        """The tensor on its device; it is no longer saved."""
        device_tensor = self.read()
        if self._pool is not None:
            self._pool.release(self._host_buffers, self._kind)
        self._device_tensor = None
        self._host_buffers = []
        return device_tensor


class HostActivationPool:
    """Host memory for the saved activations of this rank, at most `budget` bytes.

    Block inputs, at most `max_inputs` at a time, have priority; attention outputs use the rest. An
    input that does not fit stays on its device. An attention output that does not fit is
    recomputed, and so on all cp and tp ranks, whose tensors have the same size.
    """

    def __init__(self, *, max_inputs: int, budget: int | None = None) -> None:
        self.used_bytes: Counter[SavedKind] = Counter()
        """Bytes of saved tensors in host memory."""
        self.reserved_bytes = 0
        """Bytes of allocated host memory, free buffers included."""
        self._max_inputs = max_inputs
        self._budget_bytes = inf if budget is None else budget
        self._streams: OffloadStreams | None = None
        self._free_buffers: dict[int, list[Tensor]] = {}
        self._reserved_buffers: dict[int, deque[Future[Tensor]]] = {}

    def reserve_inputs(self, nbytes: int, device: torch.device) -> None:
        """Starts to allocate pinned memory for all block inputs, of `nbytes` each, in a thread.

        Pinning takes seconds for 64 GiB, in which weights load.
        """
        num_inputs = int(min(self._max_inputs, self._budget_bytes // allocated_size(nbytes)))
        # A thread begins on the first device, whatever that of the process is.
        thread = ThreadPoolExecutor(1, "pinned memory", torch.cuda.set_device, (device,))
        for size in buffer_sizes(nbytes) * num_inputs:
            reserved = self._reserved_buffers.setdefault(size, deque())
            reserved.append(thread.submit(_host_buffer, size, pinned=True))
        thread.shutdown(wait=False)

    def save_input(self, x: Tensor) -> SavedTensor:
        """Offloads a block input, or keeps it on its device beyond the budget."""
        fits = self.used_bytes["inputs"] + allocated_size(x.nbytes) <= self._budget_bytes
        return SavedTensor(x, self if fits else None)

    def has_headroom(self, outputs: Sequence[Tensor], *, head_groups: int, x: Tensor) -> bool:
        """Whether `head_groups` such outputs and `max_inputs` block inputs of the size of x fit in
        the budget.
        """
        input_bytes = self._max_inputs * allocated_size(x.nbytes)
        required_bytes = head_groups * sum(allocated_size(output.nbytes) for output in outputs)
        return self.used_bytes["attention"] + required_bytes <= self._budget_bytes - input_bytes

    def offload(self, x: Tensor, kind: SavedKind) -> list[Tensor]:
        """Starts the copy of x to host buffers and returns them."""
        on_device = runs_as_on_gpu(x)
        if on_device and self._streams is None:
            self._streams = OffloadStreams(x.device)
        with record_function(OFFLOAD_RANGE):
            buffers = [self._allocate(size, pinned=on_device) for size in buffer_sizes(x.nbytes)]
            self.used_bytes[kind] += sum(buffer.nbytes for buffer in buffers)
            copy = _copy if self._streams is None else self._streams.offload
            copy(_copy_pairs(buffers, x))
        return buffers

    def release(self, buffers: list[Tensor], kind: SavedKind) -> None:
        """Frees the buffers for the next tensor.

        They stay allocated: pinned memory is slow to allocate.
        """
        for buffer in buffers:
            self.used_bytes[kind] -= buffer.nbytes
            self._free_buffers.setdefault(buffer.nbytes, []).append(buffer)

    def release_offloaded(self) -> None:
        """Drops device tensors whose copy to the host is pending.

        The device waits for the copies, the host does not.
        """
        if self._streams is not None:
            self._streams.release_offloaded()

    def _allocate(self, size: int, *, pinned: bool) -> Tensor:
        if free_buffers := self._free_buffers.get(size):
            return free_buffers.pop()
        self.reserved_bytes += size
        if reserved := self._reserved_buffers.get(size):
            return reserved.popleft().result()
        return _host_buffer(size, pinned=pinned)

    def reload(self, buffers: list[Tensor], x: Tensor) -> None:
        copy = _copy if self._streams is None else self._streams.reload
        copy([(device_bytes, host_bytes) for host_bytes, device_bytes in _copy_pairs(buffers, x)])

    def wait(self) -> None:
        """Waits for the copies to the device: the device waits, the host does not."""
        if self._streams is not None:
            self._streams.wait()


class OffloadStreams:
    """Copies between a CUDA device and pinned host memory, on one stream per direction.

    A device tensor is held until its copy precedes all later work of the current stream, so that
    the allocator can reuse its memory: after a copy out, and if nobody reads what was copied in.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._offload_stream, self._reload_stream = (torch.cuda.Stream(device) for _ in range(2))
        self._pending_offloads: deque[tuple[torch.cuda.Event, CopyPairs]] = deque()
        self._pending_reloads: list[CopyPairs] = []

    def offload(self, pairs: CopyPairs) -> None:
        current = torch.cuda.current_stream(self._device)
        # Bounds the device memory of pending copies: the device waits for the oldest, whose tensor
        # may then be reused.
        if len(self._pending_offloads) == MAX_PENDING_OFFLOADS:
            oldest_copy, _ = self._pending_offloads.popleft()
            current.wait_event(oldest_copy)
        # The copy reads what the current stream computes.
        self._offload_stream.wait_stream(current)
        # It may still read the reused host buffers.
        self._offload_stream.wait_stream(self._reload_stream)
        with torch.cuda.stream(self._offload_stream):
            _copy(pairs)
        self._pending_offloads.append((self._offload_stream.record_event(), pairs))

    def reload(self, pairs: CopyPairs) -> None:
        # The device memory may still be in use, and the copy out must have ended.
        self._reload_stream.wait_stream(torch.cuda.current_stream(self._device))
        self._reload_stream.wait_stream(self._offload_stream)
        with torch.cuda.stream(self._reload_stream):
            _copy(pairs)
        self._pending_reloads.append(pairs)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._reload_stream)
        self._pending_reloads.clear()
        self.release_offloaded()

    def release_offloaded(self) -> None:
        current = torch.cuda.current_stream(self._device)
        while self._pending_offloads:
            current.wait_event(self._pending_offloads.popleft()[0])


def _host_buffer(size: int, *, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def buffer_sizes(size: int) -> list[int]:
    """Powers of two that sum to `size` bytes, or to at most a sixteenth more; largest first.

    PyTorch rounds every pinned allocation up to a power of two (1.1 GiB to 2 GiB).
    """
    sizes = []
    remaining = size
    while remaining > 0:
        buffer_size = 1 << (remaining.bit_length() - 1)
        # Powers of two below the rest would end in many small buffers: rounding up once wastes at
        # most a sixteenth of the tensor.
        if buffer_size < remaining and 16 * (2 * buffer_size - remaining) <= size:
            buffer_size *= 2
        sizes.append(buffer_size)
        remaining -= buffer_size
    return sizes


def allocated_size(size: int) -> int:
    return sum(buffer_sizes(size))


def _copy_pairs(buffers: list[Tensor], x: Tensor) -> CopyPairs:
    flat = x.reshape(-1).view(torch.uint8)
    slices = flat.tensor_split([*accumulate(buffer.nbytes for buffer in buffers)][:-1])
    return [
        (buffer[: device_slice.nbytes], device_slice)
        for buffer, device_slice in zip(buffers, slices, strict=True)
    ]


def _copy(pairs: CopyPairs) -> None:
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)
