"""The whole model: held to a Transformer written out with torch's functions, document by document, and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models import rope
from models.batch import IGNORE, Batch
from models.config import ModelConfig, RopeConfig
from models.transformer import Transformer
from tests.models.small import SMALL, TIED, gradients, largest_difference, packed, small_model

GROUPED = replace(SMALL, num_heads=6, num_kv_heads=2, norm_eps=1e-2)
STRETCHED = replace(SMALL, rope=RopeConfig(kind="llama3", theta=500.0, factor=8.0, original_length=32))
# Dynamo itself does what torch warns of: it looks at .grad of every tensor, and instantiates functions.
dynamo = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.*should not be instantiated:DeprecationWarning"
)
BATCH = packed([9, 1, 14], [24], [1, 22, 1])


def plain(model: Transformer, batch: Batch) -> Tensor:
    """The same losses from the same weights, by the book: dense mask, complex rotation, whole logits."""
    config, weights = model.config, dict(model.named_parameters())
    half = config.head_dim // 2
    angles = batch.positions.double()[..., None] * rope.frequencies(config.rope, config.head_dim)
    turn = torch.polar(torch.ones_like(angles), angles)[:, :, None]
    tokens = torch.arange(batch.tokens.shape[1])
    mask = (batch.documents[:, :, None] == batch.documents[:, None, :]) & (tokens[:, None] >= tokens[None, :])

    def norm(x: Tensor, name: str) -> Tensor:
        out: Tensor = x * (x.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt() * weights[name]
        return out

    def heads(x: Tensor, name: str, *, rotated: bool) -> Tensor:
        y = F.linear(x, weights[name]).unflatten(-1, (-1, config.head_dim))
        if rotated:
            z = torch.complex(y[..., :half], y[..., half:]) * turn
            y = torch.cat((z.real, z.imag), dim=-1)
        repeated: Tensor = y.transpose(1, 2).repeat_interleave(config.num_heads // y.shape[2], dim=1)
        return repeated

    x = F.embedding(batch.tokens, weights["embed.weight"])
    for layer in range(config.num_layers):
        at = f"blocks.{layer}."
        y = norm(x, at + "attention_norm.weight")
        q, k = (heads(y, f"{at}attention.{which}_proj.weight", rotated=True) for which in "qk")
        scores = q @ k.transpose(-1, -2) / config.head_dim**0.5
        chances = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        seen = chances @ heads(y, at + "attention.v_proj.weight", rotated=False)
        x = x + F.linear(seen.transpose(1, 2).flatten(-2), weights[at + "attention.o_proj.weight"])
        y = norm(x, at + "ffn_norm.weight")
        gate, up = (F.linear(y, weights[f"{at}feed_forward.{which}_proj.weight"]) for which in ("gate", "up"))
        x = x + F.linear(gate * gate.sigmoid() * up, weights[at + "feed_forward.down_proj.weight"])
    projection = weights["embed.weight" if config.tie_embeddings else "head.proj.weight"]
    logits = F.linear(norm(x, "head.norm.weight"), projection)
    losses: Tensor = F.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), reduction="none", ignore_index=IGNORE
    )
    return losses.view_as(batch.labels)


@pytest.mark.parametrize("config", [SMALL, TIED, GROUPED, STRETCHED])
def test_losses_and_every_gradient_are_those_of_the_book(config: ModelConfig) -> None:
    model = small_model(config)
    losses, found = gradients(model, BATCH)
    model.zero_grad()
    expected = plain(model, BATCH)
    (expected.sum() / BATCH.num_targets()).backward()
    torch.testing.assert_close(losses, expected.detach(), rtol=0, atol=1e-12)
    assert found.keys() == dict(model.named_parameters()).keys()
    by_book = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert largest_difference(found, by_book) < 1e-12


def part(batch: Batch, row: int, start: int, end: int) -> Batch:
    """One document as a row of its own."""
    per_token = {
        name: getattr(batch, name)[row : row + 1, start:end] for name in ("tokens", "labels", "positions", "documents")
    }
    boundaries = torch.tensor([[0, end - start]], dtype=torch.int32)
    return Batch(**per_token, boundaries=boundaries, num_tokens=end - start, num_pairs=0, attended=0)


@pytest.mark.parametrize("config", [SMALL, STRETCHED])
def test_a_packed_row_has_the_losses_of_its_documents_alone(config: ModelConfig) -> None:
    model = small_model(config)
    with torch.no_grad():
        losses = model(BATCH)
        for row, (start, end) in [(0, (0, 9)), (0, (9, 10)), (0, (10, 24)), (1, (0, 24)), (2, (1, 23))]:
            alone = model(part(BATCH, row, start, end))
            torch.testing.assert_close(losses[row : row + 1, start:end], alone, rtol=0, atol=1e-12)


def test_losses_are_single_precision_and_zero_where_there_is_no_target() -> None:
    losses = small_model(dtype=torch.float32)(BATCH)
    assert losses.dtype == torch.float32
    assert torch.equal(losses != 0, BATCH.labels != IGNORE)
    assert small_model(dtype=torch.bfloat16)(BATCH).dtype == torch.float32


def shares_its_weight(model: Transformer) -> bool:
    return model.head is not None and model.embed is not None and model.head.proj.weight is model.embed.weight


def test_a_tied_gradient_is_the_sum_of_the_embedding_s_and_the_projection_s() -> None:
    tied, untied = small_model(TIED), small_model(SMALL)
    assert shares_its_weight(tied)
    untied.load_state_dict(tied.state_dict())
    assert not shares_its_weight(untied)
    losses, found = gradients(tied, BATCH)
    expected_losses, parts = gradients(untied, BATCH)
    assert torch.equal(losses, expected_losses)
    parts["embed.weight"] = parts["embed.weight"] + parts.pop("head.proj.weight")
    assert largest_difference(found, parts) < 1e-14


@dynamo
@pytest.mark.parametrize("config", [SMALL, TIED])
def test_compiled_blocks_give_the_losses_and_gradients_of_eager_ones(config: ModelConfig) -> None:
    torch._dynamo.reset()
    eager, compiled = small_model(config), small_model(config)
    for block in compiled.layers():
        block.compile(fullgraph=True, backend="aot_eager")
    for batch in (BATCH, packed([24], [3, 21], [2, 2, 20], seed=1)):
        losses, expected = gradients(eager, batch)
        found_losses, found = gradients(compiled, batch)
        torch.testing.assert_close(found_losses, losses, rtol=0, atol=1e-12)
        assert largest_difference(found, expected) < 1e-12


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_blocks_compiled_by_inductor_give_the_losses_and_gradients_of_eager_ones() -> None:
    torch._dynamo.reset()
    config = replace(SMALL, num_layers=1)
    eager, compiled = small_model(config), small_model(config)
    for block in compiled.layers():
        block.compile(fullgraph=True)
    losses, expected = gradients(eager, BATCH)
    found_losses, found = gradients(compiled, BATCH)
    torch.testing.assert_close(found_losses, losses, rtol=0, atol=1e-12)
    assert largest_difference(found, expected) < 1e-12


def test_projections_into_the_residual_stream_start_smaller_and_norms_at_one() -> None:
    model = small_model()
    stds = {name: model.init_std(name) for name, _ in model.named_parameters()}
    assert stds["embed.weight"] == stds["head.proj.weight"] == stds["blocks.0.attention.q_proj.weight"] == 0.02
    assert stds["blocks.1.attention.o_proj.weight"] == stds["blocks.1.feed_forward.down_proj.weight"] == 0.01
    norms = {name for name, std in stds.items() if std is None}
    assert norms == {name for name, parameter in model.named_parameters() if parameter.ndim == 1}


def test_a_block_keeps_each_activation_once() -> None:
    model = small_model()
    block = model.layers()[0]
    x = torch.randn(3, 24, SMALL.dim, dtype=torch.float64, requires_grad=True)
    table = rope.rotation(SMALL.rope, SMALL.head_dim, BATCH.positions, torch.float64)
    kept: dict[int, int] = {}
    ours = {parameter.data_ptr() for parameter in model.parameters()} | {table[0].data_ptr(), table[1].data_ptr()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in ours and tensor.is_floating_point():
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x, table, BATCH.boundaries)
    tokens, heads, kv_heads, width = 3 * 24, SMALL.num_heads, SMALL.num_kv_heads, SMALL.head_dim
    stream = [SMALL.dim] * 4  # into each norm, and out of it
    attention = [heads * width] * 2 + [kv_heads * width] * 2 + [heads]  # q and out, k and v, log-sum-exp
    assert sorted(kept.values()) == sorted(tokens * size for size in [*stream, *attention, *[SMALL.ffn_dim] * 2, 1, 1])
