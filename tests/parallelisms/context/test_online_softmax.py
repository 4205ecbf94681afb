"""Partial attention results merged one by one, compared with one merge of all in float64.

Shape suffixes: M partial results, X queries, N heads, H head dim.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models import online_softmax
from models.online_softmax import OnlineSoftmax

PARTS = 17
QUERIES = 512
HEADS = 4
WIDTH = 16
EVERYTHING = slice(None)
NONE = -torch.inf


def draw(spread: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Outputs [M, X, N, H] and log-sum-exps [M, N, X] with standard deviation `spread`, exact in
    every dtype.
    """
    generator = torch.Generator().manual_seed(0)
    out_MXNH = torch.randn(PARTS, QUERIES, HEADS, WIDTH, generator=generator)
    lse_MNX = spread * torch.randn(PARTS, HEADS, QUERIES, generator=generator)
    return out_MXNH.to(dtype), lse_MNX.double() if dtype == torch.float64 else lse_MNX


def merge_sequentially(out_MXNH: Tensor, lse_MNX: Tensor) -> OnlineSoftmax:
    running = OnlineSoftmax(out_MXNH[0].clone(), lse_MNX[0].clone())
    for out_XNH, lse_NX in zip(out_MXNH[1:], lse_MNX[1:], strict=True):
        running.merge(EVERYTHING, out_XNH, lse_NX)
    return running


def merge_in_float64(out_MXNH: Tensor, lse_MNX: Tensor) -> tuple[Tensor, Tensor]:
    lse_MNX = lse_MNX.double()
    weight_MXN1 = lse_MNX.softmax(dim=0).transpose(1, 2).unsqueeze(-1)
    return (weight_MXN1 * out_MXNH.double()).sum(dim=0), lse_MNX.logsumexp(dim=0)


def errors(spread: float, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """The largest error of the output, and of the log-sum-exp relative to its spread."""
    parts = draw(spread, dtype)
    running = merge_sequentially(*parts)
    out_XNH, lse_NX = merge_in_float64(*parts)
    return (running.out_XNH - out_XNH).abs().max().item(), (
        running.lse_NX - lse_NX
    ).abs().max().item() / spread


@pytest.mark.parametrize(("spread", "bound"), [(1.0, 7e-7), (30.0, 7e-6), (1e4, 7e-5)])
def test_sixteen_float32_merges_are_accurate_for_any_spread(spread: float, bound: float) -> None:
    out, lse = errors(spread)
    assert out <= bound
    assert lse <= 2e-6


@pytest.mark.parametrize("spread", [1.0, 30.0, 1e4])
def test_float64_merges_are_exact(spread: float) -> None:
    out, lse = errors(spread, torch.float64)
    assert out <= 1e-15 * max(10, spread)
    assert lse <= 1e-14


def test_merges_accumulate_in_float32_for_any_input_dtype() -> None:
    assert errors(1.0, torch.bfloat16)[0] <= 7e-7
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        running = merge_sequentially(*draw(1.0, dtype))
        assert running.out_XNH.dtype == running.lse_NX.dtype == torch.float32
    running = merge_sequentially(*draw(1.0, torch.float64))
    assert running.out_XNH.dtype == running.lse_NX.dtype == torch.float64


@pytest.mark.parametrize(
    ("before", "part", "out", "lse"),
    [
        (NONE, 3.0, 2.0, 3.0),
        (3.0, NONE, 1.0, 3.0),
        (NONE, NONE, 1.0, NONE),
        (NONE, -1e30, 2.0, -1e30),
        (-1e30, NONE, 1.0, -1e30),
        (1e30, -1e30, 1.0, 1e30),
        (-1e30, 1e30, 2.0, 1e30),
    ],
)
def test_query_without_keys_takes_the_other_result(
    before: float, part: float, out: float, lse: float
) -> None:
    running = OnlineSoftmax(torch.full((1, 1, 2), 1.0), torch.full((1, 1), before))
    running.merge(EVERYTHING, torch.full((1, 1, 2), 2.0), torch.full((1, 1), part))
    assert running.out_XNH.tolist() == [[[out, out]]]
    assert running.lse_NX.tolist() == [[torch.tensor(lse).item()]]


def test_result_without_keys_changes_no_bit() -> None:
    out_MXNH, lse_MNX = draw(30.0)
    running = OnlineSoftmax(out_MXNH[0].clone(), lse_MNX[0].clone())
    running.merge(EVERYTHING, out_MXNH[1], torch.full_like(lse_MNX[1], NONE))
    assert torch.equal(running.out_XNH, out_MXNH[0])
    assert torch.equal(running.lse_NX, lse_MNX[0])


@pytest.mark.parametrize(
    "at", [slice(100, 300), torch.arange(QUERIES - 1, 0, -2)[:200]], ids=["range", "indices"]
)
def test_merge_changes_only_its_queries(at: slice | Tensor) -> None:
    out_MXNH, lse_MNX = draw(1.0)
    running = OnlineSoftmax(out_MXNH[0].clone(), lse_MNX[0].clone())
    given_out = out_MXNH[1, at].clone()
    given_lse = lse_MNX[1][:, at].clone()
    running.merge(at, given_out, given_lse)
    assert torch.equal(given_out, out_MXNH[1, at]), "a part is only read"
    assert torch.equal(given_lse, lse_MNX[1][:, at]), "a part is only read"
    others = torch.ones(QUERIES, dtype=torch.bool)
    others[at] = False
    assert torch.equal(running.out_XNH[others], out_MXNH[0, others])
    assert torch.equal(running.lse_NX[:, others], lse_MNX[0][:, others])
    out_XNH, lse_NX = merge_in_float64(out_MXNH[:2], lse_MNX[:2])
    torch.testing.assert_close(running.out_XNH[at].double(), out_XNH[at], rtol=0, atol=1e-6)
    torch.testing.assert_close(running.lse_NX[:, at].double(), lse_NX[:, at], rtol=0, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 100, 511, 512, 4096])
def test_gradient_of_a_sink_covers_every_chunk_of_tokens(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, lse = draw(1.0, torch.float64)
    out_XNH = out[0]
    lse_NX = lse[0]
    sink_N = torch.linspace(-1, 1, len(lse_NX), dtype=torch.float64, requires_grad=True)
    with_sink, lse_with_sink = online_softmax.add_sink(out_XNH, lse_NX, sink_N)
    grad_XNH = torch.randn(
        out_XNH.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    (expected,) = torch.autograd.grad(with_sink, sink_N, grad_XNH)
    monkeypatch.setattr(online_softmax, "SINK_TOKENS", chunk)
    found = online_softmax.sink_grad(
        grad_XNH, with_sink.detach(), lse_with_sink.detach(), sink_N.detach()
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
