"""Explicit gradients of a tile compared with autograd; how tokens are tiled; float32 accumulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.context_parallel import Peak
from models import rope, tiling
from models.config import RopeConfig
from tests.models.small_models import SMALL, YARN

ROWS, TOKENS = 3, 7
STREAM = (ROWS, TOKENS, SMALL.dim)
WIDTHS = [heads * SMALL.head_dim for heads in (SMALL.num_heads, SMALL.num_kv_heads, SMALL.num_kv_heads)]
POSITIONS = torch.arange(TOKENS).expand(ROWS, -1)
INTO = [(SMALL.ffn_dim, SMALL.dim)] * 2
OUT_OF = (SMALL.dim, SMALL.ffn_dim)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def differentiated(
    function: Callable[..., Tensor | Sequence[Tensor]], given: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of a function and the gradients of its inputs, by autograd."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    found = function(*leaves)
    outs = [found] if isinstance(found, Tensor) else [*found]
    return [out.detach() for out in outs], [*torch.autograd.grad(outs, leaves, [*grads])]


def assert_near(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-13 * float(right.abs().max()))


# ---- one tile


@pytest.mark.parametrize("rope_config", [SMALL.rope, YARN])
@pytest.mark.parametrize("normed", [False, True])
def test_qkv_projections_and_gradients_equal_autograd(*, normed: bool, rope_config: RopeConfig) -> None:
    cos, sin = rope.cos_sin_table(rope_config, SMALL.head_dim, POSITIONS, torch.float64)
    given = [draw(*STREAM, seed=9), *(draw(width, SMALL.dim, seed=seed) for seed, width in enumerate(WIDTHS))]
    given += [1 + draw(SMALL.head_dim, seed=seed) / 5 for seed in (21, 22)] * normed
    grads = [draw(ROWS, TOKENS, width // SMALL.head_dim, SMALL.head_dim, seed=5 + width) for width in WIDTHS]

    def plain(x: Tensor, *weights: Tensor) -> list[Tensor]:
        q, k, v = ((x @ weight.T).unflatten(-1, (-1, SMALL.head_dim)) for weight in weights[:3])
        if normed:
            q, k = (F.rms_norm(y, y.shape[-1:], weight, 1e-2) for y, weight in zip((q, k), weights[3:], strict=True))
        table = torch.stack((cos, sin))
        return [rope.apply_rotary_emb(q, table), rope.apply_rotary_emb(k, table), v]

    outs, expected = differentiated(plain, given, grads)
    through = tiling.QKVProjections(given[1:4], given[4:], 1e-2)
    assert_near(tiling.project_qkv(given[0], cos, sin, through), outs)
    assert_near(tiling.project_qkv_backward(given[0], cos, sin, grads, through), expected)


def test_feed_forward_and_gradients_equal_autograd() -> None:
    given = [draw(*STREAM, seed=9), *(draw(*shape, seed=seed) for seed, shape in enumerate((*INTO, OUT_OF)))]
    grad = draw(*STREAM, seed=8)
    outs, expected = differentiated(lambda x, gate, up, down: (F.silu(x @ gate.T) * (x @ up.T)) @ down.T, given, [grad])
    assert_near([tiling.feed_forward(*given, activation="silu")], outs)
    before = grad.clone()
    assert_near(tiling.feed_forward_backward(grad, *given, activation="silu"), expected)
    assert torch.equal(grad, before), "a gradient that is given is only read"


def test_input_grad_is_the_sum_of_products() -> None:
    grads, weights = [draw(2, 3, 5, seed=1), draw(2, 3, 4, seed=2)], [draw(5, 6, seed=3), draw(4, 6, seed=4)]
    expected = grads[0] @ weights[0] + grads[1] @ weights[1]
    assert_near([tiling.input_grad(grads, weights)], [expected])
    assert_near([tiling.input_grad(grads[:1], weights[:1])], [grads[0] @ weights[0]])


# ---- tiling


def sizes(tokens: int, most: int | None = None) -> list[int]:
    return [len(range(tokens)[part]) for part in tiling.split_into_tiles(tokens, most)]


def test_tiles_are_few_and_equal() -> None:
    assert sizes(21) == sizes(21, 21) == sizes(21, 100) == [21]
    assert sizes(21, 20) == [11, 10]
    assert sizes(21, 10) == [7, 7, 7]
    assert sizes(21, 5) == [5, 4, 4, 4, 4]
    assert sizes(3, 1) == sizes(3, 0) == [1, 1, 1]


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 97])
def test_tiles_cover_all_tokens_in_order_and_differ_by_at_most_one(tokens: int) -> None:
    for most in range(1, tokens + 2):
        found = tiling.split_into_tiles(tokens, most)
        assert [part.start for part in found] == [0, *(part.stop for part in found[:-1])]
        assert found[-1].stop == tokens
        alike = sizes(tokens, most)
        assert len(alike) == -(-tokens // most)
        assert max(alike) <= most
        assert max(alike) - min(alike) <= 1


@pytest.mark.parametrize(("inner", "width"), [(96, 32), (16, 32)])
def test_bytes_per_token_is_the_peak_of_the_feed_forward_backward(inner: int, width: int) -> None:
    """With a feed-forward wider than the model dim and, as on a tensor-parallel rank, narrower (16)."""
    half = torch.bfloat16
    weights = [draw(*shape, dtype=half) for shape in ((inner, width), (inner, width), (width, inner))]

    def peak(tokens: int) -> int:
        grad, normed = (draw(1, tokens, width, seed=seed, dtype=half) for seed in (1, 2))
        with Peak() as seen:
            found = tiling.feed_forward_backward(grad, normed, *weights, activation="silu")
        del found
        return int(seen.bytes)

    each = (peak(1024) - peak(512)) / 512
    # The normed input exists already and is not counted; with 16, its two gradients are allocated later.
    assert each == tiling.bytes_per_token(width, inner, 2) - width * 2 - (2 * 32 if inner == 16 else 0)


# ---- accumulation of weight gradients


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_weight_gradients_are_accumulated_in_at_least_float32(dtype: torch.dtype, wide: torch.dtype) -> None:
    """Over 512 tiles; a bfloat16 sum would stop growing at 256."""
    weights = [torch.empty(2, 3, dtype=dtype), torch.empty(4, dtype=dtype)]
    sums = tiling.GradAccumulator(weights, 512)
    assert {x.dtype for x in sums._accumulators} == {wide}
    for _ in range(512):
        sums.add([torch.ones(2, 3, dtype=dtype), torch.full((4,), 2, dtype=wide)])
    matrix, vector = sums.pop_grads()
    assert (matrix.dtype, vector.dtype) == (dtype, dtype)
    assert torch.equal(matrix, torch.full_like(weights[0], 512))
    assert torch.equal(vector, torch.full_like(weights[1], 1024))


def test_gradients_of_a_single_tile_are_copied_only_to_change_dtype() -> None:
    sums = tiling.GradAccumulator([torch.empty(2), torch.empty(3, dtype=torch.bfloat16)], 1)
    mine, wide = torch.ones(2), torch.ones(3)
    sums.add([mine, wide])
    first, second = sums.pop_grads()
    assert first is mine
    assert second.dtype == torch.bfloat16
