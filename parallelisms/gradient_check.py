"""Start-up check of recomputation and compilation: the gradients of a small block against those of plain autograd.

They hold whatever the blocks of a model are made of. Recomputation differentiates their pieces one by one; dynamo of
torch 2.11 differentiates some autograd functions wrongly: the loss is right, and nothing is raised.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from models.batch import Batch
from models.config import ModelConfig, RopeConfig
from models.transformer import Transformer
from parallelisms import activation_checkpoint
from parallelisms.activation_checkpoint import RecomputeConfig, RecomputePolicy
from parallelisms.block_recompute import Compile, Tiling, compiler, eager

TOLERANCE = 1e-9
"""Of a gradient's norm, in float64."""
SMALL: dict[str, Any] = {
    "vocab_size": 16,
    "dim": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_dim": 24,
}


def verify_gradients(config: ModelConfig, policy: RecomputePolicy, *, compiled: bool) -> None:
    """Raises ValueError with the parameters of small blocks, one of each of the model's kinds, whose gradients these options change.

    Takes about 20 ms, a second if `compiled`.
    """
    if policy == "none" and not compiled:
        return
    small = replace(config, **SMALL, num_layers=len(config.kinds), layer_pattern=config.kinds, rope=RopeConfig())
    wrong = _wrong_gradients(small, policy, compiled=compiled)
    if wrong:
        how = f"torch {torch.__version__} gives compiled blocks" if compiled else "recomputation gives blocks"
        raise ValueError(f"{how} other gradients: {', '.join(wrong)}")


@lru_cache
def _wrong_gradients(config: ModelConfig, policy: RecomputePolicy, *, compiled: bool) -> tuple[str, ...]:
    expected = _gradients(_model(config, "none", eager))
    # Traces and differentiates as every backend does, and generates no code.
    backend = "aot_eager"
    model = _model(config, policy, compiler(backend=backend) if compiled else eager)
    if compiled and policy == "none":
        for block in model.transformer_blocks():
            block.compile(fullgraph=True, backend=backend)
    with warnings.catch_warnings(action="ignore"):  # Dynamo's own.
        found = _gradients(model)
    if compiled:
        torch.compiler.reset()
    return tuple(
        f"{name} (off by {float(error):.2g} of its norm)"
        for name, grad in expected.items()
        if not (error := (found[name] - grad).norm() / grad.norm()) < TOLERANCE
    )


def _model(config: ModelConfig, policy: RecomputePolicy, compile_piece: Compile) -> Transformer:
    with torch.device("cpu"):
        model = Transformer(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
            parameter.copy_(values + (parameter.ndim == 1))
    activation_checkpoint.apply(model, RecomputeConfig(policy, tiling=Tiling(compile=compile_piece)))
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
