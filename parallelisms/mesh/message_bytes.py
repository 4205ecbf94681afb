"""Bytes that a rank sends in a collective. Imports no torch."""

from __future__ import annotations

MESSAGE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
MIN_COUNTED_BYTES = 4096
"""Messages below this size are sums of a few scalars, whose volume does not grow with the
model.
"""


def sent_bytes(kind: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends in one call in a group of `ranks`.

    `size` is the input shard for all_gather, the output shard for reduce_scatter, the whole tensor
    for all_reduce, the evenly split input for all_to_all, and the message for send. Raises
    ValueError for any other kind.
    """
    if kind not in MESSAGE_KINDS:
        raise ValueError(f'kind = "{kind}" must be one of {", ".join(MESSAGE_KINDS)}')
    # Each rank sends its shard, or the sum of one, ranks - 1 times around a ring. An all-reduce is
    # a reduce-scatter and an all-gather.
    if kind in ("all_gather", "reduce_scatter"):
        return size * (ranks - 1)
    if kind == "all_reduce":
        return 2 * size * (ranks - 1) / ranks
    return size * (ranks - 1) / ranks if kind == "all_to_all" else size
