"""The reference of attention kernels: matrix products in float64, and the sizes of the terms that
they add up.

Terms may cancel: a query of one key has no gradient, whatever its key and value. A result of zero
does not say how large a rounding error may be; its terms do.

Shape suffixes: X query tokens and Y key tokens, P queries and R keys of a block, N query heads, K
KV heads, H head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from models import attention_op
from models.kernels import accumulate_grads, attend_blocks_backward
from models.score_blocks import ScoreBlock, ScoreBlocks

OUTPUTS = ("output", "log-sum-exp", "dq", "dk", "dv")
HOST_TOLERANCE = 1e-10
"""Tolerance of float64 on a device against float64 on the host."""


class Sample(NamedTuple):
    """Gradient of the output and queries [X, N, H], keys and values [Y, K, H]."""

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Output [X, N, H], log-sum-exp [N, X], dq, dk and dv."""


class Reference(NamedTuple):
    """Results of matrix products in float64."""

    exact: Results
    terms: Results
    """The size that each number would have if its terms did not cancel; see `term_sizes`."""


def reference(sample: Sample, blocks: ScoreBlocks) -> Reference:
    """Reference results, one KV head at a time, which bounds the memory.

    Raises ValueError unless the last query's numbers are those that the host computes: a device
    may compute nothing.
    """
    exact = []
    terms = []
    for head in zip(*(x.double().chunk(sample.k.shape[1], dim=1) for x in sample), strict=True):
        exact.append(exact_results(Sample(*head), blocks))
        terms.append(term_sizes(Sample(*head), exact[-1][1], blocks))
    found = Reference(_join_heads(exact), _join_heads(terms))
    _require_those_of_the_host(found.exact, sample, blocks)
    return found


def _join_heads(results: list[Results]) -> Results:
    out, lse, dq, dk, dv = zip(*results, strict=True)
    return (
        torch.cat(out, 1),
        torch.cat(lse, 0),
        torch.cat(dq, 1),
        torch.cat(dk, 1),
        torch.cat(dv, 1),
    )


def forward_backward(sample: Sample, blocks: ScoreBlocks, kernel: str) -> Results:
    """Runs both passes over blocks that cover all queries."""
    grad, q, k, v = sample
    out, lse = attention_op.forward(q, k, v, blocks, kernel=kernel)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    accumulate_grads(
        (dq, dk, dv), attend_blocks_backward(grad, q, k, v, out, lse, blocks, kernel=kernel)
    )
    return out, lse, dq, dk, dv


# ---- by definition


def exact_results(sample: Sample, blocks: ScoreBlocks) -> Results:
    """Results for one KV head, a block at a time, with a matrix of all its scores: a window does
    not cut it into pieces.
    """
    grad_XNH, q_XNH, k_Y1H, v_Y1H = sample
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q_XNH, q_XNH, k_Y1H, v_Y1H))
    lse_NX = q_XNH.new_full(q_XNH.shape[1::-1], -torch.inf)
    # Three loops, because a softmax needs all blocks of a query: log-sum-exp, output, gradients.
    for block in blocks.blocks:
        queries = slice(block.q0, block.q1)
        scores_NPR = _mask(_scores(sample, block), block, blocks.window, -torch.inf)
        lse_NX[:, queries] = torch.logaddexp(lse_NX[:, queries], scores_NPR.logsumexp(-1))
    for block in blocks.blocks:
        queries = slice(block.q0, block.q1)
        keys = slice(block.k0, block.k1)
        out[queries] += (
            _weights(sample, lse_NX, block, blocks.window) @ v_Y1H[keys, 0]
        ).transpose(0, 1)
    # Gradient of the softmax: dS = P (dP - sum(P dP)), where sum(P dP) = grad . out.
    mean_NX1 = (grad_XNH * out).sum(-1, keepdim=True).transpose(0, 1)
    for block in blocks.blocks:
        queries = slice(block.q0, block.q1)
        keys = slice(block.k0, block.k1)
        grad_NPH, q_NPH = (x[queries].transpose(0, 1) for x in (grad_XNH, q_XNH))
        k_RH = k_Y1H[keys, 0]
        v_RH = v_Y1H[keys, 0]
        weights_NPR = _weights(sample, lse_NX, block, blocks.window)
        grad_scores_NPR = (
            weights_NPR * (grad_NPH @ v_RH.T - mean_NX1[:, queries]) * q_XNH.shape[-1] ** -0.5
        )
        dq[queries] += (grad_scores_NPR @ k_RH).transpose(0, 1)
        dk[keys, 0] += (grad_scores_NPR.transpose(1, 2) @ q_NPH).sum(0)
        dv[keys, 0] += (weights_NPR.transpose(1, 2) @ grad_NPH).sum(0)
    return out, lse_NX, dq, dk, dv


def _scores(sample: Sample, block: ScoreBlock) -> Tensor:
    """Scores of one block of one KV head: [N, P, R]."""
    queries = slice(block.q0, block.q1)
    keys = slice(block.k0, block.k1)
    scores_NPR: Tensor = sample.q[queries].transpose(0, 1) @ sample.k[keys, 0].T
    return scores_NPR.mul_(sample.q.shape[-1] ** -0.5)


def _mask(x_NPR: Tensor, block: ScoreBlock, window: int | None, value: float) -> Tensor:
    """Fills the pairs that the block masks with `value`, in place."""
    ones_PR = torch.ones(x_NPR.shape[1:], dtype=torch.bool, device=x_NPR.device)
    if block.mask == "flipped":
        return x_NPR.masked_fill_(ones_PR.tril(-1), value)
    if block.mask == "causal":
        x_NPR.masked_fill_(ones_PR.triu(1), value)
        if window is not None:
            x_NPR.masked_fill_(ones_PR.tril(-window), value)
    return x_NPR


def _weights(sample: Sample, lse_NX: Tensor, block: ScoreBlock, window: int | None) -> Tensor:
    """The softmax over all blocks of a query, here of one block of one KV head: [N, P, R]."""
    scores_NPR = _scores(sample, block)
    return _mask(scores_NPR.sub_(lse_NX[:, block.q0 : block.q1, None]).exp_(), block, window, 0)


# ---- terms


def term_sizes(sample: Sample, lse_NX: Tensor, blocks: ScoreBlocks) -> Results:
    """Term sizes for one KV head: the root of the sum of the squares of each number's terms, one
    for each pair of query and key.

    A term of dq is p g_h v_h k H ** -0.5 for each of the H products in the gradient of a weight p,
    before the softmax subtracts their mean; one of dk has q in the place of k. The log-sum-exp has
    the size 1: its absolute error is the relative error of all weights.
    """
    # Squares throughout: the sizes of independent terms add like variances.
    grad_XNH, q_XNH, k_Y1H, v_Y1H = (x.square() for x in sample)
    out = torch.zeros_like(q_XNH)
    dq = torch.zeros_like(q_XNH)
    dk = torch.zeros_like(k_Y1H)
    dv = torch.zeros_like(v_Y1H)
    for block in blocks.blocks:
        queries = slice(block.q0, block.q1)
        keys = slice(block.k0, block.k1)
        grad_NPH, q_NPH = (x[queries].transpose(0, 1) for x in (grad_XNH, q_XNH))
        k_RH = k_Y1H[keys, 0]
        v_RH = v_Y1H[keys, 0]
        weights_NPR = _weights(sample, lse_NX, block, blocks.window).square()
        pairs_NPR = weights_NPR * (grad_NPH @ v_RH.T) / q_XNH.shape[-1]
        out[queries] += (weights_NPR @ v_RH).transpose(0, 1)
        dq[queries] += (pairs_NPR @ k_RH).transpose(0, 1)
        dk[keys, 0] += (pairs_NPR.transpose(1, 2) @ q_NPH).sum(0)
        dv[keys, 0] += (weights_NPR.transpose(1, 2) @ grad_NPH).sum(0)
    return out.sqrt(), torch.ones_like(lse_NX), dq.sqrt(), dk.sqrt(), dv.sqrt()


# ---- the host's numbers


def _require_those_of_the_host(exact: Results, sample: Sample, blocks: ScoreBlocks) -> None:
    out, lse, dq, _, _ = exact
    found = out[-1].cpu(), lse.cpu()[:, -1], dq[-1].cpu()
    for name, ours, expected in zip(
        OUTPUTS, found, last_query_on_host(sample, blocks), strict=False
    ):
        # Relative above 1, absolute below: a number near zero has no relative error.
        error = float(((ours - expected).abs() / (1 + expected.abs())).max())
        if not error < HOST_TOLERANCE:
            raise ValueError(
                f"matrix products in float64 on {sample.q.device}: relative error {error:.1e} in the {name} of the last "
                f"query, above {HOST_TOLERANCE:g} of what the host computes"
            )


def last_query_on_host(sample: Sample, blocks: ScoreBlocks) -> tuple[Tensor, Tensor, Tensor]:
    """Output [N, H], log-sum-exp [N] and dq [N, H] of the last query, by definition."""
    last = len(sample.q) - 1
    scale = sample.q.shape[-1] ** -0.5
    seen = [
        _keys_of_last_query(block, blocks.window)
        for block in blocks.blocks
        if block.q1 - 1 == last
    ]
    grad_NH, q_NH = (x[last].cpu().double() for x in (sample.grad, sample.q))
    k_NRH, v_NRH = (
        torch.cat([x[keys].cpu().double() for keys in seen])
        .transpose(0, 1)
        .repeat_interleave(len(q_NH) // x.shape[1], dim=0)
        for x in (sample.k, sample.v)
    )
    scores_NR = (k_NRH @ q_NH.unsqueeze(-1)).squeeze(-1) * scale
    weights_NR = scores_NR.softmax(-1)
    grad_weights_NR = (v_NRH @ grad_NH.unsqueeze(-1)).squeeze(-1)
    mean_N1 = (weights_NR * grad_weights_NR).sum(-1, keepdim=True)
    grad_scores_NR = weights_NR * (grad_weights_NR - mean_N1) * scale
    out_NH, dq_NH = (
        (x.unsqueeze(1) @ of).squeeze(1)
        for x, of in ((weights_NR, v_NRH), (grad_scores_NR, k_NRH))
    )
    return out_NH, scores_NR.logsumexp(-1), dq_NH


def _keys_of_last_query(block: ScoreBlock, window: int | None) -> slice:
    if block.mask == "flipped":
        return slice(block.k1 - 1, block.k1)
    if block.mask == "causal" and window is not None:
        return slice(max(block.k0, block.k1 - window), block.k1)
    return slice(block.k0, block.k1)
