"""Start-up check of recomputation and compilation: the gradients of a small block against those of
plain autograd.

It holds whatever the blocks of a model are made of. Recomputation differentiates their pieces one
by one; dynamo of torch 2.11 differentiates some autograd functions wrongly: the loss is right, and
nothing is raised.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from models.batch import Batch
from models.config import ModelConfig
from models.rope_config import RopeConfig
from models.tiling import bytes_per_token, eager
from models.transformer import Transformer
from parallelisms import activation_checkpoint
from parallelisms.activation_checkpoint import RecomputeConfig, RecomputePolicy
from parallelisms.block_recompute import Tiling, compiler

TOLERANCE = 1e-9
ROUNDED = 1e-6
"""Share of the largest gradient's norm below which a gradient counts as rounding error, in
float64.
"""
LENGTHS = (5, 7)
"""Tokens of the documents."""
SMALL: dict[str, Any] = {
    "vocab_size": 16,
    "dim": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_dim": 24,
}


def verify_gradients(config: ModelConfig, policy: RecomputePolicy, tiling: Tiling) -> None:
    """Raises ValueError with what these options change: the loss or gradients of small blocks, one
    of each of the model's kinds, in as many head groups as fit them, and in several tiles if
    blocks are not compiled.

    Takes about 20 ms, a second if compiled.
    """
    is_compiled = tiling.compile is not eager
    if policy == "none" and not is_compiled:
        return
    small = small_config(config)
    options = {
        "head_groups": min(2, tiling.head_groups),
        "is_tiled": tiling.tile_bytes is not None,
    }
    if wrong := _wrong_gradients(small, policy, is_compiled=is_compiled, **options):
        how = (
            f"torch {torch.__version__} gives compiled blocks"
            if is_compiled
            else "recomputation gives blocks"
        )
        raise ValueError(f"{how} other gradients: {', '.join(wrong)}")


def small_config(config: ModelConfig) -> ModelConfig:
    """Small layers, one of each of the model's kinds."""
    # Without rotation and norms no gradient reaches the bias of keys.
    kinds = tuple(dict.fromkeys(config.unrotated_layers))
    return replace(config, **SMALL, num_layers=len(kinds), layers=kinds, rope=RopeConfig())


def verify_code_generation(device: torch.device) -> None:
    """Raises RuntimeError unless torch.compile generates right code for the device: a small gate,
    forward and backward.
    """

    def gate(x: Tensor) -> Tensor:
        return (torch.nn.functional.silu(x) * x).softmax(-1)

    found = []
    for run in (gate, torch.compile(gate, fullgraph=True)):
        x = torch.linspace(-3, 3, 64, device=device).view(4, 16).requires_grad_()
        try:
            out = run(x)
            found.append((out.detach(), *torch.autograd.grad(out, x, x.detach())))
        except Exception as error:
            raise RuntimeError(f"torch.compile fails on {device}: {error}") from error
    torch.compiler.reset()
    for expected, compiled in zip(*found, strict=True):
        if not torch.allclose(expected, compiled, rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"torch.compile gives other numbers on {device}")


@lru_cache
def _wrong_gradients(
    config: ModelConfig,
    policy: RecomputePolicy,
    *,
    is_compiled: bool,
    head_groups: int,
    is_tiled: bool,
) -> tuple[str, ...]:
    expected = _gradients(build_double(config))
    model = build_double(config)
    # Traces and differentiates as every backend does, and generates no code.
    backend = "aot_eager"
    # Tiles of at most 5 of the 12 tokens, in float64.
    tile_bytes = (
        5 * bytes_per_token(config.dim, config.ffn_dim, 8)
        if is_tiled and not is_compiled
        else None
    )
    tiling = Tiling(head_groups, tile_bytes, compiler(backend=backend) if is_compiled else eager)
    activation_checkpoint.apply(model, RecomputeConfig(policy, tiling=tiling))
    if is_compiled and policy == "none":
        model.compile_blocks(backend=backend)
    if is_compiled:
        model.compile_pieces(tiling.compile)
    with warnings.catch_warnings(action="ignore"):  # Dynamo's own.
        found = _gradients(model)
    if is_compiled:
        torch.compiler.reset()
    # A gradient of rounding errors, such as that of queries that see a single key, counts as none.
    least = ROUNDED * max(grad.norm() for grad in expected.values())
    return tuple(
        f"{name} (off by {float(error):.2g} of its norm)"
        for name, grad in expected.items()
        if not (error := (found[name] - grad).norm() / grad.norm().clamp(min=least)) < TOLERANCE
    )


def build_double(config: ModelConfig) -> Transformer:
    """On the host, in float64, with random weights that do not depend on the run's."""
    with torch.device("cpu"):
        model = Transformer(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
            parameter.copy_(values + (parameter.ndim == 1))
    return model


def _gradients(model: Transformer) -> dict[str, Tensor]:
    """Losses, and gradients of the parameters, for two documents."""
    lengths = LENGTHS
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
    losses = model(batch)
    losses.sum().backward()
    return {"losses": losses.detach()} | {
        name: torch.zeros_like(x) if x.grad is None else x.grad
        for name, x in model.named_parameters()
    }
