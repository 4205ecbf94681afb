"""Keys and flags of other trainers and ours (and how a value differs): for messages and
docs/from_torchtitan.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_EQUIVALENT = "no equivalent: "
NO_DROPPED_TOKENS = f"{NO_EQUIVALENT}no token is dropped"

TORCHTITAN = {
    "job.dump_folder": "job.output_dir",
    "model.name": "model.family",
    "model.flavor": "model.size",
    "model.hf_assets_path": "tokenizer.path",
    "model.tokenizer_path": "tokenizer.path",
    "optimizer.implementation": f"{NO_EQUIVALENT}AdamW always runs fused",
    "lr_scheduler.warmup_steps": "schedule.warmup_steps",
    "lr_scheduler.decay_type": "schedule.kind",
    "lr_scheduler.decay_ratio": "schedule.decay_steps (a number of steps)",
    "lr_scheduler.min_lr_factor": "schedule.min_lr_factor",
    "training.dataset": "data.corpus",
    "training.dataset_path": "data.corpus",
    "training.local_batch_size": "training.micro_batch_size",
    "training.batch_size": "training.micro_batch_size",
    "training.max_seq_len": "training.seq_len",
    "training.max_norm": "optimizer.max_grad_norm",
    "training.mixed_precision_param": "training.dtype",
    "training.mixed_precision_reduce": "training.reduce_dtype",
    "training.gc_freq": "training.gc_interval",
    "training.enable_cpu_offload": "memory.optimizer_placement (device or host)",
    "debug.seed": "training.seed",
    "debug.deterministic": "training.deterministic",
    "compile.enable": "training.compile",
    "parallelism.data_parallel_replicate_degree": "parallelism.dp_replicate",
    "parallelism.data_parallel_shard_degree": "parallelism.dp_shard",
    "parallelism.fsdp_reshard_after_forward": "parallelism.reshard_after_forward (true or false)",
    "parallelism.tensor_parallel_degree": "parallelism.tp",
    "parallelism.disable_loss_parallel": "parallelism.loss_parallel (the opposite)",
    "parallelism.enable_async_tensor_parallel": "parallelism.async_tp",
    "parallelism.context_parallel_degree": "parallelism.cp",
    "parallelism.context_parallel_rotate_method": "parallelism.cp_method",
    "parallelism.context_parallel_load_balancer": "parallelism.cp_layout",
    "parallelism.expert_parallel_degree": "parallelism.ep",
    "parallelism.expert_tensor_parallel_degree": "parallelism.tp (it cuts experts too)",
    "parallelism.pipeline_parallel_degree": "parallelism.pp",
    "parallelism.pipeline_parallel_schedule": "parallelism.pp_schedule",
    "parallelism.pipeline_parallel_microbatch_size": "training.micro_batch_size",
    "parallelism.module_fqns_per_model_part": "parallelism.pp_layers",
    "activation_checkpoint.mode": "memory.recompute",
    "activation_checkpoint.selective_ac_option": "memory.recompute",
    "checkpoint.enable": "checkpoint.enabled",
    "checkpoint.keep_latest_k": "checkpoint.keep",
    "checkpoint.async_mode": "checkpoint.async (true or false)",
    "checkpoint.initial_load_in_hf": "checkpoint.initial_load_path (hf:FOLDER)",
    "metrics.log_freq": "metrics.log_interval",
    "metrics.enable_tensorboard": "metrics.tensorboard",
    "metrics.enable_wandb": "metrics.trackers (a list: wandb)",
    "profiling.enable_profiling": "profiler.trace_step",
    "profiling.profile_freq": "profiler.trace_step",
    "profiling.enable_memory_snapshot": "profiler.memory_step",
    "comm.init_timeout_seconds": "distributed.start_timeout_minutes (minutes)",
    "comm.train_timeout_seconds": "distributed.timeout_minutes (minutes)",
    "validation.freq": "validation.interval",
}
MEGATRON = {
    "--seq-length": "training.seq_len",
    "--micro-batch-size": "training.micro_batch_size",
    "--global-batch-size": "training.global_batch_size",
    "--train-iters": "training.steps",
    "--bf16": "training.dtype",
    "--tensor-model-parallel-size": "parallelism.tp",
    "--pipeline-model-parallel-size": "parallelism.pp",
    "--num-layers-per-virtual-pipeline-stage": "parallelism.pp_layers",
    "--context-parallel-size": "parallelism.cp",
    "--cp-comm-type": "parallelism.cp_method",
    "--expert-model-parallel-size": "parallelism.ep",
    "--expert-tensor-parallel-size": "parallelism.tp (it cuts experts too)",
    "--use-distributed-optimizer": "parallelism.dp_shard",
    "--recompute-granularity": "memory.recompute",
    "--num-layers": "model.num_layers",
    "--hidden-size": "model.dim",
    "--ffn-hidden-size": "model.ffn_dim",
    "--num-attention-heads": "model.num_heads",
    "--num-query-groups": "model.num_kv_heads",
    "--num-experts": "model.num_experts",
    "--moe-ffn-hidden-size": "model.expert_dim",
    "--moe-shared-expert-intermediate-size": "model.shared_expert_dim",
    "--moe-layer-freq": "model.feed_forward (one of model.layers)",
    "--moe-router-topk": "model.top_k",
    "--moe-router-score-function": "model.router",
    "--moe-router-num-groups": "model.expert_groups",
    "--moe-router-group-topk": "model.top_k_groups",
    "--moe-router-topk-scaling-factor": "model.router_scaling",
    "--moe-router-enable-expert-bias": "model.correction_bias",
    "--moe-router-bias-update-rate": "training.correction_bias_rate",
    "--moe-router-load-balancing-type": "training.balance_over",
    "--moe-aux-loss-coeff": "training.balance_loss",
    "--moe-z-loss-coeff": "training.router_z_loss",
    "--moe-expert-capacity-factor": NO_DROPPED_TOKENS,
    "--moe-grouped-gemm": f"{NO_EQUIVALENT}experts are always grouped",
    "--norm-epsilon": "model.norm_eps",
    "--rotary-base": "model.rope.theta",
    "--data-path": "data.corpus",
    "--num-workers": "data.workers",
    "--lr-decay-style": "schedule.kind",
    "--lr-warmup-iters": "schedule.warmup_steps",
    "--min-lr": "schedule.min_lr_factor (a fraction of optimizer.lr)",
    "--lr-decay-iters": "schedule.decay_steps",
    "--train-samples": "training.steps (steps, not sequences)",
    "--recompute-activations": "memory.recompute (keep_attention)",
    "--tensorboard-dir": "metrics.tensorboard (true; it is in the run folder)",
    "--fp16": "training.dtype (bfloat16)",
    "--clip-grad": "optimizer.max_grad_norm",
    "--save": "job.output_dir",
    "--save-interval": "checkpoint.interval",
    "--load": "checkpoint.initial_load_path",
    "--wandb-project": "metrics.trackers (a list: wandb; the project is WANDB_PROJECT)",
}
HUGGING_FACE = {
    "per_device_train_batch_size": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size (sequences per step)",
    "max_steps": "training.steps",
    "max_seq_length": "training.seq_len",
    "max_length": "training.seq_len",
    "model_name_or_path": "checkpoint.initial_load_path (hf:FOLDER)",
    "dataset_name": "data.corpus (hf:DATASET)",
    "num_train_epochs": "training.steps",
    "optim": "optimizer.name",
    "warmup_ratio": "schedule.warmup_steps (a number of steps)",
    "lr_scheduler_kwargs": "schedule.min_lr_factor",
    "eval_steps": "validation.interval",
    "resume_from_checkpoint": f"{NO_EQUIVALENT}the same command resumes",
    "logging_dir": "metrics.tensorboard (true; it is in the run folder)",
    "learning_rate": "optimizer.lr",
    "dataloader_num_workers": "data.workers",
    "lr_scheduler_type": "schedule.kind",
    "gradient_checkpointing": "memory.recompute",
    "torch_compile": "training.compile",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep",
    "logging_steps": "metrics.log_interval",
    "report_to": "metrics.trackers (a list)",
    "hidden_size": "model.dim",
    "intermediate_size": "model.ffn_dim",
    "num_hidden_layers": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "rope_theta": "model.rope.theta",
    "num_local_experts": "model.num_experts",
    "num_experts_per_tok": "model.top_k",
    "moe_intermediate_size": "model.expert_dim",
    "norm_topk_prob": "model.normalize_top_k",
    "routed_scaling_factor": "model.router_scaling",
    "router_aux_loss_coef": "training.balance_loss",
}
ALIASES = TORCHTITAN | MEGATRON | HUGGING_FACE


DTYPES = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32"}
VALUES = {
    "training.dtype": DTYPES | {"fp64": "float64", "f64": "float64"},
    "training.reduce_dtype": DTYPES,
    "memory.optimizer_dtype": DTYPES,
    "parallelism.cp_reduce_dtype": DTYPES,
    "training.attention": {
        "flash_attention_2": "flash",
        "flash_attention_3": "fa3",
        "flash_attention_4": "fa4",
        "sdpa": "auto",
        "eager": "plain",
    },
    "memory.recompute": {"selective": "keep_attention"},
    "parallelism.cp_layout": {"zigzag": "headtail", "zig_zag": "headtail"},
    "parallelism.cp_method": {
        "all_gather": "allgather",
        "all_to_all": "alltoall",
        "p2p": "ring",
        "a2a": "ulysses",
        "a2a+p2p": "hybrid",
    },
    "parallelism.pp_schedule": {
        "1f1b": "1F1B",
        "gpipe": "GPipe",
        "interleaved1f1b": "Interleaved1F1B",
    },
    "tokenizer.kind": {"hf": "huggingface"},
}
"""The field's other words for a value of ours, in lower case, by key.

They are read as ours, which the run folder has.
"""


def our_values(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """The values of a source, with the words of `VALUES` in place of the field's others."""
    return {key: _our_value(f"{section}{key}", value) for key, value in values.items()}


def _our_value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return our_values(value, f"{name}.")
    if isinstance(value, list):
        return [_our_value(name, each) for each in value]
    known = VALUES.get(name.removeprefix("stage."), {})
    return known.get(value.lower(), value) if isinstance(value, str) else value


def _normalize(name: str) -> str:
    # Flags of a command line have dashes, keys of a file underscores: both forms compare equal.
    return name.lstrip("-").replace("-", "_")


_BY_NAME = {_normalize(alias): key for alias, key in ALIASES.items()}
# Keys without their section. A single word, such as `mode` or `name`, is too common to suggest
# anything.
_BY_KEY = {
    alias.rpartition(".")[2]: key
    for alias, key in _BY_NAME.items()
    if "_" in alias.rpartition(".")[2]
}


def suggest(name: str) -> str | None:
    """The message for another trainer's key, written with or without its section."""
    name = _normalize(name)
    key = _BY_NAME.get(name) or _BY_KEY.get(name.rpartition(".")[2])
    return key if key is None or key.startswith(NO_EQUIVALENT) else f"did you mean {key}?"
