"""All tensor communication goes through this module.

No collective here is differentiable: metrics need no gradient, and inside the model custom
operators and autograd functions call collectives in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from secrets import token_hex
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from parallelisms.mesh.values import (
    MAX_VALUE_BYTES,
    ValueExchangeError,
    ValueSeal,
    decode,
    encode,
)

T = TypeVar("T")

MAX_VALUES_BYTES = 1 << 30
"""Largest sum of the values of all ranks, each padded to the longest."""
_seal: ValueSeal | None = None
"""Authenticates the values of this process' ranks; None: values are believed."""


def all_reduce(group: ProcessGroup | None, x: Tensor) -> Tensor:
    """Sums `x` over the ranks in place and returns it. None means all ranks."""
    if distributed.get_world_size(group) > 1:
        distributed.all_reduce(x, group=group)
    return x


def all_reduce_max(group: ProcessGroup | None, x: Tensor) -> Tensor:
    """Elementwise maximum of `x` over the ranks, in place; returns `x`. None means all ranks."""
    if distributed.get_world_size(group) > 1:
        distributed.all_reduce(x, distributed.ReduceOp.MAX, group=group)
    return x


def max_over_ranks(group: ProcessGroup | None, values: list[float]) -> list[float]:
    """Elementwise maximum of host values. Blocks the host until the slowest rank joins."""
    # float64 holds Python's floats exactly.
    return all_reduce_max(group, torch.tensor(values, dtype=torch.float64)).tolist()


def broadcast(x: Tensor, group: ProcessGroup) -> Tensor:
    """Rank 0's values of `x`, in place; returns `x`, which is contiguous."""
    if group.size() > 1:
        distributed.broadcast(x, group=group, group_src=0)
    return x


def scatter(buffer: Tensor, parts: list[Tensor] | None, group: ProcessGroup) -> Tensor:
    """Fills `buffer` with this rank's part of rank 0's `parts`, which is None on the other ranks;
    returns `buffer`.
    """
    if group.size() > 1:
        distributed.scatter(buffer, parts, group=group, group_src=0)
    elif parts is not None:
        buffer.copy_(parts[0])
    return buffer


def to_local(x: Tensor) -> Tensor:
    """The local shard of a DTensor; a plain tensor unchanged.

    Without gradients it takes the host little time.
    """
    convert = getattr(x, "to_local", None)
    return x if convert is None else convert()


def num_replicas(x: Tensor) -> int:
    """Number of ranks that hold the same shard of a DTensor; 1 for a plain tensor."""
    mesh = getattr(x, "device_mesh", None)
    if mesh is None:
        return 1
    placements = cast(Any, x).placements
    return prod(
        size
        for size, placement in zip(mesh.shape, placements, strict=True)
        if placement.is_replicate()
    )


def full_tensor(x: Tensor) -> Tensor:
    """The global value of a DTensor; a plain tensor unchanged."""
    full = getattr(x, "full_tensor", None)
    return x if full is None else full()


# ---- values


def authenticate_values(secret: bytes) -> None:
    """From here on, values of ranks that do not know `secret` are refused; empty: none are.

    Each rank adds a random number to the secret, so values of an earlier launch do not fit.
    Collective.
    """
    global _seal
    _seal = None
    if secret:
        _seal = ValueSeal(secret, all_gather_values(token_hex(16)))


def all_gather_values(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Every rank's value, by rank. Values travel as JSON: a pickle would run code of whoever
    reached the group.

    A value is None, a bool, int, float or str, or a list of values, or a dict of values by str.
    Blocks the host. Raises TypeError on the rank whose value is another one, and
    `ValueExchangeError`.
    """
    content = encode(value)
    size = distributed.get_world_size(group)
    if size == 1:
        return [value]
    # Lengths first: an all-gather needs equal ones, so contents are padded to the longest.
    purpose = _next_purpose(group)
    lengths, padded = _pad_to_longest(_sealed(content, purpose, group), group)
    gathered = padded.new_empty(size, padded.numel())
    _all_gather_single(gathered.view(-1), padded, group=group)
    return [
        _opened(row, length, purpose, rank)
        for rank, (row, length) in enumerate(zip(gathered.cpu(), lengths, strict=True))
    ]


def gather_values(value: T, group: ProcessGroup) -> list[T]:
    """On rank 0 every rank's value, by rank; on the others an empty list.

    Else as `all_gather_values`.
    """
    content = encode(value)
    if group.size() == 1:
        return [value]
    purpose = _next_purpose(group)
    lengths, padded = _pad_to_longest(_sealed(content, purpose, group), group)
    gathered = [torch.empty_like(padded) for _ in lengths] if group.rank() == 0 else []
    distributed.gather(padded, gathered or None, group=group, group_dst=0)
    return [
        _opened(row.cpu(), length, purpose, rank)
        for rank, (row, length) in enumerate(zip(gathered, lengths, strict=False))
    ]


def _next_purpose(group: ProcessGroup | None) -> str:
    """Names the group's next exchange of values."""
    named = distributed.group.WORLD if group is None else group
    return _seal.next_purpose(named.group_name) if _seal and named is not None else ""


def _sealed(content: bytes, purpose: str, group: ProcessGroup | None) -> bytes:
    return _seal.seal(content, purpose, distributed.get_rank(group)) if _seal else content


def _opened(row: Tensor, length: int, purpose: str, rank: int) -> Any:
    """The value of a rank. Raises `ValueExchangeError`."""
    sealed = row[:length].numpy().tobytes()
    return decode(_seal.open(sealed, purpose, rank) if _seal else sealed, rank)


def _pad_to_longest(content: bytes, group: ProcessGroup | None) -> tuple[list[int], Tensor]:
    """The bytes of every rank's content, and this rank's, padded to the most. Collective."""
    device = _device_of(group)
    size = distributed.get_world_size(group)
    gathered = torch.empty(size, dtype=torch.int64, device=device)
    _all_gather_single(gathered, torch.tensor([len(content)], device=device), group=group)
    lengths: list[int] = gathered.tolist()
    # All ranks check the same lengths, so all of them raise, or none.
    for rank, length in enumerate(lengths):
        if not 0 < length <= MAX_VALUE_BYTES:
            raise ValueExchangeError(
                f"rank {rank} sends a value of {length:,} bytes; allowed are 1 to {MAX_VALUE_BYTES:,}"
            )
    longest = max(lengths)
    if longest * size > MAX_VALUES_BYTES:
        raise ValueExchangeError(
            f"{size:,} ranks send values of up to {longest:,} bytes; allowed are {MAX_VALUES_BYTES:,} for all of them"
        )
    padded = torch.zeros(longest, dtype=torch.uint8)
    # `frombuffer` warns about memory that it may not write to, such as bytes.
    padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return lengths, padded.to(device)


def _device_of(group: ProcessGroup | None) -> torch.device:
    """The host where the group reaches it, else this rank's GPU."""
    backends = distributed.get_backend_config(group)
    on_host = any(part.startswith("cpu:") for part in backends.split(","))
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())


# ---- called inside operators


def resolve_process_group(group_name: str) -> ProcessGroup:
    """The process group of a name: operators take names, since a graph cannot hold a group."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(cast(Any, group_name))


class AsyncHandle:
    """The result of a collective in flight. Keeps the send buffer alive until `wait`."""

    def __init__(
        self, result: Tensor, send_buffer: Tensor, works: Sequence[distributed.Work]
    ) -> None:
        self._in_flight = (result, send_buffer, works)

    @property
    def result(self) -> Tensor:
        """The tensor that `wait` returns, before it has arrived."""
        return self._in_flight[0]

    def wait(self) -> Tensor:
        """The received tensor. On CUDA the current stream waits, not the host. Call once."""
        result, _, works = self._in_flight
        del self._in_flight
        for work in works:
            work.wait()
        return result


def ring_shift(x: Tensor, group: ProcessGroup) -> AsyncHandle:
    """Starts send-recv around the ring: `x` goes to the next rank, the result comes from the
    previous one.
    """
    send_buffer, receive_buffer, to, source = _ring_buffers(x, group)
    # In one batch: as calls of their own, every rank's send could wait for a receive that comes
    # after it.
    send = distributed.P2POp(distributed.isend, send_buffer, group=group, group_peer=to)
    receive = distributed.P2POp(distributed.irecv, receive_buffer, group=group, group_peer=source)
    return AsyncHandle(receive_buffer, send_buffer, distributed.batch_isend_irecv([send, receive]))


def ring_shift_all_to_all(x: Tensor, group: ProcessGroup) -> AsyncHandle:
    """`ring_shift` as one all-to-all in which other pairs of ranks exchange nothing."""
    send_buffer, receive_buffer, to, source = _ring_buffers(x, group)
    send_counts, receive_counts = ([0] * group.size() for _ in range(2))
    send_counts[to] = receive_counts[source] = x.numel()
    work = distributed.all_to_all_single(
        receive_buffer.view(-1),
        send_buffer.view(-1),
        receive_counts,
        send_counts,
        group=group,
        async_op=True,
    )
    return AsyncHandle(receive_buffer, send_buffer, (work,))


def _ring_buffers(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, int, int]:
    """Send buffer, receive buffer, and the ranks to send to and to receive from."""
    if group.size() < 2:
        raise ValueError("a ring shift needs at least 2 ranks")
    rank = group.rank()
    size = group.size()
    receive_buffer = torch.empty_like(x, memory_format=torch.contiguous_format)
    return x.contiguous(), receive_buffer, (rank + 1) % size, (rank - 1) % size


def all_gather_async(x: Tensor, group: ProcessGroup) -> AsyncHandle:
    """Starts an all-gather of `x`: [ranks, *x.shape]."""
    send_buffer = x.contiguous()
    gathered = x.new_empty(group.size(), *x.shape)
    work = _all_gather_single(gathered.view(-1), send_buffer.view(-1), group=group, async_op=True)
    return AsyncHandle(gathered, send_buffer, (work,))


def reduce_scatter_async(x: Tensor, group: ProcessGroup) -> AsyncHandle:
    """Starts to sum `x[rank]` over the ranks: [ranks, ...] -> [...]."""
    send_buffer = x.contiguous()
    output = x.new_empty(x.shape[1:])
    work = _reduce_scatter_single(
        output.view(-1), send_buffer.view(-1), group=group, async_op=True
    )
    return AsyncHandle(output, send_buffer, (work,))


def send(x: Tensor, group: ProcessGroup, *, to: int) -> None:
    """Sends `x` to rank `to` of the group, which must call `receive`."""
    distributed.send(x.contiguous(), group=group, group_dst=to)


def receive(group: ProcessGroup, *, buffer: Tensor, source: int) -> Tensor:
    """Receives into `buffer` from rank `source` of the group; returns `buffer`."""
    distributed.recv(buffer, group=group, group_src=source)
    return buffer


def send_async(x: Tensor, group: ProcessGroup, *, to: int) -> AsyncHandle:
    """Starts to send `x` to rank `to` of the group, which must call `receive_async`."""
    send_buffer = x.contiguous()
    work = distributed.isend(send_buffer, group=group, group_dst=to)
    return AsyncHandle(send_buffer, send_buffer, [work] if work is not None else [])


def receive_async(group: ProcessGroup, *, buffer: Tensor, source: int) -> AsyncHandle:
    """Starts to receive into `buffer` from rank `source` of the group."""
    work = distributed.irecv(buffer, group=group, group_src=source)
    return AsyncHandle(buffer, buffer, [work] if work is not None else [])


def all_to_all_async(x: Tensor, group: ProcessGroup) -> AsyncHandle:
    """Starts an all-to-all of `x`, [ranks, ...]: `x[i]` goes to rank i."""
    send_buffer = x.contiguous()
    receive_buffer = torch.empty_like(x, memory_format=torch.contiguous_format)
    work = distributed.all_to_all_single(receive_buffer, send_buffer, group=group, async_op=True)
    return AsyncHandle(receive_buffer, send_buffer, (work,))


def all_to_all_tokens_async(
    group: ProcessGroup, x: Tensor, send_counts: list[int], receive_counts: list[int]
) -> AsyncHandle:
    """Starts an all-to-all of unequal parts of dimension 0: the first `send_counts[0]` tokens go
    to rank 0, and so on.
    """
    send_buffer = x.contiguous()
    receive_buffer = x.new_empty(sum(receive_counts), *x.shape[1:])
    work = distributed.all_to_all_single(
        receive_buffer, send_buffer, receive_counts, send_counts, group=group, async_op=True
    )
    return AsyncHandle(receive_buffer, send_buffer, (work,))


# ---- functional collectives, visible to the compiler, which may overlap them with matrix products


def all_gather_tokens(x_BSE: Tensor, group_name: str, size: int) -> Tensor:
    """Concatenates the tokens of all ranks: [B, S, ...] -> [B, S * size, ...]."""
    functional = torch.ops._c10d_functional
    gathered = functional.wait_tensor(
        functional.all_gather_into_tensor(x_BSE.contiguous(), size, group_name)
    )
    # With one sequence, the order by rank is that of tokens: nothing need be moved.
    if x_BSE.shape[0] == 1 and not torch.compiler.is_compiling():
        return _add_batch_dim(gathered.flatten(0, 1))
    # The pattern that async TP of the compiler recognizes.
    return torch.cat(gathered.chunk(size), dim=1)


def reduce_scatter_tokens(x_BTE: Tensor, group_name: str, size: int) -> Tensor:
    """Sums over the ranks and keeps this rank's tokens: [B, T, ...] -> [B, T / size, ...]."""
    functional = torch.ops._c10d_functional
    # With one sequence, the order by rank is that of tokens: nothing need be moved.
    is_single_sequence = x_BTE.shape[0] == 1
    by_rank = (
        x_BTE.reshape(-1, *x_BTE.shape[2:])
        if is_single_sequence
        else torch.cat(x_BTE.chunk(size, dim=1))
    )
    output: Tensor = functional.wait_tensor(
        functional.reduce_scatter_tensor(by_rank, "sum", size, group_name)
    )
    return _add_batch_dim(output) if is_single_sequence else output


def all_reduce_functional(x: Tensor, group_name: str) -> Tensor:
    functional = torch.ops._c10d_functional
    reduced: Tensor = functional.wait_tensor(
        functional.all_reduce(x.contiguous(), "sum", group_name)
    )
    return reduced


def _add_batch_dim(x_TE: Tensor) -> Tensor:
    # Not a view: FSDP2 warns if a wrapped module returns one.
    batched: Tensor = torch.ops.aten._unsafe_view(x_TE, [1, *x_TE.shape])
    return batched


def _first_available(new: str, old: str) -> Callable[..., Any]:
    # torch 2.13 deprecates the old names, 2.11 lacks the new ones.
    function: Callable[..., Any] = getattr(distributed, new, None) or getattr(distributed, old)
    return function


_all_gather_single = _first_available("all_gather_single", "all_gather_into_tensor")
_reduce_scatter_single = _first_available("reduce_scatter_single", "reduce_scatter_tensor")
