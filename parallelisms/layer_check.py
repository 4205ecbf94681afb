"""Start-up check of the layers that extensions add: what a token may see, and what weights an
output must depend on.

Each runs once, without any parallelism, on two small documents of random numbers in float64; a
mixer on two longer ones, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from models import rope
from models.config import ModelConfig
from models.layers import LayerKind
from models.sublayer import Sublayer
from parallelisms.gradient_check import LENGTHS, build_double, small_config

TOLERANCE = 1e-9
"""Share of the largest output that rounding may change, where tokens are summed in another
order.
"""
ROUNDING = 1e-5
"""Share of the largest output below which float32 may be the reason."""
LONG = (129, 171)
"""Tokens of documents in which a mixer may look further ahead."""


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
            if sublayer.name not in added:
                continue
            is_mixer = sublayer is block.sublayers[0]
            problems = chain(
                _form_problems(sublayer, block.kind),
                _problems(sublayer, small, LENGTHS, is_mixer=is_mixer),
            )
            if is_mixer:
                problems = chain(problems, _problems(sublayer, small, LONG, is_mixer=True))
            if (wrong := next(problems, None)) is not None:
                raise LayerError(f"{sublayer.name}: {wrong}")


def _form_problems(sublayer: Sublayer, kind: LayerKind) -> Iterator[str]:
    module = sublayer.module
    classes = type(module).mro()
    definer = next(each for each in classes if "forward" in vars(each))
    package, *_ = definer.__module__.split(".")
    is_own = package != "models"
    declaration = kind.sublayers.get(getattr(module, "module_name", ""))
    if is_own and declaration is not None and declaration.in_pieces:
        yield (
            f"{definer.__name__} overrides forward, so its declaration needs in_pieces=False; "
            "without that, recomputation runs `inner` between the products of `linears` and `last`"
        )


def _problems(
    sublayer: Sublayer, config: ModelConfig, lengths: Sequence[int], *, is_mixer: bool
) -> Iterator[str]:
    first = lengths[0]
    total = sum(lengths)
    # First of the tokens that are changed to see whether earlier ones notice.
    later = 2 * total // 3
    generator = torch.Generator().manual_seed(0)
    x_1SE, other_1SE = (
        torch.randn(1, total, config.dim, generator=generator, dtype=torch.float64, device="cpu")
        for _ in range(2)
    )
    positions_1S = torch.cat([torch.arange(length, device="cpu") for length in lengths])[None]
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

    if error := difference(slice(later, None), slice(later)):
        yield f"the outputs of tokens 0 to {later - 1} change with the tokens after them{error}"
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
