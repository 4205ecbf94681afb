"""Recomputation changes what is kept, and not one bit of what is computed."""

from __future__ import annotations

import warnings
from typing import Any, get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.config import ModelConfig
from parallelisms import recompute
from tests.models.small import SMALL, TIED, gradients, largest_difference, packed, remember, small_model, unchanged

BATCH = packed([9, 1, 14], [24])


class Calls(TorchDispatchMode):
    """How often attention and tiled feed-forwards ran, forward and backward."""

    forward = 0
    backward = 0
    tiled = 0
    tiled_backward = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        self.forward += function is torch.ops.longhaul.attention.default
        self.backward += function is torch.ops.longhaul.attention_backward.default
        self.tiled += function is torch.ops.longhaul.feed_forward.default
        self.tiled_backward += function is torch.ops.longhaul.feed_forward_backward.default
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [SMALL, TIED])
def test_every_policy_gives_the_same_bits(config: ModelConfig, dtype: torch.dtype) -> None:
    losses, expected = gradients(small_model(config, dtype=dtype), BATCH)
    for policy in get_args(recompute.Policy):
        model = small_model(config, dtype=dtype)
        recompute.apply(model, policy=policy)
        found_losses, found = gradients(model, BATCH)
        assert torch.equal(found_losses, losses)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("policy", get_args(recompute.Policy))
def test_tiles_are_the_same_under_every_policy_and_recomputed_once(policy: recompute.Policy) -> None:
    plain, model = small_model(), small_model()
    recompute.apply(plain, policy="none")
    recompute.apply_tiles(plain, mib=0)
    recompute.apply(model, policy=policy)
    recompute.apply_tiles(model, mib=0)
    losses, expected = gradients(plain, BATCH)
    with Calls() as calls:
        found_losses, found = gradients(model, BATCH)
    assert torch.equal(found_losses, losses)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (calls.tiled, calls.tiled_backward) == (SMALL.num_layers, SMALL.num_layers)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("policy", get_args(recompute.Policy))
def test_tiles_compute_what_all_tokens_at_once_do(policy: recompute.Policy, compiled: bool) -> None:  # noqa: FBT001
    losses, expected = gradients(small_model(), BATCH)
    model = small_model()
    recompute.apply(model, policy=policy)
    recompute.apply_tiles(model, mib=0)
    if compiled:
        warnings.simplefilter("ignore")
        for block in model.layers():
            block.compile(fullgraph=True, backend="aot_eager")
    found_losses, found = gradients(model, BATCH)
    torch.testing.assert_close(found_losses, losses, rtol=0, atol=1e-13)
    assert largest_difference(found, expected) < 1e-13


@pytest.mark.parametrize(("policy", "runs"), [("none", 1), ("full", 2)])
def test_attention_runs_once_more_where_everything_is_recomputed(policy: recompute.Policy, runs: int) -> None:
    model = small_model()
    recompute.apply(model, policy=policy)
    with Calls() as calls:
        model(BATCH).sum().backward()
    assert (calls.forward, calls.backward) == (runs * SMALL.num_layers, SMALL.num_layers)


def test_recomputing_everything_keeps_a_block_s_input_alone() -> None:
    model = small_model()
    recompute.apply(model, policy="full")
    kept: list[torch.Tensor] = []
    x = torch.randn(2, 24, SMALL.dim, dtype=torch.float64, requires_grad=True)
    table = torch.ones(2, 2, 24, 1, SMALL.head_dim // 2, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(remember(kept), unchanged):
        out = model.layers()[0](x, table, BATCH.boundaries)
    assert {tensor.data_ptr() for tensor in kept} <= {tensor.data_ptr() for tensor in (x, table, BATCH.boundaries)}
    out.sum().backward()
    assert x.grad is not None
