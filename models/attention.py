"""Attention: project, normalise heads, rotate, attend, project back.

Shape suffixes: B rows, S tokens on this rank, N query heads, K key/value heads, H head width, D document starts and
the row's end, E width of the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from models import attention_op, rope
from models.config import ModelConfig
from models.linear import Linear
from models.norm import RMSNorm


class AttentionCore(Protocol):
    """The one seam through which context parallelism enters: attention over rotated queries, keys and values.

    `boundaries_BD` (int32, on the host) are the document starts of the *whole* row and its length; on one rank the
    whole row is what it holds. Below autograd the same is done in steps; what `start` returns is theirs alone.
    """

    def __call__(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor) -> Tensor:
        """[B, S, N, H]; differentiable."""

    def start(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Any:
        """Begins to send what other ranks need."""

    def forward(self, pending: Any, boundaries_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B, S, N, H], and log-sum-exp."""

    def backward(
        self, grad_BSNH: Tensor, pending: Any, out_BSNH: Tensor, lse: Tensor, boundaries_BD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""


@dataclass(frozen=True)
class LocalAttentionCore:
    """Attention when this rank holds whole rows."""

    kernel: str = "auto"

    def __call__(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor) -> Tensor:
        return attention_op.attention(q_BSNH, k_BSKH, v_BSKH, boundaries_BD, kernel=self.kernel)[0]

    def start(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> tuple[Tensor, ...]:
        return q_BSNH, k_BSKH, v_BSKH

    def forward(self, pending: tuple[Tensor, ...], boundaries_BD: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = pending
        return attention_op.attention(q, k, v, boundaries_BD, kernel=self.kernel)

    def backward(
        self, grad_BSNH: Tensor, pending: tuple[Tensor, ...], out_BSNH: Tensor, lse: Tensor, boundaries_BD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = attention_op.attention_backward(grad_BSNH, *pending, out_BSNH, lse, boundaries_BD, self.kernel)
        dq, dk, dv = grads
        return dq, dk, dv


class Attention(nn.Module):
    """Grouped-query self-attention (Ainslie et al., 2023); each head of queries and keys may be normalised (Qwen3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.dim, config.num_heads * config.head_dim)
        self.k_proj = Linear(config.dim, config.num_kv_heads * config.head_dim)
        self.v_proj = Linear(config.dim, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.dim)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity() for _ in "qk"
        )
        self.core: AttentionCore = LocalAttentionCore()

    def qk_norms(self) -> list[RMSNorm]:
        """Of queries and keys, if they are normalised."""
        return [norm for norm in (self.q_norm, self.k_norm) if isinstance(norm, RMSNorm)]

    def forward(self, x_BSE: Tensor, cos_sin_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        # -1, not num_heads: tensor parallelism leaves fewer heads here than the config names.
        q, k, v = (
            projection(x_BSE).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rope.apply_rotary_emb(norm(x), cos_sin_2BS1F) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        out_BSNH = self.core(q, k, v, boundaries_BD)
        out: Tensor = self.o_proj(out_BSNH.flatten(-2))
        return out
