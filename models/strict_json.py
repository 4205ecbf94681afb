"""JSON that says one thing: a key twice with two values, or NaN, is an error. Imports no torch."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def load_json(content: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError with the reason."""
    try:
        return json.loads(
            content, object_pairs_hook=_one_value_each, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _one_value_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for key, value in pairs:
        if found.setdefault(key, value) != value:
            raise ValueError(
                f"{key} is stated twice: {json.dumps(found[key])} and {json.dumps(value)}"
            )
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
