"""Model inputs of one micro-batch, and what is remembered of their document boundaries.

Shape suffixes: B sequences, S tokens of this rank, T tokens of the full sequence, D document
boundaries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

IGNORE_INDEX = -100
Options = ParamSpec("Options")
Result = TypeVar("Result")
# Few, because one may hold 15 MiB on the device at 1M tokens.
NUM_RECENT = 8


@dataclass(frozen=True)
class Batch:
    """Packed sequences.

    Labels and positions are computed before sharding, so no rank needs another rank's tokens.
    """

    tokens: Tensor
    """[B, S] int64."""
    labels: Tensor
    """[B, S] int64: the next token of the same document, already shifted; IGNORE_INDEX where there
    is none.
    """
    positions: Tensor
    """[B, S] int64: offset in the document (in the sequence, with `data.mask = "none"`)."""
    document_ids: Tensor
    """[B, S] int64: index of the document in its sequence; the padding at the end is one more
    document.
    """
    boundaries: Tensor
    """[B, D] int32, always on the CPU: the document starts in the full sequence, then T, repeated
    up to a D that is the same for all batches of a run. A single document: [0, T].
    """
    num_tokens: int
    """Tokens of these sequences, without padding."""
    num_pairs: float
    """(query, key) pairs that the mask allows in these sequences, without padding: the mean over
    layers.
    """
    num_computed_pairs: float
    """(query, key) pairs that attention computes on this rank, padding included: the mean over
    layers.
    """
    busiest_pairs: float = 0.0
    """(query, key) pairs of all sequences that the busiest data-parallel rank takes in this
    micro-batch, padding included: the mean over layers.
    """
    mean_pairs: float = 0.0
    """The mean of `busiest_pairs` over all data-parallel ranks, instead of the busiest one's."""
    attention_plans: tuple[object, ...] = ()
    """Host-side plans of attention, computed while the batch was read. They are cached weakly:
    holding them here keeps them for the step.
    """
    sequence_sources: tuple[tuple[int, int], ...] = ()
    """For each sequence: the index of its data source, and its tokens without padding."""

    def to(self, device: torch.device) -> Batch:
        """Copies the per-token tensors to `device`, asynchronously from pinned memory."""
        return self.map_tokens(lambda x_BS: x_BS.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copies the per-token tensors to pinned memory."""
        return self.map_tokens(Tensor.pin_memory)

    def map_tokens(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Replaces each per-token tensor by the function's value."""
        names = ("tokens", "labels", "positions", "document_ids")
        tensors: dict[str, Any] = {name: function(getattr(self, name)) for name in names}
        return replace(self, **tensors)

    def num_targets(self) -> Tensor:
        """Number of tokens with a label: an int64 scalar on the batch's device."""
        return (self.labels != IGNORE_INDEX).sum()


# ---- document boundaries, and what is computed from them


def require_boundaries(boundaries_BD: Tensor, batch_size: int) -> None:
    """Raises ValueError unless boundaries are an int32 CPU tensor [batch_size, D]."""
    if boundaries_BD.device.type != "cpu" or boundaries_BD.dtype != torch.int32:
        device = boundaries_BD.device
        dtype = boundaries_BD.dtype
        raise ValueError(f"boundaries must be int32 on the CPU, not {dtype} on {device}")
    if boundaries_BD.ndim != 2:
        raise ValueError(
            f"boundaries must have 2 dimensions [batch, boundaries], not shape {tuple(boundaries_BD.shape)}"
        )
    if (num_sequences := boundaries_BD.shape[0]) != batch_size:
        raise ValueError(
            f"boundaries have batch size {num_sequences}; q, k and v have {batch_size}"
        )


def require_ascending(boundaries_BD: Tensor, seq_len: int) -> None:
    """Raises ValueError unless every sequence's boundaries ascend from 0 to `seq_len`."""
    for boundaries_D in boundaries_BD:
        if (
            boundaries_D[0] != 0
            or boundaries_D[-1] != seq_len
            or bool((boundaries_D.diff() < 0).any())
        ):
            raise ValueError(
                f"boundaries {boundaries_D.tolist()} must ascend from 0 to the sequence length {seq_len}"
            )


def require_keys(boundaries_BD: Tensor, kv_boundaries_BD: Tensor) -> None:
    """Raises ValueError for a document that has queries and no keys: a softmax over nothing."""
    without_keys = (boundaries_BD.diff() > 0) & (kv_boundaries_BD.diff() == 0)
    if bool(without_keys.any()):
        sequence, document = map(int, without_keys.nonzero()[0])
        raise ValueError(
            f"document {document} of sequence {sequence} has queries and no keys: each query needs a key"
        )


def split_boundaries(boundaries_BD: Tensor) -> tuple[Tensor, Tensor | None]:
    """Boundaries [B, D] of queries and of keys, which are stacked if attention is not causal; None
    if it is.
    """
    return (
        (boundaries_BD, None) if boundaries_BD.ndim == 2 else (boundaries_BD[0], boundaries_BD[1])
    )


def document_ranges(boundaries_BD: Tensor, seq_len: int) -> Tensor:
    """int64 [R, 2]: [start, end) of the documents of all sequences, concatenated. Empty ones
    count, so that the documents of queries and of keys have the same numbers.
    """
    # The offsets are int64, so the sum is: an int32 would overflow beyond 2 ** 31 tokens.
    boundaries = (boundaries_BD + _sequence_starts(boundaries_BD, seq_len)).flatten()
    return torch.stack((boundaries[:-1], boundaries[1:]), dim=1)


def concatenated_boundaries(boundaries_BD: Tensor, seq_len: int) -> Tensor:
    """int64: document starts of all sequences, concatenated, and their end; each once."""
    boundaries: Tensor = (
        (boundaries_BD + _sequence_starts(boundaries_BD, seq_len)).flatten().unique_consecutive()
    )
    return boundaries


def _sequence_starts(boundaries_BD: Tensor, seq_len: int) -> Tensor:
    """Index of each sequence's first token in the concatenated sequences: int64 [B, 1]."""
    return torch.arange(len(boundaries_BD), device="cpu")[:, None] * seq_len


def remembered(
    build: Callable[Concatenate[Tensor, int, int, Options], Result],
) -> Callable[Concatenate[Tensor, int, int, Options], Result]:
    """Remembers results of a function of (boundaries_BD, batch_size, seq_len, ...): those that
    something holds, and the last few. Every layer asks for the same ones; a batch holds what was
    computed while it was read. Further arguments may be int32 tensors on the CPU.

    Raises ValueError for boundaries that do not fit.
    """
    # Weak, so that a result lives as long as the batch that holds it. The few recent ones serve
    # callers that hold none, layer after layer.
    held: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
    recent = deque[Any](maxlen=NUM_RECENT)

    @wraps(build)
    def remember(
        boundaries_BD: Tensor,
        batch_size: int,
        seq_len: int,
        /,
        *args: Options.args,
        **kwargs: Options.kwargs,
    ) -> Result:
        require_boundaries(boundaries_BD, batch_size)
        # The key is the content: recomputation and other layers bring equal boundaries in other
        # tensors.
        content = (
            _content(each) if isinstance(each, Tensor) else each for each in (boundaries_BD, *args)
        )
        key = (*content, batch_size, seq_len, *kwargs.items())
        result: Result | None = held.get(key)
        if result is None:
            # Only here: what is remembered was valid when it was built.
            require_ascending(boundaries_BD, seq_len)
            result = build(boundaries_BD, batch_size, seq_len, *args, **kwargs)
            held[key] = result
            recent.append(result)
        return result

    return remember


def _content(x: Tensor) -> bytes:
    content = bytearray(x.nbytes)
    torch.frombuffer(content, dtype=torch.int32).copy_(x.flatten())
    return bytes(content)
