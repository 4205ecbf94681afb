"""Every causal language model of transformers that can be built tiny: exact on two ranks, or
refused, if only by `evaluation.check`. None is silently wrong.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from longhaul_attention import ContextParallel, evaluation, register_transformers
from tests.longhaul_attention.in_float64 import float64_throughout
from tests.longhaul_attention.test_refusals import flat_mesh
from tests.ranks import run_ranks

auto = pytest.importorskip("transformers.models.auto.modeling_auto")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]
TYPES = [*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
# Whatever a family calls them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_inner", "intermediate_size_mlp", "dff"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "head_dim", "shared_expert_intermediate_size", "kv_lora_rank"), 8),
    **dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"), 0),
    "vocab_size": 40, "sliding_window": 7, "q_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "is_decoder": True, "use_cache": False,
}  # fmt: skip
MAX_PARAMETERS = 3_000_000


def built(kind: str) -> Any:
    """The model on the meta device first: some sizes have names that are not known here."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    with torch.device("meta"):
        if (
            sum(
                x.numel()
                for x in transformers.AutoModelForCausalLM.from_config(config).parameters()
            )
            > MAX_PARAMETERS
        ):
            raise ValueError("it is not tiny")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    if hasattr(model, "set_experts_implementation") and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.double().eval()


def gradients(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    loss = model(**inputs).loss
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]


def outcome(kind: str) -> str:
    """Whether it is exact, or what was said: before context parallelism, it was not built."""
    warnings.simplefilter("ignore")
    register_transformers()
    cp = ContextParallel(flat_mesh(), method="ring")
    tokens = torch.randint(3, 40, (2, 32), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(32).expand(2, -1)}
    with float64_throughout():
        try:
            model = built(kind)
            expected = gradients(model, batch)
        except Exception as error:  # noqa: BLE001 - whatever keeps it from being built
            return f"not built: {error}"
        try:
            model.set_attn_implementation("longhaul")
            found = gradients(model, cp.shard_batch(batch))
        except Exception as error:  # noqa: BLE001 - whatever is said
            return f"refused: {type(error).__name__}: {error}"
        for x in found:
            distributed.all_reduce(x)
            x /= 2
    scale = max(x.abs().max() for x in expected)
    difference = max(
        float((a - b).abs().max() / scale) for a, b in zip(found, expected, strict=True)
    )
    if difference < 1e-9:
        evaluation.check(model.float(), cp)
        return "exact"
    try:
        evaluation.check(model.float(), cp)
    except ValueError as error:
        return f"refused by the check: {error}"
    return f"wrong by {difference:.1e}"


@pytest.mark.parametrize("kind", TYPES)
def test_a_model_is_exact_or_refused(kind: str) -> None:
    found = run_ranks(outcome, 2, kind, timeout=60)
    assert len(set(found)) == 1, found
    if found[0].startswith("not built"):
        pytest.skip(found[0][:150])
    assert not found[0].startswith("wrong"), found[0]
    if kind in ("rwkv", "lfm3"):  # They never call attention.
        assert "gives other logits on 2 ranks than on one" in found[0]
