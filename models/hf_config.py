"""Conversion between Hugging Face's config.json and `ModelConfig`. Imports no torch.

`models/hf_families.py` has what each `model_type` means. An export takes the first one whose config.json, read back, is
the same model again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from models.config import ALIKE_OPTIONS, MAX_LAYERS, ModelConfig
from models.hf import HuggingFaceError, format_value, read_config, text_model_values
from models.hf_families import BASE_DEFAULTS, COMMON_KEYS, FAMILIES, FULL, OFF, SLIDING, Family
from models.hf_rope import (
    ORIGINAL_LENGTH_KEY,
    is_number,
    rope_fields,
    rope_from_hf,
    rope_to_hf,
    unsupported,
    without_default_factor,
)
from models.layers import LayerKind
from models.rope_config import RopeConfig

ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
ROPES = ("rope", "local_rope")


# ---- Hugging Face -> ModelConfig


def read_model(folder: Path, *, text_only: bool = False) -> ModelConfig:
    """The model that the folder's config.json describes. Raises `HuggingFaceError`."""
    return model_config_from_hf(text_model_values(read_config(folder), text_only=text_only))


def model_config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes. Raises `HuggingFaceError` with everything unsupported."""
    model_type = values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise HuggingFaceError([unsupported("model_type", model_type, tuple(FAMILIES))])
    present = _with_defaults(values, family)
    problems = [*_feature_problems(values, family)]
    fields = _read_fields(present, problems)
    ropes = _read_ropes(present, family, problems)
    kinds = [] if problems else [*_read_layers(present, family, problems)]
    if problems:
        raise HuggingFaceError(problems)
    for key, (option, read, _) in family.keys.items():
        value = present.get(key)
        if value is not None and not (is_number(value) and value > 0):
            problems.append(f"config.json: {key} = {format_value(value)} must be a number above 0")
            continue
        fields[option] = None if value is None else read(value)
    if problems:
        raise HuggingFaceError(problems)
    if family.scales_embeddings:
        fields["embedding_multiplier"] = fields["dim"] ** 0.5
    if fields.get("attention_scale") == fields["head_dim"] ** -0.5:
        fields["attention_scale"] = None
    options: dict[str, Any] = {**fields, **family.options, **ropes}
    model = with_layers(ModelConfig(**options, model_type=str(model_type)), kinds)
    if model_problems := [*model.problems(), *_shape_problems(model, family)]:
        raise HuggingFaceError([f"config.json: {problem}" for problem in model_problems])
    return model


def _with_defaults(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Fills absent keys, and those whose null means a value, with transformers' defaults."""
    # A theta belongs to the older format if it is stated: its default comes where the rope is read.
    thetas = {"rope_theta", family.local_theta_key}
    defaults = {key: value for key, value in {**BASE_DEFAULTS, **family.defaults}.items() if key not in thetas}
    present = {**defaults, **values}
    heads, width = present.get("num_attention_heads"), present.get("hidden_size")
    if present.get("num_key_value_heads") is None:
        present["num_key_value_heads"] = heads
    if present.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads > 0:
        present["head_dim"] = width // heads
    return present


def _feature_problems(values: Mapping[str, Any], family: Family) -> Iterable[str]:
    """Keys that are not known, and values of features that our model does not have."""
    activation = ACTIVATIONS[family.options.get("activation", "silu")]
    allowed = {
        **OFF,
        "architectures": ([family.architecture], None),
        **dict.fromkeys(family.activation_keys, (activation, None)),
    }
    if family.architecture == "Qwen2ForCausalLM":  # q, k and v have biases, and o has none, whatever the key says.
        del allowed["attention_bias"]
    allowed = {key: only for key, only in allowed.items() if key not in family.keys}
    count: Any = values.get("num_hidden_layers")
    has_window = family.has_window and values.get("sliding_window", 0) is not None
    all_full = [FULL] * count if is_count(count, MAX_LAYERS) and not has_window else None
    for key, value in values.items():
        if key in allowed:
            if value not in allowed[key]:
                yield unsupported(key, value, allowed[key])
        elif key not in family.known_keys and value is not None:
            is_all_full = key == "layer_types" and value == all_full
            if key in ("sliding_window", "layer_types") and not is_all_full:
                yield unsupported(key, value, (None,))
            elif not is_all_full:
                yield f"config.json: {key} = {format_value(value)} is unknown for model_type {values['model_type']}"


def _read_fields(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    fields = {}
    for theirs, ours in COMMON_KEYS.items():
        value = values.get(theirs)
        if ours == "tie_embeddings":
            is_valid, rule = isinstance(value, bool), "true or false"
        elif ours == "norm_eps":
            is_valid, rule = is_number(value) and value > 0, "a number above 0"
        elif ours == "num_layers":
            is_valid, rule = is_count(value, MAX_LAYERS), f"an integer from 1 to {MAX_LAYERS}"
        else:
            is_valid, rule = is_count(value), "an integer above 0"
        if not is_valid:
            problems.append(f"config.json: {theirs} = {format_value(value)} must be {rule}")
        fields[ours] = value
    return fields


def is_count(value: object, largest: int = 2**31 - 1, *, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= largest


def _read_ropes(values: Mapping[str, Any], family: Family, problems: list[str]) -> dict[str, RopeConfig]:
    parameters = values.get("rope_parameters")
    if not family.has_local_rope:
        views = {"rope": values}
    elif isinstance(parameters, dict) and not parameters.keys() <= {FULL, SLIDING}:
        rule = f'must have an object for "{FULL}" and one for "{SLIDING}"'
        problems.append(f"config.json: rope_parameters = {format_value(parameters)} {rule}")
        return {}
    else:
        local = {**values, "rope_theta": values.get(family.local_theta_key), "rope_scaling": None}
        views = {"rope": _rope_of_layers(values, FULL), "local_rope": _rope_of_layers(local, SLIDING)}
    theta = values.get("rope_theta") or family.defaults.get("rope_theta", BASE_DEFAULTS["rope_theta"])
    default_thetas = {"rope": theta, "local_rope": family.defaults.get(family.local_theta_key, theta)}
    ropes = dict[str, RopeConfig]()
    for name, view in views.items():
        if (rope := rope_from_hf(view, problems, default_theta=default_thetas[name])) is not None:
            ropes[name] = rope
            if rope.kind not in family.rope_kinds:
                problems.append(unsupported("rope_type", rope.kind, family.rope_kinds))
    return ropes


def _rope_of_layers(values: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    """With the `rope_parameters` of layers of this type only."""
    parameters = values.get("rope_parameters")
    if not isinstance(parameters, dict):
        return values
    return {**values, "rope_parameters": parameters.get(layer_type) or {"rope_type": "default"}}


def _read_layers(values: Mapping[str, Any], family: Family, problems: list[str]) -> Iterable[LayerKind]:
    """Each layer's kind, as far as it differs between layers."""
    count, window = values["num_hidden_layers"], values.get("sliding_window")
    types = values.get("layer_types") if family.has_layer_types else None
    if types is not None and not (
        isinstance(types, list) and len(types) == count and all(each in (FULL, SLIDING) for each in types)
    ):
        rule = f'must have {count} items "{FULL}" or "{SLIDING}", one per layer'
        problems.append(f"config.json: layer_types = {format_value(types)} {rule}")
    switch = values.get("use_sliding_window")
    if not isinstance(switch, bool | None):
        problems.append(f"config.json: use_sliding_window = {format_value(switch)} must be true or false")
    smallest = {"sliding_window": 1, "max_window_layers": 0, "sliding_window_pattern": 1}
    problems += [
        f"config.json: {key} = {format_value(value)} must be an integer {'above 0' if least else 'of at least 0'}"
        for key, least in smallest.items()
        if (value := values.get(key)) is not None and family.has_window and not is_count(value, least=least)
    ]
    # transformers writes it beside layer_types, and does not read it.
    pattern, unread = values.get("sliding_window_pattern"), values.get("_sliding_window_pattern")
    if types is None and unread not in (None, pattern):
        problems.append(unsupported("_sliding_window_pattern", unread, (pattern,)))
    ropes = _rotated_layers(values, family, problems)
    if problems:
        return
    window = None if switch is False else window
    given = {**values, "no_rope_layers": ropes}
    for layer in range(count):
        has_window = types[layer] == SLIDING if types else bool(family.has_window and family.has_window(given, layer))
        if types and has_window and window is None:
            problems.append(f'config.json: layer_types names "{SLIDING}", but no sliding_window is used')
            return
        is_local = has_window and family.has_local_rope
        yield LayerKind(
            window=window if has_window else None, rope="local" if is_local else "global" if ropes[layer] else "none"
        )


def _rotated_layers(values: Mapping[str, Any], family: Family, problems: list[str]) -> list[int]:
    """1 for each layer that rotates queries and keys."""
    count = values["num_hidden_layers"]
    if "no_rope_layers" not in family.window_keys:
        return [1] * count
    stated, interval = values.get("no_rope_layers"), values["no_rope_layer_interval"]
    if not is_count(interval):
        problems.append(f"config.json: no_rope_layer_interval = {format_value(interval)} must be an integer above 0")
    elif stated is None:
        return [int((layer + 1) % interval != 0) for layer in range(count)]
    elif not isinstance(stated, list) or len(stated) != count or any(each not in (0, 1) for each in stated):
        problems.append(f"config.json: no_rope_layers = {format_value(stated)} must have {count} items 0 or 1")
    else:
        return stated
    return []


def with_layers(model: ModelConfig, kinds: list[LayerKind]) -> ModelConfig:
    """The model whose layers also differ as these do: options of all layers, or the shortest pattern that repeats."""
    defaults = {name: getattr(model, name) for name in ALIKE_OPTIONS}
    kinds = [dataclasses.replace(kind, **defaults | {"window": kind.window}) for kind in kinds]
    # Numbers compare faster, for ten thousand layers.
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    order = [numbers[kind] for kind in kinds]
    period = next(size for size in range(1, len(order) + 1) if order[size:] == order[: len(order) - size])
    if period == 1 and kinds[0].rope == "global":
        return dataclasses.replace(model, window=kinds[0].window)
    return dataclasses.replace(
        model, layers=tuple(kinds[:period]), **{name: getattr(ModelConfig, name) for name in ALIKE_OPTIONS}
    )


def _shape_problems(model: ModelConfig, family: Family) -> Iterable[str]:
    dim, heads, name = model.dim, model.num_heads, family.architecture
    if family.derives_head_dim and model.head_dim * heads != dim:
        width = f"model.head_dim = {model.head_dim}"
        yield f"{width} must be model.dim / model.num_heads = {dim} / {heads} for transformers' {name}"
    if family.needs_even_heads and dim % heads:
        yield f"model.dim = {dim} must be a multiple of model.num_heads = {heads} for transformers' {name}"


# ---- ModelConfig -> Hugging Face


def model_config_to_hf(
    model: ModelConfig, *, max_length: int, dtype: str, bos: int | None = None, eos: int | None = None
) -> dict[str, Any]:
    """The config.json of a model trained on `max_length` tokens. Raises `HuggingFaceError` for what it cannot express."""
    if problems := model.problems():
        raise HuggingFaceError(problems)
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
    """What this family can say of the model."""
    family, kinds = FAMILIES[model_type], model.layer_kinds
    activation = ACTIVATIONS[family.options.get("activation", "silu")]
    values: dict[str, Any] = {"architectures": [family.architecture], "model_type": model_type}
    values |= {theirs: getattr(model, ours) for theirs, ours in COMMON_KEYS.items()}
    values |= dict.fromkeys(family.activation_keys, activation) | {"max_position_embeddings": max_length}
    values |= {
        key: None if (value := _option(model, option)) is None else write(value)
        for key, (option, _, write) in family.keys.items()
    }
    values |= dict.fromkeys(family.bias_keys, False) | {"attention_dropout": 0.0}
    if family.derives_head_dim:
        del values["head_dim"]
    values |= _write_ropes(model, family) | _write_layers(kinds, family)
    if family.states_longrope_by_length and model.rope.kind == "longrope":
        scaling, original = values["rope_scaling"], model.rope.original_length
        values["rope_scaling"] = {"type": "longrope", **{key: scaling[key] for key in ("short_factor", "long_factor")}}
        values["max_position_embeddings"] = round(model.rope.factor * original)
    return values


def _option(model: ModelConfig, name: str) -> Any:
    """Of the model, or of its first layer."""
    if name == "attention_scale" and model.attention_scale is None:
        return model.head_dim**-0.5
    return getattr(model.layer_kinds[0] if name in ALIKE_OPTIONS else model, name)


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
        local_rope = model.local_rope if model.has_local_rope else RopeConfig(theta=model.rope.theta)
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
    """(their value, our value) of every field that differs, including the `rope.` fields that either kind uses.

    Options of layers are compared for all layers at once where they agree, else as `layers`; which layers rotate, as `rope.layers`.
    """
    keys = {each.name for each in dataclasses.fields(ModelConfig)}
    keys -= {*ROPES, *ALIKE_OPTIONS, "layers", "nope_every", "model_type"}
    pairs: dict[str, tuple[Any, Any]] = {key: (getattr(theirs, key), getattr(ours, key)) for key in sorted(keys)}
    pairs["attention_scale"] = _option(theirs, "attention_scale"), _option(ours, "attention_scale")
    common = [model.common_options for model in (theirs, ours)]
    alike = common[0].keys() & common[1].keys()
    pairs |= {name: (common[0][name], common[1][name]) for name in sorted(alike)}
    pairs["rope.layers"] = _by_layer(theirs, ["rope"]), _by_layer(ours, ["rope"])
    differing = [each.name for each in dataclasses.fields(LayerKind) if each.name not in {"rope", *alike}]
    pairs["layers"] = _by_layer(theirs, differing), _by_layer(ours, differing)
    for name in ROPES:
        if name == "local_rope" and not (theirs.has_local_rope and ours.has_local_rope):
            continue
        their_rope, our_rope = (without_default_factor(getattr(model, name)) for model in (theirs, ours))
        for key in rope_fields(their_rope) | rope_fields(our_rope):
            pairs[f"{name}.{key}"] = getattr(their_rope, key), getattr(our_rope, key)
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _by_layer(model: ModelConfig, options: list[str]) -> list[dict[str, Any]]:
    return [{name: getattr(kind, name) for name in options} for kind in model.layer_kinds]


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
