"""A router's arithmetic: compiled, and in 16 bits as on CUDA."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models import dispatch, router, wide_products
from models.router import ScoreRule
from models.tiling import CompilePiece, eager
from parallelisms.block_recompute import compiler

TOKENS, EXPERTS, TOP_K = 12, 8, 3
RULES = [
    ScoreRule(kind, is_normalized, scaling)
    for kind, is_normalized, scaling in product(("softmax", "sigmoid"), (True, False), (1.0, 2.5))
]


def routed(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits, and the experts that they choose."""
    logits_NX = torch.randn(
        TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0), dtype=dtype
    )
    return logits_NX.requires_grad_(), router.best(logits_NX.detach(), TOP_K)


def results(rule: ScoreRule, compiled: CompilePiece) -> list[Tensor]:
    """Everything that a router computes, and the gradients of its logits."""
    logits_NX, experts_NK = routed()
    targets_BS = torch.arange(TOKENS).view(2, -1) % 3 > 0
    num_targets = torch.tensor(17.0, dtype=torch.float64)
    with torch.no_grad():
        sums = compiled(router.tile_sums)(logits_NX, experts_NK, targets_BS, num_targets, rule)
    load_NX = (sums.counts.sum(0) / sums.counts.mean()).expand(TOKENS, -1)
    weight_NK, loss = compiled(router.weights_and_loss)(
        logits_NX, experts_NK, rule, sums.share, load_NX, 0.7, 0.4
    )
    alone_NK = compiled(router.expert_weights)(logits_NX, experts_NK, rule)
    outputs = [weight_NK, loss, alone_NK]
    sums_of_outputs = weight_NK.square().sum() + loss.square(), alone_NK.square().sum()
    grads = [torch.autograd.grad(each, logits_NX)[0] for each in sums_of_outputs]
    ordered_R, order_R = experts_NK.flatten().sort(stable=True)
    placed = [
        each
        for place in (dispatch.places, dispatch.padded_places)
        for each in compiled(place)(ordered_R, order_R, EXPERTS, TOP_K)
    ]
    return [*sums, *(each.detach() for each in outputs), *grads, *placed]


@pytest.fixture
def no_code() -> None:
    """Dynamo compiles a function for eight kinds of arguments and no more."""
    torch.compiler.reset()


@pytest.mark.usefixtures("no_code")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it.
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_compiled_router_computes_the_same(rule: ScoreRule) -> None:
    expected = results(rule, eager)
    for ours, right in zip(results(rule, compiler(backend="aot_eager")), expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-14)


@pytest.mark.slow
@pytest.mark.usefixtures("no_code")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor imports it.
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_kernels_of_a_compiled_router_compute_the_same(kind: str) -> None:
    rule = ScoreRule(kind, is_normalized=True, scaling=1.0)
    expected = results(rule, eager)
    for ours, right in zip(results(rule, compiler()), expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-13)


# ---- the product of the router


@pytest.mark.usefixtures("products_as_on_cuda")
@pytest.mark.parametrize("bias", [None, torch.arange(8.0).bfloat16()], ids=["", "bias"])
def test_neither_logits_nor_their_gradient_are_rounded_to_16_bits(bias: Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x_BSI = torch.randn(2, 5, 64, generator=generator).bfloat16().requires_grad_()
    weight_OI = torch.randn(8, 64, generator=generator).bfloat16().requires_grad_()
    given = [x_BSI, weight_OI]
    ours_BSO = wide_products.unrounded_linear(x_BSI, weight_OI, bias)
    exact_BSO = F.linear(x_BSI.float(), weight_OI.float(), None if bias is None else bias.float())
    assert ours_BSO.dtype == torch.float32
    torch.testing.assert_close(ours_BSO, exact_BSO, rtol=0, atol=1e-5)
    grad_BSO = torch.randn(ours_BSO.shape, generator=generator)
    for ours, right in zip(
        torch.autograd.grad(ours_BSO, given, grad_BSO),
        torch.autograd.grad(exact_BSO, given, grad_BSO),
        strict=True,
    ):
        torch.testing.assert_close(ours, right, rtol=0, atol=0)
