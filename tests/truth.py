"""What the product computes, by definition: in plain loops, slow and obvious, and without a line
of the product.

Planner, metrics and a run of one process share formulas, and would agree on a wrong one.
`test_truth.py` compares each of them with this module over grids of small cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NO_LABEL = -100
K = 1024
M = 1024 * 1024
BUCKETS = {
    "0-256": range(256),
    "256-1K": range(256, K),
    "1K-4K": range(K, 4 * K),
    "4K-16K": range(4 * K, 16 * K),
    "16K-64K": range(16 * K, 64 * K),
    "64K-256K": range(64 * K, 256 * K),
    "256K-1M": range(256 * K, M),
    "1M-": range(M, 1 << 62),
}
"""Positions in a document whose losses are averaged together."""
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Magnitudes of a 4-bit float E2M1 by its lower three bits (OCP Microscaling Formats 1.0, table
5).
"""


# ---- attention


def sees(query: int, key: int, document_of: Sequence[int], window: int | None = None) -> bool:
    """Whether the token at `query` attends to the one at `key`: the rule of Mistral, and of masks
    in transformers.
    """
    if document_of[query] != document_of[key]:
        return False
    if key > query:
        return False
    return window is None or key > query - window


def mask(document_of: Sequence[int], window: int | None = None) -> list[list[bool]]:
    """By query and key."""
    tokens = range(len(document_of))
    return [[sees(query, key, document_of, window) for key in tokens] for query in tokens]


def document_of(lengths: Sequence[int]) -> list[int]:
    """The document of each token."""
    return [document for document, length in enumerate(lengths) for _ in range(length)]


def attended_pairs(lengths: Sequence[int], window: int | None = None) -> int:
    """(query, key) pairs of a sequence with documents of these lengths."""
    return sum(map(sum, mask(document_of(lengths), window)))


# ---- activations and scores, of one number


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def swiglu(gate: float, up: float) -> float:
    return gate * sigmoid(gate) * up


def geglu(gate: float, up: float) -> float:
    """With Gemma's approximation of GELU (Hendrycks & Gimpel, 2016)."""
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + math.tanh(inner)) * up


def clamped_swiglu(gate: float, up: float) -> float:
    """gpt-oss: `gate` has an upper limit, `up` an upper and a lower one."""
    if gate > 7:
        gate = 7
    if up > 7:
        up = 7
    if up < -7:
        up = -7
    return gate * sigmoid(1.702 * gate) * (up + 1)


def soft_cap(x: float, cap: float) -> float:
    return cap * math.tanh(x / cap)


def rotated_dimensions(head_dim: int, fraction: float) -> int:
    """Of a head whose first `fraction` is rotated: those that lie in it wholly."""
    return sum(dimension <= head_dim * fraction for dimension in range(1, head_dim + 1))


# ---- targets and their losses


def labels(document_lengths: Sequence[int], start: int, length: int) -> list[int]:
    """Of a part of a stream whose token n is the number n: the next token, if it belongs to the
    same document.
    """
    document = document_of(document_lengths)
    found = []
    for token in range(start, start + length):
        is_last = token + 1 == len(document) or document[token + 1] != document[token]
        found.append(NO_LABEL if is_last else token + 1)
    return found


def positions(lengths: Sequence[int]) -> list[int]:
    """Of each token in its document."""
    return [position for length in lengths for position in range(length)]


def bucket(position: int) -> str:
    (name,) = [name for name, covered in BUCKETS.items() if position in covered]
    return name


def log_probability(logits: Sequence[float], token: int) -> float:
    return logits[token] - math.log(sum(math.exp(logit) for logit in logits))


def is_found(predicted: Sequence[int], number: Sequence[int]) -> bool:
    """A needle: every digit is right."""
    return [*predicted] == [*number]


# ---- numbers of a step


def learning_rate(
    kind: str, step: int, steps: int, *, warmup: int, decay: int, floor: float
) -> float:
    """As a fraction of the peak: it rises to step `warmup`, and falls to `floor` at the last
    step.
    """
    falls_after = max(warmup, steps - decay) if kind == "wsd" else warmup
    if step < warmup:
        return step / warmup
    if kind == "constant" or step <= falls_after:
        return 1.0
    remaining = (steps - step) / (steps - falls_after)
    if kind == "cosine":
        remaining = (1 + math.cos(math.pi * (1 - remaining))) / 2
    return floor + (1 - floor) * remaining


def matrix_flops(shapes: Sequence[tuple[int, int]], tokens: int) -> int:
    """Of training: a multiply-add is two, and a product of [outputs, inputs] has two of its size
    in the backward pass.
    """
    return sum(3 * 2 * outputs * inputs * tokens for outputs, inputs in shapes)


def score_flops(heads: int, head_dim: int, pairs: int) -> int:
    """Of training: scores and weighted values are a product each of every pair, with two in the
    backward pass.
    """
    return 2 * 3 * 2 * heads * head_dim * pairs


# ---- what files hold


def mxfp4(packed: Sequence[int], scale: int) -> list[float]:
    """The numbers of one block: two in a byte, the lower half first, times two to the power of
    `scale` - 127.
    """
    halves = [half for byte in packed for half in (byte % 16, byte // 16)]
    signed = [-FP4[half - 8] if half >= 8 else FP4[half] for half in halves]
    return [math.nan if scale == 255 else number * 2.0 ** (scale - 127) for number in signed]
