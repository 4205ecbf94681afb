"""The part of a trace that a plan keeps: tensors at the peak, and the order of pieces.

Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from trainer.config.job_config import Config
from trainer.trace.checkpoint_copies import checkpoint_copies
from trainer.trace.compose import ComposedStep, LiveTensor
from trainer.trace.pieces import OPTIMIZER, Piece, Trace
from trainer.trace.shorten import ShortStep
from trainer.trace.tensors import (
    CUBLAS_HANDLES,
    CUBLAS_WORKSPACE,
    DTYPE_BYTES,
    MemoryEstimate,
    MemoryTensor,
)

SOURCES = {
    "parameters": "trainer/step/build.py: ParallelModel",
    "optimizer state": "trainer/step/optimizer.py: Optimizer",
}
"""The code that allocates what exists before the step, by line of a plan's table."""
OFFLOAD = "parallelisms/activation_offload.py: HostActivationPool"


@dataclass(frozen=True)
class RankStep:
    """A step of one rank."""

    world_size: int
    memory: MemoryEstimate
    """Tensors alive at the peak."""
    pieces: tuple[Piece, ...]
    """The recorded pieces, without their allocations."""
    order: tuple[int, ...]
    """The pieces of the whole step, as indices of recorded ones."""
    windows: dict[tuple[int, int], int | None]
    """The window of attention, by stage and recorded block."""
    state_ratio: float
    """Weights and optimizer state of the whole model, relative to those of the recorded one."""


def rank_step(
    config: Config, short: ShortStep, trace: Trace, whole: ComposedStep, *, on_gpu: bool
) -> RankStep:
    """The step of the rank that was traced. `on_gpu`: with the workspaces of a GPU's products."""
    whole_states = whole.other_states + sum(
        state.size * count for state, count in whole.states.items()
    )
    estimate = MemoryEstimate(
        str(whole.peak.place),
        short.pp_rank,
        short.plan.pp,
        _merged(_tensors(config, short, whole, on_gpu=on_gpu)),
    )
    # Allocations served to compose the peak; without them an answer on disk is small.
    pieces = tuple(Piece(piece.place, [], piece.timeline) for piece in trace.pieces)
    state_ratio = whole_states / max(1, trace.state_bytes)
    return RankStep(
        short.world_size, estimate, pieces, whole.order, dict(_windows(short)), state_ratio
    )


def _windows(short: ShortStep) -> Iterator[tuple[tuple[int, int], int | None]]:
    kinds = short.whole.model.build().layer_kinds
    for stage, blocks in short.stages.items():
        layers = short.plan.stage_module(stage).layers
        for recorded, place in enumerate(blocks.kept):
            yield (stage, recorded), kinds[layers[place]].window


# ---- memory


def _tensors(
    config: Config, short: ShortStep, whole: ComposedStep, *, on_gpu: bool
) -> Iterator[MemoryTensor]:
    on_host = config.memory.optimizer_placement == "host"
    num_nodes = -(-short.world_size // short.ranks_per_node)
    kept = checkpoint_copies(config.checkpoint, num_nodes)
    for state, count in whole.states.items():
        line = "parameters" if state.kind == "buffers" else state.kind
        source = SOURCES[line]
        tensor = MemoryTensor(
            state.name, state.shape, state.dtype, line, source, "the run", count, on_host
        )
        yield _of_size(tensor, state.size)
        if kept.number and state.kind != "buffers":
            copy = tensor._replace(
                line=kept.line,
                source=kept.source,
                lifetime=kept.lifetime,
                copies=kept.number * count,
                on_host=True,
            )
            yield _of_size(copy, state.size)
    for each in whole.live:
        yield _live_tensor(each)
    if whole.other_states:
        yield MemoryTensor(
            "other tensors",
            (whole.other_states,),
            "uint8",
            "parameters",
            SOURCES["parameters"],
            "the run",
        )
    if on_gpu:
        yield MemoryTensor(
            "workspaces of cuBLAS",
            (CUBLAS_WORKSPACE,),
            "uint8",
            "matmul workspaces",
            "cuBLAS",
            "the run",
            CUBLAS_HANDLES,
        )


def _merged(tensors: Iterable[MemoryTensor]) -> tuple[MemoryTensor, ...]:
    """Tensors that differ by their number alone are one entry."""
    copies: defaultdict[MemoryTensor, float] = defaultdict(float)
    for each in tensors:
        copies[each._replace(copies=1)] += each.copies
    return tuple(tensor._replace(copies=count) for tensor, count in copies.items())


def _live_tensor(each: LiveTensor) -> MemoryTensor:
    allocation = each.allocation
    tensor = MemoryTensor(
        allocation.operator.removeprefix("aten."),
        allocation.shape,
        allocation.dtype,
        _line_of(each),
        OFFLOAD if allocation.is_offload_buffer else allocation.line,
        _lifetime(each),
        each.copies,
        allocation.on_host,
    )
    return _of_size(tensor, allocation.size)


def _of_size(tensor: MemoryTensor, size: int) -> MemoryTensor:
    """The tensor, or several of them, or the bytes of its storage if that has another size."""
    # A loop's tensors stand for several of the same shape; a view may have a larger storage.
    nominal = prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype, 0)
    if nominal and size % nominal == 0:
        return tensor._replace(copies=tensor.copies * size // nominal)
    return tensor._replace(shape=(size,), dtype="uint8")


def _line_of(each: LiveTensor) -> str:
    """The line of a plan's table that a tensor belongs to, from where it is made, by whom, and
    where it ends.
    """
    made_in = each.made_in
    freed_in = each.freed_in
    allocation = each.allocation
    if allocation.on_host:
        return "saved activations" if allocation.is_offload_buffer else "gradients"
    if made_in.action == "load":
        return "batch"
    # The first rule that matches decides: FSDP gathers in the same passes that make activations.
    if allocation.fsdp == "weights":
        return "gathered weights"
    if made_in.action == "backward" and (freed_in is None or freed_in == OPTIMIZER):
        return "gradients"
    if allocation.fsdp == "gradients":
        return "unreduced gradients"
    if "send" in made_in.action or "receive" in made_in.action:
        return "pipeline messages"
    if made_in.unit == "head":
        return "loss head"
    is_saved = (
        made_in.action == "forward" and freed_in is not None and freed_in.action == "backward"
    )
    return "saved activations" if is_saved else "transient activations"


def _lifetime(each: LiveTensor) -> str:
    made_in = each.made_in
    freed_in = each.freed_in
    if freed_in is None:
        return "from step to step"
    if made_in == freed_in:
        return f"in the {made_in.short_name}"
    return f"from the {made_in.short_name} to the {freed_in.short_name}"
