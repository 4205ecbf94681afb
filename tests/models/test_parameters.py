"""Every parameter is declared once, and one that is not, or that a consumer does not know, is
named.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from models import hf
from models.attention import Attention
from models.config import ModelConfig
from models.hf_tensors import tensor_specs
from models.hf_write import write_safetensors
from models.layers import FEED_FORWARDS, MIXERS, LayerKind, Parameter
from models.linear import Linear
from models.sublayer import Weights
from models.transformer import Transformer
from parallelisms import activation_checkpoint, tensor_parallel
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.block_recompute import Tiling
from parallelisms.init_weights import initialize
from parallelisms.mesh.collectives import to_local
from parallelisms.mesh.mesh import Mesh
from parallelisms.mesh.parallel_dims import AXES
from tests.models.small_models import gradients, largest_difference, packed, small_model
from tests.ranks import run_ranks
from trainer.checkpoint.load import require_matching_tensors
from trainer.config.sections import OptimizerSection
from trainer.errors import RankFailedError, ResumeError
from trainer.step.optimizer import Optimizer

CONFIG = ModelConfig(
    vocab_size=10, dim=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, ffn_dim=12
)
POLICIES = ("full", "keep_attention")
GATE = "attention.head_gate.weight"
HF_GATE = "model.layers.1.self_attn.gate.weight"


def with_head_gate(monkeypatch: pytest.MonkeyPatch, *, sizes: tuple[int, int] = (16, 8)) -> None:
    """A matrix that the attention module has and does not use."""
    initialize: Callable[[Attention, ModelConfig, LayerKind], None] = Attention.__init__

    def with_gate(attention: Attention, config: ModelConfig, kind: LayerKind) -> None:
        initialize(attention, config, kind)
        attention.head_gate = Linear(*sizes[::-1])

    monkeypatch.setattr(Attention, "__init__", with_gate)


def declare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        MIXERS["attention"].parameters,
        "head_gate.weight",
        Parameter("QE", "colwise", "self_attn.gate.weight"),
    )


@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": True}, {"qkv_bias": True}, {"tie_embeddings": True}], ids=str
)
def test_a_model_has_the_declared_parameters_in_their_shapes(changes: dict[str, bool]) -> None:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    declared = [(name, each.shape_of(config.sizes)) for name, each in config.parameters.items()]
    assert [
        (name, tuple(x.shape)) for name, x in Transformer(config).named_parameters()
    ] == declared


def test_a_parameter_that_is_not_declared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_head_gate(monkeypatch)
    with pytest.raises(
        ValueError,
        match=re.escape(f'blocks.1.{GATE} [16, 8] is not declared by mixer "attention"'),
    ):
        Transformer(replace(CONFIG))


def test_a_declared_shape_is_that_of_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    with_head_gate(monkeypatch, sizes=(4, 8))
    declare(monkeypatch)
    with pytest.raises(
        ValueError, match=re.escape(f"blocks.0.{GATE} has shape [4, 8], declared as [16, 8]")
    ):
        Transformer(replace(CONFIG))


def test_a_declared_parameter_that_the_model_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bias = Parameter("Q", "colwise", "self_attn.gate.bias", "zeros")
    monkeypatch.setitem(MIXERS["attention"].parameters, "head_gate.bias", bias)
    with pytest.raises(
        ValueError,
        match=re.escape(
            '0.attention.head_gate.bias is declared by mixer "attention" and not in the model'
        ),
    ):
        Transformer(replace(CONFIG))


@pytest.mark.parametrize("policy", POLICIES)
def test_recomputation_refuses_a_weight_that_no_piece_takes(
    policy: activation_checkpoint.RecomputePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_head_gate(monkeypatch)
    declare(monkeypatch)
    model = Transformer(replace(CONFIG))
    activation_checkpoint.apply(model, RecomputeConfig(policy))
    with pytest.raises(ValueError, match=r"found no gradient of head_gate\.weight"):
        model(packed([24], vocab_size=10)).sum().backward()


@pytest.mark.parametrize("tile_bytes", [None, 2000])
@pytest.mark.parametrize("head_groups", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_weight_added_to_a_piece_has_its_gradient(
    policy: activation_checkpoint.RecomputePolicy,
    head_groups: int,
    tile_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With nothing added to recomputation: here a scale of values, by channel of a head."""
    inner = Attention.inner

    def scaled(attention: Attention, products: Any, rotation: Any, weights: Weights) -> Any:
        q, k, v = inner(attention, products, rotation, weights)
        return q, k, v * weights["v_scale"]

    monkeypatch.setattr(Attention, "inner", scaled)
    declared = Parameter("H", "replicate_partial", "self_attn.v_scale", "ones")
    monkeypatch.setitem(MIXERS["attention"].parameters, "v_scale", declared)
    config = replace(CONFIG)
    batch = packed([9, 15], vocab_size=10)
    losses, expected = gradients(small_model(config), batch)
    model = small_model(config)
    activation_checkpoint.apply(
        model, RecomputeConfig(policy, tiling=Tiling(head_groups, tile_bytes))
    )
    found_losses, found = gradients(model, batch)
    assert expected["blocks.0.attention.v_scale"].norm() > 0.1
    torch.testing.assert_close(found_losses, losses, rtol=1e-12, atol=1e-12)
    assert largest_difference(found, expected) < 1e-12


def test_counts_and_files_follow_the_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    before = replace(CONFIG)
    counted = before.num_parameters
    products = before.flops(tokens=1, pairs=0)
    declare(monkeypatch)
    after = replace(CONFIG)
    assert after.num_parameters - counted == 2 * 16 * 8
    assert after.flops(tokens=1, pairs=0) - products == 6 * 2 * 16 * 8
    assert tensor_specs(after)[f"blocks.1.{GATE}"][:2] == (HF_GATE, (16, 8))


@pytest.mark.parametrize(("tp", "kv_rows"), [(1, 8), (2, 4), (4, 8)])
def test_a_rank_has_its_cut_of_each_parameter(tp: int, kv_rows: int) -> None:
    cut = {
        name: each.local_shape(CONFIG.sizes, tp)
        for name, each in CONFIG.layer_kinds[0].parameters.items()
    }
    assert cut["attention.q_proj.weight"] == (16 // tp, 8)
    # With fewer KV heads than ranks each holds them all.
    assert cut["attention.k_proj.weight"] == (kv_rows, 8)
    assert cut["feed_forward.down_proj.weight"] == (8, 12 // tp)
    assert cut["ffn_norm.weight"] == (8,)


def test_initial_weights_and_optimizer_name_what_is_not_declared() -> None:
    with torch.device("meta"):
        model = Transformer(CONFIG)
        model.transformer_blocks()[1].attention.head_gate = Linear(8, 16)
    expected = re.escape(f"parameter blocks.1.{GATE} is not declared in models/layers.py")
    with pytest.raises(ValueError, match=expected):
        initialize(model, seed=0, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=expected):
        Optimizer([model], OptimizerSection())


def test_norms_and_biases_do_not_decay() -> None:
    model = small_model(replace(CONFIG, qk_norm=True, qkv_bias=True))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Optimizer([model], OptimizerSection(weight_decay=0.5)).step(0.1)
    kept = {
        name
        for name, parameter in model.named_parameters()
        if torch.equal(parameter, before[name])
    }
    assert kept == {name for name, value in before.items() if value.ndim == 1}
    assert any(name.endswith("v_proj.bias") for name in kept)


def test_the_first_step_names_what_nothing_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    with_head_gate(monkeypatch)
    declare(monkeypatch)
    model = small_model(replace(CONFIG))
    model(packed([9, 3], vocab_size=CONFIG.vocab_size)).sum().backward()
    with pytest.raises(
        RankFailedError, match=re.escape(f"2 of 23 parameters: blocks.0.{GATE}, blocks.1.{GATE}")
    ):
        Optimizer([model], OptimizerSection()).step(1e-3)


def without_and_with_head_gate(monkeypatch: pytest.MonkeyPatch) -> tuple[ModelConfig, ModelConfig]:
    without = replace(CONFIG)
    assert without.parameters  # of now
    declare(monkeypatch)
    return without, replace(CONFIG)


def test_import_names_what_only_one_side_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, with_gate = without_and_with_head_gate(monkeypatch)
    for written, expected, problem in (
        (without, with_gate, f"{HF_GATE} is missing"),
        (with_gate, without, f"{HF_GATE} [16, 8] is unexpected"),
    ):
        weights = {name: torch.zeros(entry.shape) for name, entry in tensor_specs(written).items()}
        assert [
            *write_safetensors(
                tmp_path, written, weights.__getitem__, dtype=torch.float32, file_bytes=1 << 20
            )
        ]
        assert problem in hf.SafetensorsReader(tmp_path).problems(expected)


def test_export_names_what_only_one_side_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, with_gate = (
        {name: entry.shape for name, entry in tensor_specs(config).items()}
        for config in without_and_with_head_gate(monkeypatch)
    )
    for saved, expected, problem in (
        (without, with_gate, "is absent in the checkpoint and (16, 8) in the model"),
        (with_gate, without, "is (16, 8) in the checkpoint and absent in the model"),
    ):
        with pytest.raises(ResumeError, match=re.escape(f"blocks.1.{GATE} {problem}")):
            require_matching_tensors(tmp_path, saved, expected)


def local_shapes() -> dict[str, tuple[int, ...]]:
    """Of a model with a head gate and biases."""
    mesh = Mesh(
        "cpu",
        dict.fromkeys(AXES, 1) | {"tp": distributed.get_world_size()},
        rank=distributed.get_rank(),
    )
    with pytest.MonkeyPatch.context() as monkeypatch, torch.device("meta"):
        with_head_gate(monkeypatch)
        declare(monkeypatch)
        model = Transformer(replace(CONFIG, qkv_bias=True))
        tensor_parallel.apply(model, mesh.tp_mesh, sequence_parallel=True, loss_parallel=True)
    return {name: tuple(to_local(x).shape) for name, x in model.named_parameters()}


@pytest.mark.ranks
def test_tensor_parallelism_cuts_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch)
    config = replace(CONFIG, qkv_bias=True)
    expected = {
        name: each.local_shape(config.sizes, 2) for name, each in config.parameters.items()
    }
    assert run_ranks(local_shapes, 2) == [expected] * 2


def test_flops_of_the_model_count_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks with full recomputation."""
    before = CONFIG.hardware_flops(tokens=1, pairs=0, recompute="full")
    declare(monkeypatch)
    monkeypatch.setitem(
        FEED_FORWARDS["gated"].parameters,
        "router.weight",
        Parameter("GE", "replicate", "router.weight"),
    )
    after = replace(CONFIG).hardware_flops(tokens=1, pairs=0, recompute="full")
    sizes = CONFIG.sizes
    gate = sizes["Q"] * sizes["E"]
    router = sizes["G"] * sizes["E"]
    # Three products; what attention reads is recomputed twice, the rest once.
    assert after - before == 2 * 2 * (5 * gate + 4 * router)
