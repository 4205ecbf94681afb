"""A model spread over a mesh, as a test asks for it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from models.batch import Batch
from models.config import ModelConfig
from models.transformer import Transformer
from parallelisms import activation_checkpoint
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.activation_offload import HostActivationPool
from parallelisms.block_recompute import TileOps, Tiling, compile_tile_ops
from parallelisms.init_weights import initialize
from parallelisms.mesh import Mesh
from parallelisms.parallel_dims import AXES
from parallelisms.parallelize import parallelize
from tests.models.small_models import SMALL


@dataclass(frozen=True)
class Plan:
    config: ModelConfig = SMALL
    dp_replicate: int = 1
    dp_shard: int = 1
    policy: activation_checkpoint.RecomputePolicy = "none"
    every: int = 1
    groups: int = 1
    tile: int | None = None
    on_host: bool = False
    reshard: bool = True
    micro_batch: int = 12
    compiled: bool = False

    @property
    def ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    def mesh(self) -> Mesh:
        sizes = dict.fromkeys(AXES, 1) | {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}
        return Mesh("cpu", sizes, rank=distributed.get_rank())


def build(plan: Plan, mesh: Mesh) -> Transformer:
    double = torch.float64
    with torch.device("meta"):
        model = Transformer(plan.config).to(double)
    bodies = TileOps()
    if plan.compiled:
        # A compiler that costs nothing; it may warn of what torch itself does.
        warnings.simplefilter("ignore")
        bodies = compile_tile_ops(backend="aot_eager")
    pieces = Tiling(plan.groups, plan.tile, bodies) if plan.policy != "none" else Tiling()
    host = HostActivationPool(max_inputs=plan.config.num_layers) if plan.on_host else None
    keep = RecomputeConfig(plan.policy, host, plan.on_host, plan.every, pieces, plan.reshard)
    if plan.compiled and plan.policy == "none":
        for block in model.layers():
            block.compile(fullgraph=True, backend="aot_eager")
    parallelize(
        model,
        mesh,
        recompute_config=keep,
        param_dtype=double,
        reduce_dtype=double,
        reshard_after_forward=plan.reshard,
    )
    initialize(model, seed=0, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from the linear regime of small weights, so that every part matters.
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    return model


def joined(rows: list[Batch]) -> Batch:
    names = ("tokens", "labels", "positions", "documents", "boundaries")
    tensors: Any = {name: torch.cat([getattr(row, name) for row in rows]) for name in names}
    return Batch(**tensors, num_tokens=20 * len(rows), num_pairs=0, num_computed_pairs=0)
