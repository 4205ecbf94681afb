"""Calls of collectives: their kind, their size and their group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from parallelisms.mesh.collectives import resolve_process_group

CollectiveCall = tuple[str, float, ProcessGroup]
"""(kind, size as in `sent_bytes`, group)."""


def _all_to_all(args: tuple[Any, ...]) -> CollectiveCall:
    group = ProcessGroup.unbox(args[2])
    splits = args[4]
    size = args[1].nbytes
    if splits:
        # The even-split size with the same number of remote bytes.
        remote_bytes = size - size * splits[group.rank()] / max(1, sum(splits))
        size = remote_bytes * group.size() / (group.size() - 1)
    return "all_to_all", size, group


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


COLLECTIVES: dict[str, Any] = {
    "allreduce_": lambda args: ("all_reduce", _nbytes(args[0]), ProcessGroup.unbox(args[1])),
    "_allgather_base_": lambda args: ("all_gather", args[1].nbytes, ProcessGroup.unbox(args[2])),
    "_reduce_scatter_base_": lambda args: (
        "reduce_scatter",
        args[0].nbytes,
        ProcessGroup.unbox(args[2]),
    ),
    "alltoall_base_": _all_to_all,
    "send": lambda args: ("send", _nbytes(args[0]), ProcessGroup.unbox(args[1])),
    "recv_": lambda args: ("receive", 0, ProcessGroup.unbox(args[1])),
    "all_reduce": lambda args: ("all_reduce", args[0].nbytes, resolve_process_group(args[2])),
    "all_gather_into_tensor": lambda args: (
        "all_gather",
        args[0].nbytes,
        resolve_process_group(args[2]),
    ),
    "reduce_scatter_tensor": lambda args: (
        "reduce_scatter",
        args[0].nbytes / args[2],
        resolve_process_group(args[3]),
    ),
}


def channel_of(group: ProcessGroup) -> str:
    """`parallelisms.mesh.mesh` puts the channel first in a group's description."""
    description = group.group_desc
    return "world" if description in ("", "default_pg") else description.split()[0]
