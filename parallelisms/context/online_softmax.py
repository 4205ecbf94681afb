"""Merging attention over disjoint sets of keys, and the accumulators of its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from models.kernels import TokenIndex
from models.linear import accumulation_dtype


class OnlineSoftmax:
    """Output [X, N, H] and log-sum-exp [N, X] over the keys merged so far, in `accumulation_dtype`.

    A partial result (out', lse') has weight w = sigmoid(lse' - lse) and is merged by out += w (out' - out). This neither
    overflows nor loses precision, however far apart the two are; online softmax (Milakov & Gimelshein, 2018).
    """

    def __init__(self, out_XNH: Tensor, lse_NX: Tensor) -> None:
        """Takes ownership of both tensors: `merge` writes to them."""
        self.out_XNH = out_XNH.to(accumulation_dtype(out_XNH.dtype))
        self.lse_NX = lse_NX

    def merge(self, queries: TokenIndex, out_PNH: Tensor, lse_NP: Tensor) -> None:
        """Merges the result of some queries over further keys; an lse of -inf means no keys."""
        out, lse = self.out_XNH[queries], self.lse_NX[:, queries]
        weight_NP = torch.where(lse_NP == -torch.inf, 0.0, torch.sigmoid(lse_NP - lse))
        self.out_XNH[queries] = out.lerp_(out_PNH.to(out.dtype), weight_NP.T.unsqueeze(-1).contiguous())
        self.lse_NX[:, queries] = torch.logaddexp(lse, lse_NP)


def to_accumulators(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """dq, and dk and dv stacked, in `accumulation_dtype`."""
    dtype = accumulation_dtype(dq.dtype)
    dkv = torch.empty(2, *dk.shape, dtype=dtype, device=dk.device)
    dkv[0], dkv[1] = dk, dv
    return dq.to(dtype), dkv


def split_kv_grads(dkv_2XKH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Dk and dv in separate storages, because an operator's outputs must not alias each other."""
    dk_XKH, dv_XKH = (x.to(dtype, copy=True) for x in dkv_2XKH)
    return dk_XKH, dv_XKH
