"""Traces of experts against dry runs; every expert has as many tokens."""

from __future__ import annotations

import pytest

from tests.trace.test_record import require_equal
from trainer.config.parse import load
from trainer.trace.record import trace_step

MIXTURE = (
    "model.family=qwen3_moe model.num_layers=8 model.vocab_size=512 model.dim=256 model.head_dim=32 data.corpus=copy "
    "training.seq_len=4096 memory.loss_chunk_mib=8"
)
MESHES = {
    "one": (1, ""),
    "ep": (2, "parallelism.ep=2"),
    "ep x fsdp": (4, "parallelism.ep=2"),
    "tp": (2, "parallelism.tp=2"),
    "ep x tp": (4, "parallelism.ep=2 parallelism.tp=2"),
    "256 ranks": (
        256,
        "parallelism.cp=4 parallelism.ep=8 parallelism.tp=2 training.micro_batch_size=2",
    ),
}
OPTIONS = {
    "autograd": "training.dtype=float32 memory.recompute=none",
    "autograd, bfloat16": "training.dtype=bfloat16 memory.recompute=none",
    "recomputed": "training.dtype=float32 memory.recompute=full",
    "tiled": "training.dtype=bfloat16 memory.recompute=full memory.mlp_tile_mib=4",
    "wide": "training.dtype=float32 memory.recompute=full model.expert_dim=512",
    "shared": "training.dtype=bfloat16 memory.recompute=full model.shared_expert=true model.expert_dim=96",
}
CASES = [(mesh, options) for mesh in MESHES for options in OPTIONS]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), CASES)
def test_a_step_of_experts_follows_from_a_short_one(mesh: str, options: str) -> None:
    ranks, degrees = MESHES[mesh]
    given = f"{MIXTURE} training.global_batch_size={2 * ranks} {degrees} {OPTIONS[options]}"
    require_equal(load([f"--{each}" for each in given.split()]), ranks)


def test_tiles_of_experts_do_not_depend_on_how_weights_are_sharded() -> None:
    """Every tile is exchanged by itself, by ranks that hold whole weights or parts of them."""
    mesh = "parallelism.cp=4 parallelism.ep=8 parallelism.tp=2 training.micro_batch_size=2"
    exchanged = []
    for ranks in (16, 256):
        batch = f"training.global_batch_size={ranks // 4} model.num_layers=2"
        given = f"{MIXTURE} {batch} {mesh} {OPTIONS['tiled']}"
        work = trace_step(load([f"--{each}" for each in given.split()]), ranks).whole.work
        exchanged.append({key: count for key, count in work.calls.items() if key[0] == "ep"})
    assert exchanged[0] == exchanged[1]
    # Tokens go there and back.
    assert exchanged[0]["ep", "all_to_all", "forward"] > 2 * 2
