"""Attention to some keys and attention to others, joined into attention to all of them; and their gradients, summed."""

from __future__ import annotations

import torch
from torch import Tensor

from models.kernels import TokenIndex, accumulation_dtype


class OnlineSoftmax:
    """Output [X, N, H] and log-sum-exp [N, X] over the keys seen so far, in float32 (float64 for float64).

    With weight w = sigmoid(lse' - lse) a part with (out', lse') is joined by out += w (out' - out), which neither
    overflows nor loses digits however far apart the two lie; online softmax (Milakov & Gimelshein, 2018).
    """

    def __init__(self, out_XNH: Tensor, lse_NX: Tensor) -> None:
        """Takes both over: they are written to."""
        self.out_XNH = out_XNH.to(accumulation_dtype(out_XNH.dtype))
        self.lse_NX = lse_NX

    def merge(self, queries: TokenIndex, out_PNH: Tensor, lse_NP: Tensor) -> None:
        """Joins what the queries `at` attend to among further keys; an lse of -inf says that they saw none."""
        out, lse = self.out_XNH[queries], self.lse_NX[:, queries]
        weight_NP = torch.where(lse_NP == -torch.inf, 0.0, torch.sigmoid(lse_NP - lse))
        self.out_XNH[queries] = out.lerp_(out_PNH.to(out.dtype), weight_NP.T.unsqueeze(-1).contiguous())
        self.lse_NX[:, queries] = torch.logaddexp(lse, lse_NP)


def to_accumulators(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """As accumulators, in the type in which parts are summed: the gradient of q, and those of k and v in one."""
    dtype = accumulation_dtype(dq.dtype)
    dkv = torch.empty(2, *dk.shape, dtype=dtype, device=dk.device)
    dkv[0], dkv[1] = dk, dv
    return dq.to(dtype), dkv


def split_kv_grads(dkv_2XKH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradients of k and v, each in memory of its own, as an operator must return them."""
    dk_XKH, dv_XKH = (x.to(dtype, copy=True) for x in dkv_2XKH)
    return dk_XKH, dv_XKH
