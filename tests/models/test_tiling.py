"""Explicit gradients of a tile compared with autograd; how tokens are tiled; float32
accumulation.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.context_parallel import Peak
from models import tiling
from models.transformer import TransformerBlock
from parallelisms.block_recompute import BlockCompute, Tiling
from tests.models.small_models import SMALL

HALF = torch.bfloat16


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


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


def test_bytes_per_token_is_the_peak_of_the_feed_forward_backward() -> None:
    width = 32
    inner = 96
    block = TransformerBlock(
        replace(SMALL, dim=width, ffn_dim=inner, num_heads=1, num_kv_heads=1)
    ).to(HALF)

    def peak(tokens: int) -> int:
        x, grad = (draw(1, tokens, width, seed=seed, dtype=HALF) for seed in (1, 2))
        out = [torch.zeros(1, tokens, 1, SMALL.head_dim, dtype=HALF)]
        rotation = torch.ones(2, 1, tokens, 1, SMALL.head_dim // 2)
        compute = BlockCompute(block, x, rotation, torch.tensor([[0, tokens]]), Tiling())
        with Peak() as seen, torch.no_grad():
            found = compute.feed_forward_backward(grad, x, out)
        del found
        return int(seen.bytes)

    each = (peak(1024) - peak(512)) / 512
    # Beside the hidden state, whose inverse RMS is saved in float32.
    assert each == tiling.bytes_per_token(width, inner, 2) + width * 2 + 4


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
def test_weight_gradients_are_accumulated_in_at_least_float32(
    dtype: torch.dtype, wide: torch.dtype
) -> None:
    """Over 512 tiles; a bfloat16 sum would stop growing at 256."""
    weights = {"matrix": torch.empty(2, 3, dtype=dtype), "vector": torch.empty(4, dtype=dtype)}
    sums = tiling.GradAccumulator(weights)
    for _ in range(512):
        sums.add({"vector": torch.full((4,), 2, dtype=wide)})
        sums.add({"matrix": torch.ones(2, 3, dtype=dtype)})
    assert {x.dtype for x in sums._sums.values()} == {wide}
    matrix, vector = sums.pop_grads()
    assert (matrix.dtype, vector.dtype) == (dtype, dtype)
    assert torch.equal(matrix, torch.full((2, 3), 512, dtype=dtype))
    assert torch.equal(vector, torch.full((4,), 1024, dtype=dtype))


def test_gradients_of_a_single_tile_are_copied_only_to_change_dtype() -> None:
    sums = tiling.GradAccumulator(
        {"mine": torch.empty(2), "wide": torch.empty(3, dtype=torch.bfloat16)}
    )
    mine = torch.ones(2)
    wide = torch.ones(3)
    sums.add({"mine": mine, "wide": wide})
    first, second = sums.pop_grads()
    assert first is mine
    assert second.dtype == torch.bfloat16


def test_a_weight_without_gradient_is_refused_by_name() -> None:
    sums = tiling.GradAccumulator({"q_proj.weight": torch.empty(2), "q_proj.bias": torch.empty(2)})
    sums.add({"q_proj.weight": torch.ones(2)})
    with pytest.raises(ValueError, match=r"found no gradient of q_proj\.bias"):
        sums.pop_grads()


def test_every_part_has_its_own_result() -> None:
    parts = [slice(0, 2), slice(2, 4), slice(4, 5)]
    found = tiling.map_each(lambda part, number: part.start + number, parts, [10, 20, 30])
    assert found == [10, 22, 34]


def test_a_part_that_does_not_run_has_the_result_of_the_one_before_of_its_size() -> None:
    lengths = [1, 2, 1, 2, 1, 2, 1]
    parts = [torch.empty(length) for length in lengths]
    ran = []

    def compute(part_S: Tensor, number: int) -> int:
        ran.append(len(part_S))
        return number

    with tiling.loops_run_by(lambda indices, _: iter([indices[at] for at in (0, 1, 2, 6)])):
        found = tiling.map_each(compute, parts, range(7))
    assert ran == [1, 2, 1, 1]
    assert found == [0, 1, 2, 1, 2, 1, 6]
