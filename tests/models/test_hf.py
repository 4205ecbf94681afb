"""Weights and configurations in Hugging Face's format, compared with transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import hf
from models.config import ModelConfig
from models.hf import HuggingFaceError, read_config
from models.hf_config import model_config_from_hf
from models.hf_config_write import config_differences, model_config_to_hf
from models.hf_tensors import tensor_specs
from models.layers import LayerKind
from models.presets import FAMILIES
from models.rope_config import RopeConfig
from models.rope_scaling import attention_factor
from tests.models.hf_models import (
    LENGTH,
    LLAMA,
    QWEN2,
    QWEN3,
    load,
    logits_of,
    logits_there,
    made_by_transformers,
    write,
)
from tests.models.small_models import small_model


def scaled_rope(kind: str, **fields: Any) -> RopeConfig:
    given: dict[str, Any] = {"kind": kind, "factor": 4.0, "original_length": 16} | fields
    return replace(LLAMA.rope, **given)


ROPES = {
    "default": LLAMA.rope,
    "linear": scaled_rope("linear"),
    "llama3": scaled_rope("llama3", high_freq_factor=3.0),
    "yarn": scaled_rope("yarn", beta_fast=4.0),
    "yarn untruncated": scaled_rope("yarn", beta_fast=4.0, truncate=False, attention_factor=1.5),
    "longrope": scaled_rope(
        "longrope", short_factors=(1.0, 1.5, 2.0), long_factors=(1.0, 3.0, 5.0)
    ),
    "longrope given": scaled_rope(
        "longrope",
        short_factors=(1.0, 1.5, 2.0),
        long_factors=(1.0, 3.0, 5.0),
        attention_factor=1.1,
    ),
    "longrope given its default": scaled_rope(
        "longrope",
        short_factors=(1.0, 1.5, 2.0),
        long_factors=(1.0, 3.0, 5.0),
        attention_factor=attention_factor(scaled_rope("longrope")),
    ),
}
MODELS = {
    **{f"llama {name}": replace(LLAMA, rope=rope) for name, rope in ROPES.items()},
    "llama tied": replace(LLAMA, tie_embeddings=True),
    "llama wide heads": replace(LLAMA, head_dim=8),
    "qwen2": QWEN2,
    "qwen2 tied": replace(QWEN2, tie_embeddings=True, rope=ROPES["yarn"]),
    "qwen3": QWEN3,
    "qwen3 tied": replace(QWEN3, tie_embeddings=True, rope=ROPES["yarn"]),
}


# ---- transformers reads our files


@pytest.mark.parametrize("config", MODELS.values(), ids=list(MODELS))
def test_transformers_computes_the_same_logits(config: ModelConfig, tmp_path: Path) -> None:
    model = small_model(config, dtype=torch.float32)
    folder = write(tmp_path, config, model, file_bytes=3000)
    assert len(list(folder.glob("*.safetensors"))) > 3
    for length in (10, 40):  # longrope has short and long factors.
        tokens, logits = logits_of(model, config, length)
        assert logits.abs().max() > 3
        torch.testing.assert_close(logits, logits_there(folder, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("config", MODELS.values(), ids=list(MODELS))
def test_written_weights_are_read_back_bitwise(config: ModelConfig, tmp_path: Path) -> None:
    model = small_model(config, dtype=torch.float32)
    folder = write(tmp_path / "a", config, model, file_bytes=3000)
    found = load(folder, config)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, found.get_parameter(name)), name
    again = write(tmp_path / "b", config, found, file_bytes=3000)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in again.iterdir()
    }


# ---- we read transformers' files


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {}),
        (
            "Llama",
            {
                "tie_word_embeddings": True,
                "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16},
            },
        ),
        ("Qwen2", {}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 8}),
        ("Qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_models_written_by_transformers_give_the_same_logits(
    kind: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    made = made_by_transformers(kind, dtype, **options)
    made.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    config = model_config_from_hf(read_config(tmp_path))
    config = replace(config, rope=replace(config.rope, precision="float32"))
    tokens, logits = logits_of(load(tmp_path, config), config)
    # Loaded again, because `float()` does not restore the frequencies that `bfloat16()` rounded.
    torch.testing.assert_close(logits, logits_there(tmp_path, tokens), rtol=0, atol=1e-4)


# ---- config.json


@pytest.mark.parametrize("rope", ROPES.values(), ids=list(ROPES))
@pytest.mark.parametrize("base", [LLAMA, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_config_round_trips_through_either_format(base: ModelConfig, rope: RopeConfig) -> None:
    if rope.short_factors:
        base = replace(base, head_dim=6)
    config = replace(base, rope=rope)
    values = json.loads(
        json.dumps(model_config_to_hf(config, max_length=LENGTH, dtype="bfloat16"))
    )
    new = ("rope_parameters", "dtype")
    old = ("rope_theta", "rope_scaling", "torch_dtype")
    for left_out in ((), new, old):
        found = model_config_from_hf({key: values[key] for key in values if key not in left_out})
        assert config_differences(found, config) == {}
        assert attention_factor(found.rope) == attention_factor(config.rope)
    assert values["max_position_embeddings"] == LENGTH


def values_of(**changes: Any) -> dict[str, Any]:
    values = model_config_to_hf(LLAMA, max_length=LENGTH, dtype="float32")
    return {key: value for key, value in (values | changes).items() if value != "absent"}


def test_absent_keys_get_the_defaults_of_transformers() -> None:
    absent = dict.fromkeys(
        (
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
        ),
        "absent",
    )
    llama = model_config_from_hf(values_of(**absent))
    assert (llama.num_kv_heads, llama.head_dim, llama.norm_eps, llama.rope.theta) == (
        4,
        6,
        1e-6,
        10_000,
    )
    transformers = pytest.importorskip("transformers")
    known = transformers.LlamaConfig(hidden_size=24, num_attention_heads=4)
    assert (known.num_key_value_heads, known.head_dim, known.rms_norm_eps) == (4, 6, 1e-6)
    assert known.rope_parameters["rope_theta"] == 10_000
    for number, head_dim, width in (("2", 2, 128), ("3", 128, 24)):
        known = getattr(transformers, f"Qwen{number}Config")(
            hidden_size=width, num_attention_heads=64
        )
        qwen = model_config_from_hf(
            values_of(
                architectures=[f"Qwen{number}ForCausalLM"],
                model_type=f"qwen{number}",
                num_attention_heads=64,
                hidden_size=width,
                **absent,
            )
        )
        assert (
            (qwen.num_kv_heads, qwen.head_dim)
            == (known.num_key_value_heads, head_dim)
            == (32, head_dim)
        )
        assert (qwen.norm_eps, qwen.rope.theta) == (
            known.rms_norm_eps,
            known.rope_parameters["rope_theta"],
        )
        assert known.to_dict().get("head_dim") == (None if number == "2" else head_dim)


QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""The published config.json of Qwen2.5-0.5B."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_sliding_window": "absent"},
        {"layer_types": ["full_attention"] * 24},
        {"head_dim": 64},
        {"head_dim": None},
        {"attention_bias": False},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_the_published_config_of_qwen2_5_gives_its_preset(changes: dict[str, Any]) -> None:
    values = {key: value for key, value in (QWEN2_5_0_5B | changes).items() if value != "absent"}
    assert model_config_from_hf(values) == FAMILIES["qwen2.5"]["0.5b"]


@pytest.mark.parametrize(
    ("changes", "expected_problems"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 0},
            ["sliding_window = 0 must be an integer above 0"],
        ),
        ({"layer_types": ["full_attention", "sliding_attention"] * 12}, ["layer_types names "]),
        ({"attention_dropout": 0.1}, ["attention_dropout = 0.1 is not supported; only 0"]),
        ({"architectures": ["Qwen2ForTokenClassification"]}, ['only ["Qwen2ForCausalLM"]']),
        (
            {"head_dim": 128},
            ["head_dim = 128 must be hidden_size / num_attention_heads = 896 / 14"],
        ),
        (
            {"num_attention_heads": 12},
            ["head_dim = 74 must be hidden_size / num_attention_heads = 896 / 12"],
        ),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}},
            ['rope_scaling.rope_type = "mrope"'],
        ),
    ],
    ids=["window", "layers", "dropout", "other head", "head_dim", "heads", "mrope"],
)
def test_unsupported_features_of_qwen2_are_reported(
    changes: dict[str, Any], expected_problems: list[str]
) -> None:
    with pytest.raises(HuggingFaceError) as caught:
        model_config_from_hf(QWEN2_5_0_5B | changes)
    assert len(caught.value.problems) == len(expected_problems)
    for problem in expected_problems:
        assert any(problem in line for line in caught.value.problems), caught.value.problems


def test_older_rope_keys_are_read() -> None:
    rope = {
        "type": "yarn",
        "factor": None,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 16,
    }
    found = model_config_from_hf(
        values_of(rope_parameters="absent", rope_scaling=rope, rope_theta=1000)
    ).rope
    assert (found.kind, found.theta, found.factor, found.original_length) == ("yarn", 1000, 4, 16)
    assert found.attention_factor == (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    rope["mscale_all_dim"] = 0.0  # transformers then takes the default.
    found = model_config_from_hf(
        values_of(rope_parameters="absent", rope_scaling=rope, rope_theta=1000)
    ).rope
    assert found.attention_factor is None


UNSUPPORTED = {
    "hidden_act": ({"hidden_act": "gelu"}, ['hidden_act = "gelu" is not supported; only "silu"']),
    "bias": (
        {"attention_bias": True, "mlp_bias": True},
        [
            "attention_bias = true is not supported; only false or null",
            "mlp_bias = true is not supported; only false",
        ],
    ),
    "window": ({"sliding_window": 512}, ["sliding_window = 512 is not supported"]),
    "layers": (
        {"layer_types": ["sliding_attention"]},
        ['layer_types = ["sliding_attention"] is not supported'],
    ),
    "experts": ({"num_experts": 8}, ["num_experts = 8 is not supported"]),
    "quantized": ({"quantization_config": {"bits": 4}}, ["quantization_config = "]),
    "other head": (
        {"architectures": ["LlamaForSequenceClassification"]},
        [
            'architectures = ["LlamaForSequenceClassification"] is not supported; only ["LlamaForCausalLM"]'
        ],
    ),
    "model": (
        {"model_type": "qwen3_next"},
        ['model_type = "qwen3_next" is not supported; only "llama" or "qwen2" or "qwen3"'],
    ),
    "rope": (
        {"rope_parameters": "absent", "rope_scaling": {"rope_type": "dynamic", "factor": 2}},
        ['rope_scaling.rope_type = "dynamic" is not supported; only "default" or "linear" or'],
    ),
    "rope key": (
        {
            "rope_scaling": "absent",
            "rope_parameters": {"rope_type": "linear", "factor": 2, "mrope_section": [1]},
        },
        ["rope_parameters.mrope_section = [1] is not supported"],
    ),
    "rope without": (
        {"rope_parameters": "absent", "rope_scaling": {"rope_type": "llama3", "factor": 8}},
        ['rope_type "llama3" needs high_freq_factor', "needs low_freq_factor"],
    ),
    "two different ropes": (
        {"rope_theta": 7.0},
        ["rope_parameters.rope_theta = 500.0 disagree", "rope_scaling = "],
    ),
    "rope of another type": (
        {"rope_parameters": [1]},
        ["rope_parameters = [1] must be an object"],
    ),
    "numbers": (
        {"hidden_size": "24", "num_hidden_layers": True, "rms_norm_eps": -1},
        [
            'hidden_size = "24" must be an integer above 0',
            "num_hidden_layers = true must",
            "rms_norm_eps = -1 must",
        ],
    ),
    "heads": (
        {"num_key_value_heads": 3},
        ["num_attention_heads = 4 must be a multiple of num_key_value_heads = 3"],
    ),
}


@pytest.mark.parametrize(
    ("changes", "expected_problems"), UNSUPPORTED.values(), ids=list(UNSUPPORTED)
)
def test_unsupported_features_are_reported_by_key_and_value(
    changes: dict[str, Any], expected_problems: list[str]
) -> None:
    with pytest.raises(HuggingFaceError) as caught:
        model_config_from_hf(values_of(**changes))
    assert len(caught.value.problems) == len(expected_problems)
    for problem in expected_problems:
        assert any(problem in line for line in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("content", ["[1]", "null", '"llama"', "{", "[" * 100_000, "\x80"])
def test_config_that_is_not_a_json_object_raises(content: str, tmp_path: Path) -> None:
    (tmp_path / hf.CONFIG_FILE).write_text(content)
    with pytest.raises(
        HuggingFaceError, match=r"config\.json (must be an object|is not valid JSON)"
    ):
        read_config(tmp_path)


def test_config_without_equivalent_is_not_written() -> None:
    windows = (LayerKind(window=3), LayerKind(window=5))
    for config, expected_problems in (
        (
            replace(LLAMA, nope_every=2, qk_norm=True),
            ["model.rope.layers = [{'rope': 'global'}, {'rope': 'none'}]"],
        ),
        (replace(LLAMA, layers=windows), ["model.layers = "]),
        (replace(LLAMA, qk_norm=True, norms="post"), ["model.norms = post"]),
        (
            replace(LLAMA, dim=26, head_dim=8, logit_softcap=3.0, norms="post"),
            ["model.logit_softcap = 3.0", "model.norms = post"],
        ),
        (replace(QWEN2, qk_norm=True), ["model.qk_norm = True"]),
        (replace(QWEN2, head_dim=8), ["model.qkv_bias = True"]),
        (replace(LLAMA, logit_softcap=3.0), ["model.logit_softcap = 3.0"]),
    ):
        with pytest.raises(HuggingFaceError) as caught:
            model_config_to_hf(config, max_length=LENGTH, dtype="float32")
        for problem, expected in zip(caught.value.problems, expected_problems, strict=True):
            assert expected in problem
            assert "transformers'" in problem


# ---- the files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(
        tmp_path / "model", LLAMA, small_model(LLAMA, dtype=torch.float32), file_bytes=8000
    )


def problems_of(folder: Path, config: ModelConfig = LLAMA) -> list[str]:
    try:
        return hf.SafetensorsReader(folder).problems(config)
    except HuggingFaceError as error:
        return error.problems


def test_slices_of_a_tensor_are_read_alone(folder: Path) -> None:
    weights = hf.SafetensorsReader(folder)
    entry = tensor_specs(LLAMA)["blocks.1.feed_forward.down_proj.weight"]
    whole = weights.read(entry)
    assert torch.equal(weights.read(entry, [range(3, 9), range(5, 20)]), whole[3:9, 5:20])
    assert torch.equal(weights.read(entry, [range(24), range(7)]), whole[:, :7])
    assert weights.read(entry, [range(24, 24), range(20)]).shape == (0, 20)
    norm = tensor_specs(LLAMA)["head.norm.weight"]
    assert torch.equal(weights.read(norm, [range(2, 5)]), weights.read(norm)[2:5])


def test_missing_unexpected_and_misshaped_tensors_are_reported_together(folder: Path) -> None:
    found = problems_of(folder, replace(QWEN3, num_layers=1, ffn_dim=21, head_dim=6))
    assert "model.layers.0.self_attn.q_norm.weight is missing" in found
    assert "model.layers.1.mlp.up_proj.weight [20, 24] is unexpected" in found
    assert "model.layers.0.mlp.down_proj.weight has shape [24, 20], expected [24, 21]" in found
    assert len(found) == 2 + 9 + 3


def test_tied_head_and_inv_freq_tensors_are_accepted(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tied = replace(LLAMA, tie_embeddings=True)
    folder = write(tmp_path, tied, small_model(tied, dtype=torch.float32))
    tensors = load_file(folder / hf.SINGLE_FILE)
    assert hf.LM_HEAD not in tensors
    extra = {
        hf.LM_HEAD: torch.zeros(40, 24),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3),
    }
    save_file(tensors | extra, folder / hf.SINGLE_FILE)
    assert problems_of(folder, tied) == []
    assert hf.SafetensorsReader(folder).has_tensor(hf.LM_HEAD)
    save_file(tensors | {hf.LM_HEAD: torch.zeros(40, 23)}, folder / hf.SINGLE_FILE)
    assert problems_of(folder, tied) == ["lm_head.weight [40, 23] is unexpected"]


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / hf.INDEX_FILE
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "model.bin", "..", "a/b.safetensors"]
)
def test_index_cannot_name_files_outside_its_folder(folder: Path, name: str) -> None:
    change_index(
        folder, lambda index: {"weight_map": index["weight_map"] | {"lm_head.weight": name}}
    )
    assert [line.partition(" names ")[2] for line in problems_of(folder)] == [
        f"{json.dumps(name)}, which is not a safetensors file of its folder"
    ]


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_index_without_weight_map_raises(folder: Path, content: Any) -> None:
    change_index(folder, lambda _: content)
    assert [line.partition("index.json ")[2] for line in problems_of(folder)] == [
        "has no weight_map from tensors to files"
    ]


def test_missing_file_is_named(folder: Path) -> None:
    first = sorted(folder.glob("*.safetensors"))[0]
    first.unlink()
    assert [line.partition(" names ")[2] for line in problems_of(folder)] == [
        f"{first.name}, which does not exist"
    ]


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_truncated_file_is_named(folder: Path, size: int) -> None:
    first = sorted(folder.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:size])
    (line,) = problems_of(folder)
    assert line.startswith(f"{first} cannot be read: ")
    with pytest.raises(HuggingFaceError, match=r"embed_tokens.*cannot be read|cannot be read"):
        hf.SafetensorsReader(folder).read(tensor_specs(LLAMA)["embed.weight"])


def test_index_that_disagrees_with_the_files_is_reported(folder: Path) -> None:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    change_index(
        folder, lambda index: {"weight_map": index["weight_map"] | {"lm_head.weight": names[0]}}
    )
    assert problems_of(folder) == [f"lm_head.weight is not in the file that {hf.INDEX_FILE} names"]


def test_integer_tensors_are_rejected(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"lm_head.weight": torch.zeros(40, 24, dtype=torch.int8)}, tmp_path / hf.SINGLE_FILE)
    assert problems_of(tmp_path) == [
        "model.safetensors: lm_head.weight is I8; supported are BF16, F16, F32, F64"
    ]


def test_pickle_files_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert problems_of(tmp_path) == [
        f"{tmp_path} has neither {hf.SINGLE_FILE} nor {hf.INDEX_FILE}; pytorch_model.bin is a pickle "
        "file, which is not read because it can execute code"
    ]


def test_files_are_filled_to_the_limit_and_verified(tmp_path: Path) -> None:
    model = small_model(LLAMA, dtype=torch.float32)
    folder = write(tmp_path, LLAMA, model, file_bytes=4000, dtype=torch.bfloat16)
    files = sorted(folder.glob("*.safetensors"))
    assert [*files, folder / hf.INDEX_FILE] == sorted(folder.glob("model*"))
    assert all(path.stat().st_size < 4000 + 2000 for path in files)
    index = json.loads((folder / hf.INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == LLAMA.num_parameters * 2
    assert (
        hf.SafetensorsReader(folder).read(tensor_specs(LLAMA)["embed.weight"]).dtype
        == torch.bfloat16
    )


def test_file_that_differs_from_what_was_written_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    save = safetensors.torch.save_file

    def damage(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
        save(tensors, path, **options)
        content = bytearray(path.read_bytes())
        content[-1] ^= 128
        path.write_bytes(content)

    monkeypatch.setattr(safetensors.torch, "save_file", damage)
    with pytest.raises(HuggingFaceError, match="differs from what was written"):
        write(tmp_path, LLAMA, small_model(LLAMA, dtype=torch.float32))
