"""Every argument of the installed trainers is on a list; what is on neither is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from longhaul_attention.trainer_arguments import EXACT, RULES, argument_problems

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
    assert [*argument_problems(Arguments(new_option="on"))] == ['new_option = "on": not known to be exact']


def test_losses_that_sort_a_batch_take_one_group() -> None:
    assert [*argument_problems(Arguments(loss_type=["sigmoid", "aot"]))] == []
    (problem,) = argument_problems(Arguments(loss_type=["sigmoid", "aot"]), 2)
    assert problem == "loss_type = aot: it sorts the rows of a whole batch, and 2 groups have parts of it"
