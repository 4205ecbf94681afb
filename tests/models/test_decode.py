"""Incremental decoding, compared with the training forward pass, whose losses are negative
log-probabilities.

Shape suffixes: S tokens of the sequence, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from models.batch import Batch
from models.config import ModelConfig, StageSpec
from models.decode import Decoder
from models.transformer import Transformer
from tests.models.small_models import (
    BIASED,
    GEMMA,
    GRANITE,
    OLMO,
    SMALL,
    TIED,
    WINDOWED,
    packed,
    small_model,
)

LENGTH = 23
ROW_S = packed([LENGTH]).tokens[0]
GROUPED = replace(SMALL, num_heads=6, num_kv_heads=2)
CAPPED = replace(GEMMA, window=4, sink=True)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-5}


def log_probs(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Tensor:
    """Log-probabilities [S, V] of the next token, from the training losses of all possible
    labels.
    """
    vocab = config.vocab_size
    batch = packed(*[[LENGTH]] * vocab)
    labels = torch.arange(vocab)[:, None].expand(-1, LENGTH)
    batch = replace(batch, tokens=ROW_S.expand(vocab, -1), labels=labels)
    with torch.no_grad():
        losses_VS: Tensor = small_model(config, dtype=dtype)(batch)
    return -losses_VS.T


def decoder(
    config: ModelConfig = SMALL, dtype: torch.dtype = torch.float64, **options: int | str
) -> Decoder:
    return Decoder(small_model(config, dtype=dtype), **{"capacity": LENGTH, **options})  # type: ignore[arg-type]


def assert_close_log_probs(
    logits_V: Tensor, expected_V: Tensor, dtype: torch.dtype = torch.float64
) -> None:
    torch.testing.assert_close(
        logits_V.log_softmax(-1), expected_V, rtol=0, atol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("config", [SMALL, TIED, GROUPED, BIASED, WINDOWED, CAPPED, GRANITE, OLMO])
def test_decoding_token_by_token_equals_training_log_probs(
    config: ModelConfig, dtype: torch.dtype
) -> None:
    reader = decoder(config, dtype)
    expected_SV = log_probs(config, dtype)
    for token_S, expected_V in zip(ROW_S.split(1), expected_SV, strict=True):
        assert_close_log_probs(reader.next_token_logits(token_S), expected_V, dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "chunk",
    [1, 5, LENGTH, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, LENGTH - 1, 100))],
)
def test_prefill_of_any_length_in_chunks_of_any_size(chunk: int, dtype: torch.dtype) -> None:
    reader = decoder(GROUPED, dtype, chunk=chunk)
    expected_SV = log_probs(GROUPED, dtype)
    for length in range(1, LENGTH):
        reader.rewind(0)
        assert_close_log_probs(
            reader.next_token_logits(ROW_S[:length]), expected_SV[length - 1], dtype
        )
        assert reader.length == length
        assert_close_log_probs(
            reader.next_token_logits(ROW_S[length : length + 1]), expected_SV[length], dtype
        )


@pytest.mark.parametrize("kernel", ["auto", "plain"])
@pytest.mark.parametrize("cuts", [(4, 5, 11), (1, 9), (9, 10, 22), (20,)])
def test_sequence_may_arrive_in_parts_of_any_length(cuts: tuple[int, ...], kernel: str) -> None:
    reader = decoder(TIED, chunk=4, kernel=kernel)
    expected_SV = log_probs(TIED)
    for start, end in pairwise((0, *cuts, LENGTH)):
        assert_close_log_probs(reader.next_token_logits(ROW_S[start:end]), expected_SV[end - 1])


@pytest.mark.parametrize("config", [WINDOWED, CAPPED, OLMO])
@pytest.mark.parametrize("chunk", [1, pytest.param(3, marks=pytest.mark.slow), 6])
def test_windows_reach_into_the_cache_and_not_past_them(chunk: int, config: ModelConfig) -> None:
    """Windows of 3, 4 and 5 tokens, with chunks that are shorter, as long and longer."""
    expected_SV = log_probs(config)
    for cut in (1, 4, 11):
        reader = decoder(config, chunk=chunk)
        for start, end in pairwise((0, cut, cut + 1, LENGTH)):
            assert_close_log_probs(
                reader.next_token_logits(ROW_S[start:end]), expected_SV[end - 1]
            )
        reader.rewind(cut)
        for position in range(cut, cut + 3):
            assert_close_log_probs(
                reader.next_token_logits(ROW_S[position : position + 1]), expected_SV[position]
            )


def test_rewound_tokens_are_forgotten() -> None:
    reader = decoder()
    expected_SV = log_probs(SMALL)
    reader.next_token_logits(ROW_S[:9])
    reader.next_token_logits(ROW_S.flip(0)[:14])
    reader.rewind(9)
    assert_close_log_probs(reader.next_token_logits(ROW_S[9:16]), expected_SV[15])
    assert_close_log_probs(reader.next_token_logits(ROW_S[16:17]), expected_SV[16])
    with pytest.raises(ValueError, match="cannot rewind to 18 tokens: the KV cache holds 17"):
        reader.rewind(18)


def test_bfloat16_is_close() -> None:
    reader = decoder(dtype=torch.bfloat16, chunk=6)
    expected_SV = log_probs(SMALL)
    found_V = reader.next_token_logits(ROW_S)
    assert found_V.dtype == torch.float32
    torch.testing.assert_close(found_V.log_softmax(-1).double(), expected_SV[-1], rtol=0, atol=0.3)


def test_prefill_computes_one_chunk_at_a_time_and_logits_of_one_token() -> None:
    model = small_model()
    assert model.head is not None
    seen: dict[str, list[int]] = {"block": [], "head": []}

    def count(name: str, tokens: int) -> None:
        seen[name].append(tokens)

    model.transformer_blocks()[0].register_forward_pre_hook(
        lambda _, given: count("block", given[0].shape[1])
    )
    model.head.proj.register_forward_pre_hook(lambda _, given: count("head", given[0].shape[1]))
    reader = Decoder(model, capacity=LENGTH, chunk=8)
    reader.next_token_logits(ROW_S[:-1])
    reader.next_token_logits(ROW_S[-1:])
    assert seen == {"block": [8, 8, 6, 1], "head": [1, 1]}


def test_decoding_saves_no_activations() -> None:
    assert not decoder().next_token_logits(ROW_S).requires_grad


def test_tokens_beyond_the_capacity_raise() -> None:
    reader = decoder(capacity=9)
    with pytest.raises(
        ValueError,
        match="10 tokens given; at least 1 is needed and 9 of the capacity of 9 tokens remain",
    ):
        reader.next_token_logits(ROW_S[:10])
    reader.next_token_logits(ROW_S[:7])
    with pytest.raises(
        ValueError,
        match="3 tokens given; at least 1 is needed and 2 of the capacity of 9 tokens remain",
    ):
        reader.next_token_logits(ROW_S[7:10])
    with pytest.raises(ValueError, match="0 tokens given; at least 1 is needed"):
        reader.next_token_logits(ROW_S[:0])


def test_pipeline_stage_cannot_decode() -> None:
    with pytest.raises(
        ValueError, match="a pipeline stage without embedding or head cannot decode"
    ):
        Decoder(Transformer(SMALL, stage=StageSpec(range(1), has_head=False)), capacity=8)


def test_parts_have_the_positions_and_pair_counts_of_the_full_sequence() -> None:
    model = small_model()
    batches = list[Batch]()
    model.register_forward_pre_hook(lambda _, given: batches.append(given[0]))
    Decoder(model, capacity=LENGTH, chunk=8).next_token_logits(ROW_S)
    whole = packed([LENGTH])
    assert torch.equal(torch.cat([batch.positions for batch in batches], dim=1), whole.positions)
    assert torch.equal(torch.cat([batch.tokens for batch in batches], dim=1), whole.tokens)
    assert sum(batch.num_pairs for batch in batches) == whole.num_pairs
