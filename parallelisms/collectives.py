"""The only door to communication of tensors.

Nothing here is part of the graph that autograd differentiates: sums and maxima are of numbers about a step, and what
moves inside a model moves inside operators that have a backward of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

T = TypeVar("T")


def sum_over(group: ProcessGroup | None, x: Tensor) -> Tensor:
    """The sum of every rank's `x`, on every rank; `x` itself is overwritten with it. None means all ranks."""
    distributed.all_reduce(x, group=group)
    return x


def largest_over(group: ProcessGroup, x: Tensor) -> Tensor:
    """The largest of every rank's `x`, element by element, on every rank; `x` itself is overwritten with it."""
    distributed.all_reduce(x, distributed.ReduceOp.MAX, group=group)
    return x


def max_over(group: ProcessGroup | None, values: list[float]) -> list[float]:
    """The largest of every rank's values, one by one; waits for the slowest rank, through the host."""
    numbers = torch.tensor(values, dtype=torch.float64)
    distributed.all_reduce(numbers, distributed.ReduceOp.MAX, group=group)
    return numbers.tolist()


def gather_over(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Every rank's value, by rank; for what is compared once, at the start."""
    values: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)
    return values


def local(x: Tensor) -> Tensor:
    """What this rank holds of a sharded tensor (DTensor); a plain one as it is."""
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()


def copies(x: Tensor) -> int:
    """How many ranks hold the same part of a sharded tensor; a plain one is this rank's alone."""
    mesh = getattr(x, "device_mesh", None)
    if mesh is None:
        return 1
    placements = cast(Any, x).placements
    return prod(size for size, placement in zip(mesh.shape, placements, strict=True) if placement.is_replicate())


def whole(x: Tensor) -> Tensor:
    """A sharded or partial tensor (DTensor) as a plain one with its global value; a plain one as it is."""
    full = getattr(x, "full_tensor", None)
    return x if full is None else full()


# ---- inside operators


def named(group_name: str) -> ProcessGroup:
    """The group of that name: operators take names, since a graph cannot hold a group."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(cast(Any, group_name))


class Pending:
    """A tensor on its way. What is sent is kept alive while it is read, and no longer than until the wait."""

    def __init__(self, result: Tensor, sent: Tensor, works: Sequence[distributed.Work]) -> None:
        self._on_its_way = (result, sent, works)

    def wait(self) -> Tensor:
        """The tensor, once it is here. On CUDA the device's queue waits, not the host. To be called once."""
        result, _, works = self._on_its_way
        del self._on_its_way
        for work in works:
            work.wait()
        return result


def rotate(x: Tensor, group: ProcessGroup) -> Pending:
    """Starts to send `x` to the next rank and to receive as much from the one before, point to point."""
    _require_neighbours(group)
    sent, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    rank, size = group.rank(), group.size()
    send = distributed.P2POp(distributed.isend, sent, group=group, group_peer=(rank + 1) % size)
    receive = distributed.P2POp(distributed.irecv, received, group=group, group_peer=(rank - 1) % size)
    return Pending(received, sent, distributed.batch_isend_irecv([send, receive]))


def rotate_all_to_all(x: Tensor, group: ProcessGroup) -> Pending:
    """The same by one collective, in which every other pair of ranks exchanges nothing."""
    _require_neighbours(group)
    sent, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    rank, size = group.rank(), group.size()
    outgoing, incoming = ([0] * size for _ in range(2))
    outgoing[(rank + 1) % size] = incoming[(rank - 1) % size] = x.numel()
    work = distributed.all_to_all_single(
        received.view(-1), sent.view(-1), incoming, outgoing, group=group, async_op=True
    )
    return Pending(received, sent, (work,))


def gather(x: Tensor, group: ProcessGroup) -> Pending:
    """Starts to collect every rank's `x`: [ranks, *x.shape]."""
    sent = x.contiguous()
    everyone = x.new_empty(group.size(), *x.shape)
    work = _all_gather(everyone.view(-1), sent.view(-1), group=group, async_op=True)
    return Pending(everyone, sent, (work,))


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of every rank's `x[rank]`, x being [ranks, ...]."""
    mine = x.new_empty(x.shape[1:])
    _reduce_scatter(mine.view(-1), x.contiguous().view(-1), group=group)
    return mine


def send(x: Tensor, group: ProcessGroup, *, to: int) -> None:
    """To that rank of the group, which receives it."""
    distributed.send(x.contiguous(), group=group, group_dst=to)


def receive(group: ProcessGroup, *, like: Tensor, source: int) -> Tensor:
    """What that rank of the group sends, in the shape and type of `like`, into which it is written."""
    distributed.recv(like, group=group, group_src=source)
    return like


def exchange(x: Tensor, group: ProcessGroup) -> Pending:
    """Starts to collect every rank's `x[rank]` by rank, x being [ranks, ...]: all-to-all."""
    sent, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    work = distributed.all_to_all_single(received, sent, group=group, async_op=True)
    return Pending(received, sent, (work,))


# ---- between operators: what a compiler sees, and may overlap with matrix products


def gather_tokens(x_BSE: Tensor, group_name: str, size: int) -> Tensor:
    """Every rank's tokens in a row: [B, S, ...] -> [B, S * size, ...]."""
    functional = torch.ops._c10d_functional
    gathered = functional.wait_tensor(functional.all_gather_into_tensor(x_BSE.contiguous(), size, group_name))
    if x_BSE.shape[0] == 1 and not torch.compiler.is_compiling():
        return _one_row(gathered.flatten(0, 1))
    # In this form the compiler knows an exchange that it can overlap with the products that follow.
    return torch.cat(gathered.chunk(size), dim=1)


def scatter_tokens(x_BTE: Tensor, group_name: str, size: int) -> Tensor:
    """The sum of every rank's `x`, of this rank's tokens: [B, T, ...] -> [B, T / size, ...]."""
    functional = torch.ops._c10d_functional
    one_row = x_BTE.shape[0] == 1
    by_rank = x_BTE.reshape(-1, *x_BTE.shape[2:]) if one_row else torch.cat(x_BTE.chunk(size, dim=1))
    mine: Tensor = functional.wait_tensor(functional.reduce_scatter_tensor(by_rank, "sum", size, group_name))
    return _one_row(mine) if one_row else mine


def sum_of(x: Tensor, group_name: str) -> Tensor:
    """The sum of every rank's `x`, on every rank."""
    functional = torch.ops._c10d_functional
    total: Tensor = functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group_name))
    return total


def _one_row(x_TE: Tensor) -> Tensor:
    # Not a view, of which FSDP2 warns where a module that it wraps returns one.
    row: Tensor = torch.ops.aten._unsafe_view(x_TE, [1, *x_TE.shape])
    return row


def _require_neighbours(group: ProcessGroup) -> None:
    if group.size() < 2:
        raise ValueError("a ring of one rank has no neighbour to send to")


def _renamed(new: str, old: str) -> Callable[..., Any]:
    # torch 2.13 warns of the old names, 2.11 lacks the new ones.
    function: Callable[..., Any] = getattr(distributed, new, None) or getattr(distributed, old)
    return function


_all_gather = _renamed("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
