"""Every argument of the installed trainers is on a list; what is on neither is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from longhaul_attention.trainer_arguments import EXACT, RULES, argument_problems
from tests.longhaul_attention.trainer_cases import ARGUMENTS, LEVELS, arguments_of

CONFIGS = ("SFTConfig", "DPOConfig", "RewardConfig", "KTOConfig")


def unlisted(arguments: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(arguments)} - EXACT - RULES.keys()


def test_every_argument_of_transformers_is_on_a_list() -> None:
    transformers = pytest.importorskip("transformers")
    assert unlisted(transformers.TrainingArguments) == set()
    assert not EXACT & RULES.keys()


@pytest.mark.slow
def test_every_argument_of_trl_is_on_a_list() -> None:
    trl = pytest.importorskip("trl", reason="needs pip install 'longhaul-attention[integrations]'")
    assert [name for config in CONFIGS for name in unlisted(getattr(trl, config))] == []


NOT_DRAWN = {
    "the hub, trackers and names of files": "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
    "hub_revision trackio_space_id trackio_bucket_id trackio_static_space_id logging_dir overwrite_output_dir save_safetensors "
    "include_tokens_per_second enable_jit_checkpoint restore_callback_states_from_checkpoint",
    "what a row is, before it is a batch": "completion_only_loss assistant_only_loss chat_template_path dataset_kwargs "
    "dataset_text_field length_column_name model_init_kwargs trust_remote_code",
    "an accelerator, or another name of an argument": "tf32 use_mps_device no_cuda local_rank bf16_full_eval fp16_full_eval "
    "fp16_backend fp16_opt_level half_precision_backend torch_compile_mode ddp_timeout_delta warmup_ratio "
    "activation_checkpointing activation_checkpointing_kwargs",
    "an optimizer, which sees averaged gradients": "optim_args optim_target_modules",
    "a number of f_divergence_type": "f_alpha_divergence_coef",
    "what a resumed run reads, which `resume` compares with its default": "ignore_data_skip resume_from_checkpoint",
}
"""Exact arguments that no drawn run has with another value than its default, by what they
change.
"""


def test_every_exact_argument_is_drawn_or_changes_no_batch_and_no_loss() -> None:
    drawn = {
        name
        for by_kind in ARGUMENTS.values()
        for arguments in by_kind.values()
        for name in arguments
    }
    more = (
        "nothing",
        "checkpointing",
        "compiled",
        "workers",
        "drop_last",
        "smoothing",
        "stream",
        "resume",
    )
    for case in (
        {name: levels[0] for name, levels in LEVELS.items()} | {"more": each} for each in more
    ):
        drawn |= arguments_of(case, Path(), 1, None).keys()
    drawn |= {"packing", "padding_free"}
    not_drawn = {name for names in NOT_DRAWN.values() for name in names.split()}
    assert EXACT - drawn == not_drawn


REFUSED = {
    "neftune_noise_alpha": 5.0,
    "average_tokens_across_devices": False,
    "use_liger_kernel": True,
    "deepspeed": "ds.json",
    "train_sampling_strategy": "group_by_length",
    "include_num_input_tokens_seen": "all",
    "include_for_metrics": ["inputs"],
    "accelerator_config": {"split_batches": True},
    "use_cache": True,
    "router_aux_loss_coef": 0.01,
}


@dataclasses.dataclass
class Arguments:
    """Of a release that nobody has looked at."""

    learning_rate: Any = 1e-3
    average_tokens_across_devices: Any = True
    neftune_noise_alpha: Any = None
    use_liger_kernel: Any = False
    deepspeed: Any = None
    train_sampling_strategy: Any = "random"
    include_num_input_tokens_seen: Any = "no"
    include_for_metrics: Any = dataclasses.field(default_factory=list)
    accelerator_config: Any = None
    use_cache: Any = False
    router_aux_loss_coef: Any = None
    loss_type: Any = "nll"
    new_option: Any = "off"


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_is_not_exact_is_refused_with_its_name_and_reason(name: str) -> None:
    (problem,) = argument_problems(Arguments(**{name: REFUSED[name]}))
    assert problem.startswith(f"{name} = ")
    assert problem.endswith(RULES[name].reason)


def test_an_argument_on_neither_list_is_refused_unless_it_has_its_default() -> None:
    assert [*argument_problems(Arguments())] == []
    assert [*argument_problems(Arguments(new_option="on"))] == [
        'new_option = "on": not known to be exact'
    ]


def test_losses_that_sort_a_batch_take_one_group() -> None:
    assert [*argument_problems(Arguments(loss_type=["sigmoid", "aot"]))] == []
    (problem,) = argument_problems(Arguments(loss_type=["sigmoid", "aot"]), 2)
    assert (
        problem
        == "loss_type = aot: it sorts the rows of a whole batch, and 2 groups have parts of it"
    )
