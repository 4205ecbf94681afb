"""Rotary embedding, compared with complex multiplication, Hugging Face and exact angles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models import rope
from models.rope_config import RopeConfig
from tests.models.rope_configs import KINDS
from tests.models.small_models import TouchedElements, remember, unchanged

PLAIN = RopeConfig(theta=500_000.0)
WIDTH = 16
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 5000], [7, 6, 0, 100_000, 1, 1, 2]])


def rotation(
    config: RopeConfig = PLAIN, *, head_dim: int = WIDTH, positions: Tensor = POSITIONS
) -> Tensor:
    return rope.cos_sin_table(config, head_dim, positions, torch.float64)


def draw(positions: Tensor = POSITIONS, *, head_dim: int = WIDTH) -> Tensor:
    return torch.randn(
        *positions.shape,
        3,
        head_dim,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(0),
    )


def as_complex(x: Tensor) -> Tensor:
    """Elements i of both halves are the real and imaginary part of one number."""
    return torch.complex(x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :])


def test_halves_are_rotated_as_complex_numbers() -> None:
    x = draw()
    frequencies = torch.tensor(
        [500_000.0 ** (-2 * i / WIDTH) for i in range(WIDTH // 2)], dtype=torch.float64
    )
    angles = POSITIONS[:, :, None, None] * frequencies
    expected = as_complex(x) * torch.exp(1j * angles)
    torch.testing.assert_close(
        as_complex(rope.apply_rotary_emb(x, rotation())), expected, rtol=0, atol=1e-10
    )


def test_rotation_equals_hugging_face() -> None:
    x = draw()
    cos, sin = (torch.cat((half, half), dim=-1) for half in rotation())
    left, right = x.chunk(2, dim=-1)
    expected = x * cos + torch.cat((-right, left), dim=-1) * sin
    torch.testing.assert_close(rope.apply_rotary_emb(x, rotation()), expected, rtol=0, atol=1e-15)


def test_position_zero_is_not_rotated() -> None:
    x = draw()
    turned = rope.apply_rotary_emb(x, rotation())
    assert torch.equal(turned[POSITIONS == 0], x[POSITIONS == 0])
    assert (turned[POSITIONS == 1] - x[POSITIONS == 1]).abs().amax(-1).min() > 0.1


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_scores_depend_on_distance_only(config: RopeConfig) -> None:
    distances = []
    for first in (0, 3, 4097, 1_000_000):
        positions = torch.tensor([[first + 11, first]])
        q, k = rope.apply_rotary_emb(
            draw(torch.zeros(1, 2), head_dim=128),
            rotation(config, head_dim=128, positions=positions),
        )[0]
        distances.append((q * k).sum(-1))
    for products in distances[1:]:
        torch.testing.assert_close(products, distances[0], rtol=0, atol=1e-8)
    positions = torch.tensor([[12, 0]])
    other = rope.apply_rotary_emb(
        draw(torch.zeros(1, 2), head_dim=128), rotation(config, head_dim=128, positions=positions)
    )[0]
    assert ((other[0] * other[1]).sum(-1) - distances[0]).abs().min() > 1e-3


@pytest.mark.parametrize("position", [8_000, 1_000_000, 4_000_000, 10_000_000])
@pytest.mark.parametrize("config", [RopeConfig(theta=8e6), *KINDS.values()], ids=["abf", *KINDS])
def test_relative_angle_is_accurate_at_any_position(position: int, config: RopeConfig) -> None:
    firsts = torch.arange(position - 50, position)
    table = rope.cos_sin_table(
        config, 128, torch.stack((firsts, firsts + 1000)), torch.float32
    ).double()
    cos, sin = table.squeeze(3)
    angles = torch.atan2(sin, cos)
    error = angles[1] - angles[0] - 1000 * rope.rope_frequencies(config, 128)
    error = torch.remainder(error + math.pi, 2 * math.pi) - math.pi
    # Angles in float32 are off by 0.05 at position 1M.
    assert error.abs().max() < 2e-6


def test_table_is_as_precise_as_its_dtype() -> None:
    exact = rotation(positions=torch.tensor([[4_000_000]]))
    single = rope.cos_sin_table(PLAIN, WIDTH, torch.tensor([[4_000_000]]), torch.float32)
    assert single.dtype == torch.float32
    assert single.shape == (2, 1, 1, 1, WIDTH // 2)
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=5e-7)


@pytest.mark.parametrize(
    "config", [PLAIN, replace(KINDS["yarn"], attention_factor=1.7)], ids=["default", "yarn"]
)
def test_gradients_equal_finite_differences(config: RopeConfig) -> None:
    torch.autograd.gradcheck(
        lambda x: rope.apply_rotary_emb(x, rotation(config)), draw().requires_grad_()
    )


def test_identity_rotation_changes_nothing_and_allocates_nothing() -> None:
    x = draw().requires_grad_()
    still = rope.identity_rotation(rotation(KINDS["yarn"], head_dim=WIDTH))
    out = rope.apply_rotary_emb(x, still)
    assert torch.equal(out, x)
    out.backward(torch.ones_like(x).cumsum(-1))
    assert torch.equal(torch.ones_like(x).cumsum(-1), x.grad if x.grad is not None else x)
    assert still.untyped_storage().nbytes() == 2 * 8


def test_frequencies_are_cached() -> None:
    assert rope.rope_frequencies(PLAIN, WIDTH) is rope.rope_frequencies(PLAIN, WIDTH)


def test_bfloat16_is_rotated_in_float32() -> None:
    table = rope.cos_sin_table(PLAIN, WIDTH, POSITIONS, torch.float32)
    half = draw().bfloat16().requires_grad_()
    single = half.detach().float().requires_grad_()
    out = rope.apply_rotary_emb(half, table)
    wide = rope.apply_rotary_emb(single, table)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wide.bfloat16())
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    out.backward(grad)
    wide.backward(grad.float())
    assert half.grad is not None
    assert single.grad is not None
    assert half.grad.dtype == torch.bfloat16
    assert torch.equal(half.grad, single.grad.bfloat16())


def test_rotation_saves_no_activation() -> None:
    x = draw().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(remember(kept), unchanged):
        rope.apply_rotary_emb(x, rotation())
    assert {tensor.shape[-1] for tensor in kept} == {WIDTH // 2}


def test_rotation_of_bfloat16_moves_14_bytes_per_number() -> None:
    """One kernel reads x and writes float32 products; two read those and x, and write the
    result.
    """
    table = rope.cos_sin_table(PLAIN, WIDTH, POSITIONS, torch.float32)
    x = draw().bfloat16()
    with TouchedElements(x.numel() // 2) as seen:
        rope.apply_rotary(x, *table.unbind(0))
    assert seen.kernels == 3
    assert seen.by_dtype == {torch.bfloat16: 3 * x.numel(), torch.float32: 2 * x.numel()}
