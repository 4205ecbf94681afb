"""Rotary embeddings in transformers' config.json. Imports no torch.

There are two formats. transformers 5 uses `rope_parameters`; transformers 4 uses `rope_theta` and
`rope_scaling`, and silently ignores the other. We write both and read either.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from models.hf import format_value
from models.hf_family import FULL, SLIDING
from models.rope_config import ROPE_FIELDS, RopeConfig
from models.rope_scaling import attention_factor

DIALECTS = ("rope_parameters", "rope_scaling")
ORIGINAL_LENGTH_KEY = "original_max_position_embeddings"
# Our rope field -> their key, where the names differ.
ROPE_KEYS = {
    "original_length": ORIGINAL_LENGTH_KEY,
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
PARTIAL_KEY = "partial_rotary_factor"
OPTIONAL_ROPE_KEYS = {"beta_fast", "beta_slow", "truncate", "attention_factor"}
ROPE_TYPE_KEYS = {"rope_type", "type", "rope_theta"}
# DeepSeek's form of yarn's attention factor.
MSCALES = ("mscale", "mscale_all_dim")


def rope_from_hf(
    values: Mapping[str, Any],
    problems: list[str],
    *,
    default_theta: float,
    theta_key: str = "rope_theta",
) -> RopeConfig | None:
    """Reads the rope from either format; if both are present they must agree."""
    theta = values.get("rope_theta")
    default = {"rope_theta": default_theta if theta is None else theta}
    dialects = {key: values[key] for key in DIALECTS if values.get(key) is not None}
    if not dialects or (
        theta is not None and "rope_scaling" not in dialects and "rope_scaling" in values
    ):
        dialects["rope_scaling"] = {}
    ropes = {}
    for name, rope in dialects.items():
        if not isinstance(rope, dict):
            problems.append(f"config.json: {name} = {format_value(rope)} must be an object")
            continue
        present = default | {key: value for key, value in rope.items() if value is not None}
        theta_name = f"{name}.rope_theta" if rope.get("rope_theta") is not None else theta_key
        if (parsed := _parse_rope(name, present, values, problems, theta_name)) is not None:
            ropes[name] = parsed
    if len(ropes) == 2 and ropes["rope_parameters"] != ropes["rope_scaling"]:
        problems.append(
            f"config.json: rope_parameters = {format_value(values['rope_parameters'])} and rope_theta = {format_value(theta)}, "
            f"rope_scaling = {format_value(values.get('rope_scaling'))} disagree"
        )
    return next(iter(ropes.values()), None)


def rope_problems(values: Mapping[str, Any], local_theta_key: str) -> Iterator[str]:
    """Problems of rope keys at the top of a config.json: invalid values, and others than in
    `rope_parameters` or `rope_scaling`.
    """
    length = values.get(ORIGINAL_LENGTH_KEY)
    if length is not None and not (is_number(length) and length > 0):
        yield f"config.json: {ORIGINAL_LENGTH_KEY} = {format_value(length)} must be a number above 0"
    for name in DIALECTS:
        stated = values.get(name)
        ropes = {name: ("rope_theta", stated)}
        if isinstance(stated, dict) and stated.keys() & {FULL, SLIDING}:
            theta_keys = {FULL: "rope_theta", SLIDING: local_theta_key}
            ropes = {
                f"{name}.{layers}": (key, stated.get(layers)) for layers, key in theta_keys.items()
            }
        for path, (theta_key, rope) in ropes.items():
            if isinstance(rope, dict):
                keys = {
                    "rope_theta": theta_key,
                    ORIGINAL_LENGTH_KEY: ORIGINAL_LENGTH_KEY,
                    PARTIAL_KEY: PARTIAL_KEY,
                }
                yield from _disagreements(
                    path, rope, {key: (top, values.get(top)) for key, top in keys.items()}
                )
                yield from _disagreements(
                    path, rope, {"rope_type": (f"{path}.type", rope.get("type"))}
                )


def _disagreements(
    path: str, rope: Mapping[str, Any], others: Mapping[str, tuple[str, Any]]
) -> Iterator[str]:
    for key, (name, other) in others.items():
        if None not in (other, rope.get(key)) and other != rope[key]:
            stated = f"{name} = {format_value(other)} and {path}.{key} = {format_value(rope[key])}"
            yield f"config.json: {stated} disagree"


def _parse_rope(
    name: str,
    rope: dict[str, Any],
    values: Mapping[str, Any],
    problems: list[str],
    theta_name: str,
) -> RopeConfig | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        problems.append(unsupported(f"{name}.rope_type", kind, tuple(ROPE_FIELDS)))
        return None
    field_of = {key: field for field, key in _rope_keys(kind).items()}
    num_problems = len(problems)
    present = rope | _derived_rope_values(kind, rope, values)
    known = (
        field_of.keys()
        | ROPE_TYPE_KEYS
        | {PARTIAL_KEY}
        | (set(MSCALES) if kind == "yarn" else set())
    )
    problems += [
        f'config.json: {name}.{key} = {format_value(value)} is not supported for rope_type "{kind}"'
        for key, value in sorted(present.items())
        if key not in known
    ]
    missing = field_of.keys() - present.keys() - OPTIONAL_ROPE_KEYS
    problems += [
        f'config.json: {name} of rope_type "{kind}" needs {key}' for key in sorted(missing)
    ]
    partial = present.get(PARTIAL_KEY, values.get(PARTIAL_KEY))
    fields: dict[str, Any] = {
        "theta": present["rope_theta"],
        "partial": 1.0 if partial is None else partial,
    }
    for key, field in field_of.items():
        if key in present:
            fields[field] = tuple(present[key]) if isinstance(present[key], list) else present[key]
    names = {"theta": theta_name, "partial": PARTIAL_KEY}
    for key, value in fields.items():
        if key.endswith("_factors"):
            is_valid = isinstance(value, tuple) and all(map(is_number, value))
        else:
            is_valid = (
                isinstance(value, bool) if key == "truncate" else is_number(value) and value > 0
            )
        if not is_valid or (key == "partial" and value > 1):
            stated = names.get(key, f"{name}.{ROPE_KEYS.get(key, key)}")
            problems.append(f"config.json: {stated} = {format_value(value)} is invalid")
    if len(problems) > num_problems:
        return None
    return without_default_factor(RopeConfig(**{"kind": kind} | fields))


def without_default_factor(rope: RopeConfig) -> RopeConfig:
    """The rope without an attention factor that equals longrope's default, which every export
    states.
    """
    # Such values have no default factor: it divides by ln(original_length).
    if rope.kind != "longrope" or min(rope.factor, rope.original_length) <= 1:
        return rope
    default = dataclasses.replace(rope, attention_factor=None)
    return default if rope.attention_factor == attention_factor(default) else rope


def _rope_keys(kind: str) -> dict[str, str]:
    """The key in config.json of each field that this kind uses. Required, except
    OPTIONAL_ROPE_KEYS.
    """
    return {field: ROPE_KEYS.get(field, field) for field in ROPE_FIELDS[kind]}


def _derived_rope_values(
    kind: str, rope: dict[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Values that transformers derives from other keys."""
    derived = dict[str, Any]()
    if "original_length" in ROPE_FIELDS[kind]:
        max_length = values.get("max_position_embeddings")
        original_length = (
            values.get(ORIGINAL_LENGTH_KEY) or rope.get(ORIGINAL_LENGTH_KEY) or max_length
        )
        if original_length is not None:
            derived[ORIGINAL_LENGTH_KEY] = original_length
        # A factor that is not stated is the ratio of the lengths; llama3 must state its own.
        if (
            kind != "llama3"
            and "factor" not in rope
            and is_number(max_length)
            and is_number(original_length)
        ):
            derived["factor"] = max_length / original_length
    scales: list[Any] = [rope.get(key) for key in MSCALES]
    if (
        kind == "yarn"
        and "attention_factor" not in rope
        and all(is_number(scale) and scale for scale in scales)
    ):
        # yarn's factor 0.1 ln(s) + 1 with one scale on the logarithm, over the same with the other
        # (DeepSeek-V2).
        factor = (rope | derived).get("factor")
        log_scale = 0.1 * math.log(factor) if is_number(factor) and factor > 1 else 0.0
        numerator, denominator = (scale * log_scale + 1 for scale in scales)
        derived["attention_factor"] = numerator / denominator
    return derived


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """Kind and scaling as transformers' keys, without theta."""
    partial = {} if rope.partial == 1 else {PARTIAL_KEY: rope.partial}
    if rope.kind == "default":
        return {"rope_type": "default"} | partial
    fields = {theirs: getattr(rope, ours) for ours, theirs in _rope_keys(rope.kind).items()}
    # transformers 4 would derive another one from the trained length.
    if rope.kind == "longrope":
        fields["attention_factor"] = attention_factor(rope)
    return (
        {"rope_type": rope.kind}
        | partial
        | {key: value for key, value in fields.items() if value is not None}
    )


def rope_fields(rope: RopeConfig) -> dict[str, None]:
    """The fields that this kind uses, in order."""
    partial = ("partial",) if rope.partial != 1 else ()
    return dict.fromkeys(("kind", "theta", *partial, *ROPE_FIELDS[rope.kind]))


def unsupported(key: str, value: object, allowed: tuple[object, ...]) -> str:
    choices = " or ".join(map(format_value, allowed))
    return f"config.json: {key} = {format_value(value)} is not supported; only {choices}"


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
