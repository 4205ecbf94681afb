"""Grouped-query attention module, and `AttentionCore`, the interface through which context parallelism replaces its core.

Shape suffixes: B batch, S tokens of this rank, N query heads, K KV heads, H head dim, D document boundaries, E model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional as F

from models import attention_op, rope
from models.config import ModelConfig
from models.layers import LayerKind
from models.linear import local_parameters
from models.sublayer import SublayerModule, Weights


class AttentionCore(Protocol):
    """Causal attention inside documents, over rotated queries and keys and over values.

    `boundaries_BD` (int32, on the CPU) holds the document starts and the length of the *full* sequence, also where the
    rank holds only a shard of it. `__call__` is differentiable. `start`, `forward` and `backward` do the same below
    autograd; only they look into what `start` returns. `parallelisms.context.context_parallel.set_attention_core`
    sets the core.
    """

    def __call__(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor) -> Tensor:
        """Output [B, S, N, H]."""

    def start(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Any:
        """Starts to send what other ranks need."""

    def forward(self, pending: Any, boundaries_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B, S, N, H] and log-sum-exp."""

    def backward(
        self, grad_BSNH: Tensor, pending: Any, out_BSNH: Tensor, lse: Tensor, boundaries_BD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv."""


@dataclass(frozen=True)
class LocalAttentionCore:
    """Attention of a rank that holds full sequences."""

    kernel: str = "auto"

    def __call__(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor) -> Tensor:
        return self.forward((q_BSNH, k_BSKH, v_BSKH), boundaries_BD)[0]

    def start(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> tuple[Tensor, ...]:
        return q_BSNH, k_BSKH, v_BSKH

    def forward(self, pending: tuple[Tensor, ...], boundaries_BD: Tensor) -> tuple[Tensor, Tensor]:
        out_BSNH, lse = attention_op.attention(*pending, boundaries_BD, self.kernel)
        return out_BSNH, lse

    def backward(
        self, grad_BSNH: Tensor, pending: tuple[Tensor, ...], out_BSNH: Tensor, lse: Tensor, boundaries_BD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (grad_BSNH, *pending, out_BSNH, lse, boundaries_BD)
        dq, dk, dv = attention_op.attention_backward(*inputs, self.kernel)
        return dq, dk, dv


class Attention(SublayerModule):
    """Grouped-query self-attention (Ainslie et al., 2023), with optional RMSNorm on query and key heads (Qwen3)."""

    module_name = "attention"
    linears = ("q_proj", "k_proj", "v_proj")
    last = "o_proj"

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.head_dim = config.head_dim
        self.core: AttentionCore = LocalAttentionCore()

    def inner(self, products: Sequence[Tensor], rotation_2BS1F: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        """Normed and rotated queries and keys, and values: [B, S, heads, H], of any group of heads."""
        # -1, not num_heads: under tensor parallelism this rank has fewer heads than the config.
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in products)
        q, k = self.norm("q_norm", q, weights), self.norm("k_norm", k, weights)
        return rope.apply_rotary_emb(q, rotation_2BS1F), rope.apply_rotary_emb(k, rotation_2BS1F), v

    def forward(self, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        weights = local_parameters(self)
        q, k, v = self.inner(self.products(x_BSE, weights), rotation_2BS1F, weights)
        out_BSNH = self.core(q, k, v, boundaries_BD)
        return F.linear(out_BSNH.flatten(-2), weights[f"{self.last}.weight"])
