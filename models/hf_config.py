"""Hugging Face's config.json: what it says in our words, and ours in its.

It has two dialects. transformers 5 has `rope_parameters` and `dtype`; 4 has `rope_theta`, `rope_scaling` and
`torch_dtype`, and ignores the others without a word. Both are written, either is read. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from models.config import ModelConfig, RopeConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
FIELDS = {
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
# What only other models have: the values with which a Llama or Qwen3 does without.
WITHOUT: dict[str, tuple[object, ...]] = {
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
ORIGINAL = "original_max_position_embeddings"
# By kind of rope: their key, our field. The first of a kind are required, those of OPTIONAL are not.
ROPE = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        ORIGINAL: "original_length",
    },
    "yarn": {
        "factor": "factor",
        ORIGINAL: "original_length",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
    },
    "longrope": {
        "factor": "factor",
        ORIGINAL: "original_length",
        "short_factor": "short_factors",
        "long_factor": "long_factors",
        "attention_factor": "attention_factor",
    },
}
OPTIONAL = {"beta_fast", "beta_slow", "truncate", "attention_factor"}
KIND_KEYS = {"rope_type", "type", "rope_theta"}
MSCALES = ("mscale", "mscale_all_dim")


class HuggingFaceError(Exception):
    """Everything that keeps a model from being read from, or written in, Hugging Face's format, one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


# ---- theirs -> ours


def parse_config(content: str | bytes) -> dict[str, Any]:
    """The keys of a config.json. Raises `HuggingFaceError`."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise HuggingFaceError([f"config.json is no JSON: {error}"]) from None
    if not isinstance(values, dict):
        raise HuggingFaceError([f"config.json must be an object, not {_told(values)}"])
    return values


def read_model(values: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes. Raises `HuggingFaceError` with everything that is not supported."""
    kind = values.get("model_type")
    if kind not in ARCHITECTURES:
        raise HuggingFaceError([_refused("model_type", kind, tuple(ARCHITECTURES))])
    wanted = [ARCHITECTURES[kind]]
    named = values.get("architectures")
    problems = [_refused("architectures", named, (wanted,))] if named not in (None, wanted) else []
    problems += [
        _refused(key, values[key], allowed)
        for key, allowed in WITHOUT.items()
        if key in values and values[key] not in allowed
    ]
    layers = values.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or any(layer != "full_attention" for layer in layers)):
        problems.append(_refused("layer_types", layers, ("full_attention",)))
    if values.get("sliding_window") is not None and values.get("use_sliding_window") is not False:
        problems.append(_refused("sliding_window", values["sliding_window"], (None,)))
    numbers = _numbers(_with_defaults(values, kind), problems)
    rope = _read_rope(values, problems)
    if problems or rope is None:
        raise HuggingFaceError(problems)
    model = ModelConfig(**numbers, qk_norm=kind == "qwen3", rope=rope)
    if found := model.problems():
        raise HuggingFaceError([f"config.json: {problem}" for problem in found])
    return model


def _with_defaults(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What transformers takes for keys that are not there."""
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    narrow = width // heads if isinstance(heads, int) and isinstance(width, int) and heads > 0 else None
    known = {key: value for key, value in values.items() if value is not None}
    defaults = {
        "num_key_value_heads": 32 if kind == "qwen3" and "num_key_value_heads" not in values else heads,
        "head_dim": 128 if kind == "qwen3" else narrow,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return defaults | known


def _numbers(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    found = {}
    for theirs, ours in FIELDS.items():
        value = values.get(theirs)
        if ours == "tie_embeddings":
            fits, rule = isinstance(value, bool), "true or false"
        elif ours == "norm_eps":
            fits, rule = _is_number(value) and value > 0, "a number above 0"
        else:
            fits, rule = isinstance(value, int) and not isinstance(value, bool) and value > 0, "an integer above 0"
        if not fits:
            problems.append(f"config.json: {theirs} = {_told(value)} must be {rule}")
        found[ours] = value
    return found


def _read_rope(values: Mapping[str, Any], problems: list[str]) -> RopeConfig | None:
    """The rope of both dialects. Where a file speaks both, they must say the same."""
    theta = values.get("rope_theta")
    base = {"rope_theta": 10_000.0 if theta is None else theta}
    dialects = {key: values[key] for key in ("rope_parameters", "rope_scaling") if values.get(key) is not None}
    if not dialects or (theta is not None and "rope_scaling" not in dialects and "rope_scaling" in values):
        dialects["rope_scaling"] = {}
    found = {}
    for key, rope in dialects.items():
        if not isinstance(rope, dict):
            problems.append(f"config.json: {key} = {_told(rope)} must be an object")
        elif (read := _rope_of(key, base | rope, values, problems)) is not None:
            found[key] = read
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        problems.append(
            f"config.json: rope_parameters = {_told(values['rope_parameters'])} and rope_theta = {_told(theta)}, "
            f"rope_scaling = {_told(values.get('rope_scaling'))} are not the same"
        )
    return next(iter(found.values()), None)


def _rope_of(name: str, rope: Mapping[str, Any], values: Mapping[str, Any], problems: list[str]) -> RopeConfig | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE:
        problems.append(_refused(f"{name}.rope_type", kind, tuple(ROPE)))
        return None
    known, before = ROPE[kind], len(problems)
    given = {key: value for key, value in rope.items() if value is not None}
    if kind in ("llama3", "yarn", "longrope"):
        original = values.get(ORIGINAL) or given.get(ORIGINAL) or values.get("max_position_embeddings")
        given |= {} if original is None else {ORIGINAL: original}
        longest = values.get("max_position_embeddings")
        if kind != "llama3" and "factor" not in given and _is_number(longest) and _is_number(original):
            given["factor"] = longest / original
    given |= _mscale(kind, given)
    if kind == "longrope" and given.get("attention_factor") == _sharpened(given.get("factor"), given.get(ORIGINAL)):
        given.pop("attention_factor", None)
    unknown = given.keys() - known.keys() - KIND_KEYS - (set(MSCALES) if kind == "yarn" else set())
    problems += [_refused(f"{name}.{key}", given[key], (None,)) for key in sorted(unknown) if not _is_whole(key, given)]
    missing = known.keys() - given.keys() - OPTIONAL
    problems += [f'config.json: {name} of rope_type "{kind}" lacks {key}' for key in sorted(missing)]
    fields = {"theta": given["rope_theta"]} | {known[key]: value for key, value in given.items() if key in known}
    for key, value in fields.items():
        if key.endswith("_factors"):
            fits = isinstance(value, list) and all(map(_is_number, value))
        else:
            fits = isinstance(value, bool) if key == "truncate" else _is_number(value) and value > 0
        if not fits:
            problems.append(f"config.json: {name} has {key} = {_told(value)}")
    if len(problems) > before:
        return None
    read: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return RopeConfig(**{"kind": kind} | read)


def _is_whole(key: str, given: Mapping[str, Any]) -> bool:
    return key == "partial_rotary_factor" and given[key] == 1


def _mscale(kind: str, given: Mapping[str, Any]) -> dict[str, float]:
    """DeepSeek's way to name yarn's attention factor."""
    if kind != "yarn" or "attention_factor" in given or not all(_is_number(given.get(key)) for key in MSCALES):
        return {}
    factor = given.get("factor")
    stretch = 0.1 * math.log(factor) if _is_number(factor) and factor > 1 else 0.0
    one, all_dim = (given[key] * stretch + 1 for key in MSCALES)
    return {"attention_factor": one / all_dim}


def _sharpened(factor: object, original: object) -> float | None:
    """What longrope multiplies cosine and sine by where nothing is given."""
    if not _is_number(factor) or not _is_number(original) or factor <= 1 or original <= 1:
        return None
    return math.sqrt(1 + math.log(factor) / math.log(original))


# ---- ours -> theirs


def write_model(
    model: ModelConfig, *, length: int, dtype: str, bos: int | None = None, eos: int | None = None
) -> dict[str, Any]:
    """A config.json for a model trained on `length` tokens. Raises `HuggingFaceError` for what it has no words for."""
    kind = "qwen3" if model.qk_norm else "llama"
    problems = model.problems()
    if model.nope_every is not None:
        problems.append(f"model.nope_every = {model.nope_every}: neither Llama nor Qwen3 has layers without rotation")
    if kind == "llama" and model.dim % model.num_heads:
        dim, heads = model.dim, model.num_heads
        problems.append(f"model.dim = {dim} is no multiple of model.num_heads = {heads}, as transformers' Llama needs")
    if problems:
        raise HuggingFaceError(problems)
    scaling = _write_rope(model.rope)
    # Where transformers 4 looks for it; else it takes `length`.
    original = {ORIGINAL: model.rope.original_length} if model.rope.kind == "longrope" else {}
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **{theirs: getattr(model, ours) for theirs, ours in FIELDS.items()},
        "hidden_act": "silu",
        "max_position_embeddings": length,
        **original,
        "rope_theta": model.rope.theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": model.rope.theta},
        **({"use_sliding_window": False} if kind == "qwen3" else {"mlp_bias": False}),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _write_rope(rope: RopeConfig) -> dict[str, Any]:
    """What a rope is besides its theta; empty for one that is not stretched."""
    if rope.kind == "default":
        return {}
    fields = {theirs: getattr(rope, ours) for theirs, ours in ROPE[rope.kind].items()}
    if rope.kind == "longrope":  # transformers 4 would find another, from the trained length.
        fields["attention_factor"] = rope.attention_factor or _sharpened(rope.factor, rope.original_length)
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
    return {"rope_type": rope.kind} | {key: value for key, value in lists.items() if value is not None}


# ---- between two


def differences(theirs: ModelConfig, ours: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Every field that differs, those of `rope.` as far as the kinds have them, with its value there and here."""
    fields = [field.name for field in dataclasses.fields(ModelConfig) if field.name != "rope"]
    both = {key: (getattr(theirs, key), getattr(ours, key)) for key in fields}
    for key in rope_fields(theirs.rope) | rope_fields(ours.rope):
        both[f"rope.{key}"] = getattr(theirs.rope, key), getattr(ours.rope, key)
    return {key: (there, here) for key, (there, here) in both.items() if there != here}


def rope_fields(rope: RopeConfig) -> dict[str, None]:
    """The fields that mean something for this kind, in order."""
    return dict.fromkeys(("kind", "theta", *ROPE[rope.kind].values()))


def _refused(key: str, value: object, allowed: tuple[object, ...]) -> str:
    return f"config.json: {key} = {_told(value)} is not supported; only {' or '.join(map(_told, allowed))}"


def _told(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
