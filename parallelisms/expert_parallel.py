"""Expert parallelism (GShard, Lepikhin et al., 2020): each of `ep` ranks holds some of the
experts.

The ranks are those of dp_shard x cp, in groups of `ep` neighbours, so that expert parallelism
needs no ranks of its own. FSDP shards the experts over what remains. Tensor parallelism cuts
inside an expert:

    tokens of a rank --all-to-all over ep--> rows of its experts --gather over tp--> rows of all tp ranks, a part of each
    expert --reduce over tp--> rows --all-to-all over ep--> tokens

With sequence parallelism every tp rank sends its own tokens, so each goes over ep once; without it
all tp ranks have and send the same tokens.

Shape suffixes: N tokens of a tile on this rank, E model dim, X experts of this rank, K experts of
a token, R rows, S sources of rows, B blocks of rows of one source and expert, P ranks of ep, Q
ranks of tp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from models.dispatch import (
    Rows,
    linear_map,
    own_rows,
    select,
    sort_by_expert,
    to_places,
    to_rows,
    to_tokens,
)
from models.linear import set_local_view
from models.row_groups import RowGroups, RowPlaces, padded_ends, padded_shifts
from models.tiling import CompilePiece, eager
from models.transformer import Transformer
from parallelisms.mesh import collectives
from parallelisms.mesh.mesh import Mesh
from parallelisms.tensor_parallel import replicated_part


def apply(model: Transformer, mesh: Mesh, *, sequence_parallel: bool) -> None:
    """Shards the experts in place, and sets their dispatchers."""
    tp_group = mesh.tp_group
    ep_group = mesh.ep_group
    for block in model.transformer_blocks():
        for name, parameter in block.kind.parameters.items():
            prefix, _, attribute = name.rpartition(".")
            if parameter.per_expert and (tp_group is not None or ep_group is not None):
                is_partial = parameter.style == "replicate_partial" and tp_group is not None
                tp_dim = parameter.tp_dim(model.config.sizes, mesh.degrees["tp"])
                _distribute(
                    block.get_submodule(prefix),
                    attribute,
                    mesh,
                    tp_dim,
                    tp_group if is_partial else None,
                )
    for layer in model.expert_layers():
        layer.dispatcher = RankDispatcher(
            ep_group, tp_group, mesh.cp_groups, sequence_parallel=sequence_parallel
        )


def _distribute(
    module: nn.Module, name: str, mesh: Mesh, tp_dim: int | None, sum_group: ProcessGroup | None
) -> None:
    """Replaces a parameter of experts by a DTensor over ep and tp, of which this rank computes
    with its local shard.
    """
    from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

    placements: list[Placement] = [Shard(0)] if mesh.ep_group is not None else []
    if mesh.tp_group is not None:
        placements.append(Replicate() if tp_dim is None else Shard(tp_dim))
    # No source rank: each rank draws or loads its own shard, so nothing is broadcast.
    sharded = distribute_tensor(
        getattr(module, name), mesh.expert_mesh, placements, src_data_rank=None
    )
    setattr(module, name, nn.Parameter(sharded))
    view = (
        collectives.to_local
        if sum_group is None
        else partial(replicated_part, group_name=sum_group.group_name)
    )
    set_local_view(module, name, view)


class Route(NamedTuple):
    """Counts and places by which the rows of a tile travel."""

    ep_counts: tuple[list[int], list[int]]
    """Rows sent to, and received from, each ep rank."""
    tp_counts: list[int]
    """Rows of each tp rank, all of which every tp rank has after the gather."""
    arrived: RowPlaces
    """Places of the rows, which arrive by rank, among those of experts."""


class RankDispatcher:
    """The token dispatcher of a rank; a group of None is the rank by itself."""

    def __init__(
        self,
        ep_group: ProcessGroup | None,
        tp_group: ProcessGroup | None,
        cp_groups: Sequence[ProcessGroup],
        *,
        sequence_parallel: bool,
    ) -> None:
        self._ep_group = ep_group
        self._tp_group = tp_group
        self._cp_groups = cp_groups
        # With sequence parallelism tp ranks have different tokens, which they gather. Without it
        # all have the same ones, and each a part of their gradient.
        self._gather_group = tp_group if sequence_parallel else None
        self._copy_group = None if sequence_parallel else tp_group
        self.tp_rank = 0 if self._gather_group is None else self._gather_group.rank()
        self.tp_degree = 1 if tp_group is None else tp_group.size()

    # ---- counts

    def agree(self, num_tiles: int) -> int:
        groups = [group for group in (self._ep_group, self._gather_group) if group is not None]
        # One group after the other: the maximum over the second includes that over the first.
        for group in groups:
            num_tiles = int(collectives.max_over_ranks(group, [num_tiles])[0])
        return num_tiles

    def rows(
        self,
        experts_NK: Sequence[Tensor],
        num_experts: int,
        *,
        padded: bool,
        compiled: CompilePiece = eager,
    ) -> list[Rows]:
        if self._ep_group is None and self._gather_group is None:
            return own_rows(experts_NK, num_experts, padded=padded, compiled=compiled)
        ordered = [sort_by_expert(experts, num_experts, compiled) for experts in experts_NK]
        # [tiles, experts of all ranks]
        counts = torch.stack([counts_X for *_, counts_X in ordered])
        by_ep = (
            counts[None]
            if self._ep_group is None
            else collectives.all_gather_async(counts, self._ep_group).wait()
        )
        by_tp = (
            by_ep[None]
            if self._gather_group is None
            else collectives.all_gather_async(by_ep, self._gather_group).wait()
        )
        # One copy to the host for all tiles: each copy waits for the device.
        of_tiles = zip(ordered, by_tp.cpu().unbind(2), strict=True)
        return [self._route(rows, counts_QPX, padded=padded) for (rows, _), counts_QPX in of_tiles]

    def _route(self, rows: Rows, counts_QPX: Tensor, *, padded: bool) -> Rows:
        """Route of a tile from the rows of each tp and ep rank for each expert, on the host."""
        ep_rank, ep = (
            (0, 1) if self._ep_group is None else (self._ep_group.rank(), self._ep_group.size())
        )
        # [tp rank, ep rank that sends, ep rank that receives, its experts]
        by_owner_QPPX = counts_QPX.unflatten(2, (ep, -1))
        own_QPX = by_owner_QPPX[:, :, ep_rank]
        sent_P = by_owner_QPPX[self.tp_rank, ep_rank].sum(-1)
        received_P = own_QPX[self.tp_rank].sum(-1)
        arrived, groups = _places(own_QPX.flatten(0, 1), rows.place.device, padded=padded)
        route = Route(
            (sent_P.tolist(), received_P.tolist()), own_QPX.sum((1, 2)).tolist(), arrived
        )
        return rows._replace(groups=groups, route=route)

    # ---- tokens

    def dispatch(self, x_NE: Tensor, weight_NK: Tensor, rows: Rows) -> tuple[Any, Any]:
        x_RE, weight_R = to_rows(self._copy(x_NE), self._copy(weight_NK), rows)
        if rows.route is None:
            return x_RE, weight_R
        counts = rows.route.ep_counts
        return AllToAll(x_RE, self._ep_group, counts), AllToAll(weight_R, self._ep_group, counts)

    def wait(self, pending: tuple[Any, Any], rows: Rows) -> tuple[Tensor, Tensor]:
        if rows.route is None:
            return pending
        route: Route = rows.route
        x_RE, weight_R = (self._gather(each.wait(), route.tp_counts) for each in pending)
        source_P, place_R = route.arrived
        return select(x_RE, source_P, place_R), to_places(weight_R, place_R, len(source_P))

    def combine(self, out_PE: Tensor, rows: Rows, *, is_needed: bool) -> Tensor:
        out_RE = (
            out_PE if rows.route is None else self._return(out_PE, rows.route, is_needed=is_needed)
        )
        return self._sum_copies(to_tokens(out_RE, rows, is_needed=is_needed), is_needed=is_needed)

    def _return(self, out_PE: Tensor, route: Route, *, is_needed: bool) -> Tensor:
        """Returns rows to the ranks that sent their tokens: [R, E]."""
        source_P, place_R = route.arrived
        out_RE = select(out_PE, place_R, source_P, is_needed=is_needed)
        out_RE = self._reduce(out_RE, route.tp_counts, is_needed=is_needed)
        sent, received = route.ep_counts
        return AllToAll(out_RE, self._ep_group, (received, sent), is_needed=is_needed).wait()

    def shared(self, x_NE: Tensor, run: Callable[[Tensor], Tensor], *, is_needed: bool) -> Tensor:
        if self._gather_group is None:
            return self._sum_copies(run(self._copy(x_NE)), is_needed=is_needed)
        counts = [len(x_NE)] * self._gather_group.size()
        return self._reduce(run(self._gather(x_NE, counts)), counts, is_needed=is_needed)

    def sum_over_sequence(self, counts: Tensor) -> Tensor:
        for group in (
            *self._cp_groups,
            *([] if self._gather_group is None else [self._gather_group]),
        ):
            collectives.all_reduce(group, counts)
        return counts

    # ---- tensor parallelism

    def _copy(self, x: Tensor) -> Tensor:
        """Identity forward, all-reduce backward (Megatron's f): tp ranks have the same tokens, and
        each computes a part of their gradient.
        """
        if (group := self._copy_group) is None:
            return x
        return linear_map(x, lambda each: each, partial(_all_reduce, group=group))

    def _sum_copies(self, x: Tensor, *, is_needed: bool = True) -> Tensor:
        """All-reduce forward, identity backward (Megatron's g): sums the parts of the tp ranks."""
        if (group := self._copy_group) is None:
            return x
        return linear_map(
            x,
            partial(_all_reduce, group=group),
            lambda grad: grad,
            skipped=None if is_needed else len(x),
        )

    def _gather(self, x: Tensor, counts: list[int]) -> Tensor:
        """Concatenates the rows of the tp ranks."""
        if (group := self._gather_group) is None:
            return x
        return linear_map(
            x,
            partial(_gather_rows, group=group, counts=counts),
            partial(_reduce_rows, group=group, counts=counts),
        )

    def _reduce(self, x: Tensor, counts: list[int], *, is_needed: bool = True) -> Tensor:
        """Sums over the tp ranks, and keeps the rows of this one."""
        if (group := self._gather_group) is None:
            return x
        gather, reduce = (
            partial(each, group=group, counts=counts) for each in (_gather_rows, _reduce_rows)
        )
        return linear_map(x, reduce, gather, skipped=None if is_needed else counts[group.rank()])


class AllToAll:
    """An all-to-all of rows that overlaps what is computed before `wait`, and in the backward pass
    what was.
    """

    def __init__(
        self,
        x: Tensor,
        group: ProcessGroup | None,
        counts: tuple[list[int], list[int]],
        *,
        is_needed: bool = True,
    ) -> None:
        self._group = group
        self._counts = counts
        self._pending: collectives.AsyncHandle | None = None
        self._skipped = None if is_needed else sum(counts[1])
        self._buffers = [
            x if group is None else linear_map(x, self._start, self._finish, skipped=self._skipped)
        ]

    def wait(self) -> Tensor:
        # Its graph holds this object, which must not hold it: a cycle would live until the next
        # garbage collection.
        buffer = self._buffers.pop()
        if self._group is None:
            return buffer
        return linear_map(buffer, self._finish, self._start_back, skipped=self._skipped)

    def _start(self, x: Tensor) -> Tensor:
        """Starts the exchange, and returns its receive buffer before the rows have arrived."""
        self._pending = self._exchange(x, *self._counts)
        return self._pending.result

    def _start_back(self, grad: Tensor) -> Tensor:
        """Starts the exchange of gradients; returns its argument, because of its shape."""
        self._pending = self._exchange(grad, *reversed(self._counts))
        return grad

    def _finish(self, _: Tensor) -> Tensor:
        pending = cast(collectives.AsyncHandle, self._pending)
        self._pending = None
        return pending.wait()

    def _exchange(
        self, x: Tensor, sent: list[int], received: list[int]
    ) -> collectives.AsyncHandle:
        return collectives.all_to_all_tokens_async(
            cast(ProcessGroup, self._group), x, sent, received
        )


def _places(
    counts_SX: Tensor, device: torch.device, *, padded: bool
) -> tuple[RowPlaces, RowGroups]:
    """Places and groups of every source's rows for each expert, on a device; they arrive one source
    after the other.

    `counts_SX` is on the host, which finds how far each block of rows moves.
    """
    counts_X = counts_SX.sum(0)
    num_rows = int(counts_X.sum())
    # Rows arrive in blocks by source, then expert, and are put by expert, then source.
    arrival_ends_B = counts_SX.flatten().cumsum(0).view_as(counts_SX).T.flatten()
    ends_B = counts_SX.T.flatten().cumsum(0)
    is_padded = padded and num_rows > 0
    ends_X = padded_ends(counts_X) if is_padded else counts_X.cumsum(0)
    shifts_B = padded_shifts(counts_X, ends_X).repeat_interleave(len(counts_SX))
    blocks_3B = to_device(torch.stack((ends_B, arrival_ends_B - ends_B, shifts_B)), device)
    row_R = torch.arange(num_rows, device=device)
    block_R = torch.searchsorted(blocks_3B[0], row_R, right=True)
    source_R, place_R = row_R + blocks_3B[1:, block_R]
    places = RowPlaces.sorted(source_R, place_R, int(ends_X[-1]))
    if is_padded:
        return places, RowGroups((), to_device(ends_X.int(), device))
    return places, RowGroups(counts_X.tolist())


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of integers of the host, for which it does not wait."""
    return x.to(device, non_blocking=True)


def _all_reduce(x: Tensor, *, group: ProcessGroup) -> Tensor:
    # A copy, because the all-reduce writes in place.
    return collectives.all_reduce(group, x.clone(memory_format=torch.contiguous_format))


def _gather_rows(x: Tensor, *, group: ProcessGroup, counts: list[int]) -> Tensor:
    # An all-gather needs equal lengths: each rank sends a copy of its rows to every other one.
    copies = x.contiguous().repeat(group.size(), *[1] * (x.ndim - 1))
    return collectives.all_to_all_tokens_async(
        group, copies, [len(x)] * group.size(), counts
    ).wait()


def _reduce_rows(x: Tensor, *, group: ProcessGroup, counts: list[int]) -> Tensor:
    own = counts[group.rank()]
    # A reduce-scatter of unequal lengths: exchange, then sum.
    parts = collectives.all_to_all_tokens_async(group, x, counts, [own] * group.size()).wait()
    total: Tensor = parts.unflatten(0, (group.size(), own)).sum(0)
    return total
