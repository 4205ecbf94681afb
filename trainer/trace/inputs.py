"""Inputs of a recorded step: batches without data, and experts that get as many tokens each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from models.batch import Batch
from models.device_paths import traced_as_gpu
from models.dispatch import Rows, padded_rows, sort_by_expert
from models.dtypes import accumulation_dtype
from models.row_groups import RowGroups
from models.tiling import CompilePiece, map_each
from parallelisms.expert_parallel import RankDispatcher
from trainer.step.trainer import Trainer
from trainer.trace.operators import OpCounterMode


@dataclass(frozen=True, kw_only=True)
class LazyBatch(Batch):
    """Allocates its tensors when moved to the device."""

    allocate: Callable[[], Tensor]
    on_load: Callable[[], None]

    def to(self, device: torch.device) -> Batch:
        del device
        self.on_load()
        tokens, labels, positions, documents = (self.allocate() for _ in range(4))
        return replace(
            self, tokens=tokens, labels=labels, positions=positions, document_ids=documents
        )


def micro_batches(
    trainer: Trainer,
    counter: OpCounterMode,
    lengths: Sequence[int] | None = None,
    *,
    on_load: Callable[[int], None] = lambda _: None,
) -> list[Batch]:
    """The identical micro-batches of a step, on the host, where they are not counted.

    `lengths`: of a sequence's documents. `on_load` is called with the number of a micro-batch that
    moves to the device.
    """
    training = trainer.config.training
    plan = trainer.config.context_plan()
    lengths = lengths or [training.seq_len]
    micro_batch_size = training.micro_batch_size
    tokens = plan.padded_length(training.seq_len)
    starts = sorted({0, *accumulate(lengths), tokens})
    pairs = micro_batch_size * sum(map(trainer.config.model.build().mean_pairs, lengths))
    shape = micro_batch_size, tokens // plan.cp
    tokens_BS = counter.new_int64(*shape, track=False)
    first = LazyBatch(
        tokens=tokens_BS,
        labels=tokens_BS,
        positions=tokens_BS,
        document_ids=tokens_BS,
        boundaries=torch.tensor([starts] * micro_batch_size, dtype=torch.int32),
        num_tokens=micro_batch_size * training.seq_len,
        num_pairs=pairs,
        num_computed_pairs=pairs / plan.cp,
        sequence_sources=((0, training.seq_len),) * micro_batch_size,
        allocate=lambda: counter.new_int64(*shape),
        on_load=lambda: None,
    )
    numbers = range(trainer.loader.num_micro_batches)
    return [replace(first, on_load=partial(on_load, number)) for number in numbers]


@contextmanager
def balanced_experts(counter: OpCounterMode) -> Iterator[None]:
    """Gives every expert as many tokens: fake scores choose none.

    All compute at once, as in a kernel for groups.
    """

    def counts_of(experts_NK: Tensor, num_experts: int) -> list[int]:
        # The first experts take the remainder, so that the counts sum to all rows.
        size, remainder = divmod(experts_NK.numel(), num_experts)
        return [size + (expert < remainder) for expert in range(num_experts)]

    def own_rows(
        experts: Sequence[Tensor], num_experts: int, *, padded: bool, compiled: CompilePiece
    ) -> list[Rows]:
        def of_tile(tile: Tensor) -> Rows:
            if padded:
                return padded_rows(tile, num_experts, compiled)
            groups = RowGroups(counts_of(tile, num_experts))
            return sort_by_expert(tile, num_experts)[0]._replace(groups=groups)

        return map_each(of_tile, experts)

    def rows_of_ranks(
        self: Any,
        experts: Sequence[Tensor],
        num_experts: int,
        *,
        padded: bool,
        compiled: CompilePiece,
    ) -> list[Rows]:
        if self._ep_group is None and self._gather_group is None:
            return own_rows(experts, num_experts, padded=padded, compiled=compiled)
        ranks = [
            1 if group is None else group.size() for group in (self._gather_group, self._ep_group)
        ]

        def of_tile(tile: Tensor) -> Rows:
            rows, _ = sort_by_expert(tile, num_experts, compiled)
            # Counts are real integers, because split sizes depend on them.
            with unset_fake_temporarily():
                counts = torch.tensor(counts_of(tile, num_experts)).expand(*ranks, -1)
            found: Rows = self._route(rows, counts, padded=padded)
            return found

        return map_each(of_tile, experts)

    def to_device(x: Tensor, _: torch.device) -> Tensor:
        return counter.new_int64(*x.shape).to(x.dtype)

    with (
        patch("models.dispatch.own_rows", own_rows),
        patch("parallelisms.expert_parallel.to_device", to_device),
        patch.object(RankDispatcher, "rows", rows_of_ranks),
        patch("models.experts.ROWS_AT_ONCE", sys.maxsize),
    ):
        yield


# ---- a GPU's paths


class CopyStream:
    """Stands in for a stream on which copies run beside kernels."""

    def __init__(self, counter: OpCounterMode, _: Any = None) -> None:
        self.counter = counter
        self.latest = 0
        """Number of the latest copy; 0: none."""

    def wait_stream(self, _: Any) -> None: ...

    def record_event(self) -> int:
        return self.latest


class KernelStream:
    """Stands in for the stream of kernels, which may wait for copies."""

    def __init__(self, counter: OpCounterMode, _: Any = None) -> None:
        self.counter = counter

    def wait_stream(self, stream: CopyStream) -> None:
        self.wait_event(stream.latest)

    def wait_event(self, copy: int) -> None:
        if copy:
            self.counter.on_arrival(copy)


@contextmanager
def copies_on(stream: CopyStream) -> Iterator[None]:
    with stream.counter.copies() as numbers:
        yield
    # The copy has its number only when the context ends, since then its bytes are known.
    stream.latest = numbers[0]


class FusedRMSNorm(torch.autograd.Function):
    """Allocations of torch's fused kernels: one result each way, and a number per token between
    them.
    """

    @staticmethod
    def forward(ctx: Any, x_E: Tensor, weight_E: Tensor) -> Tensor:
        rstd_1 = x_E.new_empty(*x_E.shape[:-1], 1, dtype=accumulation_dtype(x_E.dtype))
        ctx.save_for_backward(x_E, weight_E, rstd_1)
        return torch.empty_like(x_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        del grads
        x_E, weight_E, _ = ctx.saved_tensors
        return torch.empty_like(x_E), torch.empty_like(weight_E)


def fused_rms_norm(x_E: Tensor, _shape: Sequence[int], weight_E: Tensor, _eps: float) -> Tensor:
    """Stands in for `torch.nn.functional.rms_norm`, which a CPU takes apart."""
    out_E: Tensor = FusedRMSNorm.apply(x_E, weight_E)
    return out_E


@contextmanager
def paths_of_gpu(counter: OpCounterMode) -> Iterator[None]:
    """Code runs as on a GPU, whose streams and fused operators have stand-ins."""
    with (
        traced_as_gpu(),
        patch("torch.cuda.Stream", partial(CopyStream, counter)),
        patch("torch.cuda.current_stream", partial(KernelStream, counter)),
        patch("torch.cuda.stream", copies_on),
        patch("torch.nn.functional.rms_norm", fused_rms_norm),
    ):
        yield
