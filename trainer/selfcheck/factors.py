"""The factors of random configurations and their levels: the keys of the schema that decide what
is computed.

A level sets one key, or several together. The first level of a factor is its simplest. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallelisms.mesh.parallel_dims import AXES

ConfigValues = dict[str, Any]


def _key(name: str, values: Sequence[object]) -> dict[str, dict[str, ConfigValues]]:
    """A factor of one key. None: what another factor gives it, or its default."""
    levels = {
        str(value).lower() if isinstance(value, bool) else str(value): value for value in values
    }
    return {
        name: {level: {} if value is None else {name: value} for level, value in levels.items()}
    }


def _keys(**values: object) -> ConfigValues:
    """Several keys of one section, named `section__key`."""
    return {name.replace("__", "."): value for name, value in values.items()}


LONGROPE = {
    "model.rope.short_factors": [1.0, 1.1, 1.3, 2.0],
    "model.rope.long_factors": [1.5, 2.0, 3.0, 5.0],
}
RESUMED_MESHES: dict[str, ConfigValues | None] = {
    "same": None,
    "one process": {},
    "dp_shard 2 x cp 2": {"dp_shard": 2, "cp": 2, "cp_method": "allgather"},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2, "pp_schedule": "Interleaved1F1B"},
}
"""The mesh on which a run is resumed, or on which its second stage runs."""
SOURCES: ConfigValues = {
    "data.sources": {"other": {"documents": "file"}},
    "data.mix": [
        {"source": "corpus", "weight": 2.0, "min_length": 20},
        {"source": "other", "max_length": 30},
        {"source": "other", "min_length": 30, "max_len": 25},
    ],
}

EXPERTS = _keys(
    model__feed_forward="moe", model__num_experts=6, model__top_k=2, model__expert_dim=24
)
SIGMOID = EXPERTS | _keys(
    model__router="sigmoid",
    model__router_scaling=2.5,
    model__correction_bias=True,
    training__correction_bias_rate=0.05,
    model__shared_expert=True,
)
WINDOWS: ConfigValues = {"model.layers": [{"window": 5}, {}]}
LOCAL_WINDOWS = _keys(
    model__layers=[{"window": 5, "rope": "local"}, {}], model__local_rope={"theta": 50.0}
)
OLMO = _keys(model__norms="post", model__full_qk_norm=True)
GEMMA = _keys(
    model__norms="sandwich",
    model__zero_centered_norms=True,
    model__activation="gelu_tanh",
    model__embedding_multiplier=32**0.5,
)
DENSE_MODELS: Mapping[str, ConfigValues] = {
    "llama3": {},
    "qwen3": {"model.family": "qwen3"},
    "ministral": WINDOWS,
    "olmo2": OLMO,
    "olmo3": LOCAL_WINDOWS | OLMO | _keys(model__local_rope={"theta": 500_000.0}),
    "granite": _keys(
        model__attention_scale=0.3,
        model__embedding_multiplier=3.0,
        model__residual_multiplier=0.7,
        model__logits_scaling=2.0,
    ),
    "phi3": {"model.model_type": "phi3"},
    "gemma2": WINDOWS | GEMMA | _keys(model__softcap=2.0, model__logit_softcap=3.0),
    "gemma3": LOCAL_WINDOWS | GEMMA | _keys(model__qk_norm=True),
}
"""Models of Hugging Face's transformers as one factor: drawn option by option, they would almost
never occur.
"""
MIXTURES: Mapping[str, ConfigValues] = {
    "softmax": EXPERTS,
    "biases": EXPERTS
    | _keys(model__router_bias=True, model__expert_bias=True, model__normalize_top_k=False),
    "sigmoid": SIGMOID
    | _keys(model__expert_groups=3, model__top_k_groups=2, model__shared_expert_dim=16),
    "qwen3_moe": EXPERTS
    | _keys(
        model__qk_norm=True,
        model__normalize_top_k=False,
        model__layers=[{"feed_forward": "gated"}, {}],
    ),
    "olmoe": EXPERTS | _keys(model__full_qk_norm=True, model__normalize_top_k=False),
    "gpt_oss": EXPERTS
    | WINDOWS
    | _keys(
        model__expert_dim=32,
        model__activation="clamped_swiglu",
        model__qkv_bias=True,
        model__o_bias=True,
        model__sink=True,
        model__router_bias=True,
        model__expert_bias=True,
    ),
    "glm4_moe": SIGMOID
    | _keys(
        model__shared_expert_dim=48,
        model__qkv_bias=True,
        model__layers=[{"feed_forward": "gated"}, {"feed_forward": "moe", "repeat": 3}],
    ),
}

FACTORS: Mapping[str, Mapping[str, ConfigValues]] = {
    # Mesh
    **_key("parallelism.dp_replicate", (1, 2, 3)),
    # 5 and 7 divide neither batch nor weights, so that padding and uneven shards occur.
    **_key("parallelism.dp_shard", (1, 2, 3, 5, 7)),
    **_key("parallelism.cp", (1, 2, 3, 4)),
    **_key("parallelism.ep", (1, 2, 3)),
    **_key("parallelism.tp", (1, 2, 4)),
    **_key("parallelism.pp", (1, 2, 3)),
    **_key(
        "parallelism.cp_method", ("auto", "allgather", "ring", "alltoall", "ulysses", "hybrid")
    ),
    **_key(
        "parallelism.cp_layout", ("auto", "headtail", "balanced", "doc_headtail", "contiguous")
    ),
    **_key("parallelism.cp_outer_method", ("auto", "ring", "alltoall", "allgather")),
    **_key("parallelism.cp_ulysses", (None, 2)),
    **_key("parallelism.ranks_per_node", (8, 2)),
    **_key("parallelism.sequence_parallel", (True, False)),
    **_key("parallelism.loss_parallel", (True, False)),
    **_key("parallelism.pp_schedule", ("1F1B", "GPipe", "Interleaved1F1B")),
    **_key("parallelism.pp_stages_per_rank", (None, 2)),
    **_key("parallelism.pp_reduce_gradients", ("per_step", "per_micro_batch")),
    **_key("parallelism.reshard_after_forward", (True, False)),
    # Memory
    **_key("memory.recompute", ("none", "full", "keep_attention")),
    **_key("memory.offload", ("none", "inputs", "inputs_and_attention")),
    **_key("memory.host_budget_gib", (None, 0.0001)),
    **_key("memory.blocks_per_checkpoint", (1, 2, 3)),
    **_key("memory.head_groups", (1, 2)),
    **_key("memory.mlp_tile_mib", (None, 1)),
    **_key("memory.loss_chunk_mib", (256, 1)),
    **_key("memory.optimizer_placement", ("device", "host")),
    # Training
    **_key("training.seq_len", (64, 31, 97)),
    **_key("training.global_batch_size", (2, 3, 4)),
    **_key("training.micro_batch_size", (1, 2)),
    **_key("training.seed", (0, 7)),
    **_key("training.compile", (False, True)),
    **_key("training.deterministic", (False, True)),
    # Model. Wide enough for several tiles of 1 MiB, or several chunks of logits.
    "model.family": DENSE_MODELS,
    **_key("model.qk_norm", (None, True)),
    **_key("model.qkv_bias", (None, True)),
    **_key("model.o_bias", (None, True)),
    **_key("model.tie_embeddings", (None, True)),
    "model.num_layers": {
        "2": _keys(model__num_layers=2),
        "3": _keys(model__num_layers=3),
        "3 + 1": _keys(model__num_layers=4, parallelism__pp_layers=[3, 1]),
        "0 + 1 + 2 + 1": _keys(model__num_layers=4, parallelism__pp_layers=[0, 1, 2, 1]),
    },
    "model.num_heads": {
        f"{heads} / {kv_heads}": _keys(model__num_heads=heads, model__num_kv_heads=kv_heads)
        for heads, kv_heads in ((4, 2), (8, 4), (6, 3), (8, 1))
    },
    "model.feed_forward": {"gated": {}, **MIXTURES},
    "model.num_experts": {"6": {}}
    | {f"{experts}": _keys(model__num_experts=experts) for experts in (3, 5, 7)},
    **_key("training.balance_loss", (0.0, 0.1)),
    **_key("training.balance_over", ("step", "sequence")),
    **_key("training.router_z_loss", (0.0, 0.05)),
    **_key("model.ffn_dim", (48, 2056)),
    **_key("model.vocab_size", (264, 8448)),
    **_key("model.dim", (32, 24)),
    **_key("model.norm_eps", (None, 0.01)),
    **_key("model.nope_every", (None, 2)),
    "model.layers": {
        "alike": {},
        "windows": LOCAL_WINDOWS,
        "window 20": _keys(model__window=20),
        "mixed": _keys(
            model__layers=[
                {"window": 3, "sink": True, "norms": "post"},
                {"window": 40, "rope": "none", "qk_norm": False},
            ]
        ),
    },
    **_key("model.sink", (None, True)),
    **_key("model.softcap", (None, 2.0)),
    **_key("model.norms", (None, "post", "sandwich")),
    **_key("model.full_qk_norm", (None, True)),
    **_key("model.activation", (None, "gelu_tanh", "clamped_swiglu")),
    "model.multipliers": {
        "none": {},
        "all": _keys(
            model__attention_scale=0.3,
            model__embedding_multiplier=3.0,
            model__residual_multiplier=0.7,
            model__logits_scaling=2.0,
            model__logit_softcap=3.0,
            model__zero_centered_norms=True,
        ),
    },
    **_key("model.rope.precision", (None, "float32")),
    **_key("model.rope.partial", (None, 0.5)),
    "model.rope.kind": {
        "default": {},
        "linear": _keys(
            model__rope__kind="linear", model__rope__factor=2.0, model__rope__theta=500.0
        ),
        "llama3": _keys(
            model__rope__kind="llama3",
            model__rope__factor=4.0,
            model__rope__original_length=32,
            model__rope__low_freq_factor=1.0,
            model__rope__high_freq_factor=4.0,
        ),
        "yarn": _keys(
            model__rope__kind="yarn",
            model__rope__factor=4.0,
            model__rope__original_length=16,
            model__rope__beta_fast=4.0,
            model__rope__beta_slow=0.5,
            model__rope__truncate=False,
        ),
        "longrope": LONGROPE
        | _keys(
            model__rope__kind="longrope",
            model__rope__factor=4.0,
            model__rope__original_length=64,
            model__rope__attention_factor=1.2,
        ),
    },
    # Data
    **_key("data.packing", ("best_fit", "concat", "single")),
    **_key("data.mask", ("document", "none")),
    "data.corpus": {"documents": {}, "copy": _keys(data__corpus="copy")},
    **_key("data.documents", ("file", "folder", "repository")),
    **_key("data.max_document", (None, 40)),
    **_key("data.separators", ("bos_eos", "none")),
    "data.mix": {"one source": {}, "two sources": SOURCES},
    "validation.sets": {
        "none": {},
        "one length": {
            "data.holdout": 0.2,
            "validation.sets": {"short": {"seq_len": [50], "rows": 5}},
        },
        "several lengths": {
            "validation.sets": {"context": {"seq_len": [9, 20, 37], "rows": 3, "tail": 7}}
        },
    },
    # Optimizer
    "optimizer": {
        "default": {},
        "other": _keys(
            optimizer__betas=[0.8, 0.99], optimizer__eps=1e-6, optimizer__weight_decay=0.0
        ),
    },
    **_key("optimizer.max_grad_norm", (1.0, 0.05)),
    "schedule": {
        "constant": _keys(schedule__kind="constant"),
        "cosine": _keys(schedule__kind="cosine", schedule__warmup_steps=1),
        "wsd": _keys(schedule__kind="wsd", schedule__decay_steps=2),
    },
    # More than one launch
    "checkpoint": {
        "none": {},
        "resume": {},
        "asynchronous": {"checkpoint.async": True},
        "stage": {},
    },
    "checkpoint.mesh": {mesh: {} for mesh in RESUMED_MESHES},
    # What enters a run from files, and what uses its weights at the end
    "start": {"drawn": {}, "folder": {}, "run": {}},
    "start.weights": {"float64": {}, "MXFP4": {}},
    "finish": {"none": {}, "export": {}, "evaluate": {}, "generate": {}},
}
LEVELS = [(factor, level) for factor, levels in FACTORS.items() for level in levels]
SIMPLEST = {factor: next(iter(levels)) for factor, levels in FACTORS.items()}
MESH_FACTORS = tuple(f"parallelism.{axis}" for axis in AXES)
MODEL_FACTORS = ("model.family", "model.feed_forward")
"""Factors whose levels are whole models."""


def _above_one(axis: str) -> dict[str, list[str]]:
    factor = f"parallelism.{axis}"
    return {factor: [level for level in FACTORS[factor] if level != SIMPLEST[factor]]}


def _need(levels: dict[str, list[str]], *factors: str) -> dict[str, dict[str, list[str]]]:
    return dict.fromkeys(factors, levels)


HYBRID = {"parallelism.cp": ["4"], "parallelism.cp_method": ["hybrid"]}
RECOMPUTED = {"memory.recompute": ["full", "keep_attention"]}
NEEDS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "parallelism.cp_ulysses": HYBRID,
    "parallelism.cp_outer_method": HYBRID | {"parallelism.cp_ulysses": ["2"]},
    "parallelism.ranks_per_node": HYBRID | {"parallelism.cp_ulysses": ["None"]},
    "parallelism.reshard_after_forward": {"parallelism.pp": ["1"]},
    "memory.mlp_tile_mib": RECOMPUTED | {"model.ffn_dim": ["2056"]},
    "memory.host_budget_gib": {"memory.offload": ["inputs", "inputs_and_attention"]},
    "memory.loss_chunk_mib": {"model.vocab_size": ["8448"]},
    # Unrotated, a bias of keys moves all scores of a query alike: its gradient is only rounding.
    "model.qkv_bias": {
        "model.nope_every": ["None"],
        "model.layers": ["alike", "windows", "window 20"],
    },
    **_need(
        {"model.feed_forward": [*MIXTURES]},
        *(
            "training.balance_loss",
            "training.router_z_loss",
            "parallelism.ep",
            "model.num_experts",
        ),
    ),
    "training.balance_over": {"training.balance_loss": ["0.1"]},
    "checkpoint.mesh": {"checkpoint": ["resume", "asynchronous", "stage"]},
    # MXFP4 has blocks of 32 inputs, and only gpt-oss is published in it.
    "start.weights": {"start": ["folder"], "model.feed_forward": ["gpt_oss"], "model.dim": ["32"]},
    "finish": {"data.corpus": ["documents"]},
    "model.family": {"model.feed_forward": ["gated", "softmax", "biases", "sigmoid"]},
    # All others have biases of keys, or layers of their own.
    "model.layers": {"model.feed_forward": ["gated", "softmax", "biases", "sigmoid", "olmoe"]},
    **_need(_above_one("cp"), "parallelism.cp_method", "parallelism.cp_layout"),
    **_need(_above_one("tp"), "parallelism.sequence_parallel", "parallelism.loss_parallel"),
    **_need(_above_one("pp"), "parallelism.pp_schedule", "parallelism.pp_stages_per_rank"),
    **_need(_above_one("pp") | _above_one("dp_shard"), "parallelism.pp_reduce_gradients"),
    **_need(RECOMPUTED, "memory.offload", "memory.blocks_per_checkpoint", "memory.head_groups"),
    **_need(
        {"data.corpus": ["documents"]},
        "data.packing",
        "data.mask",
        "data.documents",
        "data.max_document",
    ),
    **_need({"data.corpus": ["documents"]}, "data.separators", "data.mix"),
}
"""Levels of other factors that a factor needs in order to have an effect."""

RARE = (
    # Weights, relative to 1 for each other level of the factor.
    {("training.compile", "true"): 0.02}
    | {("checkpoint", kind): 0.06 for kind in ("resume", "asynchronous", "stage")}
    | {("start", "folder"): 0.8, ("start", "run"): 0.2, ("start.weights", "MXFP4"): 2.0}
    | {("finish", "export"): 0.3, ("finish", "evaluate"): 0.2, ("finish", "generate"): 0.2}
)
"""Levels that are drawn more or less often than others; several launches or a compilation take
many times longer.
"""

BASE: ConfigValues = {
    "model": {"family": "llama3", "size": "debug", "head_dim": 8},
    "training": {"dtype": "float64", "steps": 2},
    # AdamW divides a gradient of pure rounding error by little more than eps, which amplifies it.
    "optimizer": {"lr": 1e-2, "eps": 1e-7},
    "checkpoint": {"enabled": False, "async": False},
    "metrics": {"tensorboard": False},
    "distributed": {"start_timeout_minutes": 5, "timeout_minutes": 5},
}
