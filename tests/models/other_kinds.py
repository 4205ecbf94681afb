"""Kinds of layers that the project does not have, as someone would add them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import layers, transformer
from models.layers import LayerKind, Parameter, SublayerKind
from models.linear import local_parameters
from models.sublayer import SublayerModule, Weights
from tests.models.small_models import SMALL
from trainer.config.extension import Extension, Sublayer, TrackedRun

SHIFT = SublayerKind(
    {
        "in_proj.weight": Parameter("QE", "colwise", "shift.in_proj.weight"),
        "o_proj.weight": Parameter("EQ", "rowwise", "shift.o_proj.weight", "residual"),
    },
    in_pieces=False,
)
SQUARED = SublayerKind(
    {
        "up_proj.weight": Parameter("GE", "colwise", "mlp.up_proj.weight"),
        "down_proj.weight": Parameter("EG", "rowwise", "mlp.down_proj.weight", "residual"),
    },
)
UNEVEN = {
    "attention": {
        "attention_norm.weight": Parameter("E", "replicate", "input_layernorm.weight", "ones"),
        "attention_post_norm.weight": Parameter(
            "E", "replicate", "post_self_attn_layernorm.weight", "ones"
        ),
    },
    "feed_forward": {
        "ffn_post_norm.weight": Parameter("E", "replicate", "post_mlp_layernorm.weight", "ones")
    },
}
"""Norms of input and output of attention, and of the feed-forward's output only."""
MIXED_KINDS = replace(
    SMALL,
    num_layers=5,
    layers=(
        LayerKind(qk_norm=True, qkv_bias=True, norms=cast(Any, "uneven")),
        LayerKind(feed_forward="squared", rope="none"),
        LayerKind(mixer="shift", feed_forward="squared"),
        LayerKind(),
    ),
)
"""The last layer is of the first kind again."""


class Shift(SublayerModule):
    """Each token gets something of the one before it in its document. Only the whole block can be
    run again.
    """

    module_name = "attention"
    linears = ("in_proj",)
    last = "o_proj"

    def forward(self, x_BSE: Tensor, rotation_2BS1F: object, boundaries_BD: Tensor) -> Tensor:
        del rotation_2BS1F
        weights = local_parameters(self)
        (projected_BSQ,) = self.products(x_BSE, weights)
        batch, length, _ = projected_BSQ.shape
        starts_BS = torch.zeros(batch, length + 1, dtype=torch.bool, device=boundaries_BD.device)
        starts_BS = starts_BS.scatter(1, boundaries_BD.long(), value=True)[:, :-1]
        previous_BSQ = projected_BSQ.roll(1, dims=1).masked_fill(
            starts_BS[..., None].to(x_BSE.device), 0
        )
        return F.linear(previous_BSQ.sin(), weights["o_proj.weight"])


class Squared(SublayerModule):
    """Squared ReLU without a gate (So et al., 2021), in pieces."""

    linears = ("up_proj",)
    last = "down_proj"

    def inner(
        self, products: Sequence[Tensor], rotation_2BS1F: object, weights: Weights
    ) -> tuple[Tensor]:
        del rotation_2BS1F, weights
        return (products[0].relu().square(),)


@contextmanager
def other_kinds() -> Iterator[None]:
    """Adds them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(layers.NORMS, "uneven", UNEVEN)
        monkeypatch.setitem(layers.MIXERS, "shift", SHIFT)
        monkeypatch.setitem(layers.FEED_FORWARDS, "squared", SQUARED)
        monkeypatch.setitem(transformer.MIXERS, "shift", Shift)
        monkeypatch.setitem(transformer.FEED_FORWARDS, "squared", Squared)
        yield


class Lines:
    """A tracker that writes a line for each step that it hears of."""

    def __init__(self, run: TrackedRun) -> None:
        self.file = run.folder / "lines.txt"

    def log(self, step: int, values: Mapping[str, object]) -> None:
        with self.file.open("a") as file:
            file.write(f"{step} {sorted(values)}\n")

    def close(self) -> None:
        pass


class Descent:
    """The gradient times the learning rate."""

    clips = False

    def __init__(self, *_: object) -> None:
        pass

    def new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {"seen": torch.zeros_like(parameter)}

    def update(self, weights: list[Tensor], *_: object, lr: float, **_options: object) -> None:
        for weight in weights:
            weight.sub_(cast(Tensor, weight.grad), alpha=lr)


def smoothed(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Cross-entropy with a tenth of the weight on all tokens."""
    return F.cross_entropy(logits_CV, targets_C, reduction="none", label_smoothing=0.1)


def extension() -> Extension:
    """The same kinds, an optimizer, a loss and a tracker, by `job.extension`."""
    return Extension(
        name="other kinds",
        mixers={"shift": Sublayer(SHIFT, Shift)},
        feed_forwards={"squared": Sublayer(SQUARED, Squared)},
        norms={"uneven": UNEVEN},
        optimizers={"descent": Descent},
        losses={"smoothed": smoothed},
        trackers={"lines": Lines},
    )
