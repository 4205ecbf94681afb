"""Rules for every argument of transformers' and TRL's trainers: exact on ranks that share
sequences, or refused, and why.

An argument that is in neither list is refused unless it has its default: nobody has looked at it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """Values of an argument that are exact, and why others are not."""

    allows: Callable[[Any], bool]
    reason: str


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _is_off(value: Any) -> bool:
    return not value or value == "no"


KINDS_OF_EXACT_ARGUMENTS = {
    "runs, steps and batches": "output_dir run_name project do_train do_eval do_predict resume_from_checkpoint seed data_seed "
    "full_determinism per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps num_train_epochs "
    "max_steps",
    "the optimizer, which is given averaged gradients": "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps "
    "warmup_ratio optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules max_grad_norm",
    "losses of whole outputs": "label_smoothing_factor loss_type loss_weights ld_alpha f_divergence_type beta "
    "f_alpha_divergence_coef label_smoothing use_weighting discopop_tau center_rewards_coefficient desirable_weight "
    "undesirable_weight",
    "precision and recomputation": "bf16 fp16 bf16_full_eval fp16_full_eval tf32 gradient_checkpointing "
    "gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs fp16_backend fp16_opt_level "
    "half_precision_backend torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps disable_dropout",
    "devices and process groups": "use_cpu no_cuda use_mps_device local_rank ddp_find_unused_parameters ddp_bucket_cap_mb "
    "ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout ddp_timeout_delta fsdp fsdp_config",
    "logs and files": "logging_dir logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
    "log_level log_level_replica disable_tqdm report_to skip_memory_metrics include_tokens_per_second save_only_model "
    "save_strategy save_steps save_on_each_node save_total_limit save_safetensors enable_jit_checkpoint "
    "load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip overwrite_output_dir "
    "restore_callback_states_from_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy "
    "hub_always_push hub_revision trackio_space_id trackio_bucket_id trackio_static_space_id",
    "evaluation": "eval_strategy eval_steps eval_delay eval_on_start prediction_loss_only eval_do_concat_batches "
    "eval_accumulation_steps",
    "rows, before they are batches": "dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
    "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
    "remove_unused_columns label_names length_column_name model_init_kwargs trust_remote_code chat_template_path "
    "dataset_text_field dataset_kwargs dataset_num_proc eos_token pad_token max_length truncation_mode shuffle_dataset packing "
    "packing_strategy padding_free pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss",
}
EXACT = {name for names in KINDS_OF_EXACT_ARGUMENTS.values() for name in names.split()}
RULES = {
    "average_tokens_across_devices": Rule(
        bool, "losses count the targets of all ranks: leave it True"
    ),
    "neftune_noise_alpha": Rule(
        _is_off, "ranks would draw other noise than one process, and scale it by their own tokens"
    ),
    "auto_find_batch_size": Rule(_is_off, "ranks may not find the same size"),
    "include_num_input_tokens_seen": Rule(
        _is_off, "tokens would be counted once for every rank that shares them"
    ),
    "batch_eval_metrics": Rule(_is_off, "it gathers what ranks share as if each had its own"),
    "include_for_metrics": Rule(
        lambda value: not value, "it gathers what ranks share as if each had its own"
    ),
    "include_inputs_for_metrics": Rule(
        _is_off, "it gathers what ranks share as if each had its own"
    ),
    "eval_use_gather_object": Rule(_is_off, "it gathers what ranks share as if each had its own"),
    "use_liger_kernel": Rule(_is_off, "it replaces forward functions, and has not been tried"),
    "liger_kernel_config": Rule(
        lambda value: not value, "it replaces forward functions, and has not been tried"
    ),
    "use_cache": Rule(_is_off, "a KV cache of transformers holds no shards"),
    "activation_offloading": Rule(_is_off, "it has not been tried"),
    "parallelism_config": Rule(_is_off, "ranks are given to sequences by cp"),
    "deepspeed": Rule(_is_off, "its engine scales and shards on its own, and has not been tried"),
    "debug": Rule(lambda value: not value, "it has not been tried"),
    "train_sampling_strategy": Rule(
        _one_of("random", "sequential", None),
        "batches of a group would be of other lengths than one process's",
    ),
    "group_by_length": Rule(
        _is_off, "batches of a group would be of other lengths than one process's"
    ),
    "router_aux_loss_coef": Rule(_is_off, "a balance loss is not a mean over tokens"),
    "precompute_ref_log_probs": Rule(_is_off, "it has not been tried"),
    "precompute_ref_batch_size": Rule(_is_off, "it has not been tried"),
    "sync_ref_model": Rule(_is_off, "it has not been tried"),
    "ref_model_mixup_alpha": Rule(lambda _: True, "used by sync_ref_model alone"),
    "ref_model_sync_steps": Rule(lambda _: True, "used by sync_ref_model alone"),
    "accelerator_config": Rule(
        lambda value: not _unlike_defaults(value),
        "split_batches, dispatch_batches and samplers without a seed deal other rows",
    ),
}


def _unlike_defaults(config: Any) -> bool:
    wanted = {
        "split_batches": (False,),
        "dispatch_batches": (None, False),
        "use_seedable_sampler": (True,),
    }
    values = (
        config
        if isinstance(config, dict)
        else vars(config or object())
        if hasattr(config, "__dict__")
        else {}
    )
    return any(name in values and values[name] not in allowed for name, allowed in wanted.items())


SORTED_LOSSES = {"aot", "aot_unpaired"}
"""Losses of DPO that compare the sorted scores of a batch: a group would compare its own rows
alone.
"""


def argument_problems(arguments: Any, num_groups: int = 1) -> Iterator[str]:
    """Arguments that ranks in several groups, which share sequences, cannot compute as one process
    does.
    """
    losses = getattr(arguments, "loss_type", None) or ()
    if num_groups > 1 and (
        found := SORTED_LOSSES.intersection([losses] if isinstance(losses, str) else losses)
    ):
        yield f"loss_type = {', '.join(sorted(found))}: it sorts the rows of a whole batch, and {num_groups} groups have parts of it"
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name, None)
        rule = RULES.get(field.name)
        if rule is not None and not rule.allows(value):
            yield f"{field.name} = {_shown(value)}: {rule.reason}"
        if rule is None and field.name not in EXACT and value != _default(field):
            yield f"{field.name} = {_shown(value)}: not known to be exact"


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _default(field: dataclasses.Field[Any]) -> Any:
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )
