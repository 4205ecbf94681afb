"""Models in Hugging Face's format, written by us and read by transformers, or the reverse."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from models import hf
from models.config import ModelConfig
from models.hf_config_write import model_config_to_hf
from models.hf_family import FULL, SLIDING
from models.hf_tensors import tensor_specs
from models.hf_write import write_safetensors
from models.rope_config import RopeConfig
from models.transformer import Transformer
from tests.models.small_models import packed

LLAMA = ModelConfig(
    vocab_size=40,
    dim=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    ffn_dim=20,
    norm_eps=1e-4,
    rope=RopeConfig(theta=500.0, precision="float32"),
)
QWEN2 = replace(LLAMA, qkv_bias=True)
QWEN3 = replace(LLAMA, qk_norm=True, head_dim=10)
LENGTH = 64


def write(
    folder: Path,
    config: ModelConfig,
    model: Transformer,
    *,
    file_bytes: int = 1 << 30,
    **options: Any,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = model_config_to_hf(config, max_length=LENGTH, dtype="float32", bos=1, eos=2)
    (folder / hf.CONFIG_FILE).write_text(json.dumps(values))
    parameters = model.named_tensors()
    read = cast(Callable[[str], Tensor], lambda name: parameters[name].detach())
    given: dict[str, Any] = {"dtype": torch.float32, "file_bytes": file_bytes} | options
    assert [*write_safetensors(folder, config, read, **given)] == sorted(folder.glob("model*"))
    return folder


def load(folder: Path, config: ModelConfig) -> Transformer:
    weights = hf.SafetensorsReader(folder)
    known = tensor_specs(config)
    assert weights.problems(config) == []
    model = Transformer(config)
    with torch.no_grad():
        for name, tensor in model.named_tensors().items():
            if name in known:
                tensor.copy_(weights.read(known[name]))
    return model


def logits_of(model: Transformer, config: ModelConfig, length: int = 40) -> tuple[Tensor, Tensor]:
    """Random tokens and our logits."""
    batch = packed([length], vocab_size=config.vocab_size)
    # The sequence length selects longrope's factors.
    vars(model)["seq_len"] = length
    head = model.head
    model.head = None
    assert head is not None
    with torch.no_grad():
        hidden = model(batch)
        model.head = head
        return batch.tokens, head.logits(hidden)


def theirs(folder: Path) -> Any:
    """The model as transformers loads it, without missing or unexpected tensors."""
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(
        told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    ), told
    return model.eval()


def logits_there(folder: Path, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return cast(Tensor, theirs(folder)(tokens).logits)


SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    # The gradient of its embedding would be zero.
    "pad_token_id": None,
}


def made_by_transformers(
    kind: str, dtype: torch.dtype, *, std: float = 0.3, **options: Any
) -> Any:
    """`kind`: of the configuration's class, whose model of language is made."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(
            parameter, mean=float(parameter.ndim == 1 and not kind.startswith("Gemma")), std=std
        )
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=std)
    return model.to(dtype)


# ---- one model or more of every family

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 5.0]}
MIXED_TYPES = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL]
MADE: dict[str, dict[str, Any]] = {
    "Llama": {"rope_theta": 500.0, "rope_scaling": YARN},
    "Llama tied": {"tie_word_embeddings": True, "head_dim": 8},
    "Qwen2": {},
    "Qwen2 windows": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "Qwen3": {"head_dim": 8},
    "Qwen3 windows": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "num_hidden_layers": 6,
        "layer_types": MIXED_TYPES,
        "tie_word_embeddings": True,
    },
    "Mistral": {"sliding_window": None, "head_dim": 8},
    "Mistral window": {"sliding_window": 7},
    "Ministral": {
        "head_dim": 8,
        "sliding_window": 7,
        "layer_types": MIXED_TYPES,
        "num_hidden_layers": 6,
    },
    "Olmo2": {},
    "Olmo2 tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "Olmo3": {
        "num_hidden_layers": 5,
        "sliding_window": 7,
        # transformers 5 takes it for windowed layers whatever is stated.
        "rope_theta": 500_000.0,
        "rope_scaling": YARN,
    },
    "SmolLM3": {"num_hidden_layers": 5},
    "SmolLM3 windows": {
        "num_hidden_layers": 5,
        "use_sliding_window": True,
        "sliding_window": 7,
        "tie_word_embeddings": False,
    },
    "Granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "Phi3": {
        "original_max_position_embeddings": 16,
        "rope_theta": 500.0,
        "rope_scaling": LONGROPE,
    },
    "Phi3 window": {"sliding_window": 7, "tie_word_embeddings": True},
    "Gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 5,
        "num_hidden_layers": 3,
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "Gemma2 without caps": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 7,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "Gemma3": {
        "head_dim": 8,
        "query_pre_attn_scalar": 5,
        "num_hidden_layers": 7,
        "sliding_window": 7,
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 50.0,
    },
    "Qwen3Moe": {
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
        "mlp_only_layers": [1],
    },
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "GptOss": {
        "head_dim": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "num_hidden_layers": 3,
        "layer_types": [SLIDING, FULL, SLIDING],
        "rope_theta": 500.0,
        "rope_scaling": YARN | {"truncate": False},
    },
    "Glm4Moe": {
        "head_dim": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "Glm4Moe small": {
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": False,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 0,
    },
}
"""Options of transformers' configurations, by the name of the class, and what is special."""


def made(name: str, **changes: Any) -> Any:
    """The tiny model of a family, in float32."""
    kind = name.split()[0]
    # Larger weights would saturate attention, whose gradients float32 then loses.
    options = deepcopy(MADE[name]) | changes
    return made_by_transformers(
        "Gemma3Text" if kind == "Gemma3" else kind, torch.float32, std=0.2, **options
    )
