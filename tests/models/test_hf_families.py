"""Every family of `models/hf_families.py`, with tiny random weights, against transformers: logits,
gradients, files.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import hf
from models.attention import Attention
from models.config import ModelConfig
from models.hf import HuggingFaceError, read_config, text_model_values
from models.hf_config import model_config_from_hf, read_model, with_layers
from models.hf_config_write import config_differences, model_config_to_hf
from models.hf_families import FAMILIES
from models.hf_family import FULL, SLIDING
from models.hf_tensors import TensorSpec, tensor_specs
from models.layers import LayerKind
from models.presets import FAMILIES as PRESETS
from models.rope import cos_sin_table
from models.rope_config import RopeConfig
from tests.models.hf_models import (
    LENGTH,
    MADE,
    YARN,
    load,
    logits_of,
    logits_there,
    made,
    theirs,
    write,
)
from tests.models.small_models import gradients, packed, small_model
from trainer.config.parse import load as load_config
from trainer.hf import config_lines


def in_float32(config: ModelConfig) -> ModelConfig:
    """With transformers' rounding of angles."""
    ropes = {
        name: replace(getattr(config, name), precision="float32")
        for name in ("rope", "local_rope")
    }
    return replace(config, **ropes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As transformers writes them."""
    root = tmp_path_factory.mktemp("models")
    for name in MADE:
        made(name).save_pretrained(root / name, max_shard_size="8KB")
    return {name: root / name for name in MADE}


def test_every_family_is_made() -> None:
    architectures = {f"{name.split()[0]}ForCausalLM" for name in MADE}
    assert architectures == {family.architecture for family in FAMILIES.values()}


@pytest.mark.parametrize("name", MADE)
def test_logits_and_gradients_are_those_of_transformers(
    name: str, folders: dict[str, Path]
) -> None:
    """At positions beyond the original length and the windows."""
    config = in_float32(read_model(folders[name]))
    model = load(folders[name], config)
    tokens, logits = logits_of(model, config)
    assert logits.abs().max() > 0.5
    reference = theirs(folders[name])
    expected = reference(tokens).logits
    assert_close(logits, expected.detach())
    batch = packed([40], vocab_size=config.vocab_size)
    _, found = gradients(model, batch)
    torch.nn.functional.cross_entropy(expected[0, :-1], tokens[0, 1:]).backward()
    parameters = dict(reference.named_parameters())
    covered = dict.fromkeys(parameters, 0)
    for ours, spec in tensor_specs(config).items():
        if ours in config.buffers:
            continue
        theirs_name, grad = their_gradient(parameters, spec)
        assert (found[ours] - grad).norm() <= 1e-5 * grad.norm() + 1e-7, ours
        covered[theirs_name] += grad.numel()
    assert covered == {their: parameter.numel() for their, parameter in parameters.items()}


def their_gradient(parameters: dict[str, Any], spec: TensorSpec) -> tuple[str, Tensor]:
    """The parameter of transformers, which holds all experts of a layer and fuses gate and up, and
    the part of its gradient.
    """
    name = spec.name
    if spec.is_per_expert:
        layer, _, projection = name.replace("block_sparse_moe", "mlp").partition(".experts.{}.")
        projection = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(
            projection[:2], projection
        )
        name = (
            f"{layer}.experts.{'down_proj' if projection.startswith('down') else 'gate_up_proj'}"
        )
        grad = parameters[name].grad
        if name.endswith("gate_up_proj"):
            grad = grad.chunk(2, dim=1)[projection.startswith("up")]
        return name, grad
    name = name if name in parameters else name.replace("block_sparse_moe", "mlp")
    grad = parameters[name].grad[spec.first_row : spec.first_row + spec.shape[0]]
    return name, spec.select(grad)


@pytest.mark.parametrize("name", MADE)
def test_what_we_write_is_the_same_folder_again(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = read_model(folders[name])
    model = load(folders[name], config)
    again = write(tmp_path / "again", config, model, file_bytes=3000)
    assert read_config(again)["model_type"] == read_config(folders[name])["model_type"]
    assert config_differences(read_model(again), config) == {}
    assert read_model(again).model_type == config.model_type
    found = load(again, read_model(again))
    for parameter, value in model.named_parameters():
        assert torch.equal(found.get_parameter(parameter), value)
    tokens, logits = logits_of(load(again, in_float32(config)), in_float32(config))
    found_logits = logits_there(again, tokens)
    assert_close(logits, found_logits)
    stored, ours = (
        {
            name: tensor
            for path in folder.glob("*.safetensors")
            for name, tensor in read_file(path).items()
        }
        for folder in (folders[name], again)
    )
    stored.pop(hf.LM_HEAD, None) if config.tie_embeddings else None
    assert stored.keys() == ours.keys()
    assert all(torch.equal(stored[tensor], ours[tensor]) for tensor in ours)


def assert_close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max().clamp(min=1))
    )


def read_file(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize("name", MADE)
def test_what_an_import_writes_is_read_as_the_same_model(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = read_model(folders[name])
    (tmp_path / "model.toml").write_text("\n".join(config_lines(folders[name], model, 64)))
    assert (
        config_differences(
            load_config(["--config", str(tmp_path / "model.toml")]).model.build(), model
        )
        == {}
    )


@pytest.mark.parametrize(
    "family", [name for name, sizes in PRESETS.items() if next(iter(sizes.values())).num_experts]
)
def test_widths_that_no_layer_has_are_no_reason_to_refuse_an_export(family: str) -> None:
    model = replace(next(iter(PRESETS[family].values())), expert_dim=96)
    written = model_config_to_hf(model, max_length=64, dtype="float32")
    assert config_differences(model_config_from_hf(written), model) == {}


@pytest.mark.parametrize("family", PRESETS)
def test_presets_have_the_parameters_that_transformers_counts(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    for size, model in PRESETS[family].items():
        values = model_config_to_hf(model, max_length=1 << 17, dtype="bfloat16")
        assert values["model_type"] == model.model_type, size
        architecture = getattr(transformers, values["architectures"][0])
        config = transformers.AutoConfig.for_model(
            **{key: value for key, value in values.items() if "dtype" not in key}
        )
        with torch.device("meta"):
            counted = sum(parameter.numel() for parameter in architecture(config).parameters())
        assert counted == model.num_parameters, size


# ---- what is not understood is refused by name


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unknown_key_is_named(name: str) -> None:
    values = values_of(name)
    with pytest.raises(
        HuggingFaceError,
        match=re.escape(f'config.json: new_gate = "x" is unknown for model_type {name}'),
    ):
        model_config_from_hf(values | {"new_gate": "x"})
    assert model_config_from_hf(values | {"new_gate": None}) == model_config_from_hf(values)


def values_of(name: str) -> dict[str, Any]:
    """The config.json of a small model of this type."""
    family = FAMILIES[name]
    experts: dict[str, Any] = (
        {"num_experts": 8, "top_k": 2, "expert_dim": 704}
        if "feed_forward" in family.options
        else {}
    )
    experts |= {"shared_expert_dim": 704} if "shared_expert" in family.options else {}
    model = replace(
        PRESETS["llama3"]["debug"],
        **family.options,
        **experts,
        model_type=name,
        embedding_multiplier=16.0 if family.scales_embeddings else 1.0,
    )
    values = model_config_to_hf(model, max_length=LENGTH, dtype="float32")
    assert values["model_type"] == name
    return values


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("gemma2", {"layer_types": ["sliding_attention"]}, 'layer_types = ["sliding_attention"] must have num_hidden'),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = true is not supported"),
        ("gemma2", {"hidden_activation": "gelu"}, 'hidden_activation = "gelu" is not supported; only "gelu_pytorch_tanh"'),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0 must be an integer above 0"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts = 0 must be an integer above 0"),
        ("qwen3_moe", {"num_local_experts": 4}, "num_local_experts = 4 and num_experts = 8 disagree"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 must be at most num_experts = 8"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob = 1 must be true or false"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers = [-1] must be a list of integers of at least 0"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window = true is not supported"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias = false is not supported; only true"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit = 6.0 is not supported"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1 must be an integer of at least 0"),
        ("glm4_moe", {"first_k_dense_replace": 9}, "no layer has experts: first_k_dense_replace = 9"),
        ("glm4_moe", {"routed_scaling_factor": None}, "routed_scaling_factor = null must be a number above 0"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, "no layer has experts: decoder_sparse_step = 1, max_window_"),
        ("glm4_moe", {"n_group": 3}, "n_group = 3 must divide n_routed_experts = 8"),
        ("llama", {"num_experts": 4}, "num_experts = 4 is not supported"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ("mistral", {"sliding_window": "4096"}, 'sliding_window = "4096" must be an integer above 0'),
        ("qwen3", {"layer_types": [SLIDING] * 4}, 'layer_types names "sliding_attention", but no sliding_window is used'),
        ("qwen3", {"use_sliding_window": 1}, "use_sliding_window = 1 must be true or false"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "2"}, 'max_window_layers = "2" must be an integer'),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers = [1, 0] must have num_hidden_layers = 4"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval = 0 must be an integer"),
        ("granite", {"attention_multiplier": -1}, "attention_multiplier = -1 must be a number above 0"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75 is not supported; only 1"),
        ("phi3", {"rope_parameters": None, "rope_scaling": YARN}, 'rope_type = "yarn" is not supported; only "default"'),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 must be an integer from 1 to 10000"),
        ("olmo2", {"head_dim": 12}, "head_dim = 12 must be hidden_size / num_attention_heads = 256 / 8"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0 must be a number above 0"),
        ("olmo3", {"rope_parameters": {SLIDING: 3, FULL: {}}}, "rope_parameters = 3 must be an object"),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, 'must have an object for "full_attention" and one for'),
        ("gemma3_text", {"attn_logit_softcapping": 1.0}, "attn_logit_softcapping = 1.0 is not supported; only null"),
        ("gemma3_text", {"layer_types": None, "_sliding_window_pattern": 2}, "_sliding_window_pattern = 2 is not supported"),
        ("mistral", {"layer_types": [FULL] * 4, "sliding_window": 7}, 'layer_types = ["full_attention", "full_attention"'),
        ("llama", {"layer_types": [FULL] * 3}, 'layer_types = ["full_attention", "full_attention", "full_attention"]'),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers = -1 must be an integer of"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(name: str, changes: dict[str, Any], problem: str) -> None:
    values = values_of(name) | {"rope_theta": None, "rope_scaling": None} | changes
    with pytest.raises(HuggingFaceError) as caught:
        model_config_from_hf(values)
    assert [line for line in caught.value.problems if problem in line], caught.value.problems


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "ministral", "olmo3"])
def test_models_without_a_window_are_written_so_that_transformers_computes_them(
    name: str, tmp_path: Path
) -> None:
    config = in_float32(model_config_from_hf(values_of(name)))
    assert config.windows == ()
    model = small_model(config, dtype=torch.float32)
    folder = write(tmp_path, config, model)
    assert read_config(folder)["sliding_window"] == FAMILIES[name].defaults["sliding_window"]
    tokens, logits = logits_of(model, config)
    # Gemma 2 without soft caps makes much of the roundings of float32.
    torch.testing.assert_close(
        logits, logits_there(folder, tokens), rtol=0, atol=1e-3 * float(logits.abs().max())
    )


def test_windows_may_begin_at_the_first_layer() -> None:
    values = values_of("qwen2") | {
        "use_sliding_window": True,
        "max_window_layers": 0,
        "sliding_window": 5,
    }
    assert model_config_from_hf({**values, "layer_types": None}).windows == (5,)


def test_what_no_family_can_say_is_named_for_one_that_says_most() -> None:
    kinds = (
        LayerKind(window=37, rope="local", sink=True),
        LayerKind(sink=True, softcap=5.0),
        LayerKind(rope="none"),
    )
    model = replace(PRESETS["llama3"]["debug"], layers=kinds, local_rope=RopeConfig(theta=1000.0))
    with pytest.raises(HuggingFaceError, match=r"has no equivalent in transformers'") as caught:
        model_config_to_hf(model, max_length=LENGTH, dtype="float32")
    assert any(problem.startswith("model.layers") for problem in caught.value.problems)


def test_a_pattern_of_ten_thousand_layers_is_found_in_linear_time() -> None:
    kinds = [LayerKind()] * 9_999 + [LayerKind(window=5)]
    begun = time.process_time()
    assert (
        len(with_layers(replace(PRESETS["llama3"]["debug"], num_layers=10_000), kinds).layers)
        == 10_000
    )
    assert time.process_time() - begun < 60, "comparing every layer with every other takes minutes"


# ---- a model of several modalities


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_several_modalities(
    prefix: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    text = read_config(folders["Gemma3"])
    tensors = {
        name: x
        for path in folders["Gemma3"].glob("*.safetensors")
        for name, x in read_file(path).items()
    }
    renamed = {name.replace("model.", prefix, 1): x for name, x in tensors.items()}
    vision = {
        "vision_tower.encoder.weight": torch.ones(2),
        "multi_modal_projector.weight": torch.ones(3),
    }
    save_file(renamed | vision, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    )
    with pytest.raises(HuggingFaceError, match="--text-only imports its language model alone"):
        read_model(tmp_path)
    with pytest.raises(HuggingFaceError, match=r"tie_word_embeddings = true disagree"):
        text_model_values(
            {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
            text_only=True,
        )
    config = read_model(tmp_path, text_only=True)
    weights = hf.SafetensorsReader(tmp_path, text_only=True)
    assert weights.problems(config) == []
    assert weights.left_out == {"multi_modal_projector": 1, "vision_tower": 1}
    for spec in tensor_specs(config).values():
        assert torch.equal(weights.read(spec), tensors[spec.name])


# ---- gpt-oss: its attention; its experts are not supported


@pytest.mark.parametrize("window", [None, 7])
def test_attention_with_sinks_is_that_of_gpt_oss(window: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

    sizes: dict[str, Any] = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    types = [FULL if window is None else SLIDING]
    layers = {"num_hidden_layers": 1, "layer_types": types, "sliding_window": window or 128}
    theirs_config = transformers.GptOssConfig(
        **sizes,
        **layers,
        rope_scaling={"rope_type": "default"},
        rope_theta=500.0,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    reference = GptOssAttention(theirs_config, 0)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.zeros_(reference.o_proj.bias)
    x = torch.randn(1, 40, 24)
    positions = torch.arange(40)[None]
    distance = positions.T - positions
    mask = torch.where((distance < 0) | (distance >= (window or 40)), -torch.inf, 0.0)[None, None]
    rotation = GptOssRotaryEmbedding(theirs_config)(x, positions)
    expected = reference(x, rotation, mask)[0]
    expected.square().sum().backward()

    kind = LayerKind(qkv_bias=True, sink=True, window=window)
    config = ModelConfig(
        vocab_size=8,
        dim=24,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_dim=8,
        layers=(kind,),
    )
    attention = Attention(config, kind)
    weights = dict(reference.named_parameters())
    assert weights.keys() - dict(attention.named_parameters()) == {"o_proj.bias"}
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            parameter.copy_(weights[name])
    table = cos_sin_table(
        RopeConfig(theta=500.0, precision="float32"), 8, positions, torch.float32
    )
    out = attention(x, table, torch.tensor([[0, 40]], dtype=torch.int32))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    out.square().sum().backward()
    for name, parameter in attention.named_parameters():
        grad = weights[name].grad
        assert parameter.grad is not None and grad is not None
        assert (parameter.grad - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.parametrize(
    "name", ["Gemma2", "Gemma3", "Olmo3", "Ministral", "Qwen2 windows", "SmolLM3 windows"]
)
def test_layers_without_types_have_windows_as_in_transformers(
    name: str, folders: dict[str, Path]
) -> None:
    values = read_config(folders[name])
    types = values.pop("layer_types")
    # A window in every layer, unless stated.
    if name == "Ministral":
        types = [SLIDING] * len(types)
    kinds = model_config_from_hf(values).layer_kinds
    assert [SLIDING if kind.window else FULL for kind in kinds] == types
