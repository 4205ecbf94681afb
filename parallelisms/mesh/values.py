"""Values that ranks send each other: JSON, sealed by the secret of their launch."""

from __future__ import annotations

import hmac
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

MAX_VALUE_BYTES = 64 << 20
"""Largest value of one rank as JSON. A rank that announces more is refused before memory is
allocated for it.
"""
SEAL_BYTES = 32


class ValueExchangeError(RuntimeError):
    """A rank sent a value that is too large, that is not JSON, or whose seal does not fit."""


class ValueSeal:
    """Proves that a value comes from a rank of this launch, and belongs to this exchange."""

    def __init__(self, secret: bytes, numbers: Sequence[str]) -> None:
        """`numbers`: the random one of each rank. The key is new if any of them is."""
        self._key = hmac.digest(secret, json.dumps(list(numbers)).encode(), "sha256")
        self._exchanges: Counter[str] = Counter()
        """Exchanges begun, by group: as many on each of its ranks."""

    def next_purpose(self, group_name: str) -> str:
        """Names the next exchange of a group: a value of another one does not fit there."""
        self._exchanges[group_name] += 1
        return f"{group_name} {self._exchanges[group_name]}"

    def seal(self, content: bytes, purpose: str, rank: int) -> bytes:
        """The content, followed by its seal."""
        return content + self._digest(content, purpose, rank)

    def open(self, sealed: bytes, purpose: str, rank: int) -> bytes:
        """The content. Raises `ValueExchangeError` unless that rank sealed it for this purpose."""
        content = sealed[:-SEAL_BYTES]
        if not hmac.compare_digest(sealed[-SEAL_BYTES:], self._digest(content, purpose, rank)):
            raise ValueExchangeError(
                f"a value that came as rank {rank}'s was not sent by that rank of this launch: "
                "somebody else has joined, or the nodes have different secrets"
            )
        return content

    def _digest(self, content: bytes, purpose: str, rank: int) -> bytes:
        return hmac.digest(self._key, f"{purpose} {rank}\n".encode() + content, "sha256")


def encode(value: object) -> bytes:
    """Raises TypeError for what JSON has no word for, or would change."""
    _require_plain(value)
    return json.dumps(value).encode()


def decode(content: bytes, rank: int) -> Any:
    """Raises `ValueExchangeError` for what is no JSON."""
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueExchangeError(f"what rank {rank} sent is not JSON: {error}") from None


def _require_plain(value: object) -> None:
    """Raises TypeError for what JSON has no word for, and for what it would change: tuples, and
    keys that are no str.
    """
    if type(value) is dict:
        for key, each in value.items():
            if type(key) is not str:
                raise TypeError(
                    f"the key {key!r} is a {type(key).__name__}; keys of values sent to other ranks must be str"
                )
            _require_plain(each)
    elif type(value) is list:
        for each in value:
            _require_plain(each)
    elif type(value) not in (bool, int, float, str, type(None)):
        raise TypeError(
            f"{value!r} is a {type(value).__name__}; values sent to other ranks must be None, bool, int, float, str, list or dict"
        )
