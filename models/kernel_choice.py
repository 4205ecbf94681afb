"""Capabilities of each attention kernel, and which one takes a block of scores. Imports no torch.

A choice names one kernel, or two: with `CUDNN_AND_FLASH` cuDNN takes long blocks, where it is
faster, and FlashAttention takes windows and short blocks, many in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

CUDNN_AND_FLASH = "cudnn+flash"
LONG_TOKENS = 4096
"""Queries and keys of a block from which on cuDNN, which takes one block a call, is faster than
FlashAttention.
"""
LENGTHS_PER_OCTAVE = 16
"""Lengths from one power of two to the next at which cuDNN runs causal blocks, because each costs
it a plan.
"""
SOFTCAP_PROBLEM = (
    'attention kernel "{kernel}" has no soft-capped scores (softcap = {softcap}): torch gives no CUDA kernel the cap; '
    '"plain" has it, and holds the scores of a document in memory'
)
NVIDIA = ("ampere", "ampere rtx", "ada", "hopper", "blackwell", "blackwell rtx")


@dataclass(frozen=True, kw_only=True)
class KernelLimits:
    """Dtypes, head dims and devices with which a kernel works."""

    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    max_head_dim: int | None = 256
    head_dim_multiple: int = 8
    refused_head_dims: Mapping[str, range] = field(default_factory=dict)
    """Head dims, none above the largest, with which a generation does not train."""
    generations: tuple[str, ...] | None = None
    """Generations of devices, as the device tables name them; None: all."""
    is_deterministic: bool = True
    has_softcap: bool = False


KERNEL_LIMITS: Mapping[str, KernelLimits] = {
    # As torch's `sdp_utils.cpp` has them.
    "flash": KernelLimits(
        refused_head_dims=dict.fromkeys(("ampere rtx", "ada", "blackwell rtx"), range(193, 225))
    ),
    "cudnn": KernelLimits(
        generations=NVIDIA,
        is_deterministic=False,
        refused_head_dims=dict.fromkeys(
            (each for each in NVIDIA if each != "hopper"), range(129, 257)
        ),
    ),
    "efficient": KernelLimits(dtypes=("bfloat16", "float16", "float32"), max_head_dim=None),
    "plain": KernelLimits(
        dtypes=("bfloat16", "float16", "float32", "float64"),
        max_head_dim=None,
        head_dim_multiple=1,
        has_softcap=True,
    ),
    "fa3": KernelLimits(generations=("hopper",)),
    "fa4": KernelLimits(max_head_dim=128, generations=("hopper", "blackwell")),
}
FLASH_VERSIONS = ("fa3", "fa4")
"""FlashAttention 3 and 4: torch puts one of them in the place of its FlashAttention 2, for a whole
process.
"""
FASTEST_FIRST: Mapping[str | None, tuple[str, ...]] = dict.fromkeys(
    ("hopper", "blackwell"), ("cudnn", "flash")
)
"""Kernels by generation, fastest first, where no table of rates is at hand; `USUAL_ORDER` for all
others.
"""
USUAL_ORDER = ("flash",)


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """The requirements of a run on its kernel."""

    dtype: str
    head_dim: int
    softcap: float | None = None
    deterministic: bool = False
    generation: str | None = None
    """Generation of the device; None if unknown."""


def kernels_of(choice: str) -> tuple[str, ...]:
    return tuple(choice.split("+"))


def problems(choice: str, needs: AttentionNeeds) -> Iterator[str]:
    """Why the kernels of a choice other than "auto" cannot do it."""
    for kernel in kernels_of(choice):
        limits = KERNEL_LIMITS[kernel]
        name = f'training.attention = "{choice}"'
        if needs.dtype not in limits.dtypes:
            yield f'{name} supports {" or ".join(limits.dtypes)}, not training.dtype = "{needs.dtype}"'
        if needs.deterministic and not limits.is_deterministic:
            yield f"{name} is not deterministic, but training.deterministic = true"
        if needs.softcap is not None and not limits.has_softcap:
            yield f"{name}: {SOFTCAP_PROBLEM.format(kernel=kernel, softcap=needs.softcap)}"
        if limits.max_head_dim is not None and needs.head_dim > limits.max_head_dim:
            yield f"{name} supports heads of at most {limits.max_head_dim} dimensions, not head_dim = {needs.head_dim}"
        if needs.head_dim % limits.head_dim_multiple:
            yield f"{name} supports heads of a multiple of {limits.head_dim_multiple} dimensions, not head_dim = {needs.head_dim}"
        if (
            needs.generation is not None
            and limits.generations
            and needs.generation not in limits.generations
        ):
            yield f"{name} runs on {', '.join(limits.generations)} devices, not on {needs.generation}"
        refused = limits.refused_head_dims.get(needs.generation or "", range(0))
        if needs.head_dim in refused:
            yield (
                f"{name} trains no heads of {refused[0]} to {refused[-1]} dimensions on {needs.generation} devices, "
                f"but head_dim = {needs.head_dim}"
            )


def auto_choices(needs: AttentionNeeds, fastest_first: Sequence[str] | None = None) -> list[str]:
    """Choices for `training.attention = "auto"`, best first: each one for the case that those
    before it fail on the device.

    `fastest_first`: kernels that the device has, by measured rates; None: the usual order of its
    generation.
    """
    order = (
        FASTEST_FIRST.get(needs.generation, USUAL_ORDER)
        if fastest_first is None
        else fastest_first
    )
    able = [
        each
        for each in dict.fromkeys((*order, "efficient", "plain"))
        if not any(problems(each, needs))
    ]
    choices = list[str]()
    for kernel in able:
        if kernel != "cudnn":
            choices.append(kernel)
        elif "flash" in able:
            # Alone it would take windows in pieces, and short blocks one by one.
            choices.append(CUDNN_AND_FLASH)
    return choices


def kernel_for(choice: str, *, tokens: float, window: int | None = None) -> str:
    """The kernel of a choice that takes blocks of this many queries and keys, in layers with this
    window.
    """
    if choice != CUDNN_AND_FLASH:
        return choice
    return "flash" if window is not None or tokens < LONG_TOKENS else "cudnn"


def describe(choice: str) -> str:
    if choice != CUDNN_AND_FLASH:
        return choice
    return f"cudnn for blocks of {LONG_TOKENS:,} tokens or more, flash for shorter ones and for windows"


def planned_length(tokens: int) -> int:
    """The next length for which a kernel builds a plan."""
    # The power of two at or below, in 16 steps up to the next: at most 1 / 16 more tokens.
    step = max(1, (1 << tokens.bit_length() - 1) // LENGTHS_PER_OCTAVE)
    return -(-tokens // step) * step
