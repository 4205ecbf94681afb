"""Prefill and generation by ranks that hold a share of the keys each: logits and tokens are those
of one process.
"""

from __future__ import annotations

from copy import deepcopy
from math import ceil
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from longhaul_attention import ContextParallel, register_transformers
from tests.longhaul_attention.in_float64 import float64_throughout
from tests.longhaul_attention.test_refusals import flat_mesh, message_of, tiny
from tests.longhaul_attention.test_transformers_models import METHODS, model
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks
Found = tuple[float, bool, list[int], int]


def generated(
    name: str, method: str, prompt_tokens: int, new_tokens: int, options: dict[str, Any]
) -> Found:
    """Error of the logits, whether all tokens are equal, the tokens that each rank holds, and
    those of the sequence.
    """
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
        plain = model(name, "sdpa" if name == "Llama" else "eager")
        sharded = model(name, "longhaul")
        torch.manual_seed(3)
        seed = int(torch.tensor(torch.initial_seed()))
        torch.manual_seed(seed)
        expected = plain.generate(tokens, attention_mask=torch.ones_like(tokens), **asked)
        # Ranks draw as rank 0 does, whatever their own state.
        torch.manual_seed(seed + distributed.get_rank())
        found = generation.generate(sharded, cp, tokens, **asked)
    error = max(
        (a - b).abs().max().item() for a, b in zip(found.logits, expected.logits, strict=True)
    )
    cache = found.past_key_values
    return (
        error,
        torch.equal(found.sequences, expected.sequences),
        cp.all_gather_values(cache.held_tokens),
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
        pytest.param("Gemma2", 4, "hybrid", marks=pytest.mark.slow),
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


@pytest.mark.slow
def test_a_prompt_of_8192_tokens_on_four_ranks() -> None:
    for found in run_ranks(generated, 4, "Llama", "ring", 8192, 32, {}, timeout=300):
        check(found, 4, 8192 + 32)


class AfterRank:
    """Stops at another token on every rank."""

    def __call__(self, input_ids: Any, *_: Any, **__: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 12 + distributed.get_rank())


def drawn() -> tuple[list[Any], list[Any], int]:
    """Three draws by transformers and by ranks, one after the other, and how many tokens there are
    if rank 0 stops at 12.
    """
    from longhaul_attention import generation

    register_transformers()
    cp = ContextParallel(flat_mesh(), method="ring")
    options = {"do_sample": True, "max_new_tokens": 8, "pad_token_id": 0}
    tokens = torch.randint(40, (1, 9), generator=torch.Generator().manual_seed(2))
    with float64_throughout():
        plain = model("Llama", "eager")
        sharded = model("Llama", "longhaul")
        torch.manual_seed(5)
        expected = [
            plain.generate(tokens, attention_mask=torch.ones_like(tokens), **options).tolist()
            for _ in range(3)
        ]
        torch.manual_seed(5 + distributed.get_rank())
        found = [generation.generate(sharded, cp, tokens, **options).tolist() for _ in range(3)]
        stopped = generation.generate(
            sharded, cp, tokens, stopping_criteria=[AfterRank()], **options
        )
    return expected, found, stopped.shape[1]


def test_ranks_draw_on_and_stop_together() -> None:
    for expected, found, stopped in run_ranks(drawn, 2):
        assert found == expected
        assert expected[0] != expected[1]
        assert stopped == 12


def shared_keys(shared: int) -> float:
    """Of the logits of a model whose last layers attend to the keys of others."""
    from longhaul_attention import generation

    register_transformers()
    cp = ContextParallel(flat_mesh(), method="ring")
    tokens = torch.randint(40, (2, 15))
    sizes = {"num_hidden_layers": 4, "num_kv_shared_layers": shared, "laurel_rank": 4, "head_dim": 8, "sliding_window": 6,
             "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
             "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40, "pad_token_id": 0}  # fmt: skip
    asked: dict[str, Any] = {
        "max_new_tokens": 6,
        "return_dict_in_generate": True,
        "output_logits": True,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    sharded = tiny("Gemma3nText", **sizes).double()
    plain = transformers.AutoModelForCausalLM.from_config(
        deepcopy(sharded.config), attn_implementation="eager"
    ).double()
    plain.load_state_dict(sharded.state_dict())
    with float64_throughout():
        torch.manual_seed(1)
        tokens = torch.randint(40, (2, 15))
        expected = plain.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **asked
        )
        found = generation.generate(sharded, cp, tokens, do_sample=False, **asked)
    return float(
        max((a - b).abs().max() for a, b in zip(found.logits, expected.logits, strict=True))
    )


def test_layers_that_share_keys_keep_each_token_once() -> None:
    assert max(run_ranks(shared_keys, 2, 2)) < 1e-11


def test_ranks_sample_the_same_tokens_as_one_process() -> None:
    options = {"do_sample": True, "temperature": 1.5, "top_k": 0}
    for found in run_ranks(generated, 2, "Llama", "ulysses", 1, 20, options):
        check(found, 2, 21)


def messages() -> dict[str, str]:
    from longhaul_attention import generation

    register_transformers()
    cp = ContextParallel(flat_mesh(), method="ring")
    llama = model("Llama", "longhaul")
    tokens = torch.ones(1, 9).long()
    hurried = model("Llama", "longhaul")
    hurried.generation_config.max_time = 1.0
    return {
        "beams": message_of(generation.generate, llama, cp, tokens, num_beams=2),
        "beams without a prompt": message_of(
            generation.generate, llama, cp, tokens[:, :1], num_beams=2
        ),
        "padded prompts": message_of(
            generation.generate,
            llama,
            cp,
            tokens,
            attention_mask=torch.tensor([[0] * 2 + [1] * 7]),
        ),
        "keys made of what is kept": message_of(
            generation.generate, model("DeepseekV3", "longhaul").float(), cp, tokens
        ),
        "transformers alone": message_of(llama.generate, tokens),
        "no cache": message_of(generation.generate, llama, cp, tokens, use_cache=False),
        "a clock of the model": message_of(generation.generate, hurried, cp, tokens),
        "a clock": message_of(generation.generate, llama, cp, tokens, max_time=1.0),
        "one key for two values": message_of(
            generation.generate, tiny("DiffLlama", num_hidden_layers=2), cp, tokens
        ),
        "no attention": message_of(
            generation.generate,
            tiny("Mamba", state_size=4, num_hidden_layers=2, expand=1),
            cp,
            tokens,
        ),
    }


def test_what_needs_a_cache_of_another_kind_is_refused() -> None:
    for told in run_ranks(messages, 2):
        assert "the sharded cache holds 1 sequences and 2 are generated: beams" in told["beams"]
        assert (
            "a sharded cache cannot be cropped, repeated or reordered"
            in told["beams without a prompt"]
        )
        assert "attention_mask hides tokens" in told["padded prompts"]
        assert (
            "with models that attend to the keys and values that they keep"
            in told["keys made of what is kept"]
        )
        assert "no documents reached attention" in told["transformers alone"]
        assert "use_cache = False leaves nothing to share" in told["no cache"]
        assert "max_time is read from each rank's clock" in told["a clock"]
        assert "max_time is read from each rank's clock" in told["a clock of the model"]
        assert (
            "it attends to other keys or values than those that it keeps"
            in told["one key for two values"]
        )
        assert "nothing was refused" not in told["no attention"]
