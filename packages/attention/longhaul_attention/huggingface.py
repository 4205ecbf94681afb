"""Attention for models of `transformers`, through its interfaces for attention functions and for
masks.

No model is patched. What a model asks of attention and of its mask is either computed exactly or
refused by name: a mask that is no causal one, a window on which both disagree, dropout, biases,
layers that are not attention.

Shape suffixes: B sequences, S tokens of this rank, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import getclosurevars
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longhaul_attention.batch import Documents
from longhaul_attention.context_parallel import context_of

NAME = "longhaul"
registered_names = set[str]()
"""Names given to `register_transformers` in this process."""
LAYER_TYPES = {"full_attention", "sliding_attention"}
WITHOUT_TOKENS_OF_OTHERS = {"dense", "mlp", "moe", "sparse"}
"""Layers that are not attention, and need no other tokens."""
DROPOUTS = (
    "activation_dropout",
    "attn_pdrop",
    "decoder_layerdrop",
    "dropout",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "input_jitter_noise",
    "layerdrop",
    "mlp_dropout",
    "moe_jitter_eps",
    "resid_pdrop",
    "residual_dropout",
    "router_jitter_noise",
)
POSITIONS_FROM_PADDING = {
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
}
"""Model types that count positions from another number than 0, unless they are given."""
HARMLESS = {
    "attention_mask",
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "shift_labels",
    "use_cache",
}
"""Arguments that models pass to attention functions and that attention does not depend on."""


def register_transformers(name: str = NAME) -> str:
    """Registers attention for `attn_implementation=name` in transformers, and its mask; returns
    the name.

    Models then take what `ContextParallel.shard_batch` returns. Raises ImportError without
    transformers 4.57 or later.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    registered_names.add(name)
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, torch.compiler.disable(causal_mask))
    return name


class CausalMask:
    """Stands for a causal mask inside documents.

    Not a tensor: a layer that computes with its mask itself must fail.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window

    def __getitem__(self, places: Any) -> CausalMask:
        """The mask itself, for slices that select all of it."""
        for place in places if isinstance(places, tuple) else (places,):
            if place is not Ellipsis and place not in (slice(None), slice(0, None)):
                raise ValueError(
                    f"{NAME} attention has no part {place} of a mask: this model selects pairs itself"
                )
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{NAME} attention has no mask with {name}: this model computes with its mask itself"
        )


# ---- the mask


def causal_mask(
    *,
    mask_function: Callable[..., Any],
    config: Any = None,
    attention_mask: Tensor | None = None,
    **given: Any,
) -> CausalMask:
    """The mask that a model builds before its first layer.

    Raises ValueError for models and masks that cannot be exact.
    """
    problems = [] if config is None else [*config_problems(config)]
    if attention_mask is not None and not (
        bool(attention_mask.all()) or _is_ours(attention_mask, given)
    ):
        problems.append(
            "attention_mask hides tokens: shard_batch makes documents of it; prompts to generate must be equally long"
        )
    parts = [*_mask_parts(mask_function)]
    problems += [
        f"mask function {name} is unknown; causal masks and sliding windows are known"
        for name, _ in parts
        if name
    ]
    if problems:
        raise ValueError(f"{NAME} attention cannot be exact: {'; '.join(problems)}")
    return CausalMask(min((window for _, window in parts if window), default=None))


def _is_ours(mask_BS: Tensor, given: dict[str, Any]) -> bool:
    """Whether a mask is that of `shard_batch`: one column more than there are tokens, the first,
    which is hidden.
    """
    places = given.get("cache_position")  # transformers 4.
    is_first, tokens = (
        (given["q_offset"] == 0, given["q_length"])
        if places is None
        else (bool(places[0] == 0), len(places))
    )
    return (
        bool(is_first)
        and mask_BS.shape[1] == tokens + 1
        and not bool(mask_BS[:, 0].any())
        and bool(mask_BS[:, 1:].all())
    )


def _mask_parts(mask_function: Callable[..., Any]) -> Iterator[tuple[str | None, int | None]]:
    """The parts of which a mask function is the intersection: (its name, if it is unknown; its
    window, if it has one).
    """
    # transformers makes mask functions as closures: name and variables say what one means.
    known = getattr(mask_function, "__module__", "") == "transformers.masking_utils"
    name = getattr(mask_function, "__qualname__", repr(mask_function)).partition(".")[0]
    inside = getclosurevars(mask_function).nonlocals if known else {}
    if known and name == "and_masks":
        for part in inside["mask_functions"]:
            yield from _mask_parts(part)
    elif known and name in ("remap_positions_for_packed_sequence", "add_offsets_to_mask_function"):
        yield from _mask_parts(inside["mask_function"])
    elif known and name == "sliding_window_overlay":
        yield None, inside["sliding_window"]
    # The documents are known already: those that transformers finds here are of this rank's
    # tokens.
    elif not (known and name in ("causal_mask_function", "packed_sequence_mask_function")):
        yield name, None


def config_problems(config: Any) -> Iterator[str]:
    """Parts of a model's configuration that its ranks could not compute as one process does."""
    layers = (
        set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES - WITHOUT_TOKENS_OF_OTHERS
    )
    if layers:
        yield f"layer_types {', '.join(sorted(layers))} need the tokens of other ranks"
    if (
        getattr(config, "alibi", False)
        or getattr(config, "position_embedding_type", None) == "alibi"
    ):
        yield "ALiBi adds a bias to scores"
    if getattr(config, "output_router_logits", False):
        yield "output_router_logits = True adds a balance loss, which is not a mean over tokens"
    if getattr(config, "attn_temperature_tuning", False) and "llama4" in str(
        getattr(config, "model_type", "")
    ):
        yield "attn_temperature_tuning counts the tokens of a rank"
    if getattr(config, "is_encoder_decoder", False):
        yield "an encoder-decoder model has attention without a causal mask"


def rope_problems(config: Any, longest: tuple[int, int]) -> Iterator[str]:
    """Rotations that depend on the last position that a rank has.

    `longest`: that of `Documents`.
    """
    stated = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    for rope in [stated, *(each for each in stated.values() if isinstance(each, dict))]:
        kind = rope.get("rope_type", rope.get("type", ""))
        limit = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = limit or getattr(config, "max_position_embeddings", None) or 0
        of_batch, of_rank = longest
        if (kind == "longrope" and of_rank <= limit < of_batch) or (
            "dynamic" in kind and of_batch > limit
        ):
            yield (
                f"rope_type {kind} takes its frequencies from the last position of a rank, which may be {of_rank} of "
                f"{of_batch}; all must be on one side of {limit} (head-tail layouts and longer documents help)"
                if kind == "longrope"
                else f"rope_type {kind} takes its frequencies from the last position of a rank, beyond {limit} positions"
            )


# ---- attention


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CausalMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    documents: Documents | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Queries, keys and values [B, heads, S, H] of this rank's tokens; output [B, S, N, H], and no
    attention weights.

    Raises ValueError, before anything is sent, for what it would have to ignore.
    """
    problems = [*_problems(module, attention_mask, dropout, sliding_window, is_causal=is_causal)]
    # `generation.ShardedCache` marks its keys with the layer that attends to them.
    sharded_layer: Any = getattr(key, "sharded_layer", None)
    problems += _document_problems(module.config, documents, sharded_layer)
    keys = HARMLESS if documents is None else HARMLESS | documents.keys
    if sharded_layer is not None and not sharded_layer.keeps(key, value):
        problems.append("it attends to other keys or values than those that it keeps")
    unknown = {
        name for name, given in others.items() if given is not None and given is not False
    } - keys
    if unknown and (documents is not None or sharded_layer is not None):
        problems.append(f"attention is given {', '.join(sorted(unknown))}, which it does not know")
    if query.shape[2] != key.shape[2]:
        problems.append(
            f"{key.shape[2]} keys for {query.shape[2]} queries: a KV cache of transformers holds no shards; "
            "set use_cache = False, or generate with longhaul_attention.generation"
        )
    if problems or attention_mask is None:
        raise ValueError(f"{NAME} attention in {type(module).__name__}: {'; '.join(problems)}")
    q_BSNH, k_BSKH, v_BSKH = (x.transpose(1, 2) for x in of_equal_width(query, key, value))
    # Kernels scale by the width of the heads that they get, which may be padded.
    factor = q_BSNH.shape[-1] ** 0.5 * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if not isclose(factor, 1, rel_tol=1e-12):
        q_BSNH = q_BSNH * factor
    attend = (
        partial(context_of(documents).attention, boundaries=documents)
        if documents is not None
        else sharded_layer.attend
    )
    out_BSNH = attend(
        q_BSNH, k_BSKH, v_BSKH, window=attention_mask.window, sink=s_aux, softcap=softcap
    )
    return out_BSNH[..., : value.shape[-1]], None


def _document_problems(
    config: Any, documents: Documents | None, sharded_layer: Any
) -> Iterator[str]:
    """Positions that differ between shards, and calls that know no documents."""
    if documents is not None:
        if (
            not documents.positions_given
            and getattr(config, "model_type", "") in POSITIONS_FROM_PADDING
        ):
            yield (
                f"{config.model_type} counts positions from another number than 0: give position_ids"
            )
        yield from rope_problems(config, documents.longest)
    elif sharded_layer is None:
        yield (
            "no documents reached attention: give the model what shard_batch returns, whole, if it passes its inputs on to "
            "attention (to generate, use longhaul_attention.generation, with models that attend to the keys and values that "
            "they keep, and without other forward passes)"
        )


def _problems(
    module: nn.Module,
    mask: CausalMask | None,
    dropout: float,
    sliding_window: int | None,
    *,
    is_causal: bool | None,
) -> Iterator[str]:
    if not isinstance(mask, CausalMask):
        given = "none" if mask is None else type(mask).__name__
        yield f"the mask ({given}) was not made by transformers' mask interface; its pairs are not known"
    elif sliding_window is not None and mask.window != sliding_window:
        yield f"the layer's window is {sliding_window} and that of its mask is {mask.window}"
    if dropout > 0:
        yield f"attention dropout {dropout}: ranks would drop other pairs than one process"
    yield from config_dropout_problems(module)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        yield "attention without a causal mask"


def config_dropout_problems(module: nn.Module) -> Iterator[str]:
    """Problems of what a layer's configuration drops in training, also without a module of its
    own.
    """
    config: Any = module.config
    for name in DROPOUTS if module.training else ():
        if rate := getattr(config, name, None):
            yield f"{name} = {rate}: ranks would drop other values than one process"


def dropout_problems(model: nn.Module) -> Iterator[str]:
    """Problems of every dropout layer of a model in training, also of adapters, which its
    configuration does not know.
    """
    if not model.training:
        return
    rates = {
        name: module.p
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p
    }
    if rates:
        name, rate = next(iter(rates.items()))
        yield f"{name} drops {rate:.0%} (and {len(rates) - 1} more layers): ranks would drop other values than one process"


def of_equal_width(*heads: Tensor) -> list[Tensor]:
    """Pads heads with zeros to the widest: neither scores nor the other columns of the output
    change.
    """
    width = max(x.shape[-1] for x in heads)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in heads]
