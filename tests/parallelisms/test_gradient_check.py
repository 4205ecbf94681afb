"""The start-up check: recomputed and compiled blocks have the gradients of plain autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from models import rope
from models.attention import Attention
from models.config import ModelConfig
from models.layers import MIXERS, Parameter
from parallelisms import gradient_check
from parallelisms.activation_checkpoint import RecomputePolicy
from parallelisms.block_recompute import Tiling, compiler
from tests.models.small_models import DEEPSEEK, NORMED, OLMOE, SMALL
from trainer.config import model as model_section
from trainer.config.parse import load
from trainer.errors import RankFailedError
from trainer.step import build

RUN = ["--data.corpus=copy", "--training.compile=true", "--memory.recompute=none"]


COMPILED = Tiling(compile=compiler(backend="aot_eager"))


@pytest.fixture(autouse=True)
def forgotten() -> None:
    gradient_check._wrong_gradients.cache_clear()


@pytest.fixture
def lost_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation loses the gradient of the rotation, as it did with torch 2.11."""
    rotate = rope.apply_rotary_emb

    def detached(x_BSNH: Tensor, cos_sin_2BS1F: Tensor) -> Tensor:
        return rotate(x_BSNH.detach() if torch.compiler.is_compiling() else x_BSNH, cos_sin_2BS1F)

    monkeypatch.setattr(rope, "apply_rotary_emb", detached)


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        pytest.param("none", NORMED, marks=pytest.mark.slow),
        ("keep_attention", NORMED),
        ("none", OLMOE),
        ("keep_attention", DEEPSEEK),
    ],
)
def test_compiled_blocks_have_the_gradients_of_eager_ones(
    policy: RecomputePolicy, config: ModelConfig
) -> None:
    """Those with experts too, in which the host may wait."""
    gradient_check.verify_gradients(config, policy, COMPILED)


@pytest.mark.usefixtures("lost_gradients")
def test_lost_gradients_are_named() -> None:
    lost = r"torch \S+ gives compiled blocks other gradients: .*q_proj.weight \(off by 1 of its norm\), .*k_proj.weight"
    with pytest.raises(ValueError, match=lost):
        gradient_check.verify_gradients(SMALL, "none", COMPILED)


@pytest.mark.usefixtures("lost_gradients")
def test_a_run_does_not_start_with_them() -> None:
    with pytest.raises(
        RankFailedError, match=r"training\.compile = true cannot be used here: torch .*q_proj"
    ):
        build.require_right_gradients(load(RUN))


@pytest.mark.parametrize("policy", ["full", "keep_attention"])
@pytest.mark.parametrize(
    "config", [SMALL, replace(NORMED, qkv_bias=True)], ids=["plain", "normed-biased"]
)
def test_recomputed_blocks_have_the_gradients_of_autograd(
    config: ModelConfig, policy: RecomputePolicy
) -> None:
    gradient_check.verify_gradients(config, policy, Tiling(2, 1 << 20))


def test_layers_without_rotation_and_with_biases_pass() -> None:
    """No gradient reaches the bias of their keys."""
    config = replace(SMALL, qkv_bias=True, nope_every=1)
    gradient_check.verify_gradients(config, "full", Tiling(2))
    gradient_check.verify_gradients(config, "none", COMPILED)


def test_queries_that_see_a_single_key_pass() -> None:
    """No gradient reaches them."""
    gradient_check.verify_gradients(replace(SMALL, window=1), "keep_attention", Tiling(2))


def test_a_piece_that_mixes_heads_is_refused_with_head_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = Attention.inner

    def centred(attention: Attention, products: Any, *given: Any) -> Any:
        q, k, v = inner(attention, products, *given)
        return q, k - k.mean(-2, keepdim=True), v

    monkeypatch.setattr(Attention, "inner", centred)
    config = replace(SMALL, vocab_size=38)  # A result for SMALL may be remembered.
    gradient_check.verify_gradients(config, "full", Tiling())
    with pytest.raises(ValueError, match="recomputation gives blocks other gradients: losses"):
        gradient_check.verify_gradients(config, "full", Tiling(2))


def test_a_run_does_not_start_with_a_weight_that_recomputation_would_lose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here because a piece reads it from its module, where gradients of a piece do not go."""
    inner = Attention.inner

    def scaled(attention: Attention, products: Any, *given: Any) -> Any:
        q, k, v = inner(attention, products, *given)
        return q, k, v * cast(Tensor, attention.v_scale)

    monkeypatch.setattr(Attention, "inner", scaled)
    monkeypatch.setattr(
        model_section, "_build_model_config", model_section._build_model_config.__wrapped__
    )
    declared = Parameter("H", "replicate_partial", "self_attn.v_scale", "ones")
    monkeypatch.setitem(MIXERS["attention"].parameters, "v_scale", declared)
    lost = r'memory\.recompute = "full" cannot be used here: recomputation found no gradient of v_scale: no piece uses it'
    with pytest.raises(RankFailedError, match=lost):
        build.require_right_gradients(load(["--data.corpus=copy", "--memory.recompute=full"]))
