"""What blocks keep for their backward passes, in host memory: copied out while the next block runs, and back in time.

    forward     block 0     block 1     block 2
    copies         0 out       1 out       2 out
    backward    block 2     block 1     block 0
    copies         1 in        0 in

A block runs as activation checkpointing runs it, but its input, and attention's output and log-sum-exp, are not held on
the device: they are fetched when the backward pass comes to the block, and attention is not computed again. Copies have
streams of their own, for which the device waits and the host does not. On a CPU the same code copies at once.

Shape suffixes: B rows, S tokens of this rank, E width of the residual stream, F rotary frequencies, D document starts
and the row's end.
"""

from __future__ import annotations

from math import inf
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from models.transformer import Layer, Transformer
from parallelisms.recompute import is_attention

What = Literal["none", "inputs", "inputs_and_attention"]

AHEAD = 4
"""Tensors on their way back at a time: those of one block, and the input of the next."""


def apply(model: Transformer, *, host: HostMemory, what: What, keep_attention: bool) -> None:
    """Lets every block keep its input in host memory, with `inputs_and_attention` also what attention gave.

    `keep_attention` keeps that on the device otherwise; without either, attention is computed again.
    """
    if what == "none":
        return
    attention: Literal["device", "host"] | None = "host" if what == "inputs_and_attention" else None
    if what == "inputs" and keep_attention:
        attention = "device"
    for block in model.layers():
        block.policy = Keeping(host, attention=attention)


class Kept:
    """A tensor, held in host memory or, where there was no room, where it is."""

    def __init__(self, x: Tensor, host: Tensor | None, copies: Copies | None) -> None:
        self._device = x.device
        self._copies = copies
        self.host = host
        self._here = x if host is None else None
        if host is not None:
            host.copy_(x) if copies is None else copies.out(host, x)

    def start(self) -> None:
        """Starts the way back to the device."""
        if self._here is None and self.host is not None:
            self._here = self.host.clone() if self._copies is None else self._copies.back(self.host, self._device)

    def take(self) -> Tensor:
        """The tensor, on its device again. To be called once."""
        self.start()
        x, self._here = self._here, None
        if x is None:
            raise RuntimeError("what a block kept for its backward pass has been taken already")
        if self._copies is not None and self.host is not None:
            self._copies.wait(x)
        self.host = None
        return x

    @property
    def nbytes(self) -> int:
        """In host memory."""
        return 0 if self.host is None else self.host.nbytes


class Copies:
    """Copies between a CUDA device and pinned memory, each way on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._out, self._in = (torch.cuda.Stream(device) for _ in range(2))

    def out(self, host: Tensor, x: Tensor) -> None:
        self._out.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._out):
            host.copy_(x, non_blocking=True)
        x.record_stream(self._out)

    def back(self, host: Tensor, device: torch.device) -> Tensor:
        self._in.wait_stream(self._out)
        with torch.cuda.stream(self._in):
            return host.to(device, non_blocking=True)

    def wait(self, x: Tensor) -> None:
        current = torch.cuda.current_stream(x.device)
        current.wait_stream(self._in)
        x.record_stream(current)


class HostMemory:
    """Keeps tensors of this rank, up to `budget` bytes. What was kept last is fetched first.

    `inputs` of blocks are held at a time, at most, and come first: what attention gave has the room that they leave.
    An input that finds none stays on its device; attention is then computed again, on all ranks that share rows alike,
    since their tensors are.
    """

    def __init__(self, *, inputs: int, budget: int | None = None) -> None:
        self.held = 0
        """Bytes in host memory."""
        self._inputs = inputs
        self._budget = inf if budget is None else budget
        self._of_attention = 0
        self._copies: Copies | None = None
        self._kept: list[Kept] = []

    def keep(self, x: Tensor) -> Kept:
        """A block's input."""
        return self._keep(x, has_room=self.held + x.nbytes <= self._budget)

    def keep_attention(self, outputs: tuple[Tensor, ...], *, x: Tensor) -> tuple[Kept, ...]:
        """What attention gave in the block of this input; nothing if there is no room."""
        wanted = sum(output.nbytes for output in outputs)
        if self._of_attention + wanted > self._budget - self._inputs * x.nbytes:
            return ()
        self._of_attention += wanted
        return tuple(self._keep(output, has_room=True) for output in outputs)

    def take(self, kept: Kept) -> Tensor:
        nbytes = kept.nbytes
        x = kept.take()
        self._kept.remove(kept)
        self.held -= nbytes
        if not self._kept:
            self._of_attention = 0
        for earlier in self._kept[-AHEAD:]:
            earlier.start()
        return x

    def _keep(self, x: Tensor, *, has_room: bool) -> Kept:
        host = None
        if has_room:
            on_device = x.device.type != "cpu"
            if on_device and self._copies is None:
                self._copies = Copies(x.device)
            host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=on_device)
            self.held += x.nbytes
        self._kept.append(Kept(x, host, self._copies))
        return self._kept[-1]


class Keeping:
    """The policy of a block: its input is kept by `host`, and the rest is computed again.

    `attention` says where what attention gave is kept: on its device, by the host, or (None) not at all.
    """

    def __init__(self, host: HostMemory, *, attention: Literal["device", "host"] | None) -> None:
        self._host = host
        self._attention = attention

    def __call__(self, layer: Layer, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return layer(x_BSE, rotation_2BS1F, boundaries_BD)
        kept = self._host.keep(x_BSE.detach())
        entering = [x_BSE]
        memory = Memory(self._host, x_BSE.detach(), self._attention)

        def run() -> Tensor:
            # The graph is that of the first run; the second one only makes again what that would have saved.
            x = entering.pop() if entering else self._host.take(kept).requires_grad_()
            return layer(x, rotation_2BS1F, boundaries_BD)

        out: Tensor = checkpoint(
            run, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (Remember(memory), Recall(memory))
        )
        return out


class Memory:
    """What attention gave in one block, between its two runs."""

    def __init__(self, host: HostMemory, x_BSE: Tensor, where: Literal["device", "host"] | None) -> None:
        self._host, self._where = host, where
        self._x: Tensor | None = x_BSE
        self._kept: tuple[Kept, ...] = ()
        self._here: tuple[Tensor, ...] = ()

    def remember(self, outputs: tuple[Tensor, ...]) -> None:
        if self._x is None:
            raise RuntimeError("a block attends once; what was kept of it would be lost")
        if self._where == "host":
            self._kept = self._host.keep_attention(outputs, x=self._x)
        elif self._where == "device":
            self._here = outputs
        self._x = None

    def recall(self) -> tuple[Tensor, ...] | None:
        """The same, or None if it is to be computed again. To be called once."""
        # The last to be kept is the first on its way back.
        here = self._here or tuple(self._host.take(kept) for kept in reversed(self._kept))[::-1]
        self._here = self._kept = ()
        return here or None


class Remember(TorchDispatchMode):
    """Keeps what attention gives."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        outputs = function(*arguments, **(options or {}))
        if is_attention(function):
            self.memory.remember(outputs)
        return outputs


class Recall(Remember):
    """Gives what was kept instead of computing it again."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if is_attention(function) and (outputs := self.memory.recall()) is not None:
            return outputs
        return function(*arguments, **(options or {}))
