"""A small model and random packed batches for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.batch import IGNORE_INDEX, Batch
from models.config import ModelConfig
from models.feed_forward import FeedForward
from models.layers import LayerKind
from models.rope_config import RopeConfig
from models.transformer import Transformer

aten = torch.ops.aten
UNTOUCHED = (
    "empty",
    "new_empty",
    "gather",
    "scatter",
    "mm",
    "addmm",
    "_scaled_dot",
    "detach",
    "_unsafe_view",
)
"""Operators that touch no elements, or few, or belong to products and attention."""
SMALL = ModelConfig(
    vocab_size=37,
    dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    ffn_dim=20,
    rope=RopeConfig(theta=500.0),
)
WINDOWED = replace(
    SMALL,
    num_layers=4,
    layers=(
        LayerKind(window=3, sink=True, rope="local"),
        LayerKind(window=5),
        LayerKind(sink=True, qkv_bias=True),
    ),
    local_rope=RopeConfig(theta=50.0),
)
"""Windows, sinks and two rotations, in a pattern of three layers."""
GEMMA = replace(
    SMALL,
    num_layers=3,
    activation="gelu_tanh",
    norms="sandwich",
    zero_centered_norms=True,
    qk_norm=True,
    softcap=2.0,
    attention_scale=0.3,
    embedding_multiplier=4.0,
    logit_softcap=3.0,
)
GRANITE = replace(
    SMALL,
    attention_scale=0.2,
    embedding_multiplier=3.0,
    residual_multiplier=0.7,
    logits_scaling=2.0,
)
OLMO = replace(SMALL, norms="post", full_qk_norm=True)
EXPERTS: dict[str, Any] = {"feed_forward": "moe", "num_experts": 8, "top_k": 2, "expert_dim": 12}
GPT_OSS = replace(
    SMALL,
    num_experts=8,
    top_k=3,
    expert_dim=12,
    layers=tuple(
        LayerKind(
            feed_forward="moe",
            window=window,
            sink=True,
            qkv_bias=True,
            o_bias=True,
            router_bias=True,
            expert_bias=True,
            activation="clamped_swiglu",
        )
        for window in (5, None)
    ),
)
DEEPSEEK = replace(
    SMALL,
    num_layers=3,
    num_experts=8,
    top_k=2,
    expert_dim=12,
    shared_expert_dim=8,
    router="sigmoid",
    router_scaling=2.5,
    expert_groups=4,
    top_k_groups=2,
    head_dim=8,
    rope=RopeConfig(theta=500.0, partial=0.5),
    layers=(
        LayerKind(),
        *[LayerKind(feed_forward="moe", shared_expert=True, correction_bias=True)] * 2,
    ),
)
"""A layer without experts, then experts in groups, and one of all tokens."""
OLMOE = replace(SMALL, **EXPERTS, full_qk_norm=True, normalize_top_k=False)
TIED = replace(SMALL, tie_embeddings=True)
NORMED = replace(SMALL, qk_norm=True)
BIASED = replace(SMALL, qkv_bias=True)
# Two of every three layers use rope, with scaled frequencies.
YARN = RopeConfig(
    kind="yarn", theta=500.0, factor=4.0, original_length=16, beta_fast=2.0, beta_slow=0.5
)
MIXED = replace(NORMED, num_layers=3, nope_every=3, rope=YARN)


def small_model(config: ModelConfig = SMALL, *, dtype: torch.dtype = torch.float64) -> Transformer:
    """A model with weights large enough that every part affects the losses."""
    model = Transformer(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + values / 5 if parameter.ndim == 1 else values / 3)
        for buffer in model.buffers():
            buffer.copy_(torch.rand(buffer.shape, generator=generator, dtype=torch.float64) * 2)
    return model


def feed_forward_tokens(counts: list[int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For `Tiling.compile`: compiles nothing, and adds the tokens of a tile whenever a
    feed-forward's gate runs.
    """

    def wrap(piece: Callable[..., Any]) -> Callable[..., Any]:
        def counted(mixer: Any, products: Any, *given: Any) -> Any:
            counts.append(products[0].shape[1])
            return piece(mixer, products, *given)

        return counted if piece is FeedForward.inner else piece

    return wrap


def starts(*rows: list[int], width: int = 0) -> Tensor:
    """Boundaries of sequences with documents of these lengths, padded to the same `width`."""
    bounds = [[0, *accumulate(lengths)] for lengths in rows]
    width = max(width, *(len(row) for row in bounds))
    return torch.tensor([row + row[-1:] * (width - len(row)) for row in bounds], dtype=torch.int32)


def packed(
    *rows: list[int], seed: int = 0, vocab_size: int = SMALL.vocab_size, targets: int | None = None
) -> Batch:
    """Random sequences with documents of these lengths, and at most `targets` labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (len(rows), sum(rows[0])), generator=generator)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    positions = torch.empty_like(tokens)
    documents = torch.empty_like(tokens)
    for index, lengths in enumerate(rows):
        end = 0
        for document, length in enumerate(lengths):
            start = end
            end = end + length
            labels[index, start : end - 1] = tokens[index, start + 1 : end]
            positions[index, start:end] = torch.arange(length)
            documents[index, start:end] = document
    if targets is not None:
        flat = labels.view(-1)
        flat[(flat != IGNORE_INDEX).nonzero().flatten()[targets:]] = IGNORE_INDEX
    pairs = sum(length * (length + 1) // 2 for lengths in rows for length in lengths)
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=positions,
        document_ids=documents,
        boundaries=starts(*rows, width=8),
        num_tokens=tokens.numel(),
        num_pairs=pairs,
        num_computed_pairs=pairs,
    )


def gradients(model: Transformer, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses, and every parameter's gradient of their mean over targets."""
    model.zero_grad()
    losses: Tensor = model(batch)
    (losses.sum() / batch.num_targets()).backward()
    return losses.detach(), {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def remember(kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """A pack hook that appends saved tensors to `kept`, for `saved_tensors_hooks(remember(kept),
    unchanged)`.
    """

    def hook(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    return hook


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The maximum over all tensors of the difference relative to the tensor's largest value."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - expected[name]).abs().max() / expected[name].abs().max())
        for name in expected
    )


class TouchedElements(TorchDispatchMode):
    """Counts the elements that operators read and write in tensors of at least `elements`, by
    dtype, outside of products and attention.
    """

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.kernels = 0
        self.by_dtype = Counter[torch.dtype]()

    @property
    def bytes(self) -> int:
        return sum(count * dtype.itemsize for dtype, count in self.by_dtype.items())

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        out = function(*arguments, **(options or {}))
        if function.is_view or function.overloadpacket.__name__.startswith(UNTOUCHED):
            return out
        read = arguments[1:] if function.overloadpacket in (aten.copy_, aten.fill_) else arguments
        written = () if options and options.get("out") is not None else tree_leaves(out)
        touched = [x for x in (*tree_leaves((read, options)), *written) if isinstance(x, Tensor)]
        self.kernels += any(x.numel() >= self.elements for x in touched)
        for x in touched:
            if x.numel() >= self.elements:
                self.by_dtype[x.dtype] += x.numel()
        return out
