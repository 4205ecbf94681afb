"""Start-up check of an attention kernel against matrix products in float64.

Kernels of one name differ between devices and versions without raising an error, and one call may
reach several code paths. Each block of work is therefore judged by itself, row by row: a wrong
last row is not hidden by large first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from math import ceil, log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.kernel_choice import CUDNN_AND_FLASH, LONG_TOKENS
from models.kernel_reference import (
    OUTPUTS,
    Reference,
    Results,
    Sample,
    forward_backward,
    reference,
)
from models.score_blocks import ScoreBlock, ScoreBlocks
from models.score_pairs import Scores

SHORT_LENGTHS = (2, 3, 63, 64, 65, 127, 128, 129)
LENGTHS = (*SHORT_LENGTHS, 1000, 4097)
"""Lengths of documents: around the tile sizes of kernels, and beyond several tiles."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-4, torch.float16: 0.03, torch.bfloat16: 0.15}
FLOOR = 0.25
"""Share of a tensor's maximum that is added to a row's scale: rows may cancel to zero in float64
only.
"""
CANCELLED = 0.0625
"""The least scale where terms cancel in a whole tensor: this share of their sizes, a row's plus
the mean of all rows'.
"""
MAX_ELEMENTS = 2**31 - 1
"""Elements that a kernel with 32-bit indices can address."""
# `verify_wide`: tokens of its documents and of the few keys or queries, and scores that the
# reference holds at once. MAX_ROWS: tokens that `compare` looks at.
LONG_DOCUMENT = 1024
FEW_TOKENS = 256
MAX_SCORES = 1 << 24
MAX_ROWS = 1 << 14


class Heads(NamedTuple):
    """Query heads, KV heads and head dim, as the kernel gets them."""

    num: int
    kv: int
    dim: int


def verify_kernel(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: Heads,
    lengths: Sequence[int] = LENGTHS,
    windows: Collection[int] = (),
    deterministic: bool = False,
) -> dict[str, float]:
    """The largest relative error of each output. `deterministic`: two passes must also agree
    bitwise.

    `windows`: those of the model's layers; causal blocks longer than a window and flipped blocks
    are checked too.

    Raises ValueError unless the kernel's forward and backward pass agree with the reference, each
    number finite.
    """
    errors = dict.fromkeys(OUTPUTS, 0.0)
    for name, blocks in (check_cases(lengths, windows) | long_cases(kernel)).items():
        for inputs, draw in SAMPLES.items():
            sample = draw(blocks, heads, device, dtype)
            actual = forward_backward(sample, blocks, kernel)
            found = compare(
                f'"{kernel}" on {name}, {inputs}',
                actual,
                reference(sample, blocks),
                TOLERANCES[dtype],
            )
            errors = {output: max(error, found[output]) for output, error in errors.items()}
            if deterministic:
                # Atomic additions sum in another order each time, which shows in the last bits.
                again = forward_backward(sample, blocks, kernel)
                for output, one, other in zip(OUTPUTS, actual, again, strict=True):
                    if (one != other).any():
                        raise ValueError(
                            f'attention kernel "{kernel}" gives another {output} the second time on {name}; '
                            "training.deterministic = true needs equal ones"
                        )
    return errors


def check_cases(lengths: Sequence[int], windows: Collection[int] = ()) -> dict[str, ScoreBlocks]:
    """Blocks by name: every kernel takes single tokens by another path than longer documents."""
    spans = [*pairwise(accumulate(lengths, initial=0))]
    # A model's window may be longer than all lengths: around a tile it says as much.
    windowed = {
        f"a window of {window}": ScoreBlocks(
            [span + span for span in spans], causal=True, scores=Scores(window)
        )
        for window in sorted(
            {min(window, near) for window in windows for near in (1, 65, *lengths[-1:])}
        )
    }
    flipped = ScoreBlocks([ScoreBlock(*span, *span, "flipped") for span in spans])
    whole = 2 * max(lengths)
    half = max(lengths) // 2
    rectangles = [(0, 50, 0, 20), (50, 100, 20, 71), (100, 192, 80, 192)]
    return {
        "causal blocks": causal_blocks(lengths),
        "causal blocks and single tokens": causal_blocks((65, 1, 126, 1)),
        "a rectangular block": ScoreBlocks([(0, half, 0, whole)], causal=False),
        "rectangular blocks": ScoreBlocks(rectangles, causal=False),
        "rectangular blocks that share keys": ScoreBlocks(
            [(0, 50, 0, 20), (50, 70, 0, 70)], causal=False
        ),
        "single queries and keys": ScoreBlocks([(0, 1, 0, 70), (1, 50, 70, 71)], causal=False),
        **windowed,
        **({"flipped blocks": flipped} if windows else {}),
    }


def long_cases(kernel: str) -> dict[str, ScoreBlocks]:
    """Cases for the kernel of a pair that takes long blocks only; a long causal one is in
    `LENGTHS`.
    """
    if kernel != CUDNN_AND_FLASH:
        return {}
    return {
        "a long rectangular block": ScoreBlocks(
            [(0, LONG_TOKENS, 0, 2 * LONG_TOKENS)], causal=False
        )
    }


def causal_blocks(lengths: Sequence[int]) -> ScoreBlocks:
    spans = pairwise(accumulate(lengths, initial=0))
    return ScoreBlocks([span + span for span in spans], causal=True)


# ---- samples


def random_sample(
    blocks: ScoreBlocks, heads: Heads, device: torch.device, dtype: torch.dtype
) -> Sample:
    num_queries, num_keys = (
        max(getattr(block, side) for block in blocks.blocks) for side in ("q1", "k1")
    )
    drawn: Any = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    shapes = [(num_queries, heads.num)] * 2 + [(num_keys, heads.kv)] * 2
    return Sample(*(torch.randn(*shape, heads.dim, **drawn).to(dtype) for shape in shapes))


def matching_sample(
    blocks: ScoreBlocks, heads: Heads, device: torch.device, dtype: torch.dtype
) -> Sample:
    """A sample in which every query gives about half of its attention to one key, its own: no row
    of any gradient is small.
    """
    grad, q, k, v = random_sample(blocks, heads, device, torch.float32)
    for q0, q1, k0, k1, _ in blocks.blocks:
        own_key = k[k0 + torch.arange(q1 - q0, device=device) % (k1 - k0)]
        own_score = own_key.square().sum(-1, keepdim=True) * heads.dim**-0.5
        # The own key's score is 1 + ln(n) among n keys, the others' are near 0: exp of it
        # outweighs their sum by e.
        matching = own_key * ((1 + log(k1 - k0)) / own_score)
        per_head = matching.repeat_interleave(heads.num // heads.kv, dim=1)
        q[q0:q1] = per_head + 0.3 * q[q0:q1]
    return Sample(*(x.to(dtype) for x in (grad, q, k, v)))


def negative_sample(
    blocks: ScoreBlocks, heads: Heads, device: torch.device, dtype: torch.dtype
) -> Sample:
    """Scores so negative that their exponentials underflow."""
    grad, q, k, v = random_sample(blocks, heads, device, dtype)
    return Sample(grad, 5 * q.abs(), -5 * k.abs(), v)


SAMPLES: dict[str, Callable[[ScoreBlocks, Heads, torch.device, torch.dtype], Sample]] = {
    "random": random_sample,
    "each query near its own key": matching_sample,
    "very negative scores": negative_sample,
}


# ---- comparison


def compare(
    where: str, actual: Results, expected: Reference, tolerance: float
) -> dict[str, float]:
    """The largest error of each output over MAX_ROWS tokens.

    Raises ValueError, with the worst token, for an error that is not below the tolerance.
    """
    found = {}
    for name, *tensors in zip(OUTPUTS, actual, *expected, strict=True):
        token_dim = 1 if name == "log-sum-exp" else 0
        stride = ceil(tensors[0].shape[token_dim] / MAX_ROWS)
        first = (tensors[0].shape[token_dim] - 1) % stride  # So that the last token is among them.
        errors = row_errors(*(x.movedim(token_dim, 0)[first::stride] for x in tensors))
        error = float(errors.max())  # NaN, if there is one.
        if not error < tolerance:
            token = first + stride * int(errors.nan_to_num(torch.inf).argmax())
            which = f"in the {name} of token {token}"
            raise ValueError(
                f"attention kernel {where}: relative error {error:.1e} {which}, above {tolerance:g}"
            )
        found[name] = error
    return found


def row_errors(actual: Tensor, exact: Tensor, terms: Tensor) -> Tensor:
    """Relative error of each row, in float64."""
    actual, exact, terms = (x.flatten(1).double() for x in (actual, exact, terms))
    return (actual - exact).abs().amax(1) / row_scales(exact, terms)


def row_scales(exact: Tensor, terms: Tensor) -> Tensor:
    """The scale to which each row's errors are relative; above zero, whatever cancels.

    Where all terms are zero there is nothing to round: any other number is wrong.
    """
    largest = exact.abs().amax(1)
    sizes = terms.amax(1)
    # The larger of two scales: the row's numbers and, where they cancel, the sizes of their terms.
    of_numbers = largest + FLOOR * largest.max()
    of_terms = CANCELLED * (sizes + sizes.mean())
    return torch.maximum(of_numbers, of_terms).clamp(min=torch.finfo(exact.dtype).tiny)


# ---- tensors that 32 bits cannot index


def verify_wide(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: Heads,
    num_tokens: int,
    max_elements: int = MAX_ELEMENTS,
) -> None:
    """Raises ValueError unless the kernel is right where queries or KV of `num_tokens` have more
    than `max_elements`.

    Quick: short documents, few keys or queries, the first and last KV head. Takes memory for about
    ten such tensors.
    """
    elements = heads.dim * LONG_DOCUMENT
    # The fewest whole documents with which a tensor has more than `max_elements`.
    num_queries, num_keys = (
        LONG_DOCUMENT * (max_elements // (n * elements) + 1) for n in (heads.num, heads.kv)
    )
    cases = {}
    if num_tokens >= num_queries:
        cases["documents"] = causal_blocks([LONG_DOCUMENT] * (num_queries // LONG_DOCUMENT))
        cases["few keys"] = ScoreBlocks([(0, num_queries, 0, FEW_TOKENS)], causal=False)
    if num_tokens >= num_keys:
        cases["few queries"] = ScoreBlocks([(0, FEW_TOKENS, 0, num_keys)], causal=False)
    for name, blocks in cases.items():
        # The last block alone is compared: its indices are beyond the limit.
        q0, q1, k0, k1, mask = blocks.blocks[-1]
        drawn: Any = {
            "device": device,
            "dtype": dtype,
            "generator": torch.Generator(device).manual_seed(0),
        }
        shapes = [(q1, heads.num)] * 2 + [(k1, heads.kv)] * 2
        sample = Sample(*(torch.randn(*shape, heads.dim, **drawn) for shape in shapes))
        out, lse, dq, dk, dv = forward_backward(sample, blocks, kernel)
        # The reference holds whole scores, so a rectangle is compared in strips of queries.
        step = q1 - q0 if mask == "causal" else max(1, MAX_SCORES // (k1 - k0))
        chunks = [
            (start, min(start + step, q1 - q0), 0, k1 - k0) for start in range(0, q1 - q0, step)
        ]
        work = ScoreBlocks(chunks, causal=mask == "causal")
        ratio = heads.num // heads.kv
        for head in sorted({0, heads.kv - 1}):
            queries = slice(q0, q1), slice(head * ratio, (head + 1) * ratio)
            keys = slice(k0, k1), slice(head, head + 1)
            actual = out[queries], lse[queries[::-1]], dq[queries], dk[keys], dv[keys]
            part = Sample(sample.grad[queries], sample.q[queries], sample.k[keys], sample.v[keys])
            where = (
                f'"{kernel}" on {name}, in tensors of {max(x.numel() for x in sample):,} elements'
            )
            compare(where, actual, reference(part, work), TOLERANCES[dtype])
