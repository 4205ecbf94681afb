"""Parallelized models for tests."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from models.attention_core import LocalAttentionCore
from models.batch import Batch
from models.config import ModelConfig
from models.tiling import CompilePiece, eager
from models.transformer import Transformer
from parallelisms import activation_checkpoint
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.activation_offload import HostActivationPool
from parallelisms.block_recompute import Tiling, compiler
from parallelisms.fsdp import FSDPConfig
from parallelisms.init_weights import initialize
from parallelisms.mesh.mesh import Mesh
from parallelisms.mesh.parallel_dims import AXES
from parallelisms.parallelize import parallelize
from tests.models.small_models import SMALL


@dataclass(frozen=True)
class Plan:
    config: ModelConfig = SMALL
    dp_replicate: int = 1
    dp_shard: int = 1
    policy: activation_checkpoint.RecomputePolicy = "none"
    blocks_per_checkpoint: int = 1
    head_groups: int = 1
    tile_bytes: int | None = None
    offload: bool = False
    reshard_after_forward: bool = True
    micro_batch_size: int = 12
    compiled: bool = False

    @property
    def ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    def mesh(self) -> Mesh:
        sizes = dict.fromkeys(AXES, 1) | {
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
        }
        return Mesh("cpu", sizes, rank=distributed.get_rank())


def build(plan: Plan, mesh: Mesh) -> Transformer:
    double = torch.float64
    with torch.device("meta"):
        model = Transformer(plan.config).to(double)
    compile_piece: CompilePiece = eager
    if plan.compiled:
        # A cheap backend; torch may warn about its own code.
        warnings.simplefilter("ignore")
        compile_piece = compiler(backend="aot_eager")
    tiling = (
        Tiling(plan.head_groups, plan.tile_bytes, compile_piece)
        if plan.policy != "none"
        else Tiling()
    )
    host_pool = HostActivationPool(max_inputs=plan.config.num_layers) if plan.offload else None
    recompute_config = RecomputeConfig(
        plan.policy,
        host_pool,
        plan.offload,
        plan.blocks_per_checkpoint,
        tiling,
        plan.reshard_after_forward,
    )
    if plan.compiled and plan.policy == "none":
        for block in model.transformer_blocks():
            block.compile(fullgraph=True, backend="aot_eager")
    if plan.compiled:
        model.compile_pieces(compile_piece)
    parallelize(
        model,
        mesh,
        core=LocalAttentionCore(),
        recompute_config=recompute_config,
        fsdp_config=FSDPConfig(
            param_dtype=double,
            reduce_dtype=double,
            reshard_after_forward=plan.reshard_after_forward,
        ),
    )
    initialize(model, seed=0, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            # Leave the linear regime of small weights, so that every part of the model matters.
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    return model


def concat_batches(batches: list[Batch]) -> Batch:
    names = ("tokens", "labels", "positions", "document_ids", "boundaries")
    tensors: Any = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
    return Batch(**tensors, num_tokens=20 * len(batches), num_pairs=0, num_computed_pairs=0)
