"""Conversion of `ModelConfig` to Hugging Face's config.json, and the differences of two models.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from models.config import ALIKE_OPTIONS, ModelConfig
from models.hf import HuggingFaceError
from models.hf_config import ROPES, model_config_from_hf
from models.hf_families import FAMILIES
from models.hf_family import COMMON_KEYS, FULL, SLIDING, Family
from models.hf_keys import ACTIVATIONS
from models.hf_rope import ORIGINAL_LENGTH_KEY, rope_fields, rope_to_hf, without_default_factor
from models.layers import LayerKind
from models.rope_config import RopeConfig


def model_config_to_hf(
    model: ModelConfig,
    *,
    max_length: int,
    dtype: str,
    bos: int | None = None,
    eos: int | None = None,
) -> dict[str, Any]:
    """The config.json of a model trained on `max_length` tokens.

    Raises `HuggingFaceError` for what it cannot express.
    """
    if problems := model.problems():
        raise HuggingFaceError(problems)
    # Every family is tried, the model's own first. The first whose config.json reads back as the
    # same model is taken; else the error lists what the closest one cannot express.
    nearest = list[str]()
    for model_type in sorted(FAMILIES, key=lambda name: name != model.model_type):
        values = _write(model, model_type, max_length)
        try:
            changes = config_differences(model_config_from_hf(values), model)
            problems = [
                f"model.{key} = {_shorten(ours)} has no equivalent in transformers' {model_type}"
                for key, (_, ours) in changes.items()
            ]
        except HuggingFaceError as error:
            if model_type != model.model_type:
                continue
            problems = [problem.removeprefix("config.json: ") for problem in error.problems]
        if not problems:
            return values | {
                "initializer_range": 0.02,
                "use_cache": True,
                "bos_token_id": bos,
                "eos_token_id": eos,
                "pad_token_id": None,
                "dtype": dtype,
                "torch_dtype": dtype,
            }
        nearest = min(nearest or problems, problems, key=len)
    raise HuggingFaceError(nearest)


def _write(model: ModelConfig, model_type: str, max_length: int) -> dict[str, Any]:
    """The config.json of a model as one family can express it."""
    family = FAMILIES[model_type]
    kinds = model.layer_kinds
    activation = ACTIVATIONS[family.options.get("activation", "silu")]
    values: dict[str, Any] = {"architectures": [family.architecture], "model_type": model_type}
    values |= {theirs: getattr(model, ours) for theirs, ours in COMMON_KEYS.items()}
    values |= dict.fromkeys(family.activation_keys, activation) | {
        "max_position_embeddings": max_length
    }
    values |= {
        key: None if (value := _option(model, option)) is None else write(value)
        for key, (option, _, write, _) in family.keys.items()
    }
    values |= {key: only[0] for key, only in family.allowed.items()} | _write_experts(
        model, family
    )
    values |= dict.fromkeys(family.bias_keys, False) | {"attention_dropout": 0.0}
    if family.derives_head_dim:
        del values["head_dim"]
    values |= _write_ropes(model, family) | _write_layers(kinds, family)
    # transformers 4 takes longrope's factor from the two lengths, and ignores a stated one.
    if family.states_longrope_by_length and model.rope.kind == "longrope":
        scaling = values["rope_scaling"]
        original = model.rope.original_length
        values["rope_scaling"] = {
            "type": "longrope",
            **{key: scaling[key] for key in ("short_factor", "long_factor")},
        }
        values["max_position_embeddings"] = round(model.rope.factor * original)
    return values


def _write_experts(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Keys that say which layers have experts, and how many are shared."""
    dense = [layer for layer, kind in enumerate(model.layer_kinds) if kind.feed_forward == "gated"]
    shared = model.sizes["Z"] // model.expert_dim if model.expert_dim else 0
    known = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "max_window_layers": model.num_layers,
        "first_k_dense_replace": len(dense),
        "n_shared_experts": shared,
        "partial_rotary_factor": model.rope.partial,
    }
    return {key: known[key] for key in family.expert_keys}


def _option(model: ModelConfig, name: str) -> Any:
    """An option of the model, or of its first layer that may have it."""
    if name == "attention_scale" and model.attention_scale is None:
        return model.head_dim**-0.5
    if name not in ALIKE_OPTIONS:
        return getattr(model, name)
    return getattr(
        next(
            (kind for kind in model.layer_kinds if kind.feed_forward == "moe"),
            model.layer_kinds[0],
        ),
        name,
    )


def _write_ropes(model: ModelConfig, family: Family) -> dict[str, Any]:
    scaling = rope_to_hf(model.rope)
    values: dict[str, Any] = {
        "rope_theta": model.rope.theta,
        "rope_scaling": None if model.rope.kind == "default" else scaling,
        "rope_parameters": scaling | {"rope_theta": model.rope.theta},
    }
    if model.rope.kind == "longrope":
        # transformers 4 reads it here, and falls back to `max_position_embeddings`.
        values[ORIGINAL_LENGTH_KEY] = model.rope.original_length
    if family.has_local_rope:
        local_rope = (
            model.local_rope if model.has_local_rope else RopeConfig(theta=model.rope.theta)
        )
        local = rope_to_hf(local_rope) | {"rope_theta": local_rope.theta}
        values["rope_parameters"] = {FULL: values["rope_parameters"], SLIDING: local}
        if family.local_theta_key not in values:
            values[family.local_theta_key] = local_rope.theta
    return values


def _write_layers(kinds: tuple[LayerKind, ...], family: Family) -> dict[str, Any]:
    windows = [kind.window for kind in kinds]
    values: dict[str, Any] = {}
    if family.has_window:
        values["sliding_window"] = next((window for window in windows if window is not None), None)
    if "use_sliding_window" in family.window_keys:
        values["use_sliding_window"] = values["sliding_window"] is not None
    elif family.has_layer_types and values["sliding_window"] is None:
        # transformers computes the mask of windows even if no layer has one.
        values["sliding_window"] = family.defaults["sliding_window"]
    if family.has_layer_types:
        values["layer_types"] = [FULL if window is None else SLIDING for window in windows]
    if "no_rope_layers" in family.window_keys:
        values["no_rope_layers"] = [int(kind.rope != "none") for kind in kinds]
    return values


# ---- comparison


def config_differences(theirs: ModelConfig, ours: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """(their value, our value) of every field that differs, including the `rope.` fields that
    either kind uses.

    Options of layers are compared for all layers at once where they agree, else as `layers`; which
    layers rotate, as `rope.layers`.
    """
    keys = {each.name for each in dataclasses.fields(ModelConfig)}
    # Two configurations may state the same layers differently: these are compared by layer below.
    keys -= {*ROPES, *ALIKE_OPTIONS, "layers", "nope_every", "model_type"}
    pairs: dict[str, tuple[Any, Any]] = {
        key: (getattr(theirs, key), getattr(ours, key)) for key in sorted(keys)
    }
    pairs["shared_expert_dim"] = theirs.sizes["Z"], ours.sizes["Z"]
    kinds = [*theirs.layer_kinds, *ours.layer_kinds]
    # A field that no layer of either model reads makes no difference.
    if not any(kind.shared_expert for kind in kinds):
        del pairs["shared_expert_dim"]
    if all(kind.feed_forward == "moe" for kind in kinds):
        del pairs["ffn_dim"]
    pairs["attention_scale"] = _option(theirs, "attention_scale"), _option(ours, "attention_scale")
    common = [model.common_options for model in (theirs, ours)]
    alike = common[0].keys() & common[1].keys()
    pairs |= {name: (common[0][name], common[1][name]) for name in sorted(alike)}
    pairs["rope.layers"] = _by_layer(theirs, ["rope"]), _by_layer(ours, ["rope"])
    differing = [
        each.name for each in dataclasses.fields(LayerKind) if each.name not in {"rope", *alike}
    ]
    pairs["layers"] = _by_layer(theirs, differing), _by_layer(ours, differing)
    for name in ROPES:
        if name == "local_rope" and not (theirs.has_local_rope and ours.has_local_rope):
            continue
        their_rope, our_rope = (
            without_default_factor(getattr(model, name)) for model in (theirs, ours)
        )
        for key in rope_fields(their_rope) | rope_fields(our_rope):
            pairs[f"{name}.{key}"] = getattr(their_rope, key), getattr(our_rope, key)
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _by_layer(model: ModelConfig, options: list[str]) -> list[dict[str, Any]]:
    return [{name: getattr(kind, name) for name in options} for kind in model.layer_kinds]


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
