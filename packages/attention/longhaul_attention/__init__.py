"""Exact context parallelism for any trainer: sequences sharded over ranks, packed documents of any
length.

    register_transformers()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longhaul")
    cp = ContextParallel(mesh, method="ring")
    loss = model(**cp.shard_batch(batch)).loss  # Its mean over the ranks, and that of every gradient, is one process's.

For models of your own, `cp.attention(q, k, v, boundaries)` takes this rank's tokens; with
`causal=False`, they see all keys. Code that calls `scaled_dot_product_attention` stays as it is
inside `with cp.sdpa():`.
"""

from __future__ import annotations

from longhaul_attention.batch import Documents
from longhaul_attention.context_parallel import ContextParallel
from longhaul_attention.group_loader import share_batches
from longhaul_attention.huggingface import register_transformers
from longhaul_attention.huggingface_trainer import ContextParallelTrainer
from longhaul_attention.parallel_model import gathers_logits, parallelize

__version__ = "0.1.0"
__all__ = [
    "ContextParallel",
    "ContextParallelTrainer",
    "Documents",
    "gathers_logits",
    "parallelize",
    "register_transformers",
    "share_batches",
]
