"""Start-up check of the layers that extensions add: what a token may see, and what weights an
output must depend on.

Each runs once, without any parallelism, on two small documents of random numbers in float64.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from models import rope
from models.config import ModelConfig
from models.sublayer import Sublayer
from parallelisms.gradient_check import LENGTHS, build_double, small_config

TOLERANCE = 1e-9
"""Share of the largest output that rounding may change, where tokens are summed in another
order.
"""
ROUNDING = 1e-5
"""Share of the largest output below which float32 may be the reason."""
LATER = 8
"""First of the tokens that are changed to see whether earlier ones notice."""


class LayerError(ValueError):
    """A layer sees tokens that it must not see, or does not use its weights."""


def verify_layers(config: ModelConfig, added: Collection[str]) -> None:
    """Raises LayerError for a sublayer of these names that looks at later tokens or into another
    document, for a feed-forward that looks at other tokens at all, and for weights
    without gradient.
    """
    small = small_config(config)
    model = build_double(small)
    for block in model.transformer_blocks():
        for sublayer in block.sublayers:
            is_mixer = sublayer is block.sublayers[0]
            if sublayer.name in added and (
                wrong := next(_problems(sublayer, small, is_mixer=is_mixer), None)
            ):
                raise LayerError(f"{sublayer.name}: {wrong}")


def _problems(sublayer: Sublayer, config: ModelConfig, *, is_mixer: bool) -> Iterator[str]:
    first = LENGTHS[0]
    total = sum(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    x_1SE, other_1SE = (
        torch.randn(1, total, config.dim, generator=generator, dtype=torch.float64, device="cpu")
        for _ in range(2)
    )
    positions_1S = torch.cat([torch.arange(length, device="cpu") for length in LENGTHS])[None]
    rotation = rope.cos_sin_table(
        config.rope, config.rope.rotary_dim(config.head_dim), positions_1S, torch.float64
    )
    boundaries = torch.tensor([[0, first, total]], dtype=torch.int32, device="cpu")
    expected_1SE = sublayer(x_1SE, rotation, boundaries)

    def difference(changed: slice, seen: slice) -> str:
        """How far other inputs at `changed` change the outputs at `seen`; empty if they do not."""
        with torch.no_grad():
            mixed_1SE = x_1SE.clone()
            mixed_1SE[:, changed] = other_1SE[:, changed]
            found_1SE = sublayer(mixed_1SE, rotation, boundaries)
            error = float(
                (found_1SE - expected_1SE)[:, seen].abs().max() / expected_1SE.abs().max()
            )
            if error <= TOLERANCE:
                return ""
            # So small a difference is what rounding to a narrower dtype leaves of equal sums.
            hint = "; is a part computed in float32?" if error < ROUNDING else ""
            return f", by {error:.0e} of the largest in float64{hint}"

    if error := difference(slice(LATER, None), slice(LATER)):
        yield f"the outputs of tokens 0 to {LATER - 1} change with the tokens after them{error}"
    if error := difference(slice(first), slice(first, None)):
        yield f"the outputs of a document change with the tokens of another (see boundaries){error}"
    if not is_mixer and (error := difference(slice(1), slice(1, first))):
        yield f"the output of a token changes with the tokens before it, which only a mixer may see{error}"
    yield from _unused(sublayer, expected_1SE, other_1SE)


def _unused(sublayer: Sublayer, out_1SE: Tensor, weights_1SE: Tensor) -> Iterator[str]:
    (out_1SE * weights_1SE).sum().backward()
    unused = [
        name
        for name, parameter in sublayer.module.named_parameters()
        # Few tokens need not reach every expert, each a slice of dimension 0.
        if parameter.grad is None and parameter.ndim < 3
    ]
    if unused:
        yield f"its output has no gradient for {', '.join(unused)}"
