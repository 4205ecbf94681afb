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

What = Literal["none", "inputs", "inputs_and_attention"]

LEAVING = 4
"""Tensors on their way out at a time, at most."""


Kind = Literal["inputs", "attention"]
Pairs = list[tuple[Tensor, Tensor]]
"""What is written, and what is read."""


class Kept:
    """A tensor, on the host or, without memory there, where it is."""

    def __init__(self, x: Tensor, memory: HostMemory | None = None, kind: Kind = "inputs") -> None:
        self._memory, self._kind = memory, kind
        self._shape, self._dtype, self._device = x.shape, x.dtype, x.device
        self._here: Tensor | None = x if memory is None else None
        self._host: list[Tensor] = [] if memory is None else memory.copy_out(x, kind)

    def start(self) -> None:
        """Lets it begin its way back to the device."""
        if self._here is None and self._memory is not None and self._host:
            self._here = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._memory.copy_back(self._host, self._here)

    def read(self) -> Tensor:
        """The tensor, on its device; it stays kept."""
        self.start()
        here = self._here
        if here is None:
            raise RuntimeError("what a block kept for its backward pass has been taken already")
        if self._memory is not None:
            self._memory.wait()
            self._here = None
        return here

    def take(self) -> Tensor:
        """The tensor, on its device, and kept no longer."""
        here = self.read()
        if self._memory is not None:
            self._memory.give_back(self._host, self._kind)
        self._here, self._host = None, []
        return here


class HostMemory:
    """Keeps tensors of this rank, up to `budget` bytes.

    `inputs` of blocks are held at a time, at most, and come first: what attention gave has the room that they leave.
    An input that finds none stays on its device; attention is then computed again, on all ranks that share rows alike,
    since their tensors are.
    """

    def __init__(self, *, inputs: int, budget: int | None = None) -> None:
        self.held: Counter[Kind] = Counter()
        """Bytes in host memory."""
        self.reserved = 0
        """Bytes that were got for them, also those that wait for the next tensor."""
        self._inputs = inputs
        self._budget = inf if budget is None else budget
        self._copies: Copies | None = None
        self._free: dict[int, list[Tensor]] = {}

    def keep_input(self, x: Tensor) -> Kept:
        """A block's input."""
        return Kept(x, self if self.held["inputs"] + rounded(x.nbytes) <= self._budget else None)

    def has_room(self, outputs: Sequence[Tensor], *, times: int, x: Tensor) -> bool:
        """For so many times what attention gave, beside all inputs, which are like x."""
        wanted = times * sum(rounded(output.nbytes) for output in outputs)
        return self.held["attention"] + wanted <= self._budget - self._inputs * rounded(x.nbytes)

    def copy_out(self, x: Tensor, kind: Kind) -> list[Tensor]:
        """Pieces of host memory with the bytes of x, or on their way to have them."""
        on_device = x.device.type != "cpu"
        if on_device and self._copies is None:
            self._copies = Copies(x.device)
        host = [self._piece(size, pinned=on_device) for size in pieces(x.nbytes)]
        self.held[kind] += sum(piece.nbytes for piece in host)
        if self._copies is None:
            _copy(_paired(host, x))
        else:
            self._copies.out(_paired(host, x))
        return host

    def give_back(self, host: list[Tensor], kind: Kind) -> None:
        """For the next tensor: pinned memory is slow to get, and stays within the budget only if it is used again."""
        for piece in host:
            self.held[kind] -= piece.nbytes
            self._free.setdefault(piece.nbytes, []).append(piece)

    def settle(self) -> None:
        """Lets go of what has left for the host: the device waits for the copies, the host does not."""
        if self._copies is not None:
            self._copies.settle()

    def _piece(self, size: int, *, pinned: bool) -> Tensor:
        if free := self._free.get(size):
            return free.pop()
        self.reserved += size
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def copy_back(self, host: list[Tensor], x: Tensor) -> None:
        pairs = [(here, there) for there, here in _paired(host, x)]
        _copy(pairs) if self._copies is None else self._copies.back(pairs)

    def wait(self) -> None:
        """Until what was copied back is here: the device waits, the host does not."""
        if self._copies is not None:
            self._copies.wait()


class Copies:
    """Copies between a CUDA device and pinned memory, each way on a stream of its own.

    What leaves is held until the device, not the host, has waited for the copy: its memory may then be used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = (torch.cuda.Stream(device) for _ in range(2))
        self._leaving: deque[tuple[torch.cuda.Event, Pairs]] = deque()

    def out(self, pairs: Pairs) -> None:
        current = torch.cuda.current_stream(self._device)
        if len(self._leaving) == LEAVING:
            gone, _ = self._leaving.popleft()
            current.wait_event(gone)
        self._out.wait_stream(current)
        self._out.wait_stream(self._in)  # Which may still read what this is written over.
        with torch.cuda.stream(self._out):
            _copy(pairs)
        self._leaving.append((self._out.record_event(), pairs))

    def back(self, pairs: Pairs) -> None:
        # The memory that it goes to was used before, and what was copied out has to be there.
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        self._in.wait_stream(self._out)
        with torch.cuda.stream(self._in):
            _copy(pairs)

    def wait(self) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._in)
        self.settle()

    def settle(self) -> None:
        current = torch.cuda.current_stream(self._device)
        while self._leaving:
            current.wait_event(self._leaving.popleft()[0])


def pieces(size: int) -> list[int]:
    """Powers of two that sum up to so many bytes, or at most a sixteenth more, largest first.

    PyTorch rounds every piece of pinned memory up to a power of two, 1.1 GiB to 2.
    """
    found, rest = [], size
    while rest > 0:
        piece = 1 << (rest.bit_length() - 1)
        if piece < rest and 16 * (2 * piece - rest) <= size:
            piece *= 2
        found.append(piece)
        rest -= piece
    return found


def rounded(size: int) -> int:
    return sum(pieces(size))


def _paired(host: list[Tensor], x: Tensor) -> Pairs:
    flat = x.reshape(-1).view(torch.uint8)
    pairs, start = [], 0
    for piece in host:
        part = flat[start : start + piece.nbytes]
        pairs.append((piece[: part.nbytes], part))
        start += piece.nbytes
    return pairs


def _copy(pairs: Pairs) -> None:
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
