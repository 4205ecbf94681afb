"""Two values of every key, and what differs between runs with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from tests.config.wiring import observables as see
from tests.config.wiring import runs
from tests.config.wiring.cases import Case
from trainer.config.training_stages import Recipe

Pair = tuple[Any, Any]
Observable = Callable[[Recipe], Any]
Cases = dict[str, Case | tuple[Case, ...]]


def case(observable: Observable, values: Pair, base: Mapping[str, Any] | None = None) -> Case:
    return Case(observable, values, base or {})


def losses(values: Pair, base: Mapping[str, Any] | None = None) -> Case:
    """The loss of one step."""
    return case(see.losses, values, base)


def steps(values: Pair, base: Mapping[str, Any] | None = None) -> Case:
    """The losses of three steps."""
    return losses(values, {"training.steps": 3, **(base or {})})


def ranks(observable: Observable, values: Pair, base: Mapping[str, Any] | None = None) -> Case:
    """Observed on two ranks."""
    return Case(observable, values, base or {}, (2, 2))


# ---- model

LLAMA3_ROPE = {"model.rope": {"kind": "llama3", "factor": 8.0, "original_length": 256}}
YARN = {
    "model.rope": {
        "kind": "yarn",
        "factor": 8.0,
        "original_length": 1024,
        "theta": 1000.0,
        "truncate": False,
    }
}
FACTORS = {"short_factors": [1.0, 2.0, 3.0, 4.0], "long_factors": [2.0, 3.0, 4.0, 5.0]}
LONG = {"model.rope": {"kind": "longrope", "factor": 4.0, "original_length": 32, **FACTORS}}
SHORT = {"model.rope": {"kind": "longrope", "factor": 4.0, "original_length": 128, **FACTORS}}

TWO_KINDS = {"model.layers": [{}, {"window": 5}], "model.num_layers": 2}
OTHER_KINDS = {"job.extension": ["tests.models.other_kinds:extension"]}
EXPERTS = {"model.family": "qwen3_moe"}
SPARSE_KINDS = {**EXPERTS, **TWO_KINDS}
ALL_LOCAL = {"model.layers": [{"rope": "local"}]}

ROPE: Cases = {
    "model.rope.theta": losses((1e2, 1e4)),
    "model.rope.factor": losses((2.0, 4.0), {"model.rope": {"kind": "linear"}}),
    "model.rope.low_freq_factor": losses((1.0, 0.5), LLAMA3_ROPE),
    "model.rope.high_freq_factor": losses((4.0, 8.0), LLAMA3_ROPE),
    "model.rope.original_length": losses((256, 64), LLAMA3_ROPE),
    "model.rope.beta_fast": losses((32.0, 100.0), YARN),
    "model.rope.beta_slow": losses((1.0, 10.0), YARN),
    "model.rope.truncate": losses((True, False), YARN),
    "model.rope.attention_factor": losses((None, 2.0), YARN),
    "model.rope.short_factors": losses(([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0]), SHORT),
    "model.rope.long_factors": losses(([2.0, 3.0, 4.0, 5.0], [1.0, 1.0, 1.0, 1.0]), LONG),
    "model.rope.partial": losses((1.0, 0.5)),
    "model.rope.precision": losses(("float64", "float32"), {"training.dtype": "float64"}),
}


def of_local_rope(rope_case: Case) -> Case:
    """The same of the rope of layers that have their own."""
    rope = {
        "theta": 500_000.0,
        **rope_case.base.get("model.rope", rope_case.base.get("model.local_rope", {})),
    }
    others = {key: value for key, value in rope_case.base.items() if not key.endswith("rope")}
    return replace(rope_case, base={**others, **ALL_LOCAL, "model.local_rope": rope})


MODEL: Cases = {
    "model.family": losses(("llama3", "qwen3")),
    "model.size": losses(("debug", "8b"), {"model.ffn_dim": None}),
    "model.vocab_size": losses((264, 320)),
    "model.dim": losses((16, 32)),
    "model.num_layers": losses((1, 2)),
    "model.num_heads": losses((2, 4)),
    "model.num_kv_heads": losses((2, 4)),
    "model.head_dim": losses((8, 16)),
    "model.ffn_dim": losses((48, 64)),
    "model.norm_eps": (
        losses((1e-5, 1e-3)),
        case(see.normed, (1e-5, 1e-3), {"model.qk_norm": True}),
    ),
    "model.tie_embeddings": (losses((False, True)), case(see.weight_shapes, (False, True))),
    "model.qk_norm": (losses((False, True)), case(see.weight_shapes, (False, True))),
    # Biases start at zero.
    "model.qkv_bias": (steps((False, True)), case(see.weight_shapes, (False, True))),
    "model.nope_every": losses((None, 1)),
    "model.full_qk_norm": (losses((False, True)), case(see.weight_shapes, (False, True))),
    "model.activation": losses(("silu", "gelu_tanh")),
    "model.norms": losses(("pre", "sandwich")),
    # Norms start as the same function.
    "model.zero_centered_norms": steps((False, True), {"optimizer.weight_decay": 0.5}),
    "model.window": losses((None, 3)),
    "model.sink": (losses((False, True)), case(see.weight_shapes, (False, True))),
    "model.softcap": losses((None, 1e-3)),
    "model.attention_scale": losses((None, 3.0)),
    "model.embedding_multiplier": losses((1.0, 3.0)),
    "model.residual_multiplier": losses((1.0, 0.5)),
    "model.logits_scaling": losses((1.0, 2.0)),
    "model.logit_softcap": losses((None, 0.1)),
    "model.model_type": case(see.exported_model_type, ("llama", "mistral")),
    "model.layers.repeat": losses((1, 2), TWO_KINDS),
    "model.layers.window": losses((None, 3), TWO_KINDS),
    "model.layers.rope": losses(("global", "none"), TWO_KINDS),
    "model.layers.sink": losses((False, True), TWO_KINDS),
    "model.layers.softcap": losses((None, 1e-3), TWO_KINDS),
    "model.layers.norms": losses(("pre", "sandwich"), TWO_KINDS),
    "model.layers.qk_norm": losses((False, True), TWO_KINDS),
    "model.layers.full_qk_norm": losses((False, True), TWO_KINDS),
    "model.layers.qkv_bias": steps((False, True), TWO_KINDS),
    "model.layers.activation": losses(("silu", "gelu_tanh"), TWO_KINDS),
    "model.o_bias": (steps((False, True)), case(see.weight_shapes, (False, True))),
    "model.mixer": losses(("attention", "shift"), OTHER_KINDS),
    "model.feed_forward": losses(("moe", "gated"), EXPERTS),
    "model.num_experts": losses((8, 4), EXPERTS),
    "model.top_k": losses((2, 1), EXPERTS),
    "model.expert_dim": losses((16, 24), EXPERTS),
    "model.shared_expert": losses((False, True), EXPERTS),
    "model.shared_expert_dim": losses((8, 24), {**EXPERTS, "model.shared_expert": True}),
    "model.router": losses(("softmax", "sigmoid"), EXPERTS),
    "model.normalize_top_k": losses((True, False), EXPERTS),
    "model.router_scaling": losses((1.0, 2.5), EXPERTS),
    "model.expert_groups": losses((1, 4), EXPERTS),
    "model.top_k_groups": losses((1, 2), {**EXPERTS, "model.expert_groups": 4}),
    "model.router_bias": (
        steps((False, True), EXPERTS),
        case(see.weight_shapes, (False, True), EXPERTS),
    ),
    "model.expert_bias": (
        steps((False, True), EXPERTS),
        case(see.weight_shapes, (False, True), EXPERTS),
    ),
    "model.correction_bias": case(see.state_dtypes, (False, True), EXPERTS),
    "model.layers.o_bias": steps((False, True), TWO_KINDS),
    "model.layers.mixer": losses(("attention", "shift"), {**OTHER_KINDS, **TWO_KINDS}),
    "model.layers.feed_forward": losses(("moe", "gated"), SPARSE_KINDS),
    "model.layers.shared_expert": losses((False, True), SPARSE_KINDS),
    "model.layers.router_bias": steps((False, True), SPARSE_KINDS),
    "model.layers.expert_bias": steps((False, True), SPARSE_KINDS),
    "model.layers.correction_bias": case(see.state_dtypes, (False, True), SPARSE_KINDS),
    "model.rope.kind": losses(
        ("linear", "yarn"), {"model.family": "llama3.1", "model.size": "8b"}
    ),
    **ROPE,
    "model.local_rope.kind": of_local_rope(
        losses(("linear", "yarn"), {"model.local_rope": {"factor": 2.0}})
    ),
    **{
        key.replace("model.rope", "model.local_rope"): of_local_rope(cast(Case, each))
        for key, each in ROPE.items()
    },
}

# ---- data

RANKS = {"kind": "tiktoken", "path": "first.model"}
UNSTATED_BPE = {"model.vocab_size": 600, "tokenizer": RANKS}
BPE = {"model.vocab_size": 600, "tokenizer": {**RANKS, "pattern": "llama3"}}
ENDS: dict[str, Any] = {
    "pattern": "llama3",
    "special_tokens": ("<first>", "<second>"),
    "eos": "<first>",
}
STATED_BPE = {"model.vocab_size": 600, "tokenizer": {**RANKS, **ENDS}}
WEB = {"data.sources": {"web": {"path": "others"}}, "data.mix": [{"source": "web"}]}
JSON_WEB = {"data.sources": {"web": {"path": "lines.jsonl"}}, "data.mix": [{"source": "web"}]}
MIX = {
    "data.sources": {"web": {"path": "others"}},
    "data.mix": [{"source": "web"}, {"source": "corpus"}],
}
TWICE = {
    "data.sources": {"web": {"path": "others"}},
    "data.mix": [{}, {"source": "web", "max_length": 1000}],
}
HELD = {
    "data.sources": {"web": {"path": "others"}},
    "validation.sets": {"held": {"source": "web", "seq_len": [32], "rows": 3}},
}
HELD_SAME = {"validation.sets": {"held": {"seq_len": [32], "rows": 3}}, "data.holdout": 0.5}
CONTEXTS = {"validation.sets": {"held": {"seq_len": [16, 32], "rows": 3}}, "data.holdout": 0.5}

DATA: Cases = {
    # One file cannot be both: sentencepiece refuses it, and tiktoken misses the pattern, which
    # sentencepiece may not have.
    "tokenizer.kind": losses(("tiktoken", "sentencepiece"), UNSTATED_BPE),
    "tokenizer.path": losses(("first.model", "second.model"), BPE),
    "tokenizer.pattern": losses((r"[\s\S]", "llama3"), STATED_BPE),
    "tokenizer.special_tokens": losses((("<first>",), ("<other>", "<first>")), STATED_BPE),
    "tokenizer.bos": losses(("<first>", "<second>"), STATED_BPE),
    "tokenizer.eos": losses(("<first>", "<second>"), STATED_BPE),
    "data.corpus": losses(("corpus", "others")),
    "data.sources.path": losses(("corpus", "others"), WEB),
    "data.sources.documents": losses((None, "folder"), WEB),
    "data.sources.max_document": losses((None, 9), WEB),
    "data.sources.separators": losses((None, "eos"), WEB),
    "data.sources.text_key": losses((None, "body"), JSON_WEB),
    "data.sources.files": losses((None, ("a/*",)), WEB),
    "data.mix.source": losses(("corpus", "web"), TWICE),
    "data.mix.weight": losses((1.0, 5.0), {**MIX, "training.global_batch_size": 4}),
    "data.mix.min_length": losses((None, 40), WEB),
    "data.mix.max_length": losses((None, 40), WEB),
    "data.mix.max_len": losses((None, 8), WEB),
    "data.copy_period": losses((8, 16), {"data.corpus": "copy"}),
    "data.documents": losses(("file", "folder")),
    "data.text_key": losses(("text", "body"), {"data.corpus": "lines.jsonl"}),
    "data.files": losses((None, ("a/*",))),
    "data.max_document": losses((None, 9)),
    "data.separators": losses(("bos_eos", "eos")),
    "data.holdout": (losses((0.0, 0.5)), case(see.validation, (0.25, 0.5), HELD_SAME)),
    "data.packing": (
        losses(("best_fit", "concat")),
        case(see.validation, ("best_fit", "concat"), HELD),
    ),
    "data.packing_version": (losses((1, 2)), case(see.validation, (1, 2), HELD)),
    "data.mask": (
        losses(("document", "none")),
        case(see.inputs, ("document", "none")),
        case(see.validation, ("document", "none"), HELD),
        ranks(
            see.collectives, ("document", "none"), {"parallelism.cp": 2, "model.num_kv_heads": 1}
        ),
    ),
    "data.bad_files": losses(("skip", "error"), {"data.corpus": "damaged"}),
    "data.workers": case(see.reading_processes, (0, 2)),
    "data.cache_dir": case(see.prepared_folders, ("prepared", "elsewhere")),
    "data.remote_cache_gib": case(see.cache_size, (1.0, 2.0)),
    "validation.interval": case(see.validated_steps, (1, 2), {"training.steps": 3}),
    "validation.sets.source": case(see.validation, ("web", "corpus"), {**WEB, **HELD}),
    "validation.sets.seq_len": case(see.validation, ([32], [48]), HELD),
    "validation.sets.rows": case(see.validation, (3, 4), HELD),
    "validation.sets.tail": case(see.validation, (None, 4), CONTEXTS),
}

# ---- steps

BF16 = {"training.dtype": "bfloat16"}
WSD = {"schedule.kind": "wsd", "training.steps": 4}
STAGES = [{"name": name, "seq_len": 64, "steps": 2} for name in ("first", "second")]
STAGED = {"training.steps": None, "training.seq_len": None, "stage": STAGES}
ONE_STEP = {**STAGED, "stage.0.steps": 1}

TRAINING: Cases = {
    "training.seq_len": losses((64, 48)),
    "training.global_batch_size": losses((2, 4)),
    "training.micro_batch_size": case(see.inputs, (2, 1)),
    "training.steps": losses((3, 4)),
    "training.seed": (
        case(see.initial_weights, (0, 1)),
        case(see.inputs, (0, 1)),
        case(see.inputs, (0, 1), {"data.corpus": "copy"}),
    ),
    "training.dtype": (losses(("float32", "float64")), losses(("float32", "bfloat16"))),
    "training.reduce_dtype": ranks(see.collectives, ("float32", "bfloat16"), BF16),
    "training.attention": (
        case(see.kernel, ("auto", "efficient"), BF16),
        case(see.kernel_calls, ("auto", "plain")),
    ),
    # The load of the first step counts from the second on.
    "training.loss": losses(("cross_entropy", "smoothed"), OTHER_KINDS),
    "training.balance_loss": steps((0.0, 0.5), EXPERTS),
    "training.balance_over": steps(
        ("step", "sequence"), {**EXPERTS, "training.balance_loss": 0.5}
    ),
    "training.router_z_loss": steps((0.0, 0.5), EXPERTS),
    "training.correction_bias_rate": steps((0.0, 0.5), {**EXPERTS, "model.correction_bias": True}),
    "training.compile": (
        case(see.compiled, (False, True)),
        case(see.compiled, (False, True), {"memory.recompute": "none"}),
    ),
    "training.deterministic": case(see.deterministic, (False, True)),
    "training.gc_interval": case(see.garbage_collections, (1, 2), {"training.steps": 2}),
    "optimizer.name": steps(("adamw", "descent"), OTHER_KINDS),
    "optimizer.lr": steps((1e-2, 2e-2)),
    "optimizer.betas": (steps(((0.9, 0.95), (0.8, 0.95))), steps(((0.9, 0.95), (0.9, 0.9)))),
    "optimizer.eps": steps((1e-8, 1e-2)),
    "optimizer.weight_decay": steps((0.1, 0.5)),
    "optimizer.max_grad_norm": steps((1.0, 0.1)),
    "schedule.kind": steps(("cosine", "linear")),
    "schedule.warmup_steps": steps((0, 2)),
    "schedule.decay_steps": steps((1, 3), WSD),
    "schedule.min_lr_factor": steps((0.1, 0.5)),
    "schedule.over": losses(("stage", "run"), STAGED),
    "stage.name": case(runs.stage_names, ("first", "other"), STAGED),
    "stage.seq_len": losses((64, 48), ONE_STEP),
    "stage.steps": losses((2, 1), STAGED),
    "stage.tokens": losses((128, 256), {**STAGED, "stage.0.steps": None}),
    "stage.batch_tokens": losses((None, 256), ONE_STEP),
    "stage.micro_batch_size": case(see.inputs, (None, 1), ONE_STEP),
    "stage.mask": losses((None, "none"), ONE_STEP),
    "stage.packing": losses((None, "concat"), ONE_STEP),
    "stage.lr": losses((None, 2e-2), STAGED),
    "stage.warmup": losses((None, 0.5), STAGED),
    "stage.optimizer": case(runs.run_losses, ("carry", "fresh"), STAGED),
    "stage.schedule.over": losses(("stage", "run"), STAGED),
}

# ---- mesh and memory

CP = {"parallelism.cp": 2, "parallelism.cp_method": "ring"}
HYBRID = {"parallelism.cp": 2, "parallelism.cp_method": "hybrid"}
PP = {
    "parallelism.pp": 2,
    "model.num_layers": 2,
    "training.global_batch_size": 4,
    "training.micro_batch_size": 1,
}
INTERLEAVED = {**PP, "parallelism.pp_schedule": "Interleaved1F1B", "model.num_layers": 6}
TP = {"parallelism.tp": 2}
OFFLOAD = {"memory.offload": "inputs_and_attention"}
TILED = {"model.ffn_dim": 1024, "training.seq_len": 512}

PARALLELISM: Cases = {
    "parallelism.dp_replicate": ranks(see.weight_shapes, (1, 2)),
    "parallelism.dp_shard": Case(see.weight_shapes, (1, 2), {}, (1, 2)),
    "parallelism.cp": ranks(see.inputs, (1, 2)),
    "parallelism.cp_method": ranks(see.collectives, ("ring", "allgather"), {"parallelism.cp": 2}),
    "parallelism.cp_layout": ranks(see.inputs, ("headtail", "contiguous"), CP),
    "parallelism.cp_ulysses": ranks(see.collectives, (1, 2), HYBRID),
    "parallelism.cp_outer_method": ranks(
        see.collectives, ("ring", "allgather"), {**HYBRID, "parallelism.cp_ulysses": 1}
    ),
    "parallelism.cp_reduce_dtype": ranks(see.collectives, ("float32", "bfloat16"), {**CP, **BF16}),
    "parallelism.ranks_per_node": ranks(see.collectives, (1, 2), HYBRID),
    "parallelism.ep": ranks(see.collectives, (1, 2), {**EXPERTS, "parallelism.dp_shard": 2}),
    "parallelism.tp": ranks(see.weight_shapes, (1, 2)),
    "parallelism.sequence_parallel": ranks(see.collectives, (True, False), TP),
    "parallelism.loss_parallel": ranks(see.weight_shapes, (True, False), TP),
    # Needs CUDA devices: their absence is refused.
    "parallelism.async_tp": ranks(see.refusal, (False, True), {**TP, "training.compile": True}),
    "parallelism.pp": ranks(see.weight_shapes, (1, 2), {**PP, "parallelism.pp": None}),
    "parallelism.pp_schedule": ranks(see.collectives, ("1F1B", "GPipe"), PP),
    "parallelism.pp_stages_per_rank": ranks(see.weight_shapes, (2, 3), INTERLEAVED),
    "parallelism.pp_layers": ranks(see.weight_shapes, ([1, 1], [2, 0]), PP),
    "parallelism.pp_reduce_gradients": Case(
        see.collectives, ("per_step", "per_micro_batch"), {**PP, "parallelism.dp_shard": 2}, (4, 4)
    ),
    "parallelism.reshard_after_forward": ranks(see.collectives, (True, False)),
    "memory.recompute": (
        case(see.kernel_calls, ("keep_attention", "full")),
        case(see.kernel_calls, ("keep_attention", "none")),
    ),
    "memory.device_gib": case(see.auto_memory, (1e-4, 16.0), {"memory.recompute": "auto"}),
    "memory.offload": (
        case(see.host_copies, ("none", "inputs")),
        case(see.host_copies, ("inputs", "inputs_and_attention")),
    ),
    "memory.host_budget_gib": case(see.host_copies, (None, 2e-5), OFFLOAD),
    "memory.blocks_per_checkpoint": case(see.kernel_calls, (1, 2), {"model.num_layers": 2}),
    "memory.head_groups": case(see.kernel_calls, (1, 2)),
    "memory.mlp_tile_mib": case(see.kernel_calls, (None, 1), TILED),
    "memory.loss_chunk_mib": case(see.kernel_calls, (1, 2), {"model.vocab_size": 16384}),
    "memory.optimizer_placement": case(see.kernel_calls, ("device", "host")),
    "memory.optimizer_dtype": case(see.state_dtypes, ("float32", "bfloat16")),
}

# ---- the run

FOUR = {"training.steps": 4}
EVERY_STEP = {**FOUR, "checkpoint.interval": 1}

RUN: Cases = {
    "job.name": (case(see.script, ("run", "other")), case(runs.run_files, (None, "other"), FOUR)),
    "job.output_dir": (
        case(runs.run_files, (None, "elsewhere"), FOUR),
        case(see.script, (None, "elsewhere")),
    ),
    "job.extension": case(runs.run_files, (None, OTHER_KINDS["job.extension"]), FOUR),
    "job.max_minutes": case(see.deadline, (1.0, 2.0)),
    "checkpoint.enabled": case(runs.run_files, (None, False), FOUR),
    "checkpoint.interval": case(runs.run_files, (None, 2), FOUR),
    "checkpoint.interval_minutes": case(runs.run_files, (None, 1e-6), FOUR),
    "checkpoint.keep": case(runs.run_files, (1, 2), EVERY_STEP),
    "checkpoint.keep_every": case(runs.run_files, (None, 2), {**EVERY_STEP, "checkpoint.keep": 1}),
    "checkpoint.async": case(runs.checkpoint_threads, (None, False), FOUR),
    "checkpoint.memory_interval": case(runs.checkpoint_threads, (None, 2), FOUR),
    "checkpoint.remote": case(see.uploads, (None, "s3://bucket/x")),
    "checkpoint.initial_load_path": case(runs.run_losses, (None, "initial"), FOUR),
    "checkpoint.initial_ignore_keys": case(
        see.initial_problem, ([], ["house_key"]), {"checkpoint.initial_load_path": "hf:hub"}
    ),
    "metrics.log_interval": case(runs.logged_steps, (1, 2), FOUR),
    "metrics.peak_flops": case(runs.stated_peak, (None, 2e12), FOUR),
    "metrics.trackers": case(see.trackers, ([], ["mlflow"])),
    "metrics.tensorboard": case(runs.run_files, (False, True), FOUR),
    "health.max_consecutive_skips": case(see.skips_until_failure, (10, 3)),
    "health.spike_sigmas": case(see.spikes, (6.0, 4.0)),
    "health.rerun_suspicious": case(see.reruns, (True, False), {"training.deterministic": True}),
    "health.on_spike": case(see.spike_reaction, ("warn", "roll_back")),
    "health.max_dead_experts_pct": case(see.collapses, (50.0, 80.0)),
    "health.straggler_ratio": case(see.stragglers, (1.3, 1.7)),
    "health.check_replicas": case(see.compares_replicas, (False, True)),
    "health.replica_check_interval": (
        case(runs.replica_checks, (None, 4), FOUR),
        case(runs.replica_checks, (1, 2), FOUR),
    ),
    "profiler.trace_step": (
        case(see.trace_files, (None, 1), FOUR),
        case(see.trace_files, (1, 2), FOUR),
    ),
    "profiler.trace_steps": case(see.trace_files, (1, 2), {**FOUR, "profiler.trace_step": 1}),
    # Recorded on CUDA devices only: the windows that would be.
    "profiler.memory_step": (
        case(see.memory_windows, (None, 1), FOUR),
        case(see.memory_windows, (1, 2), FOUR),
    ),
    "profiler.memory_steps": case(see.memory_windows, (1, 2), {**FOUR, "profiler.memory_step": 1}),
    "distributed.start_timeout_minutes": (
        case(see.group_timeouts, (30, 40)),
        case(runs.phase_timeouts, (None, 40), FOUR),
        case(runs.world_timeouts, (None, 40), FOUR),
    ),
    "distributed.timeout_minutes": (
        case(see.group_timeouts, (20, 10)),
        case(runs.phase_timeouts, (None, 10), FOUR),
        case(runs.world_timeouts, (None, 10), FOUR),
    ),
    "distributed.hang_minutes": case(runs.phase_timeouts, (None, 16.0), FOUR),
    "distributed.restarts": case(see.restart_delays, (2, 3)),
    "distributed.restart_seconds": case(see.restart_delays, (10, 20)),
    "distributed.through_host": case(runs.backends, (False, True), FOUR),
    "plan.device": case(see.planned_device, ("h100-80gb", "a100-80gb")),
}

CPU_JOB = {"slurm.gpus_per_node": 0}
SLURM: Cases = {
    f"slurm.{key}": case(see.script, (a, b), base)
    for key, a, b, base in (
        ("nodes", 1, 2, {}),
        ("gpus_per_node", 8, 4, {}),
        ("processes_per_node", 2, 4, CPU_JOB),
        ("cpus_per_task", None, 4, {}),
        ("partition", None, "long", {}),
        ("account", None, "lab", {}),
        ("qos", None, "high", {}),
        ("time", None, "2:00:00", {}),
        ("memory", None, "64G", {}),
        ("constraint", None, "nvlink", {}),
        ("exclude", None, "node[3,7]", {}),
        ("preflight", True, False, {}),
        ("spare_nodes", 0, 1, {}),
        ("launcher", "srun", "torchrun", {}),
        ("lead_seconds", 300, 200, {}),
        ("max_requeues", 1000, 10, {}),
        ("max_stuck", 3, 4, {}),
        ("backoff_seconds", 20, 30, {}),
        ("setup", [], ["module load cuda"], {}),
        ("python", None, "python3.12", {}),
        ("container", None, "nvcr.io#nvidia/pytorch:26.01-py3", {}),
        ("options", [], ["--exclusive"], {}),
        ("srun_options", [], ["--cpu-bind=none"], {}),
    )
}

TABLE: Cases = MODEL | DATA | TRAINING | PARALLELISM | RUN | SLURM
