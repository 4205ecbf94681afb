"""The Transformer of every family: embedding, blocks, loss head. Families differ by configuration
only.

`MIXERS` and `FEED_FORWARDS` have the modules of the kinds that `models/layers.py` declares.

Shape suffixes: B batch, S tokens of this rank, T tokens of the sequence-parallel group, E model
dim, F rotary frequencies, D document boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from models import rope
from models.attention import Attention
from models.batch import Batch
from models.config import ModelConfig, StageSpec
from models.dtypes import accumulation_dtype
from models.feed_forward import FeedForward
from models.layers import NORMS, LayerKind
from models.linear import Embedding, identity
from models.loss_head import LossHead
from models.moe import MixtureOfExperts
from models.norm import RMSNorm, config_norm
from models.router import RouterStep
from models.sublayer import Sublayer, SublayerModule
from models.tiling import CompilePiece


class SequenceParallelComm(NamedTuple):
    """All-gather and reduce-scatter of a block's tokens; each is the other's gradient.

    Tensor parallelism sets them.
    """

    gather: Callable[[Tensor], Tensor] = identity
    """All-gather: [B, S, E] -> [B, T, E]."""
    reduce: Callable[[Tensor], Tensor] = identity
    """Reduce-scatter of partial sums: [B, T, E] -> [B, S, E]."""


BlockForward = Callable[["TransformerBlock", Tensor, Tensor, Tensor], Tensor]
"""Runs a block.

`parallelisms.activation_checkpoint` sets one that saves less and recomputes in the backward pass.
"""


Build = Callable[[ModelConfig, LayerKind], SublayerModule]
MIXERS: dict[str, Build] = {"attention": Attention}
FEED_FORWARDS: dict[str, Build] = {"gated": FeedForward, "moe": MixtureOfExperts}


class TransformerBlock(nn.Module):
    """Attention and feed-forward with residual connections and norms: those of one of the
    configuration's layers.
    """

    attention: SublayerModule
    feed_forward: SublayerModule

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.kind = config.layer_kinds[layer]
        kind = self.kind
        self.sublayers = (
            self._add("attention", f'mixer "{kind.mixer}"', MIXERS[kind.mixer], config),
            self._add(
                "feed_forward",
                f'feed_forward "{kind.feed_forward}"',
                FEED_FORWARDS[kind.feed_forward],
                config,
            ),
        )
        self.sp_comm = SequenceParallelComm()
        self.forward_fn: BlockForward = default_block_forward

    def _add(self, name: str, label: str, build: Build, config: ModelConfig) -> Sublayer:
        """Adds a sublayer's norms and module. `label` is its name in errors."""
        norms = dict[str, RMSNorm]()
        for declared in NORMS[self.kind.norms][name]:
            norm_name = declared.removesuffix(".weight")
            role = "post_norm" if norm_name.endswith("_post_norm") else "norm"
            norms[role] = config_norm(config, config.dim)
            self.add_module(norm_name, norms[role])
        # Checked before the parameters: a class with the wrong name declares none of its own.
        if (given := getattr(build, "module_name", name)) != name:
            raise ValueError(f'{label} needs module_name = "{name}", not "{given}"')
        module = build(config, self.kind)
        self.add_module(name, module)
        return Sublayer(module, **norms, name=label, multiplier=config.residual_multiplier)

    def forward(self, x_BSE: Tensor, cos_sin_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        return self.forward_fn(self, x_BSE, cos_sin_2BS1F, boundaries_BD)


def default_block_forward(
    block: TransformerBlock, x_BSE: Tensor, cos_sin_2BS1F: Tensor, boundaries_BD: Tensor
) -> Tensor:
    """Leaves the backward pass to autograd."""
    for sublayer in block.sublayers:
        x_BSE = sublayer(x_BSE, cos_sin_2BS1F, boundaries_BD)
    return x_BSE


class Transformer(nn.Module):
    """A decoder-only language model, or one pipeline stage of it with the same parameter names.

    `seq_len` is the length of the training sequences, which selects `longrope`'s factors.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        stage: StageSpec | None = None,
        seq_len: int = 0,
        loss_chunk_mib: int = 256,
    ) -> None:
        super().__init__()
        stage = stage or StageSpec(range(config.num_layers))
        self.config = config
        self.seq_len = seq_len
        if problems := [problem for kind in config.kinds for problem in kind.problems()]:
            raise ValueError("; ".join(problems))
        self.embed = Embedding(config.vocab_size, config.dim) if stage.has_embedding else None
        # Keyed by layer index, so that parameter names do not depend on the pipeline split.
        self.blocks = nn.ModuleDict(
            {str(index): TransformerBlock(config, index) for index in stage.layers}
        )
        self.head = LossHead(config, chunk_mib=loss_chunk_mib) if stage.has_head else None
        self.router_step = RouterStep()
        for layer in self.expert_layers():
            layer.step = self.router_step
        # Called on the residual stream before each block and after the last one. The trainer sets
        # it to track progress.
        self.block_boundary_hook: Callable[[Tensor], Tensor] = identity
        # The same parameter object: FSDP, the optimizer and checkpoints see it once.
        if config.tie_embeddings and self.embed is not None and self.head is not None:
            self.head.proj.weight = self.embed.weight
        if problems := config.parameter_problems(
            {name: tuple(x.shape) for name, x in self.named_parameters()}
        ):
            raise ValueError("; ".join(problems))

    def compile_blocks(self, **options: Any) -> None:
        """Compiles each block as one graph, or as those around its mixture of experts, in which
        the host may wait.
        """
        for block in self.transformer_blocks():
            block.compile(fullgraph=block.kind.feed_forward != "moe", **options)

    def compile_pieces(self, compile_piece: CompilePiece) -> None:
        """Compiles the pieces of the loss head and of experts, which are not compiled with their
        blocks.
        """
        for module in (*self.expert_layers(), self.head):
            if module is not None:
                module.compile_piece = compile_piece

    def transformer_blocks(self) -> list[TransformerBlock]:
        return [cast(TransformerBlock, block) for block in self.blocks.values()]

    def named_tensors(self) -> dict[str, Tensor]:
        """Tensors of the model that a checkpoint holds: parameters, and the buffers of routers."""
        return {
            name: each.detach() for name, each in (*self.named_parameters(), *self.named_buffers())
        }

    def cast(self, dtype: torch.dtype) -> Transformer:
        """Weights in `dtype`, and buffers in the dtype of its sums."""
        self.to(dtype)
        for layer in self.expert_layers():
            for name, buffer in layer.named_buffers(recurse=False):
                setattr(layer, name, buffer.to(accumulation_dtype(dtype)))
        return self

    def expert_layers(self) -> list[MixtureOfExperts]:
        modules = [block.feed_forward for block in self.transformer_blocks()]
        return [module for module in modules if isinstance(module, MixtureOfExperts)]

    def init_mean_std(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a parameter's initial values: norms start at 1, biases at
        0.

        0.02; the two projections that write to the residual stream get 0.02 / sqrt(2 num_layers), as in GPT-2.
        """
        residual_std = 0.02 * (2 * self.config.num_layers) ** -0.5
        values = {
            "normal": (0.0, 0.02),
            "residual": (0.0, residual_std),
            "ones": (1.0, 0.0),
            "zeros": (0.0, 0.0),
        }
        return values[self.config.declared(name).initial]

    def _rotations(self, positions_BS: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """[2, B, S, 1, F] of each `LayerKind.rope` of this stage's layers, computed once for all
        of them.
        """
        config = self.config
        # Layers without RoPE turn by zero, so that every block takes the same inputs.
        needed = {block.kind.rope for block in self.transformer_blocks()}
        ropes = {"global": config.rope, "local": config.local_rope}
        tables = {
            name: rope.cos_sin_table(
                each, each.rotary_dim(config.head_dim), positions_BS, dtype, seq_len=self.seq_len
            )
            for name, each in ropes.items()
            if name in needed or (name == "global" and "none" in needed)
        }
        return tables | (
            {"none": rope.identity_rotation(tables["global"])} if "none" in needed else {}
        )

    def forward(self, batch: Batch, x_BSE: Tensor | None = None) -> Tensor:
        """Loss per token [B, S], zero where there is no target; see `LossHead.forward`.

        A stage without embedding also takes the hidden states [B, S, E]; a stage without head
        returns them.
        """
        if self.embed is not None:
            x_BSE = self.embed(batch.tokens)
            if self.config.embedding_multiplier != 1:
                x_BSE = x_BSE * self.config.embedding_multiplier
        if x_BSE is None:
            raise ValueError(
                "a pipeline stage without embedding needs the hidden states of the previous stage"
            )
        rotations = self._rotations(batch.positions, accumulation_dtype(x_BSE.dtype))
        self.router_step.begin(batch.labels)
        for block in self.transformer_blocks():
            x_BSE = block(
                self.block_boundary_hook(x_BSE), rotations[block.kind.rope], batch.boundaries
            )
        x_BSE = self.block_boundary_hook(x_BSE)
        return x_BSE if self.head is None else self.head(x_BSE, batch.labels)
