"""Attention from results over parts of the keys: merging them, and the sink that takes part in the
softmax's sum.

Shape suffixes: X query tokens (all sequences of a batch concatenated), P tokens of a part, N query
heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from models.dtypes import accumulation_dtype
from models.score_blocks import TokenIndex
from models.tiling import each_chunk


class OnlineSoftmax:
    """Output [X, N, H] and log-sum-exp [N, X] over the keys merged so far, in
    `accumulation_dtype`.

    A partial result (out', lse') has weight w = sigmoid(lse' - lse) and is merged by out += w
    (out' - out). This neither overflows nor loses precision, however far apart the two are; online
    softmax (Milakov & Gimelshein, 2018).
    """

    def __init__(self, out_XNH: Tensor, lse_NX: Tensor) -> None:
        """Takes ownership of both tensors: `merge` writes to them."""
        self.out_XNH = out_XNH.to(accumulation_dtype(out_XNH.dtype))
        self.lse_NX = lse_NX

    @staticmethod
    def of_no_keys(q_XNH: Tensor) -> OnlineSoftmax:
        """Results of queries without keys: zeros, and a log-sum-exp of -inf."""
        dtype = accumulation_dtype(q_XNH.dtype)
        out_XNH = torch.zeros_like(q_XNH, dtype=dtype, memory_format=torch.contiguous_format)
        return OnlineSoftmax(out_XNH, q_XNH.new_full(q_XNH.shape[1::-1], -torch.inf, dtype=dtype))

    def merge(self, queries: TokenIndex, out_PNH: Tensor, lse_NP: Tensor) -> None:
        """Merges the result of some queries over further keys; an lse of -inf means no keys."""
        out = self.out_XNH[queries]
        lse = self.lse_NX[:, queries]
        # Without the case, two parts without keys would give -inf - -inf = NaN.
        weight_NP = torch.where(lse_NP == -torch.inf, 0.0, torch.sigmoid(lse_NP - lse))
        self.out_XNH[queries] = out.lerp_(
            out_PNH.to(out.dtype), weight_NP.T.unsqueeze(-1).to(out.dtype).contiguous()
        )
        self.lse_NX[:, queries] = torch.logaddexp(lse, lse_NP)

    def merge_all(self, results: Iterator[tuple[TokenIndex, Tensor, Tensor]]) -> None:
        """Merges each of the results, which is freed before the next is computed."""
        for result in results:
            self.merge(*result)
            del result


SINK_TOKENS = 8192
"""Tokens in `sink_grad` at once, whose products are in `accumulation_dtype`."""


def add_sink(out_XNH: Tensor, lse_NX: Tensor, sink_N: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with one more logit per head, which has no value (gpt-oss, OpenAI,
    2025). Overwrites the output.

    For the result over *all* keys. With what this returns, the gradients of Q, K and V are those
    of plain attention.
    """
    sink_N1 = sink_N.to(lse_NX.dtype).unsqueeze(1)
    # exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).
    weight_XN1 = torch.sigmoid(lse_NX - sink_N1).T.unsqueeze(-1)
    return out_XNH.mul_(weight_XN1), torch.logaddexp(lse_NX, sink_N1)


def sink_grad(grad_XNH: Tensor, out_XNH: Tensor, lse_NX: Tensor, sink_N: Tensor) -> Tensor:
    """Gradient of the sink over these tokens, [N], given the results of `add_sink`."""
    dtype = accumulation_dtype(sink_N.dtype)
    total_N = torch.zeros_like(sink_N, dtype=dtype)
    sink_N1 = sink_N.to(lse_NX.dtype).unsqueeze(1)
    zero = total_N.new_zeros(1)
    for chunk in each_chunk(len(grad_XNH), SINK_TOKENS):
        # The sink's weight is p = exp(sink - lse), and it has no value: its gradient is -p times
        # the dot product of the output and its gradient.
        weight_NP = (sink_N1 - lse_NX[:, chunk]).exp_()
        # The sum with zero makes products in its dtype, without a copy of a factor.
        dots_PN = torch.addcmul(zero, grad_XNH[chunk], out_XNH[chunk]).sum(-1)
        total_N -= weight_NP.mul_(dots_PN.T).sum(1)
    return total_N
