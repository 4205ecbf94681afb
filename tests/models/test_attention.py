"""The attention layer and its seam."""

from __future__ import annotations

import torch
from torch import Tensor

from models import rope
from models.attention import Attention, LocalCore
from tests.models.small import SMALL, packed


def layer_inputs() -> tuple[Attention, Tensor, Tensor, Tensor]:
    batch = packed([5, 7, 4], [15, 1])
    torch.manual_seed(0)
    attention = Attention(SMALL).double()
    x_BSE = torch.randn(2, 16, SMALL.dim, dtype=torch.float64)
    rotation = rope.rotation(SMALL.rope, SMALL.head_dim, batch.positions, torch.float64)
    return attention, x_BSE, rotation, batch.boundaries


def test_the_core_sees_rotated_queries_and_keys_values_as_they_are_and_whole_boundaries() -> None:
    attention, x_BSE, rotation, boundaries = layer_inputs()
    seen: list[Tensor] = []

    def core(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor) -> Tensor:
        seen.extend((q_BSNH, k_BSKH, v_BSKH, boundaries_BD))
        return LocalCore()(q_BSNH, k_BSKH, v_BSKH, boundaries_BD)

    attention.core = core
    attention(x_BSE, rotation, boundaries)
    q, k, v, given = seen
    width = SMALL.head_dim
    assert torch.equal(
        q, rope.rotate((x_BSE @ attention.q_proj.weight.T).view(2, 16, SMALL.num_heads, width), rotation)
    )
    assert torch.equal(
        k, rope.rotate((x_BSE @ attention.k_proj.weight.T).view(2, 16, SMALL.num_kv_heads, width), rotation)
    )
    assert torch.equal(v, (x_BSE @ attention.v_proj.weight.T).view(2, 16, SMALL.num_kv_heads, width))
    assert given is boundaries


def test_what_the_core_returns_is_projected_head_after_head() -> None:
    attention, x_BSE, rotation, boundaries = layer_inputs()
    answer = torch.randn(2, 16, SMALL.num_heads, SMALL.head_dim, dtype=torch.float64)
    attention.core = lambda *_: answer
    torch.testing.assert_close(
        attention(x_BSE, rotation, boundaries),
        answer.reshape(2, 16, -1) @ attention.o_proj.weight.T,
        rtol=0,
        atol=1e-14,
    )
