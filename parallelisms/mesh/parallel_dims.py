"""Mesh dimensions, and rules for models on them. Imports no torch."""

from __future__ import annotations

from models.config import ModelConfig

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def head_groups_problem(model: ModelConfig, head_groups: int) -> str | None:
    if head_groups == 1 or not any(kind.full_qk_norm for kind in model.kinds):
        return None
    return (
        f"memory.head_groups = {head_groups} must be 1: queries and keys are normed over all heads "
        "(model.full_qk_norm = true)"
    )


def expert_parallel_problems(model: ModelConfig, ep: int, *, num_shards: int) -> list[str]:
    """Every rule of expert parallelism that is broken. `num_shards`: dp_shard x cp."""
    if ep > 1 and not model.has_experts:
        return [f"parallelism.ep = {ep} must be 1: no layer has experts"]
    rules = {"model.num_experts": model.num_experts, "parallelism.dp_shard x cp": num_shards}
    return [
        f"parallelism.ep = {ep} must divide {name} = {size}"
        for name, size in rules.items()
        if ep > 1 and size % ep
    ]


def tensor_parallel_problems(
    model: ModelConfig, tp: int, *, replicate_vocab: bool = False
) -> list[str]:
    """Every rule of tensor parallelism that the model breaks, one message each."""
    kinds = model.kinds
    kv_heads = model.num_kv_heads
    is_used = {
        "num_heads": True,
        "ffn_dim": any(kind.feed_forward == "gated" for kind in kinds),
        "expert_dim": model.has_experts,
        "shared_expert_dim": model.shared_expert_dim > 0,
        "vocab_size": not replicate_vocab,
    }
    names = [name for name, used in is_used.items() if used]
    sizes = {f"model.{name}": getattr(model, name) for name in names}
    problems = [
        f"parallelism.tp = {tp} must divide {name} = {size}"
        for name, size in sizes.items()
        if size % tp
    ]
    if kv_heads % tp and tp % kv_heads:
        problems.append(
            f"parallelism.tp = {tp} must divide model.num_kv_heads = {kv_heads} or be a multiple of it (replicated KV heads)"
        )
    return problems
