"""Reference attention with an explicit mask, for every kernel and context-parallel method.

Shape suffixes: B batch, S tokens, N query heads, K KV heads, H head dim, D document boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor]


def inputs(
    boundaries_BD: Tensor,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float64,
    *,
    head_dim: int = 8,
    device: str = "cpu",
) -> Inputs:
    rows = boundaries_BD.shape[0]
    tokens = int(boundaries_BD[0, -1])
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> Tensor:
        values = torch.randn(
            rows, tokens, count, head_dim, generator=generator, dtype=torch.float64
        )
        return values.to(device, dtype).requires_grad_()

    return draw(heads[0]), draw(heads[1]), draw(heads[1])


def dense(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    boundaries_BD: Tensor,
    sink_N: Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention with an explicit mask: same document, not a later token, and one of the
    last `window` keys.

    The sink is one more column of scores, without a value.
    """
    group = q_BSNH.shape[2] // k_BSKH.shape[2]
    tokens = torch.arange(q_BSNH.shape[1])
    document_BS = (tokens[None, :, None] >= boundaries_BD[:, None, :]).sum(-1)
    distance_SS = tokens[:, None] - tokens[None, :]
    allowed_BSS = (document_BS[:, :, None] == document_BS[:, None, :]) & (distance_SS >= 0)
    if window is not None:
        allowed_BSS = allowed_BSS & (distance_SS < window)
    k_BSNH, v_BSNH = (x.repeat_interleave(group, dim=2) for x in (k_BSKH, v_BSKH))
    scores_BNSS = torch.einsum("bqnh,bknh->bnqk", q_BSNH, k_BSNH) / q_BSNH.shape[-1] ** 0.5
    if softcap is not None:
        scores_BNSS = softcap * (scores_BNSS / softcap).tanh()
    scores_BNSS = scores_BNSS.masked_fill(~allowed_BSS[:, None], -torch.inf)
    if sink_N is not None:
        column_BNS1 = sink_N.view(1, -1, 1, 1).expand(*scores_BNSS.shape[:3], 1)
        scores_BNSS = torch.cat((scores_BNSS, column_BNS1), dim=-1)
    weights_BNSS = scores_BNSS.softmax(-1)[..., : len(tokens)]
    return torch.einsum("bnqk,bknh->bqnh", weights_BNSS, v_BSNH), scores_BNSS.logsumexp(-1)


def run(
    function: Callable[..., tuple[Tensor, Tensor]], given: Sequence[Tensor], boundaries_BD: Tensor
) -> list[Tensor]:
    """Output, gradients of q, k, v and any sink for a fixed gradient of the output, and the
    log-sum-exp.
    """
    out, lse = function(*given[:3], boundaries_BD, *given[3:])
    weights = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    grads = torch.autograd.grad(out, [*given], weights.to(out))
    return [x.detach() for x in (out, *grads, lse)]
