"""Every parameter is declared once, and one that is not, or that a consumer does not know, is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from models import hf, parameters
from models.attention import Attention
from models.config import ModelConfig
from models.linear import Linear
from models.parameters import Parameter
from models.transformer import Transformer
from parallelisms import activation_checkpoint
from parallelisms.activation_checkpoint import RecomputeConfig

CONFIG = ModelConfig(vocab_size=10, dim=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, ffn_dim=12)
GATE = "attention.head_gate.weight"


def with_head_gate(monkeypatch: pytest.MonkeyPatch, *, sizes: tuple[int, int] = (16, 8)) -> None:
    """A matrix that the attention module has and does not use."""
    initialize: Callable[[Attention, ModelConfig], None] = Attention.__init__

    def with_gate(attention: Attention, config: ModelConfig) -> None:
        initialize(attention, config)
        attention.head_gate = Linear(*sizes[::-1])

    monkeypatch.setattr(Attention, "__init__", with_gate)


def declare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parameters.BLOCK, GATE, Parameter("QE", "colwise", "self_attn.gate.weight"))


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, qk_norm=True), replace(CONFIG, tie_embeddings=True)])
def test_a_model_has_the_declared_parameters_in_their_shapes(config: ModelConfig) -> None:
    declared = {name: each.shape_of(config.sizes) for name, each in config.parameters.items()}
    assert {name: tuple(x.shape) for name, x in Transformer(config).named_parameters()} == declared


def test_a_parameter_that_is_not_declared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_head_gate(monkeypatch)
    with pytest.raises(ValueError, match=re.escape(f"blocks.1.{GATE} [16, 8] is not declared in models/parameters.py")):
        Transformer(replace(CONFIG))


def test_a_declared_shape_is_that_of_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    with_head_gate(monkeypatch, sizes=(4, 8))
    declare(monkeypatch)
    with pytest.raises(ValueError, match=re.escape(f"blocks.0.{GATE} has shape [4, 8], declared as [16, 8]")):
        Transformer(replace(CONFIG))


def test_a_declared_parameter_that_the_model_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch)
    with pytest.raises(ValueError, match=re.escape(f"blocks.0.{GATE} is declared and not in the model")):
        Transformer(replace(CONFIG))


@pytest.mark.parametrize("policy", ["full", "keep_attention"])
def test_recomputation_loses_no_gradient(
    policy: activation_checkpoint.RecomputePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_head_gate(monkeypatch)
    declare(monkeypatch)
    with pytest.raises(ValueError, match=f"computes no gradient of {re.escape(GATE)}"):
        activation_checkpoint.apply(Transformer(replace(CONFIG)), RecomputeConfig(policy))


def test_counts_and_files_follow_the_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    before = replace(CONFIG)
    counted, products = before.num_parameters, before.flops(tokens=1, pairs=0)
    declare(monkeypatch)
    after = replace(CONFIG)
    assert after.num_parameters - counted == 2 * 16 * 8
    assert after.flops(tokens=1, pairs=0) - products == 6 * 2 * 16 * 8
    assert hf.tensor_specs(after)[f"blocks.1.{GATE}"] == ("model.layers.1.self_attn.gate.weight", (16, 8))


@pytest.mark.parametrize(("tp", "kv_rows"), [(1, 8), (2, 4), (4, 8)])
def test_a_rank_has_its_cut_of_each_parameter(tp: int, kv_rows: int) -> None:
    cut = {name: each.local_shape(CONFIG.sizes, tp) for name, each in CONFIG.block_parameters.items()}
    assert cut["attention.q_proj.weight"] == (16 // tp, 8)
    # With fewer KV heads than ranks each holds them all.
    assert cut["attention.k_proj.weight"] == (kv_rows, 8)
    assert cut["feed_forward.down_proj.weight"] == (8, 12 // tp)
    assert cut["ffn_norm.weight"] == (8,)
