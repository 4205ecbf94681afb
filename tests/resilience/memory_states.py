"""State and tensors of a rank at a step, for tests of in-memory checkpoints that train nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trainer.storage.train_state import SpikeState, StagePosition, TrainerState, TrainState

RANKS = 4
NODES = 2


def state_of(step: int) -> TrainState:
    scalars = TrainerState(
        step=step,
        next_sequence=6 * step,
        tokens=0,
        skipped=0,
        sources={},
        losses=SpikeState(),
        goodput=None,
    )
    return TrainState(
        step=step,
        trainer=scalars,
        stage=StagePosition(name="", index=0, start_step=0),
        data={"corpus": "abc"},
        plans={},
        config={"optimizer.lr": 0.1, "schedule.kind": "constant"},
        schema_version=1,
        degrees={"dp_shard": RANKS},
        torch="2",
        optimizer_steps=None,
    )


def tensors_of(rank: int, step: int) -> dict[str, Tensor]:
    """Shapes differ between ranks, as for stages of a pipeline."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return {
        "model.weight": torch.randn(3 + rank, 5, generator=draw),
        "model.bias": torch.randn(0 if rank else 7, generator=draw),
        "optimizer.weight.exp_avg": torch.randn(3 + rank, 5, generator=draw).bfloat16(),
        "optimizer.weight.step": torch.tensor(float(step)),
    }


def node_of(rank: int) -> int:
    return rank // (RANKS // NODES)


def memory_of_node(root: Path, node: int) -> Path:
    """In place of the shared memory of a node, so that nodes see each other's as little as on a
    cluster.
    """
    folder = root / f"memory of node {node}"
    folder.mkdir(exist_ok=True)
    return folder
