"""A small model whose steps tests trace, count and run."""

from __future__ import annotations

from functools import cache
from itertools import chain

from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.trace.record import TracedStep, trace_pp_ranks

# Activations dominate, and every item is large enough to matter. The vocabulary is small because
# the CPU's bfloat16 matmuls allocate workspace for a large loss head.
MODEL = {
    "data.corpus": "copy",
    "model.vocab_size": 264,
    "model.dim": 128,
    "model.num_layers": 3,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 32,
    "model.ffn_dim": 384,
    "memory.loss_chunk_mib": 1,
    "training.seq_len": 1024,
    "training.steps": 4,
    "training.dtype": "float32",
    "training.global_batch_size": 1,
    "checkpoint.enabled": "false",
}
HALF = "training.dtype=bfloat16"
FULL = "memory.recompute=full"
KEEP = "memory.recompute=keep_attention"
FOUR = "parallelism.pp=2 model.num_layers=4 training.global_batch_size=4"


def configured(changes: str = "") -> Config:
    values = MODEL | dict(change.split("=", 1) for change in changes.split())
    config = load(
        [*chain.from_iterable((f"--{key}", str(value)) for key, value in values.items())]
    )
    # An option that no layer reads would make a case of another one.
    assert not config.model.problems()
    return config


@cache
def traced(changes: str = "", world_size: int = 1) -> list[TracedStep]:
    """The steps of the first rank of every pipeline rank, as on a CPU."""
    return trace_pp_ranks(configured(changes), world_size)
