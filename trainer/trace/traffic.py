"""Bytes that a kernel reads and writes, from its operator and its tensors.

Kernels that look up rows touch as many as they return. A tensor that several arguments share is read once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
LOOKUPS = {aten.embedding, aten.index_select, aten.index, aten.gather, aten.take_along_dim}
"""Read as many rows as they return."""
ROW_WRITES = {aten.index_add, aten.index_add_, aten.index_copy_, aten.index_put_, aten.scatter_, aten.scatter_add_}
"""Write as many rows as the last tensor among their arguments has."""

NO_KERNELS = ("empty", "new_empty", "_unsafe_view", "_reshape_alias")
"""How the names of operators begin that return a view or uninitialized memory and do not say so."""


def moved_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """0 for an operator without a kernel: a view, or an allocation."""
    packet = func.overloadpacket
    written = written_arguments(func)
    returned = tensors_of((result,))
    if packet in ROW_WRITES:
        return 3 * tensors_of(args)[-1].nbytes
    if packet in LOOKUPS:
        return 2 * sum(x.nbytes for x in returned)
    if not written:
        if not _has_kernel(func):
            return 0
        return nbytes([*tensors_of((*args, *kwargs.values())), *returned])
    outputs = [x for name in written for x in tensors_of((_argument(func, name, args, kwargs),))]
    inputs = tensors_of([*(args[1:] if _overwrites(packet) else args), *kwargs.values()])
    return nbytes(inputs) + nbytes(outputs)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Of all different tensors; an expanded one has as many bytes as its storage."""
    return sum({id(x): min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors}.values())


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(value)
    return found


@cache
def written_arguments(func: Any) -> tuple[str, ...]:
    """Names of the arguments that the operator writes to."""
    return tuple(
        each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write
    )


def _argument(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = [each.name for each in func._schema.arguments]
    index = names.index(name)
    return args[index] if index < len(args) else kwargs.get(name)


def _overwrites(packet: Any) -> bool:
    """Whether the operator does not read the first argument, which it writes to."""
    return packet in {aten.copy_, aten.fill_, aten.zero_}


@cache
def _has_kernel(func: Any) -> bool:
    """Whether a kernel runs: results are neither views nor uninitialized."""
    is_view = any(each.alias_info is not None for each in func._schema.returns)
    name = func.overloadpacket.__name__
    return not is_view and bool(func._schema.returns) and not name.startswith(NO_KERNELS)
