"""Grouped-query attention module.

Shape suffixes: B batch, S tokens of this rank, N query heads, K KV heads, H head dim, D document
boundaries, E model dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from models import rope
from models.attention_core import AttentionCore, LocalAttentionCore
from models.config import ModelConfig
from models.layers import LayerKind
from models.linear import local_parameters
from models.sublayer import SublayerModule, Weights

SINKS = "sinks"
"""Name of the attention sinks' parameter: one logit per query head that has no key."""


class Attention(SublayerModule):
    """Grouped-query self-attention (Ainslie et al., 2023), with optional norms of queries and
    keys.
    """

    module_name = "attention"
    linears = ("q_proj", "k_proj", "v_proj")
    last = "o_proj"

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.head_dim = config.head_dim
        self.query_multiplier = config.query_multiplier
        self.core: AttentionCore = LocalAttentionCore(scores=kind.scores)

    def inner(
        self, products: Sequence[Tensor], rotation_2BS1F: Tensor, weights: Weights
    ) -> tuple[Tensor, ...]:
        """Normed and rotated queries and keys, and values: [B, S, heads, H], for any group of
        heads.
        """
        q, k, v = products
        # OLMo 2 norms all heads of a token at once, before they are split; Qwen3 norms each head,
        # after.
        q = self.norm("wide_q_norm", q, weights)
        k = self.norm("wide_k_norm", k, weights)
        # -1, not num_heads: under tensor parallelism this rank has fewer heads than the config.
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        q = self.norm("q_norm", q, weights)
        k = self.norm("k_norm", k, weights)
        # Kernels scale scores by head_dim ** -0.5: a model's own scale becomes a factor of the
        # queries.
        if self.query_multiplier != 1:
            q = q * self.query_multiplier
        return (
            rope.apply_rotary_emb(q, rotation_2BS1F),
            rope.apply_rotary_emb(k, rotation_2BS1F),
            v,
        )

    def forward(self, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        weights = local_parameters(self)
        q, k, v = self.inner(self.products(x_BSE, weights), rotation_2BS1F, weights)
        out_BSNH = self.core(q, k, v, boundaries_BD, weights.get(SINKS))
        return F.linear(out_BSNH.flatten(-2), weights[f"{self.last}.weight"])
