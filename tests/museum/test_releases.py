"""Released models are read: every config.json of the museum, with a line for each key that means
nothing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.museum import pages
from models import hf
from models.config import ModelConfig
from models.hf import HuggingFaceError
from models.hf_config import config_remarks, model_config_from_hf
from tests.models.hf_models import load, logits_of, logits_there
from tests.models.test_hf_families import assert_close, in_float32, values_of
from tests.models.test_model_config import PUBLISHED
from tests.museum.releases import FIRST, READ, REFUSED, RELEASES, Release, tiny

SOURCE = re.compile(
    r"https://github\.com/[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/\S+|[\w.-]+==[\w.]+:\S+"
)
SIZES = {
    "meta-llama/Llama-2-70b-hf": ("llama2", "70b"),
    "meta-llama/Meta-Llama-3-8B-Instruct": ("llama3", "8b"),
    "meta-llama/Meta-Llama-3-70B": ("llama3", "70b"),
    "meta-llama/Meta-Llama-3.1-8B": ("llama3.1", "8b"),
    "meta-llama/Meta-Llama-3.1-70B": ("llama3.1", "70b"),
    "meta-llama/Meta-Llama-3.1-405B": ("llama3.1", "405b"),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama3.2", "1b"),
    "meta-llama/Llama-3.2-3B": ("llama3.2", "3b"),
    "Qwen/Qwen2.5-3B": ("qwen2.5", "3b"),
    "Qwen/Qwen2.5-7B": ("qwen2.5", "7b"),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2.5", "7b"),
    "Qwen/Qwen2.5-14B": ("qwen2.5", "14b"),
    "Qwen/Qwen2.5-32B": ("qwen2.5", "32b"),
    "Qwen/Qwen3-0.6B": ("qwen3", "0.6b"),
    "Qwen/Qwen3-1.7B": ("qwen3", "1.7b"),
    "Qwen/Qwen3-4B": ("qwen3", "4b"),
    "Qwen/Qwen3-8B": ("qwen3", "8b"),
    "Qwen/Qwen3-14B": ("qwen3", "14b"),
    "Qwen/Qwen3-32B": ("qwen3", "32b"),
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", "30b-a3b"),
    "Qwen/Qwen3-235B-A22B": ("qwen3_moe", "235b-a22b"),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral", "7b"),
    "mistralai/Mistral-Nemo-Base-2407": ("mistral", "nemo-12b"),
    "mistralai/Mixtral-8x7B-v0.1": ("mixtral", "8x7b"),
    "allenai/OLMoE-1B-7B": ("olmoe", "1b-7b"),
    "allenai/Olmo-3.1-32B-Instruct": ("olmo3", "32b"),
    "google/gemma-3-27b-it": ("gemma3", "27b"),
    "openai/gpt-oss-20b": ("gpt_oss", "20b"),
    "openai/gpt-oss-120b": ("gpt_oss", "120b"),
}
"""Releases whose published size is that of a preset."""


def test_the_museum_states_where_each_of_its_releases_was_read() -> None:
    assert len(RELEASES) >= 40
    assert [each.name for each in RELEASES.values() if not SOURCE.fullmatch(each.source)] == []


@pytest.mark.parametrize("name", READ)
def test_a_release_is_read_with_a_line_for_each_key_that_means_nothing(name: str) -> None:
    release = READ[name]
    assert release.read().model_type == release.model_type
    ignored = {line.removeprefix("ignored: ").partition(" = ")[0] for line in release.remarks()}
    unread = {*IGNORED.get(name, ()), *release.ignore_keys}
    assert ignored == unread
    # None of them is needed, and without --ignore-key it is named.
    without = {key: value for key, value in release.text_config.items() if key not in ignored}
    assert model_config_from_hf(without) == release.read()
    for key in release.ignore_keys:
        with pytest.raises(
            HuggingFaceError, match=f"{key} = .* --ignore-key {key} imports the model without it"
        ):
            model_config_from_hf(
                release.text_config, [each for each in release.ignore_keys if each != key]
            )


GENERATION = [
    "max_length",
    "min_length",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "num_return_sequences",
    "output_scores",
    "return_dict_in_generate",
    "remove_invalid_values",
    "tf_legacy_loss",
]
IGNORED: dict[str, list[str]] = {
    "HuggingFaceTB/SmolLM2-135M": ["is_llama_config", "rope_interleaved"],
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": [
        "qkv_bias",
        "shared_expert_intermediate_size",
        "use_qk_norm",
    ],
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ["auto_map"],
    "google/gemma-2-9b-it": ["sliding_window_size"],
    "meta-llama/Llama-3.2-1B-Instruct": ["_commit_hash"],
    "microsoft/Phi-3-mini-4k-instruct": ["auto_map"],
    "mistralai/Mistral-7B-Instruct-v0.3": GENERATION,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_release_that_cannot_be_read_is_refused_for_one_key(name: str) -> None:
    with pytest.raises(HuggingFaceError) as caught:
        RELEASES[name].read()
    assert [REFUSED[name] in problem for problem in caught.value.problems] == [True]


@pytest.mark.parametrize("name", SIZES)
def test_a_release_has_its_published_size(name: str) -> None:
    assert READ[name].read().num_parameters == PUBLISHED[SIZES[name]]


def test_the_lists_of_the_docs_are_current() -> None:
    assert [page.name for page, text in pages().items() if page.read_text() != text] == []


# ---- keys of releases that no file of the museum has


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("smollm3", {"pretraining_tp": 2, "max_window_layers": 28}),
        ("llama", {"is_llama_config": True, "rope_interleaved": False}),
        (
            "qwen3_moe",
            {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
        ),
        ("qwen3", {"unsloth_version": "2026.1", "unsloth_fixed": True}),
        ("phi3", {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}),
        ("llama", {"pretraining_tp": 2, "max_sequence_length": 2048}),
    ],
)
def test_a_key_that_means_nothing_is_ignored_with_a_line(
    model_type: str, keys: dict[str, Any]
) -> None:
    values = values_of(model_type)
    assert model_config_from_hf(values | keys) == model_config_from_hf(values)
    lines = config_remarks(values | keys)
    assert [line.partition(": ")[2].partition(" = ")[0] for line in lines] == [*keys]
    assert config_remarks(values) == []


@pytest.mark.parametrize(
    ("model_type", "keys", "problem"),
    [
        (
            "llama",
            {"rope_interleaved": True},
            "rope_interleaved = true is not supported; only false",
        ),
        (
            "llama",
            {"is_llama_config": False},
            "is_llama_config = false is not supported; only true",
        ),
        ("qwen3_moe", {"qkv_bias": True}, "qkv_bias = true is not supported; only false"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm = false is not supported; only true"),
        (
            "qwen3_moe",
            {"shared_expert_intermediate_size": 8},
            "shared_expert_intermediate_size = 8 is not supported",
        ),
        (
            "gemma2",
            {"sliding_window_size": 8},
            "sliding_window_size = 8 and sliding_window = 4096 disagree",
        ),
        (
            "llama",
            {"qkv_bias": False},
            "qkv_bias = false is unknown for model_type llama; --ignore-key qkv_bias",
        ),
        ("llama", {"is_causal": None}, "is_causal = null is not supported; only true"),
    ],
)
def test_a_value_that_changes_the_model_is_refused(
    model_type: str, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(HuggingFaceError, match=re.escape(problem)):
        model_config_from_hf(values_of(model_type) | keys)


def test_only_unknown_keys_can_be_ignored() -> None:
    values = values_of("llama") | {"new_gate": 1, "rope_interleaved": True, "hidden_act": "relu"}
    with pytest.raises(HuggingFaceError) as caught:
        model_config_from_hf(values, ["new_gate", "hidden_act", "rope_interleaved", "absent"])
    assert caught.value.problems == [
        'config.json: hidden_act = "relu" is not supported; only "silu" or null',
        "config.json: rope_interleaved = true is not supported; only false",
        "config.json: absent shall be ignored, but is absent",
        "config.json: hidden_act is known for model_type llama and cannot be ignored",
        "config.json: rope_interleaved is known for model_type llama and cannot be ignored",
    ]
    with pytest.raises(HuggingFaceError, match="other_gate = 1 is unknown"):
        model_config_from_hf(values_of("llama") | {"new_gate": 1, "other_gate": 1}, ["new_gate"])


# ---- against transformers


def made_tiny(release: Release, folder: Path) -> Path:
    """A tiny model of this kind with random weights, which transformers saves; config.json has the
    release's keys.
    """
    transformers = pytest.importorskip("transformers")
    values = tiny(release)
    config = transformers.AutoConfig.for_model(
        **{key: each for key, each in values.items() if key != "auto_map"}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    is_gemma = release.model_type.startswith("gemma")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1 and not is_gemma), std=0.2)
    model.save_pretrained(folder)
    (folder / hf.CONFIG_FILE).write_text(json.dumps(values))
    return folder


def compare_logits(release: Release, folder: Path) -> None:
    made_tiny(release, folder)
    config = in_float32(model_config_from_hf(hf.read_config(folder), release.ignore_keys))
    tokens, logits = logits_of(load(folder, config), config)
    assert logits.abs().max() > 0.01
    assert_close(logits, logits_there(folder, tokens))


@pytest.mark.parametrize("model_type", FIRST)
def test_a_release_of_each_type_has_the_logits_of_transformers_at_a_tiny_size(
    model_type: str, tmp_path: Path
) -> None:
    compare_logits(FIRST[model_type], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_every_release_has_the_logits_of_transformers_at_a_tiny_size(
    name: str, tmp_path: Path
) -> None:
    compare_logits(READ[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_every_release_has_the_parameters_that_transformers_counts(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    values = {key: each for key, each in READ[name].text_config.items() if "auto_map" not in key}
    values.pop("quantization_config", None)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**values)
        )
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == READ[name].read().num_parameters


def test_a_tiny_model_keeps_what_its_release_is() -> None:
    """The rule of tiny sizes changes sizes only."""
    for release in READ.values():
        small: ModelConfig = model_config_from_hf(tiny(release), release.ignore_keys)
        whole = release.read()
        assert small.rope == whole.rope
        kinds = [whole.layer_kinds[layer] for layer in range(small.num_layers)]
        assert [kind.rope for kind in small.layer_kinds] == [kind.rope for kind in kinds], (
            release.name
        )
        assert [bool(kind.window) for kind in small.layer_kinds] == [
            bool(kind.window) for kind in kinds
        ], release.name


@pytest.mark.parametrize(
    "stated", [{}, {"rope_theta": 10_000.0}, {"rope_parameters": None}, {"rope_scaling": None}]
)
def test_the_rope_that_a_gpt_oss_folder_leaves_out_is_that_of_transformers(
    stated: dict[str, Any],
) -> None:
    left_out = ("rope_theta", "rope_parameters", "rope_scaling")
    values = {
        key: value for key, value in values_of("gpt_oss").items() if key not in left_out
    } | stated
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GptOssConfig.from_dict(dict(values)).rope_parameters
    ours = model_config_from_hf(values).rope
    assert (ours.kind, ours.theta, ours.factor) == (
        theirs["rope_type"],
        theirs["rope_theta"],
        theirs["factor"],
    )
