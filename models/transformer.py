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
from models.loss_head import LossHead
from models.norm import RMSNorm
from models.view import identity


class SequenceParallelComm(NamedTuple):
    """How ranks that share a block's matrices trade tokens; each is what the other's gradient needs."""

    gather: Callable[[Tensor], Tensor] = identity
    """[B, S, E] of this rank's tokens -> [B, T, E] of all ranks'."""
    reduce: Callable[[Tensor], Tensor] = identity
    """[B, T, E], of which each rank has a part of the sum -> [B, S, E]."""


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each on the normalised stream and added to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.sp_comm = SequenceParallelComm()
        # The second seam: how a block runs, so that it may keep less and compute it again in the backward pass.
        self.forward_fn: Callable[[TransformerBlock, Tensor, Tensor, Tensor], Tensor] = default_block_forward

    def forward(self, x_BSE: Tensor, cos_sin_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        return self.forward_fn(self, x_BSE, cos_sin_2BS1F, boundaries_BD)


def default_block_forward(
    block: TransformerBlock, x_BSE: Tensor, cos_sin_2BS1F: Tensor, boundaries_BD: Tensor
) -> Tensor:
    """As autograd does it."""
    x_BSE = x_BSE + block.attention(block.attention_norm(x_BSE), cos_sin_2BS1F, boundaries_BD)
    out: Tensor = x_BSE + block.feed_forward(block.ffn_norm(x_BSE))
    return out


@dataclass(frozen=True)
class StageSpec:
    """A piece of a model that is cut between blocks: these layers, the embedding before them, the head after them."""

    layers: range
    has_embedding: bool = True
    has_head: bool = True


class Transformer(nn.Module):
    """A decoder-only language model: a batch in, one loss per token out. Or a part of one, under the same names.

    `seq_len` are the tokens of the rows that it is for: `longrope` has other factors for longer ones.
    """

    def __init__(
        self, config: ModelConfig, *, stage: StageSpec | None = None, seq_len: int = 0, loss_chunk_mib: int = 256
    ) -> None:
        super().__init__()
        stage = stage or StageSpec(range(config.num_layers))
        self.config, self.seq_len = config, seq_len
        self.embed = Embedding(config.vocab_size, config.dim) if stage.has_embedding else None
        # Keyed by layer number, so that names do not depend on where the model is cut.
        self.blocks = nn.ModuleDict({str(index): TransformerBlock(config) for index in stage.layers})
        self.head = LossHead(config, chunk_mib=loss_chunk_mib) if stage.has_head else None
        # Gets the residual stream before each block and after the last: for who wants to know how far this is.
        self.block_boundary_hook: Callable[[Tensor], Tensor] = identity
        if config.tie_embeddings and self.embed is not None and self.head is not None:
            self.head.proj.weight = self.embed.weight

    def layers(self) -> list[TransformerBlock]:
        return [cast(TransformerBlock, block) for block in self.blocks.values()]

    def init_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values; None for norms, which start at one.

        0.02, and for the two projections that write to the residual stream 0.02 / sqrt(2 layers), as GPT-2 has it.
        """
        if name.endswith("norm.weight"):
            return None
        writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return 0.02 * (2 * self.config.num_layers) ** -0.5 if writes_residual else 0.02

    def forward(self, batch: Batch, x_BSE: Tensor | None = None) -> Tensor:
        """One loss per token, [B, S], zero where there is no target; see `Head`.

        A part without embedding takes the residual stream [B, S, E] too, and one without head returns it.
        """
        if self.embed is not None:
            x_BSE = self.embed(batch.tokens)
        if x_BSE is None:
            raise ValueError("a part of a model without embedding needs the residual stream that enters it")
        rope_dtype = torch.float64 if x_BSE.dtype == torch.float64 else torch.float32
        config = self.config
        cos_sin_2BS1F = rope.cos_sin_table(
            config.rope, config.head_dim, batch.positions, rope_dtype, seq_len=self.seq_len
        )
        identity_2BS1F = rope.identity_rotation(cos_sin_2BS1F)
        for index, block in self.blocks.items():
            uses_rope = config.uses_rope(int(index))
            x_BSE = block(
                self.block_boundary_hook(x_BSE), cos_sin_2BS1F if uses_rope else identity_2BS1F, batch.boundaries
            )
        x_BSE = self.block_boundary_hook(x_BSE)
        return x_BSE if self.head is None else self.head(x_BSE, batch.labels)
