"""The attention module and the `AttentionCore` interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models import rope
from models.attention import Attention
from models.attention_core import LocalAttentionCore
from tests.models.dense_attention import inputs
from tests.models.small_models import SMALL, packed, starts


def layer_inputs() -> tuple[Attention, Tensor, Tensor, Tensor]:
    batch = packed([5, 7, 4], [15, 1])
    torch.manual_seed(0)
    attention = Attention(SMALL, SMALL.layer_kinds[0]).double()
    x_BSE = torch.randn(2, 16, SMALL.dim, dtype=torch.float64)
    rotation = rope.cos_sin_table(SMALL.rope, SMALL.head_dim, batch.positions, torch.float64)
    return attention, x_BSE, rotation, batch.boundaries


def test_core_gets_rotated_q_and_k_plain_v_and_full_boundaries() -> None:
    attention, x_BSE, rotation, boundaries = layer_inputs()
    seen: list[Tensor] = []

    class Core(LocalAttentionCore):
        def __call__(self, *given: Any, **named: Any) -> Tensor:
            seen.extend(given[:4])
            return super().__call__(*given, **named)

    attention.core = Core()
    attention(x_BSE, rotation, boundaries)
    q, k, v, given = seen
    width = SMALL.head_dim
    assert torch.equal(
        q,
        rope.apply_rotary_emb(
            (x_BSE @ attention.get_parameter("q_proj.weight").T).view(
                2, 16, SMALL.num_heads, width
            ),
            rotation,
        ),
    )
    assert torch.equal(
        k,
        rope.apply_rotary_emb(
            (x_BSE @ attention.get_parameter("k_proj.weight").T).view(
                2, 16, SMALL.num_kv_heads, width
            ),
            rotation,
        ),
    )
    assert torch.equal(
        v,
        (x_BSE @ attention.get_parameter("v_proj.weight").T).view(
            2, 16, SMALL.num_kv_heads, width
        ),
    )
    assert given is boundaries


def test_core_output_is_projected_head_by_head() -> None:
    attention, x_BSE, rotation, boundaries = layer_inputs()
    answer = torch.randn(2, 16, SMALL.num_heads, SMALL.head_dim, dtype=torch.float64)

    class Core(LocalAttentionCore):
        def __call__(self, *given: Any, **named: Any) -> Tensor:
            del given, named
            return answer

    attention.core = Core()
    torch.testing.assert_close(
        attention(x_BSE, rotation, boundaries),
        answer.reshape(2, 16, -1) @ attention.get_parameter("o_proj.weight").T,
        rtol=0,
        atol=1e-14,
    )


@pytest.mark.parametrize("kernel", ["auto", "plain"])
def test_core_below_autograd_equals_core_and_autograd_gradients(kernel: str) -> None:
    boundaries_BD = starts([5, 7, 4], [15, 1])
    given = inputs(boundaries_BD, (4, 2))
    core = LocalAttentionCore(kernel)
    out = core(*given, boundaries_BD)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = torch.autograd.grad(out, given, grad)
    q, k, v = (x.detach() for x in given)
    started = core.start(q, k, v, boundaries_BD)
    found, lse = core.forward(started, boundaries_BD)
    assert torch.equal(found, out)
    assert lse.shape == (2, 4, 16)
    *grads, sink_grad = core.backward(grad, started, found, lse, boundaries_BD)
    assert sink_grad.numel() == 0
    for ours, right in zip(grads, expected, strict=True):
        assert torch.equal(ours, right)
