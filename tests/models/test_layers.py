"""Layers of several kinds in one model: declared once, counted by kind, exact under recomputation
and on ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models import layers, transformer
from models.config import ModelConfig
from models.decode import Decoder
from models.hf import HuggingFaceError
from models.hf_config_write import config_differences, model_config_to_hf
from models.hf_tensors import tensor_specs
from models.layers import LayerKind, Parameter, SublayerKind
from models.transformer import Transformer
from parallelisms import activation_checkpoint, gradient_check
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.block_recompute import Tiling
from parallelisms.parallelize import set_attention_core
from tests.models.other_kinds import MIXED_KINDS, other_kinds
from tests.models.small_models import (
    NORMED,
    SMALL,
    gradients,
    largest_difference,
    packed,
    small_model,
)
from tests.models.test_model_config import flops_of_addition
from trainer.launch.initial_checks import model_config_from_values

POLICIES: tuple[activation_checkpoint.RecomputePolicy, ...] = ("full", "keep_attention")


@pytest.fixture(autouse=True)
def kinds() -> Iterator[None]:
    with other_kinds():
        yield


def test_a_pattern_repeats_over_the_layers() -> None:
    assert [kind.mixer for kind in MIXED_KINDS.layer_kinds] == [
        "attention",
        "attention",
        "shift",
        "attention",
        "attention",
    ]
    assert MIXED_KINDS.layer_kinds[4] == MIXED_KINDS.layer_kinds[0]
    assert len(MIXED_KINDS.kinds) == 4


def test_options_of_all_layers_make_the_kinds_that_a_pattern_states() -> None:
    said = replace(NORMED, num_layers=7, nope_every=3)
    kind = LayerKind(qk_norm=True)
    stated = replace(SMALL, num_layers=7, layers=(kind, kind, replace(kind, rope="none")))
    assert said.layer_kinds == stated.layer_kinds
    assert config_differences(said, stated) == {}
    assert set(config_differences(SMALL, replace(stated, num_layers=2))) == {"qk_norm"}
    assert set(config_differences(replace(said, nope_every=None), stated)) == {"rope.layers"}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            replace(SMALL, layers=(LayerKind(mixer="conv"),)),
            'mixer = "conv" is unknown; there are attention, shift',
        ),
        (
            replace(SMALL, layers=(LayerKind(mixer="shift", qk_norm=True),)),
            'qk_norm is read neither by mixer "shift"',
        ),
        (
            replace(NORMED, layers=(LayerKind(),)),
            "model.qk_norm must be set in each kind of model.layers",
        ),
    ],
    ids=["unknown", "unread", "twice"],
)
def test_a_pattern_that_cannot_be_meant_is_refused(config: ModelConfig, problem: str) -> None:
    assert any(problem in each for each in config.problems())


def test_every_declared_kind_has_a_module_with_its_parameters() -> None:
    """And says of itself whether it runs in pieces."""
    assert layers.MIXERS.keys() == transformer.MIXERS.keys()
    assert layers.FEED_FORWARDS.keys() == transformer.FEED_FORWARDS.keys()
    with torch.device("meta"):
        model = Transformer(MIXED_KINDS)
    declared = [
        (name, each.shape_of(MIXED_KINDS.sizes)) for name, each in MIXED_KINDS.parameters.items()
    ]
    assert [(name, tuple(x.shape)) for name, x in model.named_parameters()] == declared
    for block in model.transformer_blocks():
        assert activation_checkpoint.consists_of_pieces(block) == block.kind.in_pieces


def declared_with(**changes: Parameter) -> SublayerKind:
    """The gated feed-forward with other declarations."""
    gated = layers.FEED_FORWARDS["gated"]
    return gated._replace(
        parameters={**gated.parameters}
        | {name.replace("__", "."): x for name, x in changes.items()}
    )


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (
            declared_with(down_proj__weight=Parameter("EG", "rowwise", "w")),
            'must be declared with initial "residual"',
        ),
        (
            declared_with(scale=Parameter("G", "colwise", "s")),
            "feed_forward.scale is no matrix: its initial values",
        ),
        (
            declared_with(scale=Parameter("W", "colwise", "s", "ones")),
            "feed_forward.scale has a width that is unknown: W",
        ),
        (
            declared_with(scale=Parameter("G", "colwise", "s", "ones", "scaled")),
            "scaled is no option of LayerKind",
        ),
    ],
)
def test_a_declaration_that_cannot_be_built_is_refused(
    kind: SublayerKind, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(layers.FEED_FORWARDS, "gated", kind)
    with pytest.raises(ValueError, match=re.escape(problem)):
        Transformer(replace(SMALL))


@pytest.mark.parametrize("tiling", [Tiling(), Tiling(2, 4000)], ids=["whole", "tiles"])
@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_recomputed_layers_have_the_gradients_of_autograd(
    policy: activation_checkpoint.RecomputePolicy, every: int, tiling: Tiling
) -> None:
    batch = packed([9, 1, 14], [24])
    losses, expected = gradients(small_model(MIXED_KINDS), batch)
    model = small_model(MIXED_KINDS)
    activation_checkpoint.apply(
        model, RecomputeConfig(policy, blocks_per_checkpoint=every, tiling=tiling)
    )
    found_losses, found = gradients(model, batch)
    assert len(expected) == len(MIXED_KINDS.parameters)
    torch.testing.assert_close(found_losses, losses, rtol=1e-12, atol=1e-12)
    assert largest_difference(found, expected) < 1e-12


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("policy", ["none", *POLICIES])
def test_counted_products_are_those_that_run(
    policy: activation_checkpoint.RecomputePolicy, every: int
) -> None:
    model = small_model(MIXED_KINDS)
    batch = packed([5, 7, 4], [9, 6, 1])
    activation_checkpoint.apply(model, RecomputeConfig(policy, blocks_per_checkpoint=every))
    with FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.addmm_: flops_of_addition}
    ) as counter:
        model(batch).sum().backward()
    counted = MIXED_KINDS.hardware_flops(
        tokens=batch.num_tokens, pairs=0, recompute=policy, blocks_per_checkpoint=every
    )
    assert counter.get_total_flops() == counted


def test_counts_are_sums_over_layers() -> None:
    sizes = MIXED_KINDS.sizes
    dim = sizes["E"]
    queries = sizes["Q"]
    ffn = sizes["G"]
    attention = 2 * dim * (queries + sizes["K"])
    matrices = 4 * attention + 2 * dim * queries + (3 * 3 + 2 * 2) * dim * ffn
    assert MIXED_KINDS.matrix_parameters == matrices + sizes["V"] * dim
    assert MIXED_KINDS.flops(tokens=0, pairs=10) == 12 * 4 * queries * 10
    assert MIXED_KINDS.num_parameters == sum(
        x.numel() for x in Transformer(MIXED_KINDS).parameters()
    )
    assert tensor_specs(MIXED_KINDS)["blocks.2.attention.in_proj.weight"][:2] == (
        "model.layers.2.shift.in_proj.weight",
        (queries, dim),
    )


def test_the_gradient_check_covers_each_kind_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[ModelConfig]()

    def see(config: ModelConfig, *_: object, **__: object) -> tuple[str, ...]:
        seen.append(config)
        return ()

    monkeypatch.setattr(gradient_check, "_wrong_gradients", see)
    gradient_check.verify_gradients(replace(MIXED_KINDS, num_layers=9), "full", Tiling())
    assert seen[0].layers == tuple(replace(kind, rope="global") for kind in MIXED_KINDS.kinds)
    monkeypatch.undo()
    with other_kinds():
        gradient_check.verify_gradients(MIXED_KINDS, "full", Tiling())


def test_a_mixer_without_context_parallelism_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r'mixer "shift" has no context parallelism: parallelism\.cp must be 1'
    ):
        set_attention_core(small_model(MIXED_KINDS), MagicMock())
    with pytest.raises(ValueError, match='mixer "shift" cannot decode'):
        Decoder(small_model(MIXED_KINDS), capacity=8)


def test_a_pattern_is_not_exported_unless_all_layers_are_alike() -> None:
    with pytest.raises(HuggingFaceError, match=r"model\.layers = .* has no equivalent"):
        model_config_to_hf(MIXED_KINDS, max_length=64, dtype="float32")
    with pytest.raises(HuggingFaceError, match=r"model\.activation = gelu has no equivalent"):
        model_config_to_hf(
            replace(SMALL, activation=cast(Any, "gelu")), max_length=64, dtype="float32"
        )
    alike = replace(SMALL, head_dim=4, layers=(LayerKind(qkv_bias=True),))
    assert model_config_to_hf(alike, max_length=64, dtype="float32")["model_type"] == "qwen2"


def test_a_stored_pattern_is_read_again() -> None:
    stored = {f"model.{key}": value for key, value in asdict(MIXED_KINDS).items()}
    for rope in ("model.rope", "model.local_rope"):
        stored |= {f"{rope}.{key}": value for key, value in stored.pop(rope).items()}
    stored["model.layers"] = [*stored["model.layers"]]
    assert model_config_from_values(stored) == MIXED_KINDS
