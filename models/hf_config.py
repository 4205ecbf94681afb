"""Conversion between Hugging Face's config.json and `ModelConfig`. Imports no torch.

There are two formats. transformers 5 uses `rope_parameters` and `dtype`; transformers 4 uses `rope_theta`,
`rope_scaling` and `torch_dtype`, and silently ignores the others. We write both and read either.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from models.config import ALIKE_OPTIONS, ROPE_FIELDS, ModelConfig, RopeConfig
from models.hf import CONFIG_FILE, HuggingFaceError
from models.layers import LayerKind
from models.rope_scaling import attention_factor

EXPORTED_OPTIONS = {"", "qk_norm", "qkv_bias"}
"""Of declared parameters."""
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
CONFIG_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
# Features that our model does not have: the values that switch them off.
SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "quantization_config": (None,),
    "auto_map": (None,),
}
ORIGINAL_LENGTH_KEY = "original_max_position_embeddings"
# Our rope field -> their key, where the names differ.
ROPE_KEYS = {
    "original_length": ORIGINAL_LENGTH_KEY,
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
OPTIONAL_ROPE_KEYS = {"beta_fast", "beta_slow", "truncate", "attention_factor"}
ROPE_TYPE_KEYS = {"rope_type", "type", "rope_theta"}
MSCALES = ("mscale", "mscale_all_dim")  # DeepSeek's form of yarn's attention factor.


# ---- Hugging Face -> ModelConfig


def read_config(folder: Path) -> dict[str, Any]:
    """The content of the folder's config.json. Raises `HuggingFaceError`."""
    try:
        values = json.loads((folder / CONFIG_FILE).read_bytes())
    except OSError as error:
        raise HuggingFaceError(
            [f"{folder / CONFIG_FILE} cannot be read: {error.strerror} (models are not downloaded)"]
        ) from None
    except (ValueError, RecursionError) as error:
        raise HuggingFaceError([f"config.json is not valid JSON: {error}"]) from None
    if not isinstance(values, dict):
        raise HuggingFaceError([f"config.json must be an object, not {_format_value(values)}"])
    return values


def model_config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes. Raises `HuggingFaceError` with everything unsupported."""
    model_type = values.get("model_type")
    if model_type not in ARCHITECTURES:
        raise HuggingFaceError([_unsupported("model_type", model_type, tuple(ARCHITECTURES))])
    supported = SUPPORTED_VALUES | {"architectures": ([ARCHITECTURES[model_type]], None)}
    if values.get("use_sliding_window", None if model_type == "llama" else False) is not False:
        supported["sliding_window"] = (None,)
    if model_type == "qwen2":  # q, k and v have biases, and o has none, whatever the key says.
        del supported["attention_bias"]
    problems = [
        _unsupported(key, values[key], allowed)
        for key, allowed in supported.items()
        if key in values and values[key] not in allowed
    ]
    layers = values.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or any(layer != "full_attention" for layer in layers)):
        problems.append(_unsupported("layer_types", layers, ("full_attention",)))
    fields = _read_fields(_with_defaults(values, model_type), problems)
    rope = _rope_from_hf(values, problems)
    if problems or rope is None:
        raise HuggingFaceError(problems)
    model = ModelConfig(**fields, qk_norm=model_type == "qwen3", qkv_bias=model_type == "qwen2", rope=rope)
    if model_problems := _model_problems(model):
        raise HuggingFaceError([f"config.json: {problem}" for problem in model_problems])
    return model


def _with_defaults(values: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Fills absent keys with transformers' defaults."""
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    default_head_dim = width // heads if isinstance(heads, int) and isinstance(width, int) and heads > 0 else None
    present = {key: value for key, value in values.items() if value is not None}
    defaults = {
        "num_key_value_heads": heads if model_type == "llama" or "num_key_value_heads" in values else 32,
        "head_dim": 128 if model_type == "qwen3" else default_head_dim,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return defaults | present


def _read_fields(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    fields = {}
    for theirs, ours in CONFIG_FIELDS.items():
        value = values.get(theirs)
        if ours == "tie_embeddings":
            is_valid, rule = isinstance(value, bool), "true or false"
        elif ours == "norm_eps":
            is_valid, rule = _is_number(value) and value > 0, "a number above 0"
        else:
            is_valid, rule = isinstance(value, int) and not isinstance(value, bool) and value > 0, "an integer above 0"
        if not is_valid:
            problems.append(f"config.json: {theirs} = {_format_value(value)} must be {rule}")
        fields[ours] = value
    return fields


def _rope_from_hf(values: Mapping[str, Any], problems: list[str]) -> RopeConfig | None:
    """Reads the rope from either format; if both are present they must agree."""
    theta = values.get("rope_theta")
    default = {"rope_theta": 10_000.0 if theta is None else theta}
    dialects = {key: values[key] for key in ("rope_parameters", "rope_scaling") if values.get(key) is not None}
    if not dialects or (theta is not None and "rope_scaling" not in dialects and "rope_scaling" in values):
        dialects["rope_scaling"] = {}
    ropes = {}
    for name, rope in dialects.items():
        if not isinstance(rope, dict):
            problems.append(f"config.json: {name} = {_format_value(rope)} must be an object")
            continue
        present = default | {key: value for key, value in rope.items() if value is not None}
        if (parsed := _parse_rope(name, present, values, problems)) is not None:
            ropes[name] = parsed
    if len(ropes) == 2 and ropes["rope_parameters"] != ropes["rope_scaling"]:
        problems.append(
            f"config.json: rope_parameters = {_format_value(values['rope_parameters'])} and rope_theta = {_format_value(theta)}, "
            f"rope_scaling = {_format_value(values.get('rope_scaling'))} disagree"
        )
    return next(iter(ropes.values()), None)


def _parse_rope(name: str, rope: dict[str, Any], values: Mapping[str, Any], problems: list[str]) -> RopeConfig | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        problems.append(_unsupported(f"{name}.rope_type", kind, tuple(ROPE_FIELDS)))
        return None
    field_of, num_problems = {key: field for field, key in _rope_keys(kind).items()}, len(problems)
    present = rope | _derived_rope_values(kind, rope, values)
    known = field_of.keys() | ROPE_TYPE_KEYS | (set(MSCALES) if kind == "yarn" else set())
    problems += [
        _unsupported(f"{name}.{key}", value, (None,))
        for key, value in sorted(present.items())
        if key not in known and (key, value) != ("partial_rotary_factor", 1)
    ]
    missing = field_of.keys() - present.keys() - OPTIONAL_ROPE_KEYS
    problems += [f'config.json: {name} of rope_type "{kind}" needs {key}' for key in sorted(missing)]
    fields: dict[str, Any] = {"theta": present["rope_theta"]}
    for key, field in field_of.items():
        if key in present:
            fields[field] = tuple(present[key]) if isinstance(present[key], list) else present[key]
    for key, value in fields.items():
        if key.endswith("_factors"):
            is_valid = isinstance(value, tuple) and all(map(_is_number, value))
        else:
            is_valid = isinstance(value, bool) if key == "truncate" else _is_number(value) and value > 0
        if not is_valid:
            problems.append(f"config.json: {name} has an invalid {key} = {_format_value(value)}")
    if len(problems) > num_problems:
        return None
    return _without_default_factor(RopeConfig(**{"kind": kind} | fields))


def _without_default_factor(rope: RopeConfig) -> RopeConfig:
    """The rope without an attention factor that equals longrope's default, which every export states."""
    if rope.kind != "longrope" or min(rope.factor, rope.original_length) <= 1:
        return rope
    default = dataclasses.replace(rope, attention_factor=None)
    return default if rope.attention_factor == attention_factor(default) else rope


def _rope_keys(kind: str) -> dict[str, str]:
    """Their key of each field that this kind uses. Required, except OPTIONAL_ROPE_KEYS."""
    return {field: ROPE_KEYS.get(field, field) for field in ROPE_FIELDS[kind]}


def _derived_rope_values(kind: str, rope: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers derives from other keys."""
    derived = dict[str, Any]()
    if "original_length" in ROPE_FIELDS[kind]:
        max_length = values.get("max_position_embeddings")
        original_length = values.get(ORIGINAL_LENGTH_KEY) or rope.get(ORIGINAL_LENGTH_KEY) or max_length
        if original_length is not None:
            derived[ORIGINAL_LENGTH_KEY] = original_length
        if kind != "llama3" and "factor" not in rope and _is_number(max_length) and _is_number(original_length):
            derived["factor"] = max_length / original_length
    scales: list[Any] = [rope.get(key) for key in MSCALES]
    if kind == "yarn" and "attention_factor" not in rope and all(_is_number(scale) and scale for scale in scales):
        factor = (rope | derived).get("factor")
        log_scale = 0.1 * math.log(factor) if _is_number(factor) and factor > 1 else 0.0
        numerator, denominator = (scale * log_scale + 1 for scale in scales)
        derived["attention_factor"] = numerator / denominator
    return derived


# ---- ModelConfig -> Hugging Face


def model_config_to_hf(
    model: ModelConfig, *, max_length: int, dtype: str, bos: int | None = None, eos: int | None = None
) -> dict[str, Any]:
    """The config.json of a model trained on `max_length` tokens. Raises `HuggingFaceError` for what it cannot express."""
    if problems := _model_problems(model):
        raise HuggingFaceError(problems)
    kind = model.layer_kinds[0]
    model_type = "qwen3" if kind.qk_norm else "qwen2" if kind.qkv_bias else "llama"
    scaling = _rope_to_hf(model.rope)
    # transformers 4 reads it here, and falls back to `max_position_embeddings`.
    original_length = {ORIGINAL_LENGTH_KEY: model.rope.original_length} if model.rope.kind == "longrope" else {}
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        **{theirs: getattr(model, ours) for theirs, ours in CONFIG_FIELDS.items()},
        "hidden_act": "silu",
        "max_position_embeddings": max_length,
        **original_length,
        "rope_theta": model.rope.theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": model.rope.theta},
        **({"mlp_bias": False} if model_type == "llama" else {"use_sliding_window": False}),
        **({} if model_type == "qwen2" else {"attention_bias": False}),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _model_problems(model: ModelConfig) -> list[str]:
    """What makes the model invalid, or leaves it without equivalent in transformers."""
    if problems := model.problems():
        return problems
    kind, dim, heads = model.layer_kinds[0], model.dim, model.num_heads
    unknown = {each.option for each in kind.parameters.values()} - EXPORTED_OPTIONS
    if model.nope_every is not None:
        unknown.add(f"nope_every = {model.nope_every}")
    elif set(model.layer_kinds) != {LayerKind(qk_norm=kind.qk_norm, qkv_bias=kind.qkv_bias)}:
        unknown.add("layers")
    for option in sorted(unknown):
        problems.append(f"model.{option} has no equivalent in transformers' Llama, Qwen2 and Qwen3")
    if kind.qk_norm and kind.qkv_bias:
        problems.append("model.qk_norm and model.qkv_bias have no common equivalent in transformers' Qwen2 and Qwen3")
    elif kind.qkv_bias and model.head_dim * heads != dim:
        width = f"model.head_dim = {model.head_dim}"
        problems.append(f"{width} must be model.dim / model.num_heads = {dim} / {heads} for transformers' Qwen2")
    elif not kind.qk_norm and dim % heads:
        problems.append(f"model.dim = {dim} must be a multiple of model.num_heads = {heads} for transformers' Llama")
    return problems


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The rope without theta; empty for a default rope."""
    if rope.kind == "default":
        return {}
    fields = {theirs: getattr(rope, ours) for ours, theirs in _rope_keys(rope.kind).items()}
    if rope.kind == "longrope":  # transformers 4 would derive another one from the trained length.
        fields["attention_factor"] = attention_factor(rope)
    return {"rope_type": rope.kind} | {key: value for key, value in fields.items() if value is not None}


# ---- comparison


def config_differences(theirs: ModelConfig, ours: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """(their value, our value) of every field that differs, including the `rope.` fields that either kind uses."""
    keys = {field.name for field in dataclasses.fields(ModelConfig)} - {"rope", "layers"}
    pairs: dict[str, tuple[Any, Any]] = {}
    if theirs.layers or ours.layers:
        keys -= {*ALIKE_OPTIONS}
        their_layers, our_layers = (
            [dataclasses.asdict(kind) for kind in model.layer_kinds] for model in (theirs, ours)
        )
        their_ropes, our_ropes = ([kind.pop("rope") for kind in layers] for layers in (their_layers, our_layers))
        pairs["rope.layers"] = their_ropes, our_ropes
        pairs["layers"] = their_layers, our_layers
    pairs |= {key: (getattr(theirs, key), getattr(ours, key)) for key in sorted(keys)}
    their_rope, our_rope = _without_default_factor(theirs.rope), _without_default_factor(ours.rope)
    for key in rope_fields(their_rope) | rope_fields(our_rope):
        pairs[f"rope.{key}"] = getattr(their_rope, key), getattr(our_rope, key)
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def rope_fields(rope: RopeConfig) -> dict[str, None]:
    """The fields that this kind uses, in order."""
    return dict.fromkeys(("kind", "theta", *ROPE_FIELDS[rope.kind]))


def _unsupported(key: str, value: object, allowed: tuple[object, ...]) -> str:
    choices = " or ".join(map(_format_value, allowed))
    return f"config.json: {key} = {_format_value(value)} is not supported; only {choices}"


def _format_value(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
