"""Start-up check of compilation: gradients of compiled blocks against those of eager ones, with the torch at hand.

Dynamo of torch 2.11 differentiates some autograd functions wrongly: the loss is right, and nothing is raised.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from models.batch import Batch
from models.config import ModelConfig
from models.transformer import Transformer
from parallelisms import activation_checkpoint
from parallelisms.activation_checkpoint import RecomputeConfig, RecomputePolicy
from parallelisms.block_recompute import TileOps, Tiling, compile_tile_ops

TOLERANCE = 1e-9
"""Of a gradient's norm, in float64."""


def verify_compilation(config: ModelConfig, policy: RecomputePolicy) -> None:
    """Raises ValueError with the parameters of small blocks whose gradients compilation changes. Takes about a second."""
    wrong = _wrong_gradients(config.activation, policy, qk_norm=config.qk_norm)
    if wrong:
        raise ValueError(f"torch {torch.__version__} gives compiled blocks other gradients: {', '.join(wrong)}")


@lru_cache
def _wrong_gradients(activation: Literal["silu"], policy: RecomputePolicy, *, qk_norm: bool) -> tuple[str, ...]:
    config = ModelConfig(
        vocab_size=16,
        dim=16,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_dim=24,
        qk_norm=qk_norm,
        activation=activation,
    )
    # Traces and differentiates as every backend does, and generates no code.
    backend = "aot_eager"
    compiled = _model(config, policy, compile_tile_ops(backend=backend))
    if policy == "none":
        for block in compiled.transformer_blocks():
            block.compile(fullgraph=True, backend=backend)
    expected = _gradients(_model(config, policy, TileOps()))
    with warnings.catch_warnings(action="ignore"):  # Dynamo's own.
        found = _gradients(compiled)
    torch.compiler.reset()
    return tuple(
        f"{name} (off by {float(error):.2g} of its norm)"
        for name, grad in expected.items()
        if not (error := (found[name] - grad).norm() / grad.norm()) < TOLERANCE
    )


def _model(config: ModelConfig, policy: RecomputePolicy, ops: TileOps) -> Transformer:
    with torch.device("cpu"):
        model = Transformer(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
            parameter.copy_(values + (parameter.ndim == 1))
    activation_checkpoint.apply(model, RecomputeConfig(policy, tiling=Tiling(ops=ops)))
    return model


def _gradients(model: Transformer) -> dict[str, Tensor]:
    lengths = (5, 7)
    tokens = torch.arange(sum(lengths), device="cpu")[None]
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    batch = Batch(
        tokens=tokens,
        labels=tokens.flip(1),
        positions=torch.cat([torch.arange(length, device="cpu") for length in lengths])[None],
        document_ids=(tokens >= lengths[0]).long(),
        boundaries=torch.tensor([[0, lengths[0], sum(lengths)]], dtype=torch.int32, device="cpu"),
        num_tokens=sum(lengths),
        num_pairs=pairs,
        num_computed_pairs=pairs,
    )
    model(batch).sum().backward()
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()}
