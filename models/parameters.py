"""Every parameter of the model, declared once. Imports no torch.

From a declaration follow its tensor-parallel cut, initial values, weight decay, Hugging Face tensor, part of counts and
FLOPs, and bytes in the memory estimate. A parameter that is not declared ends the run when the model is built.

Letters of a shape: V vocabulary, E model dim, G feed-forward dim, Q query heads x head dim, K KV heads x head dim,
H head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Sizes = Mapping[str, int]
"""Of every letter, in one model."""
ParallelStyle = Literal["replicate", "replicate_heads", "colwise", "rowwise", "vocab"]
"""As torch's: colwise shards dimension 0, rowwise dimension 1. Ranks use `replicate_heads` for their own heads."""


class Parameter(NamedTuple):
    """`option`: the field of `ModelConfig` without which it does not exist. `weight_decay`: by default of matrices only."""

    shape: str
    style: ParallelStyle
    hf_name: str
    initial: Literal["normal", "residual", "ones", "zeros"] = "normal"
    """`residual`: normal, of a projection that writes to the residual stream."""
    option: str = ""
    weight_decay: bool | None = None

    @property
    def is_matrix(self) -> bool:
        """A matrix product has it, except for the embedding."""
        return len(self.shape) == 2

    @property
    def decays(self) -> bool:
        return self.is_matrix if self.weight_decay is None else self.weight_decay

    def shape_of(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[letter] for letter in self.shape)

    def style_over(self, sizes: Sizes, tp: int) -> ParallelStyle:
        """With fewer KV heads than ranks, their projections are replicated."""
        return "replicate" if self.shape[0] == "K" and sizes["K"] < tp * sizes["H"] else self.style

    def local_shape(self, sizes: Sizes, tp: int) -> tuple[int, ...]:
        """Of one of `tp` ranks."""
        cut = {"colwise": 0, "vocab": 0, "rowwise": 1}.get(self.style_over(sizes, tp))
        return tuple(size // tp if dim == cut else size for dim, size in enumerate(self.shape_of(sizes)))


EMBEDDING = {"embed.weight": Parameter("VE", "vocab", "model.embed_tokens.weight")}
BLOCK = {
    "attention_norm.weight": Parameter("E", "replicate", "input_layernorm.weight", "ones"),
    "attention.q_proj.weight": Parameter("QE", "colwise", "self_attn.q_proj.weight"),
    "attention.q_proj.bias": Parameter("Q", "colwise", "self_attn.q_proj.bias", "zeros", "qkv_bias"),
    "attention.k_proj.weight": Parameter("KE", "colwise", "self_attn.k_proj.weight"),
    "attention.k_proj.bias": Parameter("K", "colwise", "self_attn.k_proj.bias", "zeros", "qkv_bias"),
    "attention.v_proj.weight": Parameter("KE", "colwise", "self_attn.v_proj.weight"),
    "attention.v_proj.bias": Parameter("K", "colwise", "self_attn.v_proj.bias", "zeros", "qkv_bias"),
    "attention.o_proj.weight": Parameter("EQ", "rowwise", "self_attn.o_proj.weight", "residual"),
    "attention.q_norm.weight": Parameter("H", "replicate_heads", "self_attn.q_norm.weight", "ones", "qk_norm"),
    "attention.k_norm.weight": Parameter("H", "replicate_heads", "self_attn.k_norm.weight", "ones", "qk_norm"),
    "ffn_norm.weight": Parameter("E", "replicate", "post_attention_layernorm.weight", "ones"),
    "feed_forward.gate_proj.weight": Parameter("GE", "colwise", "mlp.gate_proj.weight"),
    "feed_forward.up_proj.weight": Parameter("GE", "colwise", "mlp.up_proj.weight"),
    "feed_forward.down_proj.weight": Parameter("EG", "rowwise", "mlp.down_proj.weight", "residual"),
}
HEAD = {
    "head.norm.weight": Parameter("E", "replicate", "model.norm.weight", "ones"),
    "head.proj.weight": Parameter("VE", "colwise", "lm_head.weight"),
}


def find(name: str) -> Parameter | None:
    """By its name in the model or a pipeline stage; None if it is not declared."""
    return BLOCK.get(name.split(".", 2)[2]) if name.startswith("blocks.") else (EMBEDDING | HEAD).get(name)


def declared(name: str) -> Parameter:
    """As `find`. Raises ValueError if it is not declared."""
    if (parameter := find(name)) is None:
        raise ValueError(f"parameter {name} is not declared in models/parameters.py")
    return parameter
