"""Conversion of Hugging Face's config.json to `ModelConfig`. Imports no torch.

`models/hf_families.py` has what each `model_type` means. An export takes the first one whose
config.json, read back, is the same model again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from models.config import ALIKE_OPTIONS, MAX_LAYERS, ModelConfig
from models.hf import HuggingFaceError, format_value, read_config, text_model_values
from models.hf_families import BASE_DEFAULTS, FAMILIES
from models.hf_family import COMMON_KEYS, FULL, SLIDING, Family
from models.hf_keys import dtype_remarks, id_remarks, is_count, pattern_remarks, review_keys
from models.hf_rope import ROPE_KEYS, is_number, rope_from_hf, rope_problems, unsupported
from models.layers import EXPERT_OPTIONS, LayerKind
from models.rope_config import RopeConfig

ROPES = ("rope", "local_rope")
DEFAULTS = {each.name: each.default for each in dataclasses.fields(ModelConfig)}


def read_model(folder: Path, *, text_only: bool = False) -> ModelConfig:
    """The model that the folder's config.json describes. Raises `HuggingFaceError`."""
    return model_config_from_hf(text_model_values(read_config(folder), text_only=text_only))


def config_remarks(values: Mapping[str, Any], ignore_keys: Iterable[str] = ()) -> list[str]:
    """A line for everything that a config.json states and `model_config_from_hf` does not read."""
    values, _ = _without_aliases(values, family := _family(values))
    ignored = review_keys(values, family, ignore_keys).ignored
    return [*ignored, *id_remarks(values), *pattern_remarks(values), *dtype_remarks(values)]


def model_config_from_hf(
    values: Mapping[str, Any], ignore_keys: Iterable[str] = ()
) -> ModelConfig:
    """The model that a config.json describes. Raises `HuggingFaceError` with everything
    unsupported.

    `ignore_keys`: keys that are not known, and need not be.
    """
    family = _family(values)
    model_type = values["model_type"]
    values, problems = _without_aliases(values, family)
    present = _with_defaults(values, family)
    problems += review_keys(values, family, ignore_keys).problems
    problems += rope_problems(values, family.local_theta_key)
    fields = _read_fields(present, problems)
    ropes = _read_ropes(present, family, problems)
    kinds = [] if problems else [*_read_layers(present, family, problems)]
    if problems:
        raise HuggingFaceError(problems)
    for key, (option, read, _, rule) in family.keys.items():
        value = present.get(key)
        is_required = isinstance(DEFAULTS.get(option), int | float) and rule != "true or false"
        if not VALID[rule](value) and (value is not None or is_required):
            problems.append(f"config.json: {key} = {format_value(value)} must be {rule}")
            continue
        fields[option] = None if value is None else read(value)
    if problems:
        raise HuggingFaceError(problems)
    # transformers computes the shared experts as one feed-forward of their summed width.
    if "n_shared_experts" in family.expert_keys:
        fields["shared_expert_dim"] = present["n_shared_experts"] * fields["expert_dim"]
    # Gemma multiplies embeddings by sqrt(dim), and config.json does not say so.
    if family.scales_embeddings:
        fields["embedding_multiplier"] = fields["dim"] ** 0.5
    # None is the default scale: equal models must compare equal.
    if fields.get("attention_scale") == fields["head_dim"] ** -0.5:
        fields["attention_scale"] = None
    options: dict[str, Any] = {**fields, **family.options, **ropes}
    model = with_layers(ModelConfig(**options, model_type=model_type), kinds)
    if model_problems := [*model.problems(), *_shape_problems(model, family)]:
        raise HuggingFaceError(
            [f"config.json: {_with_their_keys(problem, family)}" for problem in model_problems]
        )
    return model


def _family(values: Mapping[str, Any]) -> Family:
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise HuggingFaceError([unsupported("model_type", model_type, tuple(FAMILIES))])
    return FAMILIES[model_type]


def _with_their_keys(problem: str, family: Family) -> str:
    """A model's problem, with the keys of its config.json in place of our options."""
    ours = {option: key for key, option in COMMON_KEYS.items()} | {
        key.option: name for name, key in family.keys.items()
    }
    for rope, theta_key in (("rope", "rope_theta"), ("local_rope", family.local_theta_key)):
        keys = {**ROPE_KEYS, "kind": "rope_type", "theta": theta_key}
        ours |= {
            f"{rope}.{each.name}": keys.get(each.name, each.name)
            for each in dataclasses.fields(RopeConfig)
        }
    return re.sub(
        r"\bmodel\.((?:rope\.|local_rope\.)?\w+)",
        lambda found: ours.get(found[1], found[0]),
        problem,
    )


def _without_aliases(
    values: Mapping[str, Any], family: Family
) -> tuple[dict[str, Any], list[str]]:
    """config.json under the usual names of keys, and the aliases that disagree with them."""
    found = dict(values)
    problems = list[str]()
    for alias, key in family.aliases.items():
        if alias in found:
            value = found.pop(alias)
            if found.setdefault(key, value) != value:
                stated = f"{alias} = {format_value(value)} and {key} = {format_value(found[key])}"
                problems.append(f"config.json: {stated} disagree")
    return found, problems


def _with_defaults(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Fills absent keys, and those whose null means a value, with transformers' defaults."""
    # A theta belongs to the older format if it is stated: its default comes where the rope is
    # read.
    thetas = {"rope_theta", family.local_theta_key}
    defaults = {
        key: value
        for key, value in {**BASE_DEFAULTS, **family.defaults}.items()
        if key not in thetas
    }
    present = {**defaults, **values}
    if present.get("rope_parameters") is None:
        present["rope_parameters"] = defaults.get("rope_parameters")
    heads = present.get("num_attention_heads")
    width = present.get("hidden_size")
    if present.get("num_key_value_heads") is None:
        present["num_key_value_heads"] = heads
    if (
        present.get("head_dim") is None
        and isinstance(heads, int)
        and isinstance(width, int)
        and heads > 0
    ):
        present["head_dim"] = width // heads
    return present


def _read_fields(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    fields = {}
    for theirs, ours in COMMON_KEYS.items():
        value = values.get(theirs)
        if ours == "tie_embeddings":
            is_valid = isinstance(value, bool)
            rule = "true or false"
        elif ours == "norm_eps":
            is_valid = is_number(value) and value > 0
            rule = "a number above 0"
        elif ours == "num_layers":
            is_valid = is_count(value, MAX_LAYERS)
            rule = f"an integer from 1 to {MAX_LAYERS}"
        else:
            is_valid = is_count(value)
            rule = "an integer above 0"
        if ours == "head_dim":
            sizes = [
                format_value(values.get(key)) for key in ("hidden_size", "num_attention_heads")
            ]
            rule += f"; left out, it is hidden_size / num_attention_heads = {' / '.join(sizes)}"
        if not is_valid:
            problems.append(f"config.json: {theirs} = {format_value(value)} must be {rule}")
        fields[ours] = value
    return fields


def _read_ropes(
    values: Mapping[str, Any], family: Family, problems: list[str]
) -> dict[str, RopeConfig]:
    parameters = values.get("rope_parameters")
    if not family.has_local_rope:
        views = {"rope": values}
    elif isinstance(parameters, dict) and not parameters.keys() <= {FULL, SLIDING}:
        rule = f'must have an object for "{FULL}" and one for "{SLIDING}"'
        problems.append(f"config.json: rope_parameters = {format_value(parameters)} {rule}")
        return {}
    else:
        # `rope_scaling` of the older format extends the layers without a window only (Gemma 3).
        local = {**values, "rope_theta": values.get(family.local_theta_key), "rope_scaling": None}
        views = {
            "rope": _rope_of_layers(values, FULL),
            "local_rope": _rope_of_layers(local, SLIDING),
        }
    theta = values.get("rope_theta") or family.defaults.get(
        "rope_theta", BASE_DEFAULTS["rope_theta"]
    )
    default_thetas = {
        "rope": theta,
        "local_rope": family.defaults.get(family.local_theta_key, theta),
    }
    ropes = dict[str, RopeConfig]()
    for name, view in views.items():
        theta_key = family.local_theta_key if name == "local_rope" else "rope_theta"
        rope = rope_from_hf(
            view, problems, default_theta=default_thetas[name], theta_key=theta_key
        )
        if rope is not None:
            ropes[name] = rope
            if rope.partial != 1 and not family.has_partial_rotary:
                problems.append(unsupported("partial_rotary_factor", rope.partial, (1,)))
            if rope.kind not in family.rope_kinds:
                problems.append(unsupported("rope_type", rope.kind, family.rope_kinds))
    return ropes


def _rope_of_layers(values: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    """config.json with the `rope_parameters` of layers of this type only."""
    parameters = values.get("rope_parameters")
    if not isinstance(parameters, dict):
        return values
    return {**values, "rope_parameters": parameters.get(layer_type) or {"rope_type": "default"}}


def _window_problems(
    values: Mapping[str, Any], family: Family, types: list[Any] | None
) -> Iterable[str]:
    """Malformed keys that say which layers have a window. `types` are the `layer_types`."""
    count = values["num_hidden_layers"]
    if types is not None and not (
        isinstance(types, list)
        and len(types) == count
        and all(each in (FULL, SLIDING) for each in types)
    ):
        rule = (
            f'must have num_hidden_layers = {count} items "{FULL}" or "{SLIDING}", one per layer'
        )
        yield f"config.json: layer_types = {format_value(types)} {rule}"
    switch = values.get("use_sliding_window")
    if not isinstance(switch, bool | None):
        yield f"config.json: use_sliding_window = {format_value(switch)} must be true or false"
    smallest = {"sliding_window": 1, "max_window_layers": 0, "sliding_window_pattern": 1}
    # A null that would be computed with. No window is no mistake.
    needed = {"sliding_window_pattern"} | ({"max_window_layers"} if switch else set())
    needed = needed & family.window_keys if types is None else set()
    for key, least in smallest.items():
        value = values.get(key)
        is_used = family.has_window and (value is not None or key in needed)
        if is_used and not is_count(value, least=least):
            bound = "above 0" if least else "of at least 0"
            yield f"config.json: {key} = {format_value(value)} must be an integer {bound}"
    # transformers writes it beside layer_types, and does not read it.
    pattern = values.get("sliding_window_pattern")
    unread = values.get("_sliding_window_pattern")
    if types is None and unread not in (None, pattern):
        yield unsupported("_sliding_window_pattern", unread, (pattern,))


def _read_layers(
    values: Mapping[str, Any], family: Family, problems: list[str]
) -> Iterable[LayerKind]:
    """Each layer's kind, as far as it differs between layers."""
    count = values["num_hidden_layers"]
    types = values.get("layer_types") if family.has_layer_types else None
    problems += _window_problems(values, family, types)
    ropes = _rotated_layers(values, family, problems)
    problems += _expert_key_problems(values, family)
    if problems:
        return
    window = None if values.get("use_sliding_window") is False else values.get("sliding_window")
    given = {**values, "no_rope_layers": ropes}
    for layer in range(count):
        has_window = (
            types[layer] == SLIDING
            if types
            else bool(family.has_window and family.has_window(given, layer))
        )
        if types and has_window and window is None:
            problems.append(
                f'config.json: layer_types names "{SLIDING}", but no sliding_window is used'
            )
            return
        is_local = has_window and family.has_local_rope
        yield LayerKind(
            window=window if has_window else None,
            rope="local" if is_local else "global" if ropes[layer] else "none",
            feed_forward="moe" if family.has_experts(given, layer) else "gated",
        )
    if family.expert_keys and not any(family.has_experts(given, layer) for layer in range(count)):
        stated = ", ".join(
            f"{key} = {format_value(given.get(key))}" for key in sorted(family.expert_keys)
        )
        problems.append(f"config.json: no layer has experts: {stated}")


def _expert_key_problems(values: Mapping[str, Any], family: Family) -> Iterable[str]:
    """Problems of the keys that say which layers have experts."""
    least = {
        "decoder_sparse_step": 1,
        "first_k_dense_replace": 0,
        "n_shared_experts": 1,
        "max_window_layers": 0,
    }
    for key in sorted(family.expert_keys & least.keys() & values.keys()):
        if not is_count(value := values[key], least=least[key]):
            rule = "an integer above 0" if least[key] else "an integer of at least 0"
            yield f"config.json: {key} = {format_value(value)} must be {rule}"
    layers = values.get("mlp_only_layers", [])
    if "mlp_only_layers" in family.expert_keys and not (
        isinstance(layers, list) and all(is_count(each, least=0) for each in layers)
    ):
        yield f"config.json: mlp_only_layers = {format_value(layers)} must be a list of integers of at least 0"


def _rotated_layers(values: Mapping[str, Any], family: Family, problems: list[str]) -> list[int]:
    """1 for each layer that rotates queries and keys."""
    count = values["num_hidden_layers"]
    if "no_rope_layers" not in family.window_keys:
        return [1] * count
    stated = values.get("no_rope_layers")
    interval = values["no_rope_layer_interval"]
    if not is_count(interval):
        problems.append(
            f"config.json: no_rope_layer_interval = {format_value(interval)} must be an integer above 0"
        )
    elif stated is None:
        return [int((layer + 1) % interval != 0) for layer in range(count)]
    elif (
        not isinstance(stated, list)
        or len(stated) != count
        or any(each not in (0, 1) for each in stated)
    ):
        problems.append(
            f"config.json: no_rope_layers = {format_value(stated)} must have num_hidden_layers = {count} items 0 or 1"
        )
    else:
        return stated
    return []


def with_layers(model: ModelConfig, kinds: list[LayerKind]) -> ModelConfig:
    """The model whose layers also differ as these do: options of all layers, or the shortest
    pattern that repeats.
    """
    defaults = {name: getattr(model, name) for name in ALIKE_OPTIONS}
    without_experts = {"feed_forward": "gated"} | dict.fromkeys(EXPERT_OPTIONS, False)
    kinds = [
        dataclasses.replace(
            kind,
            **defaults
            | {"window": kind.window}
            | (without_experts if kind.feed_forward == "gated" else {}),
        )
        for kind in kinds
    ]
    # Numbers compare faster, for ten thousand layers.
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    order = [numbers[kind] for kind in kinds]
    # The shortest shift under which the order of kinds agrees with itself.
    period = next(
        size for size in range(1, len(order) + 1) if order[size:] == order[: len(order) - size]
    )
    if period == 1 and kinds[0].rope == "global":
        return dataclasses.replace(model, window=kinds[0].window)
    return dataclasses.replace(
        model,
        layers=tuple(kinds[:period]),
        **{name: getattr(ModelConfig, name) for name in ALIKE_OPTIONS},
    )


def _shape_problems(model: ModelConfig, family: Family) -> Iterable[str]:
    dim = model.dim
    heads = model.num_heads
    name = family.architecture
    if family.derives_head_dim and model.head_dim * heads != dim:
        width = f"model.head_dim = {model.head_dim}"
        yield f"{width} must be model.dim / model.num_heads = {dim} / {heads} for transformers' {name}"
    if family.needs_even_heads and dim % heads:
        yield f"model.dim = {dim} must be a multiple of model.num_heads = {heads} for transformers' {name}"


VALID: Mapping[str, Callable[[Any], bool]] = {
    "a number above 0": lambda value: is_number(value) and value > 0,
    "an integer above 0": is_count,
    "true or false": lambda value: isinstance(value, bool),
}
"""Checks by the rule of a key."""
