"""Transient tensors of norms. Imports no torch."""

from __future__ import annotations

from trainer.memory.block import BlockMemory
from trainer.trace.tensors import MemoryTensor


def are_fused(block: BlockMemory) -> bool:
    """Whether eager norms run as kernels without float32 temporaries: `is_fused` of
    models/norm.py.
    """
    # torch's fused kernel needs input and weight of one dtype, and a weight that 1 is added to is
    # float32.
    has_wide_weight = block.model.zero_centered_norms and block.is_mixed
    return not (has_wide_weight or block.compute_dtype == "float64" or block.kernel == "cpu")


def have_temporaries(block: BlockMemory) -> bool:
    """Whether norms of a block have float32 temporaries.

    For compiled norms this is an upper bound.
    """
    return block.compiled or not are_fused(block)


def backward(block: BlockMemory, gradient: str, tokens: int) -> tuple[MemoryTensor, ...]:
    """Tensors of a norm's backward pass, beside its input. A zero-centered norm adds 1 to its
    weight in float32, so the products with it are float32 too.
    """
    if not have_temporaries(block):
        return (block.numbers(f"{gradient}, and of its input", tokens, block.model.dim, copies=2),)
    is_wide = block.model.zero_centered_norms and block.is_mixed
    return (
        block.numbers(
            f"{gradient}, also by the norm's weight",
            tokens,
            block.model.dim,
            copies=1 if is_wide else 2,
        ),
        block.sums(
            f"{gradient}, by the norm's weight",
            tokens,
            block.model.dim,
            copies=1 if is_wide else 0,
        ),
        block.sums("products of the norm's backward pass", 3, tokens, block.model.dim),
    )
