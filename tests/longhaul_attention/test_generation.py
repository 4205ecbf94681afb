"""Prefill and generation by ranks that hold a share of the keys each: logits and tokens are those of one process."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from longhaul_attention import ContextParallel, register_transformers
from tests.longhaul_attention.in_float64 import float64_throughout
from tests.longhaul_attention.test_refusals import flat_mesh, message_of
from tests.longhaul_attention.test_transformers_models import METHODS, model
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks
Found = tuple[float, bool, list[int], int]


def generated(name: str, method: str, prompt_tokens: int, new_tokens: int, options: dict[str, Any]) -> Found:
    """Error of the logits, whether all tokens are equal, the tokens that each rank holds, and those of the sequence."""
    from longhaul_attention import generation

    register_transformers()
    ranks = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2) if method == "hybrid" else (ranks,))
    cp = ContextParallel(mesh, method=method)
    tokens = torch.randint(40, (2, prompt_tokens), generator=torch.Generator().manual_seed(2))
    asked: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "return_dict_in_generate": True,
        "output_logits": True,
        "pad_token_id": 0,
    } | options
    with float64_throughout():
        plain, sharded = model(name, "sdpa" if name == "Llama" else "eager"), model(name, "longhaul")
        torch.manual_seed(3)
        seed = int(torch.tensor(torch.initial_seed()))
        torch.manual_seed(seed)
        expected = plain.generate(tokens, attention_mask=torch.ones_like(tokens), **asked)
        torch.manual_seed(seed + distributed.get_rank())  # Ranks draw as rank 0 does, whatever their own state.
        found = generation.generate(sharded, cp, tokens, **asked)
    error = max((a - b).abs().max().item() for a, b in zip(found.logits, expected.logits, strict=True))
    cache = found.past_key_values
    return (
        error,
        torch.equal(found.sequences, expected.sequences),
        cp.all_gather_object(cache.held_tokens),
        cache.get_seq_length(),
    )


def check(found: Found, ranks: int, total: int) -> None:
    error, is_equal, held, in_cache = found
    assert error < 1e-11
    assert is_equal
    assert in_cache == sum(held) == total - 1  # The last token has no keys yet.
    assert max(held) <= ceil(total / ranks)


@pytest.mark.parametrize(
    ("name", "ranks", "method"),
    [
        pytest.param("GptOss", 4, "ring"),
        pytest.param("Gemma2", 4, "hybrid"),
        *(
            pytest.param(name, ranks, method, marks=pytest.mark.slow)
            for name in ("Llama", "Qwen3Moe", "GptOss", "Gemma2", "Qwen3 windows")
            for ranks in (2, 4)
            for method in METHODS
            if (name, ranks, method) not in {("GptOss", 4, "ring"), ("Gemma2", 4, "hybrid")}
        ),
    ],
)
def test_tokens_and_logits_equal_one_process(name: str, ranks: int, method: str) -> None:
    for found in run_ranks(generated, ranks, name, method, 37, 12, {}):
        check(found, ranks, 37 + 12)


def test_a_prompt_of_8192_tokens_on_four_ranks() -> None:
    for found in run_ranks(generated, 4, "Llama", "ring", 8192, 32, {}, timeout=300):
        check(found, 4, 8192 + 32)


def test_ranks_sample_the_same_tokens_as_one_process() -> None:
    options = {"do_sample": True, "temperature": 1.5, "top_k": 0}
    for found in run_ranks(generated, 2, "Llama", "ulysses", 1, 20, options):
        check(found, 2, 21)


def messages() -> dict[str, str]:
    from longhaul_attention import generation

    register_transformers()
    cp, llama = ContextParallel(flat_mesh(), method="ring"), model("Llama", "longhaul")
    tokens = torch.ones(1, 9).long()
    return {
        "beams": message_of(generation.generate, llama, cp, tokens, num_beams=2),
        "beams without a prompt": message_of(generation.generate, llama, cp, tokens[:, :1], num_beams=2),
        "padded prompts": message_of(
            generation.generate, llama, cp, tokens, attention_mask=torch.tensor([[0] * 2 + [1] * 7])
        ),
        "keys made of what is kept": message_of(
            generation.generate, model("DeepseekV3", "longhaul").float(), cp, tokens
        ),
        "transformers alone": message_of(llama.generate, tokens),
    }


def test_what_needs_a_cache_of_another_kind_is_refused() -> None:
    for told in run_ranks(messages, 2):
        assert "the sharded cache holds 1 sequences and 2 are generated: beams" in told["beams"]
        assert "a sharded cache cannot be cropped, repeated or reordered" in told["beams without a prompt"]
        assert "attention_mask hides tokens" in told["padded prompts"]
        assert (
            "it supports models that attend to the keys and values that they keep" in told["keys made of what is kept"]
        )
        assert "no documents reached attention" in told["transformers alone"]
