"""One Transformer for every family: embed -> blocks -> head. Their differences are data (`models/config.py`).

Shape suffixes: B rows, S tokens on this rank, E width of the residual stream, F rotary frequencies, D document starts
and the row's end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from models import rope
from models.attention import Attention
from models.batch import Batch
from models.config import ModelConfig
from models.feed_forward import FeedForward
from models.linear import Embedding
from models.loss_head import Head
from models.norm import RMSNorm
from models.view import unchanged


class Exchange(NamedTuple):
    """How ranks that share a block's matrices trade tokens; each is what the other's gradient needs."""

    gather: Callable[[Tensor], Tensor] = unchanged
    """[B, S, E] of this rank's tokens -> [B, T, E] of all ranks'."""
    reduce: Callable[[Tensor], Tensor] = unchanged
    """[B, T, E], of which each rank has a part of the sum -> [B, S, E]."""


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised stream and added to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.exchange = Exchange()
        # The second seam: how a block runs, so that it may keep less and compute it again in the backward pass.
        self.run: Callable[[Block, Tensor, Tensor, Tensor], Tensor] = keep_everything

    def forward(self, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        return self.run(self, x_BSE, rotation_2BS1F, boundaries_BD)


def keep_everything(block: Block, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
    """As autograd does it."""
    x_BSE = x_BSE + block.attention(block.attention_norm(x_BSE), rotation_2BS1F, boundaries_BD)
    out: Tensor = x_BSE + block.feed_forward(block.ffn_norm(x_BSE))
    return out


@dataclass(frozen=True)
class Part:
    """A piece of a model that is cut between blocks: these layers, the embedding before them, the head after them."""

    layers: range
    embed: bool = True
    head: bool = True


class Transformer(nn.Module):
    """A decoder-only language model: a batch in, one loss per token out. Or a part of one, under the same names.

    `seq_len` are the tokens of the rows that it is for: `longrope` has other factors for longer ones.
    """

    def __init__(
        self, config: ModelConfig, *, part: Part | None = None, seq_len: int = 0, head_chunk_mib: int = 256
    ) -> None:
        super().__init__()
        part = part or Part(range(config.num_layers))
        self.config, self.seq_len = config, seq_len
        self.embed = Embedding(config.vocab_size, config.dim) if part.embed else None
        # Keyed by layer number, so that names do not depend on where the model is cut.
        self.blocks = nn.ModuleDict({str(index): Block(config) for index in part.layers})
        self.head = Head(config, chunk_mib=head_chunk_mib) if part.head else None
        # Gets the residual stream before each block and after the last: for who wants to know how far this is.
        self.between: Callable[[Tensor], Tensor] = unchanged
        if config.tie_embeddings and self.embed is not None and self.head is not None:
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

    def forward(self, batch: Batch, x_BSE: Tensor | None = None) -> Tensor:
        """One loss per token, [B, S], zero where there is no target; see `Head`.

        A part without embedding takes the residual stream [B, S, E] too, and one without head returns it.
        """
        if self.embed is not None:
            x_BSE = self.embed(batch.tokens)
        if x_BSE is None:
            raise ValueError("a part of a model without embedding needs the residual stream that enters it")
        precision = torch.float64 if x_BSE.dtype == torch.float64 else torch.float32
        config = self.config
        rotation_2BS1F = rope.rotation(config.rope, config.head_dim, batch.positions, precision, seq_len=self.seq_len)
        still_2BS1F = rope.still(rotation_2BS1F)
        for index, block in self.blocks.items():
            rotates = config.rotates(int(index))
            x_BSE = block(self.between(x_BSE), rotation_2BS1F if rotates else still_2BS1F, batch.boundaries)
        x_BSE = self.between(x_BSE)
        return x_BSE if self.head is None else self.head(x_BSE, batch.labels)
