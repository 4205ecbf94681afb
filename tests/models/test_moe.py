"""Mixtures of experts: choice, grouped products, the edges of routing, MXFP4."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models import experts, mxfp4
from models.config import ModelConfig
from models.dispatch import Rows, padded_rows, sort_by_expert, to_rows, to_tokens
from models.hf import SafetensorsReader
from models.hf_tensors import tensor_specs
from models.moe import MixtureOfExperts
from models.router import statistics_length
from models.row_groups import RowGroups
from models.tiling import CompilePiece, eager
from parallelisms.block_recompute import compiler
from tests.models.dense_model import RouterLosses, dense_gradients
from tests.models.small_models import (
    DEEPSEEK,
    GPT_OSS,
    OLMOE,
    gradients,
    largest_difference,
    packed,
    small_model,
)

MIXTURES = {"gpt-oss": GPT_OSS, "deepseek": DEEPSEEK, "olmoe": OLMOE}


def layer_of(config: ModelConfig) -> MixtureOfExperts:
    return small_model(config).expert_layers()[0]


@pytest.mark.parametrize("config", MIXTURES.values(), ids=MIXTURES)
def test_equal_scores_go_to_the_lower_index(config: ModelConfig) -> None:
    layer = layer_of(config)
    for buffer in layer.buffers(recurse=False):
        buffer.zero_()
    expected = [*range(config.top_k)]
    assert (
        layer.choose(torch.zeros(3, config.num_experts, dtype=torch.float64)).tolist()
        == [expected] * 3
    )


@pytest.mark.parametrize("config", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_every_number_of_tokens_equals_the_dense_reference(
    config: ModelConfig, tokens: int
) -> None:
    """Of one token, most experts have none."""
    model = small_model(config)
    batch = packed([1, tokens + 1], vocab_size=config.vocab_size)
    losses, expected = dense_gradients(model, batch)
    found_losses, found = gradients(model, batch)
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-12)
    assert float((found_losses - losses).abs().max()) <= 1e-12


def test_all_tokens_at_the_same_experts() -> None:
    """The router sees nothing: its weights are zero, and the bias chooses."""
    model = small_model(GPT_OSS)
    batch = packed([9, 4], vocab_size=GPT_OSS.vocab_size)
    with torch.no_grad():
        for layer in model.expert_layers():
            layer.get_parameter("router.weight").zero_()
    losses, expected = dense_gradients(model, batch)
    found_losses, found = gradients(model, batch)
    assert largest_difference(found, expected) <= 1e-12
    assert float((found_losses - losses).abs().max()) <= 1e-12
    idle = model.expert_layers()[0].get_parameter("experts.gate_proj").grad
    assert idle is not None
    assert int((idle.flatten(1).abs().sum(1) == 0).sum()) == GPT_OSS.num_experts - GPT_OSS.top_k


def test_a_router_with_nan_gives_nan_and_no_error() -> None:
    """The step is skipped then, as for any other weight."""
    model = small_model(OLMOE)
    batch = packed([9, 4], vocab_size=OLMOE.vocab_size)
    with torch.no_grad():
        model.expert_layers()[0].get_parameter("router.weight")[0, 0] = torch.nan
    losses, _ = gradients(model, batch)
    assert losses.isnan().any()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"top_k": 9}, "model.top_k = 9 must be at most model.num_experts = 8"),
        ({"expert_dim": 0}, "model.expert_dim = 0 must be above 0"),
        ({"expert_groups": 3}, "model.expert_groups = 3 must divide model.num_experts = 8"),
        ({"top_k_groups": 5}, "model.top_k_groups = 5 must be from 1 to model.expert_groups = 4"),
        (
            {"top_k": 5},
            "model.top_k = 5 must be at most 4, the experts in model.top_k_groups = 2 of",
        ),
        (
            {"layers": (), "num_experts": 8},
            'model.num_experts = 8 is only used with model.feed_forward = "moe"',
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(changes: dict[str, Any], problem: str) -> None:
    assert any(problem in each for each in replace(DEEPSEEK, **changes).problems())


# ---- grouped products

COUNTS = [[3, 0, 8, 5], [0, 0, 0, 16], [8, 8, 8, 8], [1, 0, 0, 0]]


def filled(counts: list[int]) -> tuple[Rows, int]:
    """Places of single-expert tokens of which each expert has as many, in an order that mixes
    them; and their number.
    """
    experts_N1 = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    shuffled_N1 = experts_N1[
        torch.randperm(len(experts_N1), generator=torch.Generator().manual_seed(1))
    ][:, None]
    return padded_rows(shuffled_N1, len(counts)), len(experts_N1)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize("compile_piece", [None, eager], ids=["", "compiled"])
def test_the_grouped_kernel_gives_what_the_loop_gives(
    counts: list[int], activation: str, compile_piece: CompilePiece | None
) -> None:
    """With padding between groups and after all, in which a number that is not finite stays; on a
    CPU it is a fallback.
    """
    generator = torch.Generator().manual_seed(0)
    padded, num_rows = filled(counts)
    plain, _ = sort_by_expert(expert_of_row(padded)[:, None], len(counts))
    plain = plain._replace(groups=RowGroups(counts))
    shapes = [[4, 24, 16], [4, 24, 16], [4, 16, 24], [4, 24], [4, 24], [4, 16]]
    given = [
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ([num_rows, 16], [num_rows, 1], *shapes)
    ]
    grad = torch.randn(num_rows, 16, generator=generator).bfloat16()
    found = list[list[Tensor | None]]()
    for rows, how in ((plain, None), (padded, compile_piece)):
        leaves = [each.clone().requires_grad_() for each in given]
        x_PE, weight_P = to_rows(leaves[0], leaves[1], rows)
        parameters = dict(zip([*experts.PRODUCTS, *experts.BIASES], leaves[2:], strict=True))
        options = experts.Options(activation, bias_scale=0.5, compile_piece=how)
        out_PE = experts.run_experts(x_PE, weight_P, rows.groups, parameters, options)
        assert len(out_PE) == len(rows.tokens)
        out = to_tokens(out_PE, rows)
        out.backward(grad)
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*found, strict=True):
        assert ours is not None
        assert expected is not None
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)
    empty = [expert for expert, count in enumerate(counts) if count == 0]
    for weight_grad in found[1][3:]:
        assert weight_grad is not None
        assert not weight_grad[empty].any()


def expert_of_row(rows: Rows) -> Tensor:
    """[R], of padded rows."""
    assert rows.groups.ends is not None
    return torch.searchsorted(rows.groups.ends, rows.place.int(), right=True)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_padded_groups_begin_where_the_kernel_takes_them_and_have_rows(counts: list[int]) -> None:
    rows, num_rows = filled(counts)
    assert rows.groups.ends is not None
    ends = rows.groups.ends.tolist()
    assert all(end % 8 == 0 for end in ends)
    assert all(
        end - start >= max(8, count)
        for start, end, count in zip([0, *ends], ends, counts, strict=False)
    )
    assert ends[-1] <= len(rows.tokens)
    assert torch.equal(rows.tokens[rows.place], torch.arange(num_rows))
    assert len(rows.place.unique()) == num_rows


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it.
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_skipped_outputs_few_experts_at_once_and_compilation_change_nothing(
    activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = RowGroups([3, 0, 4, 0])
    names = [*experts.PRODUCTS, *experts.BIASES]
    shapes = ([4, 6, 4], [4, 6, 4], [4, 4, 6], [4, 6], [4, 6], [4, 4])
    found = list[list[Tensor | None]]()
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ([7, 4], [7], *shapes)
    ]
    ways = [(True, 7), (False, 7), (True, 1), (False, 4), (True, 4)]
    for (needs_output, rows_at_once), compile_piece in product(
        ways, (None, eager, compiler(backend="aot_eager"))
    ):
        monkeypatch.setattr(experts, "ROWS_AT_ONCE", rows_at_once)
        leaves = [each.clone().requires_grad_() for each in inputs]
        parameters = dict(zip(names, leaves[2:], strict=True))
        options = experts.Options(activation, 0.5, needs_output, compile_piece)
        out = experts.run_experts(leaves[0], leaves[1], groups, parameters, options)
        out.backward(torch.ones(7, 4, dtype=torch.float64))
        found.append(
            [out.detach() if needs_output else found[0][0], *(leaf.grad for leaf in leaves)]
        )
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=0, atol=1e-14)


# ---- MXFP4


def quantized(experts: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales, and the values that they stand for, one number at a time."""
    generator = torch.Generator().manual_seed(0)
    shapes = mxfp4.stored_shapes((experts, outputs, inputs))
    blocks = torch.randint(0, 256, shapes[mxfp4.BLOCKS], generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 132, shapes[mxfp4.SCALES], generator=generator, dtype=torch.uint8)
    values = torch.empty(experts, outputs, inputs)
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for e in range(experts):
        for o in range(outputs):
            for i in range(inputs):
                byte = int(blocks[e, o, i // 32, i % 32 // 2])
                code = byte >> 4 if i % 2 else byte & 15
                values[e, o, i] = (
                    table[code & 7]
                    * (-1) ** (code >> 3)
                    * 2.0 ** (int(scales[e, o, i // 32]) - 127)
                )
    return blocks, scales, values


def test_mxfp4_is_dequantized_exactly() -> None:
    blocks, scales, values = quantized(2, 3, 64)
    assert torch.equal(mxfp4.dequantize(blocks, scales), values)
    scales[1, 2, 1] = 255
    assert torch.equal(
        mxfp4.dequantize(blocks, scales).isnan().nonzero()[:, 2], torch.arange(32, 64)
    )


@pytest.mark.parametrize(
    ("inputs", "dtype", "of", "problem"),
    [
        (32, torch.bfloat16, "mlp.experts.gate_up_proj", "_blocks is BF16; supported are U8"),
        (
            40,
            torch.uint8,
            "mlp.experts.gate_up_proj",
            "gate_up_proj_blocks [2, 128, 1, 16] is unexpected",
        ),
        (
            32,
            torch.uint8,
            "self_attn.q_proj.weight",
            "q_proj.weight_blocks [2, 128, 1, 16] is unexpected",
        ),
    ],
)
def test_what_is_no_quantized_weight_is_named(
    inputs: int, dtype: torch.dtype, of: str, problem: str, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    config = replace(
        GPT_OSS,
        dim=inputs,
        expert_dim=64,
        num_experts=2,
        top_k=1,
        model_type="gpt_oss",
        num_layers=1,
    )
    blocks, scales, _ = quantized(2, 128, 32)
    name = f"model.layers.0.{of}"
    save_file(
        {f"{name}_blocks": blocks.to(dtype), f"{name}_scales": scales},
        tmp_path / "model.safetensors",
    )
    assert any(problem in each for each in SafetensorsReader(tmp_path).problems(config))


def test_quantized_experts_are_read_slice_by_slice(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    config = replace(
        GPT_OSS,
        dim=32,
        expert_dim=64,
        num_experts=2,
        top_k=1,
        model_type="gpt_oss",
        layers=GPT_OSS.layers[:1],
        num_layers=1,
    )
    blocks, scales, values = quantized(2, 128, 32)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    specs = tensor_specs(config)
    prefix = "blocks.0.feed_forward.experts"
    for ours, turn in (("gate_proj", 0), ("up_proj", 1)):
        spec = specs[f"{prefix}.{ours}"]
        assert torch.equal(reader.read(spec), values[:, turn::2])
        ranges = [range(1, 2), range(3, 40), range(8, 30)]
        assert torch.equal(reader.read(spec, ranges), values[1:2, turn::2][:, 3:40, 8:30])
    missing = reader.problems(config)
    assert not any(
        "gate_up_proj_blocks" in each or "gate_up_proj_scales" in each for each in missing
    )
    assert "model.layers.0.mlp.experts.down_proj is missing" in missing


# ---- losses of routers


def test_router_losses_equal_the_dense_reference_with_padding() -> None:
    """Tokens without a target count in no mean."""
    for losses in (
        RouterLosses(0.7),
        RouterLosses(0.7, balances_sequences=True),
        RouterLosses(z=0.4),
    ):
        model = small_model(DEEPSEEK)
        batch = packed([5, 9, 1], [3, 3, 9], vocab_size=DEEPSEEK.vocab_size)
        step = model.router_step
        step.balance_loss, step.balances_sequences, step.z_loss = losses
        step.num_targets = batch.num_targets()
        _, expected = dense_gradients(model, batch, losses)
        found_losses = model(batch)
        (found_losses.sum() / batch.num_targets()).backward()
        found = {
            name: each.grad for name, each in model.named_parameters() if each.grad is not None
        }
        assert largest_difference(found, expected) <= 1e-12


def test_evaluation_counts_nothing_and_adds_no_loss() -> None:
    model = small_model(OLMOE)
    batch = packed([9, 4], vocab_size=OLMOE.vocab_size)
    model.router_step.balance_loss = 5.0
    for layer in model.expert_layers():
        layer.statistics = torch.zeros(statistics_length(OLMOE.num_experts), dtype=torch.float64)
    _, found = gradients(model, batch)
    _, expected = dense_gradients(model, batch)
    assert largest_difference(found, expected) <= 1e-12
    assert all(
        float(layer.statistics.abs().sum()) == 0
        for layer in model.expert_layers()
        if layer.statistics is not None
    )


def test_a_batch_of_weights_in_bfloat16_routes_in_float32() -> None:
    layer = layer_of(OLMOE).bfloat16()
    x = torch.randn(1, 5, OLMOE.dim).bfloat16()
    weights = {name: each.detach() for name, each in layer.named_parameters()}
    logits = layer.logits(x, weights)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, F.linear(x.float(), weights["router.weight"].float()))
