"""The full model, compared with a plain torch Transformer, with its documents alone, and
compiled.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models import rope
from models.batch import IGNORE_INDEX, Batch
from models.config import ModelConfig, StageSpec
from models.layers import LayerKind
from models.presets import FAMILIES
from models.rope_config import RopeConfig
from models.transformer import Transformer
from tests.models.dense_model import dense_gradients
from tests.models.small_models import (
    BIASED,
    GEMMA,
    GRANITE,
    MIXED,
    NORMED,
    OLMO,
    SMALL,
    TIED,
    WINDOWED,
    YARN,
    gradients,
    largest_difference,
    packed,
    small_model,
)

GROUPED = replace(SMALL, num_heads=6, num_kv_heads=2, norm_eps=1e-2)
STRETCHED = replace(
    SMALL, rope=RopeConfig(kind="llama3", theta=500.0, factor=8.0, original_length=32)
)
# Dynamo triggers these warnings itself: it reads .grad of every tensor and instantiates autograd
# functions.
dynamo = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore:.*should not be instantiated:DeprecationWarning",
)
BATCH = packed([9, 1, 14], [24], [1, 22, 1])
AROUND_WINDOWS = packed([1, 2, 3, 4, 5, 6, 3], [7, 1, 16], seed=1)
"""Documents one token shorter than the windows of `WINDOWED`, as long, one token longer, and much
longer.
"""
SCALED = replace(
    WINDOWED,
    layers=(
        *WINDOWED.layers[1:],
        LayerKind(window=4, rope="local", softcap=1.5, full_qk_norm=True),
    ),
    rope=YARN,
)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        TIED,
        GROUPED,
        STRETCHED,
        NORMED,
        BIASED,
        MIXED,
        WINDOWED,
        SCALED,
        GEMMA,
        GRANITE,
        OLMO,
    ],
)
def test_losses_and_every_gradient_equal_the_reference(config: ModelConfig) -> None:
    model = small_model(config)
    for batch in (BATCH, AROUND_WINDOWS):
        losses, found = gradients(model, batch)
        expected_losses, expected = dense_gradients(model, batch)
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-12)
        assert found.keys() == dict(model.named_parameters()).keys()
        assert largest_difference(found, expected) < 1e-12


def single_document(batch: Batch, row: int, start: int, end: int) -> Batch:
    """One document as a separate sequence."""
    per_token = {
        name: getattr(batch, name)[row : row + 1, start:end]
        for name in ("tokens", "labels", "positions", "document_ids")
    }
    boundaries = torch.tensor([[0, end - start]], dtype=torch.int32)
    return Batch(
        **per_token,
        boundaries=boundaries,
        num_tokens=end - start,
        num_pairs=0,
        num_computed_pairs=0,
    )


@pytest.mark.parametrize("config", [SMALL, MIXED])
def test_packed_sequence_has_the_losses_of_its_documents_alone(config: ModelConfig) -> None:
    model = small_model(config)
    with torch.no_grad():
        losses = model(BATCH)
        for row, (start, end) in [
            (0, (0, 9)),
            (0, (9, 10)),
            (0, (10, 24)),
            (1, (0, 24)),
            (2, (1, 23)),
        ]:
            alone = model(single_document(BATCH, row, start, end))
            torch.testing.assert_close(losses[row : row + 1, start:end], alone, rtol=0, atol=1e-12)


def test_losses_are_float32_and_zero_without_target() -> None:
    losses = small_model(dtype=torch.float32)(BATCH)
    assert losses.dtype == torch.float32
    assert torch.equal(losses != 0, BATCH.labels != IGNORE_INDEX)
    assert small_model(dtype=torch.bfloat16)(BATCH).dtype == torch.float32


def is_tied(model: Transformer) -> bool:
    return (
        model.head is not None
        and model.embed is not None
        and model.head.proj.weight is model.embed.weight
    )


def test_tied_gradient_is_the_sum_of_embedding_and_projection() -> None:
    tied = small_model(TIED)
    untied = small_model(SMALL)
    assert is_tied(tied)
    untied.load_state_dict(tied.state_dict())
    assert not is_tied(untied)
    losses, found = gradients(tied, BATCH)
    expected_losses, parts = gradients(untied, BATCH)
    assert torch.equal(losses, expected_losses)
    parts["embed.weight"] = parts["embed.weight"] + parts.pop("head.proj.weight")
    assert largest_difference(found, parts) < 1e-14


@dynamo
@pytest.mark.parametrize(
    "config",
    [MIXED, *(pytest.param(config, marks=pytest.mark.slow) for config in (SMALL, TIED, BIASED))],
)
def test_compiled_blocks_equal_eager(config: ModelConfig) -> None:
    torch._dynamo.reset()
    eager = small_model(config)
    compiled = small_model(config)
    for block in compiled.transformer_blocks():
        block.compile(fullgraph=True, backend="aot_eager")
    for batch in (BATCH, packed([24], [3, 21], [2, 2, 20], seed=1)):
        losses, expected = gradients(eager, batch)
        found_losses, found = gradients(compiled, batch)
        torch.testing.assert_close(found_losses, losses, rtol=0, atol=1e-12)
        assert largest_difference(found, expected) < 1e-12


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_inductor_blocks_equal_eager() -> None:
    torch._dynamo.reset()
    config = replace(SMALL, num_layers=1)
    eager = small_model(config)
    compiled = small_model(config)
    for block in compiled.transformer_blocks():
        block.compile(fullgraph=True)
    losses, expected = gradients(eager, BATCH)
    found_losses, found = gradients(compiled, BATCH)
    torch.testing.assert_close(found_losses, losses, rtol=0, atol=1e-12)
    assert largest_difference(found, expected) < 1e-12


def test_pipeline_stages_leave_the_same_layers_unrotated() -> None:
    model = small_model(MIXED)
    with torch.no_grad():
        expected = model(BATCH)
        first, second = (
            Transformer(
                MIXED, stage=StageSpec(layers, has_embedding=index == 0, has_head=index == 1)
            ).double()
            for index, layers in enumerate((range(1), range(1, 3)))
        )
        for single_document in (first, second):
            single_document.load_state_dict(
                {name: model.state_dict()[name] for name in single_document.state_dict()}
            )
        assert torch.equal(second(BATCH, first(BATCH)), expected)


def test_sequence_length_of_the_run_selects_longrope_factors() -> None:
    rope_ = RopeConfig(
        kind="longrope",
        factor=2.0,
        original_length=100,
        short_factors=(1,) * 3,
        long_factors=(9,) * 3,
    )
    config = replace(SMALL, rope=rope_)
    of_length = {}
    for seq_len in (0, 100, 101):
        model = Transformer(config, seq_len=seq_len).double()
        model.load_state_dict(small_model(config).state_dict())
        of_length[seq_len] = model(BATCH).detach()
    assert torch.equal(of_length[0], of_length[100])
    assert not torch.equal(of_length[101], of_length[100])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "kind"), [("qwen2.5", "Qwen2"), ("qwen3", "Qwen3")])
def test_qwen_logits_equal_hugging_face(family: str, kind: str) -> None:
    import transformers

    config = FAMILIES[family]["debug"]
    given = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab_size, hidden_size=config.dim, intermediate_size=config.ffn_dim,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, head_dim=config.head_dim,
        num_key_value_heads=config.num_kv_heads, rms_norm_eps=config.norm_eps, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
    )  # fmt: skip
    theirs = getattr(transformers, f"{kind}ForCausalLM")(given).eval()
    ours = small_model(config, dtype=torch.float32)
    names = {"embed.weight": "model.embed_tokens.weight", "head.norm.weight": "model.norm.weight"}
    inner = {"attention.": "self_attn.", "attention_norm": "input_layernorm"}
    inner |= {"ffn_norm": "post_attention_layernorm", "feed_forward": "mlp"}
    weights = {}
    for name, parameter in ours.named_parameters():
        there = names.get(name, name.replace("blocks.", "model.layers."))
        for old, new in inner.items():
            there = there.replace(f".{old}", f".{new}")
        weights[there] = parameter.detach()
        with torch.no_grad():
            parameter.mul_(0.3 if parameter.ndim > 1 else 1)
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    batch = packed([300], vocab_size=config.vocab_size)
    with torch.no_grad():
        logits = theirs(batch.tokens).logits
        expected = F.cross_entropy(logits[0, :-1], batch.tokens[0, 1:], reduction="none")
        torch.testing.assert_close(ours(batch)[0, :-1], expected, rtol=0, atol=1e-4)
    assert float(logits.std()) > 1


def test_residual_projections_have_smaller_init_and_norms_start_at_one() -> None:
    model = small_model()
    values = {name: model.init_mean_std(name) for name, _ in model.named_parameters()}
    stds = {name: std for name, (mean, std) in values.items() if mean == 0}
    assert (
        stds["embed.weight"]
        == stds["head.proj.weight"]
        == stds["blocks.0.attention.q_proj.weight"]
        == 0.02
    )
    assert (
        stds["blocks.1.attention.o_proj.weight"]
        == stds["blocks.1.feed_forward.down_proj.weight"]
        == 0.01
    )
    norms = {name for name, value in values.items() if value == (1, 0)}
    assert norms == {name for name, parameter in model.named_parameters() if parameter.ndim == 1}


def test_block_saves_each_activation_once() -> None:
    model = small_model()
    block = model.transformer_blocks()[0]
    x = torch.randn(3, 24, SMALL.dim, dtype=torch.float64, requires_grad=True)
    table = rope.cos_sin_table(SMALL.rope, SMALL.head_dim, BATCH.positions, torch.float64)
    kept: dict[int, int] = {}
    ours = {parameter.data_ptr() for parameter in model.parameters()} | {
        table[0].data_ptr(),
        table[1].data_ptr(),
    }

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in ours and tensor.is_floating_point():
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x, table, BATCH.boundaries)
    tokens = 3 * 24
    heads = SMALL.num_heads
    kv_heads = SMALL.num_kv_heads
    width = SMALL.head_dim
    stream = [SMALL.dim] * 4  # into each norm, and out of it
    # q and out, k and v, log-sum-exp
    attention = [heads * width] * 2 + [kv_heads * width] * 2 + [heads]
    assert sorted(kept.values()) == sorted(
        tokens * size for size in [*stream, *attention, *[SMALL.ffn_dim] * 2, 1, 1]
    )
