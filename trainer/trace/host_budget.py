"""Which blocks a host budget lets offload what. Imports no torch.

The rule is that of `parallelisms.activation_offload.HostActivationPool`: inputs first, then the
attention outputs of as many blocks as fit beside all inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer.trace.pieces import Allocation, Trace

INPUTS = "offload of inputs"
ATTENTION = "offload of attention"


class Offloaded(NamedTuple):
    """Bytes of a block's activations in host memory."""

    input_bytes: int
    attention_bytes: int


def offloaded_by_block(trace: Trace) -> list[Offloaded]:
    """Offloaded bytes of the first micro-batch without a budget, by recorded block of the only
    stage.
    """
    sizes: dict[int, dict[str, int]] = {}
    for piece in trace.pieces:
        place = piece.place
        if place.action == "forward" and place.micro_batch == 0 and isinstance(place.unit, int):
            found = sizes.setdefault(place.unit, {INPUTS: 0, ATTENTION: 0})
            for event in piece.events:
                if isinstance(event, Allocation) and event.operator in found:
                    found[event.operator] += event.size
    return [Offloaded(each[INPUTS], each[ATTENTION]) for _, each in sorted(sizes.items())]


def within_budget(
    wanted: Sequence[Offloaded], budget: int, blocks_per_checkpoint: int
) -> tuple[Offloaded, ...]:
    """Offloaded bytes of each block under the budget. `wanted`: without one."""
    # Attention outputs may use only what the inputs of all blocks leave.
    reserved = _bytes_of_all_inputs(wanted, blocks_per_checkpoint)
    inputs = attention = 0
    found = []
    for each in wanted:
        keeps_input = inputs + each.input_bytes <= budget
        keeps_attention = attention + each.attention_bytes <= budget - reserved
        kept = Offloaded(
            each.input_bytes if keeps_input else 0,
            each.attention_bytes if keeps_attention else 0,
        )
        inputs = inputs + kept.input_bytes
        attention = attention + kept.attention_bytes
        found.append(kept)
    return tuple(found)


def host_budget(kept: Sequence[Offloaded], blocks_per_checkpoint: int) -> int:
    """The smallest budget in which these blocks offload this."""
    attention = sum(each.attention_bytes for each in kept)
    inputs = sum(each.input_bytes for each in kept)
    return (_bytes_of_all_inputs(kept, blocks_per_checkpoint) if attention else inputs) + attention


def _bytes_of_all_inputs(blocks: Sequence[Offloaded], blocks_per_checkpoint: int) -> int:
    # Only the first block of each checkpoint group saves its input.
    return -(-len(blocks) // blocks_per_checkpoint) * max(
        (each.input_bytes for each in blocks), default=0
    )
