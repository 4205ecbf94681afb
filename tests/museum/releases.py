"""Released models: their config.json, and where each was read.

`configs/MODEL_TYPE.json` lists releases: `release`, its name on the hub; `source`, the address
where the values were read (a file of a commit, or of a version of a package); `config`, every key
of it; `note`, how the source differs from the release; `ignore_keys`, what `longhaul hf import` is
told to ignore.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.hf import text_model_values
from models.hf_config import config_remarks, model_config_from_hf

CONFIGS = Path(__file__).parent / "configs"
REFUSED = {
    "Qwen/Qwen3-32B-FP8": "quantization_config",
    "Qwen/Qwen3-32B-FP8-Static-PerTensor": "quantization_config",
}
"""The key for which a release is refused."""


@dataclass(frozen=True)
class Release:
    name: str
    source: str
    config: dict[str, Any]
    note: str
    ignore_keys: tuple[str, ...]

    @property
    def text_config(self) -> dict[str, Any]:
        """Of the language model."""
        return dict(text_model_values(self.config, text_only=True))

    @property
    def model_type(self) -> str:
        return str(self.text_config["model_type"])

    @property
    def short_name(self) -> str:
        return self.name.partition("/")[2]

    @property
    def is_read(self) -> bool:
        return self.name not in REFUSED

    def read(self, **changes: Any) -> Any:
        return model_config_from_hf(self.text_config | changes, self.ignore_keys)

    def remarks(self, **changes: Any) -> list[str]:
        return config_remarks(self.text_config | changes, self.ignore_keys)


def _release(item: dict[str, Any]) -> Release:
    ignore_keys = tuple(item.get("ignore_keys", ()))
    return Release(
        item["release"], item["source"], item["config"], item.get("note", ""), ignore_keys
    )


RELEASES = {
    item["release"]: _release(item)
    for path in sorted(CONFIGS.glob("*.json"))
    for item in json.loads(path.read_text())
}
READ = {name: release for name, release in RELEASES.items() if release.is_read}
FIRST = {release.model_type: release for release in reversed(READ.values())}
"""One release of each type."""


# ---- small models of the same kind

LARGEST = {
    "num_hidden_layers": 7,
    "vocab_size": 40,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "sliding_window": 7,
    "sliding_window_size": 7,
}
HEAD_DIM = 8
QUERIES_PER_KEY = 3
KV_HEADS = 2


def tiny(release: Release) -> dict[str, Any]:
    """The release's config.json with small sizes, and every other key as it is."""
    values = release.text_config
    # Weights are random, and not quantized.
    values.pop("quantization_config", None)
    for key, largest in LARGEST.items():
        if values.get(key) is not None:
            values[key] = min(values[key], largest)
    heads = values["num_attention_heads"]
    width = values["hidden_size"]
    kv_heads = values.get("num_key_value_heads") or heads
    values["num_key_value_heads"] = min(kv_heads, KV_HEADS)
    values["num_attention_heads"] = values["num_key_value_heads"] * min(
        heads // kv_heads, QUERIES_PER_KEY
    )
    is_derived = values.get("head_dim", width // heads) == width / heads
    values["hidden_size"] = values["num_attention_heads"] * (
        HEAD_DIM if is_derived else HEAD_DIM + 4
    )
    values |= {"head_dim": HEAD_DIM} if "head_dim" in values else {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(values.get(key), int):
            values[key] %= values["vocab_size"]
    values |= {"eos_token_id": [1, 2]} if isinstance(values.get("eos_token_id"), list) else {}
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    return values
