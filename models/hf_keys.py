"""Review of a config.json's keys: which are read, which say nothing about a model, and which are
refused.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from models.config import MAX_LAYERS
from models.hf import format_value
from models.hf_family import FULL, OFF, SLIDING, Family
from models.hf_rope import unsupported

ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "clamped_swiglu": "silu"}


class Meaningless(NamedTuple):
    """A key without which transformers computes the same numbers."""

    key: str
    why: str
    values: tuple[object, ...] | None = None
    """Values with which the key means nothing; any other one is refused. None: all."""
    model_types: frozenset[str] = frozenset()
    """The families in which it means nothing; empty: all."""
    same_as: str | None = None
    """The key whose value it repeats; any other value is refused."""


QWEN3_TYPES = frozenset({"qwen3", "qwen3_moe"})
GENERATION_KEYS = (
    *(
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
    ),
    *(
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
    ),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores"),
    *(
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
    ),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
)
MEANINGLESS = (
    Meaningless("pretraining_tp", "products are computed in slices, whose sum is the product"),
    Meaningless(
        "auto_map", "code of the folder, which is not executed; the model is that of model_type"
    ),
    Meaningless("is_llama_config", "written by nanotron", (True,), frozenset({"llama"})),
    Meaningless("is_qwen2_config", "written by nanotron", (True,), frozenset({"qwen2"})),
    Meaningless(
        "rope_interleaved",
        "the halves of a head rotate, as in every model of transformers",
        (False,),
    ),
    Meaningless(
        "max_window_layers",
        "layer_types and no_rope_layers say it",
        model_types=frozenset({"smollm3"}),
    ),
    Meaningless("qkv_bias", "the model_type has no bias of q, k and v", (False,), QWEN3_TYPES),
    Meaningless(
        "qkv_bias", "the model_type has biases of q, k and v", (True,), frozenset({"qwen2"})
    ),
    Meaningless(
        "use_qk_norm", "the model_type has norms of queries and keys", (True,), QWEN3_TYPES
    ),
    Meaningless("shared_expert_intermediate_size", "no expert is shared", (0,), QWEN3_TYPES),
    Meaningless(
        "sliding_window_size",
        "repeats sliding_window",
        model_types=frozenset({"gemma2"}),
        same_as="sliding_window",
    ),
    Meaningless("max_sequence_length", "a length, on which no number depends"),
    Meaningless("unsloth_version", "what wrote the file"),
    Meaningless("unsloth_fixed", "what wrote the file"),
    Meaningless("_commit_hash", "where the file was read"),
    Meaningless("tf_legacy_loss", "a loss of TensorFlow"),
    *(Meaningless(key, "an option of generation") for key in GENERATION_KEYS),
)


WINDOW_KEYS = ("sliding_window", "layer_types")
"""Keys that are known for some types only: others have no window."""


class KeyReview(NamedTuple):
    problems: list[str]
    ignored: list[str]
    """A line for each key that is not read, though it has a value."""


def review_keys(
    values: Mapping[str, Any], family: Family, ignore_keys: Iterable[str] = ()
) -> KeyReview:
    """Keys that are not known, and values of features that our model does not have.

    `ignore_keys`: unknown ones that a user vouches for.
    """
    vouched = set(ignore_keys)
    model_type = values["model_type"]
    allowed = _allowed_values(values, family)
    all_full = _all_full(values, family)
    problems = list[str]()
    ignored = list[str]()
    for key, value in values.items():
        stated = f"{key} = {format_value(value)}"
        if key in allowed and value in allowed[key]:
            continue
        if value is not None and (entry := _meaningless(key, model_type)) is not None:
            if problem := _meaning(entry, value, values):
                problems.append(problem)
            else:
                ignored.append(f"ignored: {stated}: {entry.why}")
        elif key in allowed:
            problems.append(unsupported(key, value, allowed[key]))
        elif (
            value is None
            or key in family.known_keys
            or (key == "layer_types" and value == all_full)
        ):
            continue
        elif key in WINDOW_KEYS:
            problems.append(unsupported(key, value, (None,)))
        elif key in vouched:
            ignored.append(f"ignored: {stated}: --ignore-key")
        else:
            unknown = f"config.json: {stated} is unknown for model_type {model_type}"
            problems.append(f"{unknown}; --ignore-key {key} imports the model without it")
    return KeyReview([*problems, *_ignore_key_problems(vouched, values, family)], ignored)


def _allowed_values(values: Mapping[str, Any], family: Family) -> dict[str, tuple[object, ...]]:
    """Values that switch off a feature that our model does not have, by key."""
    activation = ACTIVATIONS[family.options.get("activation", "silu")]
    allowed: dict[str, tuple[object, ...]] = {
        **OFF,
        "architectures": ([family.architecture], None),
        **dict.fromkeys(family.activation_keys, (activation, None)),
    }
    # q, k and v have biases, and o has none, whatever the key says.
    if family.architecture == "Qwen2ForCausalLM":
        del allowed["attention_bias"]
    allowed = {
        key: only for key, only in {**allowed, **family.allowed}.items() if key not in family.keys
    }
    if family.has_partial_rotary:
        del allowed["partial_rotary_factor"]
    if is_mxfp4(values, family):
        del allowed["quantization_config"]
    return allowed


def is_mxfp4(values: Mapping[str, Any], family: Family) -> bool:
    """Whether the weights of experts are MXFP4, which is read."""
    config = values.get("quantization_config")
    is_known = family.architecture == "GptOssForCausalLM"
    return is_known and isinstance(config, dict) and config.get("quant_method") == "mxfp4"


def is_count(value: object, largest: int = 2**31 - 1, *, least: int = 1) -> bool:
    # bool is an int in Python, but true is no count.
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= largest


def _all_full(values: Mapping[str, Any], family: Family) -> list[str] | None:
    """The `layer_types` of a model without windows."""
    count: Any = values.get("num_hidden_layers")
    has_window = family.has_window and values.get("sliding_window", 0) is not None
    return [FULL] * count if is_count(count, MAX_LAYERS) and not has_window else None


def _meaningless(key: str, model_type: str) -> Meaningless | None:
    entries = (each for each in MEANINGLESS if each.key == key)
    return next(
        (each for each in entries if not each.model_types or model_type in each.model_types), None
    )


def _meaning(entry: Meaningless, value: object, values: Mapping[str, Any]) -> str | None:
    """Why this value cannot be ignored."""
    if entry.values is not None and value not in entry.values:
        return unsupported(entry.key, value, entry.values)
    if entry.same_as is not None and value != values.get(entry.same_as):
        other = f"{entry.same_as} = {format_value(values.get(entry.same_as))}"
        return f"config.json: {entry.key} = {format_value(value)} and {other} disagree"
    return None


def _ignore_key_problems(
    vouched: Iterable[str], values: Mapping[str, Any], family: Family
) -> Iterator[str]:
    known = {*family.known_keys, *family.aliases, *WINDOW_KEYS}
    for key in sorted(vouched):
        if key in known or _meaningless(key, values["model_type"]):
            yield f"config.json: {key} is known for model_type {values['model_type']} and cannot be ignored"
        elif key not in values:
            yield f"config.json: {key} shall be ignored, but is absent"


# ---- remarks


def id_remarks(values: Mapping[str, Any]) -> Iterator[str]:
    """Ids of special tokens that are none of the vocabulary's. No weight depends on them."""
    size: Any = values.get("vocab_size")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        stated = values.get(key)
        ids = stated if isinstance(stated, list) else [stated]
        if is_count(size) and any(
            each is not None and not is_count(each, size - 1, least=0) for each in ids
        ):
            yield f"ignored: {key} = {format_value(stated)}: not in the vocabulary of {size}"


def pattern_remarks(values: Mapping[str, Any]) -> Iterator[str]:
    """Remarks on a pattern of windows beside `layer_types`, which decides."""
    types: Any = values.get("layer_types")
    for key in (
        ("sliding_window_pattern", "_sliding_window_pattern") if isinstance(types, list) else ()
    ):
        every = values.get(key)
        if every is not None and not (
            is_count(every) and types == _windows_but_every(every, len(types))
        ):
            yield f"ignored: {key} = {format_value(every)}: layer_types says which layers have windows"


def _windows_but_every(interval: int, count: int) -> list[str]:
    return [SLIDING if (layer + 1) % interval else FULL for layer in range(count)]


def dtype_remarks(values: Mapping[str, Any]) -> Iterator[str]:
    new = values.get("dtype")
    old = values.get("torch_dtype")
    if new is not None and old is not None and new != old:
        stated = f"dtype = {format_value(new)} and torch_dtype = {format_value(old)}"
        yield f"ignored: {stated} disagree: weights are read in the type that they are stored in"
