"""One Transformer for every family: embed -> blocks -> head. Their differences are data (`models/config.py`).

Shape suffixes: B rows, S tokens on this rank, E width of the residual stream, F rotary frequencies, D document starts
and the row's end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from models import rope
from models.attention import Attention
from models.batch import Batch
from models.config import ModelConfig
from models.feed_forward import FeedForward
from models.head import Head
from models.norm import RMSNorm

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def keep_everything(layer: Layer, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
    """The recomputation policy that recomputes nothing."""
    return layer(x_BSE, rotation_2BS1F, boundaries_BD)


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised stream and added to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)
        # The second seam: how the layer is run, so that a policy may recompute it in the backward pass.
        self.policy: Callable[[Layer, Tensor, Tensor, Tensor], Tensor] = keep_everything

    def layer(self, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        x_BSE = x_BSE + self.attention(self.attention_norm(x_BSE), rotation_2BS1F, boundaries_BD)
        out: Tensor = x_BSE + self.feed_forward(self.ffn_norm(x_BSE))
        return out

    def forward(self, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        return self.policy(self.layer, x_BSE, rotation_2BS1F, boundaries_BD)


class Transformer(nn.Module):
    """A decoder-only language model: a batch in, one loss per token out."""

    def __init__(self, config: ModelConfig, *, head_chunk_mib: int = 256) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        # Keyed by layer number, so that a pipeline stage's names do not depend on where the model is cut.
        self.blocks = nn.ModuleDict({str(index): Block(config) for index in range(config.num_layers)})
        self.head = Head(config, chunk_mib=head_chunk_mib)
        if config.tie_embeddings:
            self.head.proj.weight = self.embed.weight

    def layers(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks.values()]

    def init_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values; None for norms, which start at one.

        0.02, and for the two projections that write to the residual stream 0.02 / sqrt(2 layers), as GPT-2 has it.
        """
        if name.endswith("norm.weight"):
            return None
        into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
        return 0.02 * (2 * self.config.num_layers) ** -0.5 if into_stream else 0.02

    def forward(self, batch: Batch) -> Tensor:
        """One loss per token, [B, S], zero where there is no target; see `Head`."""
        x_BSE = self.embed(batch.tokens)
        precision = torch.float64 if x_BSE.dtype == torch.float64 else torch.float32
        rotation_2BS1F = rope.rotation(self.config.rope, self.config.head_dim, batch.positions, precision)
        for block in self.layers():
            x_BSE = block(x_BSE, rotation_2BS1F, batch.boundaries)
        losses_BS: Tensor = self.head(x_BSE, batch.labels)
        return losses_BS
