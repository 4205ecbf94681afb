"""Tiles change what is kept and what lives at once, and nothing of what is computed but its last digits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.context_parallel import Peak
from models import tiles
from models.feed_forward import FeedForward
from models.norm import RMSNorm
from tests.models.small import SMALL, remember, unchanged

ROWS, TOKENS = 3, 7
NAMES = ("x", "norm", "gate", "up", "down")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def made(*, tile: int | None = None, dtype: torch.dtype = torch.float64) -> tuple[RMSNorm, FeedForward]:
    """With weights that do not depend on how it runs; at most so many tokens in a tile."""
    norm, module = RMSNorm(SMALL.dim, eps=1e-5).to(dtype), FeedForward(SMALL).to(dtype)
    with torch.no_grad():
        for seed, weight in enumerate((*norm.parameters(), *module.parameters())):
            weight.copy_(draw(*weight.shape, seed=seed, dtype=dtype) / 2 + (weight.ndim == 1))
    if tile is not None:
        module.run = partial(tiles.feed_forward, limit=tile * (4 * SMALL.ffn_dim + SMALL.dim) * dtype.itemsize)
    return norm, module


def run(norm: RMSNorm, module: FeedForward, x_E: Tensor, *, inside: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of the input and of each weight; with the norm inside of a tile or before it."""
    x_E = x_E.detach().requires_grad_()
    out_E = module(x_E, norm) if inside else module(norm(x_E))
    leaves = (x_E, *norm.parameters(), *module.parameters())
    grads = torch.autograd.grad(out_E, leaves, draw(*x_E.shape, seed=9, dtype=x_E.dtype))
    return out_E.detach(), dict(zip(NAMES, grads, strict=True))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("tile", [1, 2, 4, 7, 20, 21, 100])
def test_values_and_gradients_are_those_of_all_tokens_at_once(tile: int, inside: bool) -> None:  # noqa: FBT001
    x_E = draw(ROWS, TOKENS, SMALL.dim, seed=8)
    expected, expected_grads = run(*made(), x_E)
    found, grads = run(*made(tile=tile), x_E, inside=inside)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-13 * float(grad.abs().max()), msg=name)


def test_tiles_are_few_and_alike() -> None:
    def sizes(tokens: int, most: int) -> list[int]:
        return [len(range(tokens)[part]) for part in tiles.tiles(tokens, most)]

    assert sizes(21, 21) == sizes(21, 100) == [21]
    assert sizes(21, 20) == [11, 10]
    assert sizes(21, 10) == [7, 7, 7]
    assert sizes(3, 1) == [1, 1, 1]


def test_gradients_of_weights_are_summed_in_single_precision() -> None:
    """Of 512 tiles. A sum in half precision would lose most of them: here it would be wrong by a tenth."""
    x_E = draw(1, 512, SMALL.dim, seed=8, dtype=torch.bfloat16)
    norm, module = made(dtype=torch.bfloat16)
    _, exact = run(norm.double(), module.double(), x_E.double())
    _, found = run(*made(tile=1, dtype=torch.bfloat16), x_E)
    for name, grad in found.items():
        assert grad.dtype == torch.bfloat16
        assert (grad - exact[name]).abs().max() < 0.02 * exact[name].abs().max(), name


@pytest.mark.parametrize("inside", [True, False])
def test_nothing_but_the_input_is_kept(inside: bool) -> None:  # noqa: FBT001
    norm, module = made(tile=2)
    x_E = draw(ROWS, TOKENS, SMALL.dim).requires_grad_()
    normed_E = x_E if inside else norm(x_E)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(remember(kept), unchanged):
        module(normed_E, *[norm] * inside)
    weights = {weight.data_ptr() for weight in (*norm.parameters(), *module.parameters())}
    assert {tensor.data_ptr() for tensor in kept} - weights == {normed_E.data_ptr()}


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    norm, module = made(tile=2)
    kept: list[Tensor] = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(remember(kept), unchanged):
        out_E = module(draw(ROWS, TOKENS, SMALL.dim), norm)
    assert kept == []
    assert not out_E.requires_grad


def peaks(tokens: int, *, tile: int, inner: int, normed: bool) -> tuple[int, int, int]:
    """Most bytes alive at once, forward and backward; and the bytes of gradients of weights, in single precision."""
    width, half = 32, torch.bfloat16
    norm_E = draw(width, dtype=half) if normed else None
    weights = [draw(*shape, dtype=half) for shape in ((inner, width), (inner, width), (width, inner))]
    x_E, grad_E = (draw(1, tokens, width, seed=seed, dtype=half) for seed in (1, 2))
    found = []
    for given in ((tiles.forward, x_E), (tiles.backward, grad_E, x_E)):
        function: Any = given[0]
        with Peak() as peak:
            out = function(*given[1:], norm_E, *weights, 1e-5, tile)
        del out
        found.append(peak.bytes)
    return (
        found[0],
        found[1],
        sum(4 * weight.numel() for weight in (*weights, *[x for x in (norm_E,) if x is not None])),
    )


@pytest.mark.parametrize(("inner", "normed"), [(96, True), (96, False), (16, False)])
def test_what_lives_at_once_is_one_tile_and_a_gradient_per_token(inner: int, normed: bool) -> None:  # noqa: FBT001
    """With 16, a rank of tp's: narrower than the residual stream, and normalised before tokens were gathered."""
    few, many = (peaks(tokens, tile=256, inner=inner, normed=normed) for tokens in (512, 2048))
    assert many[0] - few[0] == many[1] - few[1] == (2048 - 512) * 32 * 2
    x_E, gate_GE = torch.empty(1, 32, dtype=torch.bfloat16), torch.empty(inner, 32)
    limit = 256 * tiles.bytes_of_token(x_E, gate_GE, normed=normed)
    # Beside: one gradient of a matrix, before it is added, and the norm's number per token.
    assert few[1] - 512 * 32 * 2 - few[2] <= limit + 2 * inner * 32 + 256 * 4 * normed
    assert few[1] - 512 * 32 * 2 - few[2] >= limit
    assert few[0] - 512 * 32 * 2 <= limit


@pytest.mark.parametrize("normed", [True, False])
def test_the_operators_are_what_a_compiler_is_told_they_are(normed: bool) -> None:  # noqa: FBT001
    norm, module = made()
    x_E, grad_E = (draw(ROWS, TOKENS, SMALL.dim, seed=seed) for seed in (1, 2))
    weights = [norm.weight.detach() if normed else None, *(weight.detach() for weight in module.parameters())]
    for operator, given in ((tiles._forward, (x_E,)), (tiles._backward, (grad_E, x_E))):
        torch.library.opcheck(operator, (*given, *weights, 1e-5, 4), test_utils=("test_schema", "test_faketensor"))
