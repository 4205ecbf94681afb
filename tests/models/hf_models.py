"""Models in Hugging Face's format, written by us and read by transformers, or the reverse."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from models import hf
from models.config import ModelConfig, RopeConfig
from models.hf_config import model_config_to_hf
from models.hf_write import write_safetensors
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


def write(folder: Path, config: ModelConfig, model: Transformer, *, file_bytes: int = 1 << 30, **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = model_config_to_hf(config, max_length=LENGTH, dtype="float32", bos=1, eos=2)
    (folder / hf.CONFIG_FILE).write_text(json.dumps(values))
    parameters = dict(model.named_parameters())
    read = cast(Callable[[str], Tensor], lambda name: parameters[name].detach())
    given: dict[str, Any] = {"dtype": torch.float32, "file_bytes": file_bytes} | options
    assert [*write_safetensors(folder, config, read, **given)] == sorted(folder.glob("model*"))
    return folder


def load(folder: Path, config: ModelConfig) -> Transformer:
    weights, known = hf.SafetensorsReader(folder), hf.tensor_specs(config)
    assert weights.problems(config) == []
    model = Transformer(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(known[name]))
    return model


def logits_of(model: Transformer, config: ModelConfig, length: int = 40) -> tuple[Tensor, Tensor]:
    """Random tokens and our logits."""
    batch = packed([length], vocab_size=config.vocab_size)
    vars(model)["seq_len"] = length  # The sequence length selects longrope's factors.
    head, model.head = model.head, None
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
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), told
    return model.eval()


def logits_there(folder: Path, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return cast(Tensor, theirs(folder)(tokens).logits)


def made_by_transformers(kind: str, dtype: torch.dtype, *, std: float = 0.3, **options: Any) -> Any:
    """`kind`: of the configuration's class, whose model of language is made."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "pad_token_id": None,  # The gradient of its embedding would be zero.
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes | options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1 and not kind.startswith("Gemma")), std=std)
    return model.to(dtype)
