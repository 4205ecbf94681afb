"""Bytes that a kernel reads and writes, from its operator and its tensors.

Kernels that look up rows touch as many as they return. A tensor that several arguments share is
read once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.trace.operator_facts import facts_of

aten = torch.ops.aten
LOOKUPS = {aten.embedding, aten.index_select, aten.index, aten.gather, aten.take_along_dim}
"""Read as many rows as they return."""
ROW_WRITES = {
    aten.index_add,
    aten.index_add_,
    aten.index_copy_,
    aten.index_put_,
    aten.scatter_,
    aten.scatter_add_,
}
"""Write as many rows as the last tensor among their arguments has."""
OVERWRITES = {aten.copy_, aten.fill_, aten.zero_}
"""Do not read their first argument, which they write to."""
FILLED = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
"""Read nothing of the tensor whose like they write."""
NO_KERNELS = ("empty", "new_empty", "_unsafe_view", "_reshape_alias")
"""How the names of operators begin that return a view or uninitialized memory and do not say
so.
"""


def moved_bytes(
    func: Any,
    tensors: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Sequence[Tensor],
) -> int:
    """0 for an operator without a kernel: a view, or an allocation.

    `tensors`: those among the arguments.
    """
    packet = func.overloadpacket
    facts = facts_of(func)
    if packet in ROW_WRITES:
        # Of each row: the values are read, and the row is read and written.
        return 3 * tensors[-1].nbytes
    if packet in LOOKUPS:
        return 2 * sum(x.nbytes for x in result)
    if packet is aten.copy_ and _are_same(*tensors[:2]):
        return 0  # `x[i] += y` ends with one, which torch does not run.
    if facts.writes:
        written = tensors_of(
            args[place] if isinstance(place, int) else kwargs[place] for place in facts.writes
        )
        if packet in OVERWRITES:
            return nbytes(tensors[1:]) + nbytes(written)
        # What has no place, "out", is written to alone.
        given = (value for name, value in kwargs.items() if name not in facts.writes)
        return nbytes(tensors_of([*args, *given])) + nbytes(written)
    if facts.returns_views or not func._schema.returns or packet.__name__.startswith(NO_KERNELS):
        return 0
    return nbytes(result if packet.__name__ in FILLED else [*tensors, *result])


def _are_same(x: Tensor, y: Tensor) -> bool:
    """Whether both are the same numbers in memory."""
    first, second = (
        (
            each.untyped_storage()._cdata,
            each.storage_offset(),
            each.shape,
            each.stride(),
            each.dtype,
        )
        for each in (x, y)
    )
    return first == second


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all different tensors; an expanded one has as many as its storage."""
    return sum({id(x): min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors}.values())


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values and in their lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(value)
    return found
