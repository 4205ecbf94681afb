"""Every parameter of the model, declared once. Imports no torch.

From a declaration follow its tensor-parallel cut, initial values, Hugging Face tensor, its part of the parameter counts
and FLOPs, and its bytes in the memory estimate. A parameter that is not declared ends the run when the model is built.

Letters of a shape: V vocabulary, E model dim, G feed-forward dim, Q query heads x head dim, K KV heads x head dim,
H head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from models.config import ModelConfig

ParallelStyle = Literal["replicate", "replicate_heads", "colwise", "rowwise", "vocab"]
"""As torch's: colwise shards dimension 0, rowwise dimension 1. Ranks use `replicate_heads` for their own heads."""


class Parameter(NamedTuple):
    """`option`: the field of the model's configuration without which it does not exist."""

    shape: str
    style: ParallelStyle
    hf_name: str
    initial: Literal["normal", "residual", "ones"] = "normal"
    """`residual`: normal, of a projection that writes to the residual stream."""
    option: str = ""

    @property
    def is_matrix(self) -> bool:
        """A matrix product has it, except for the embedding."""
        return len(self.shape) == 2

    def sizes(self, model: ModelConfig) -> tuple[int, ...]:
        letters = {
            "V": model.vocab_size,
            "E": model.dim,
            "G": model.ffn_dim,
            "Q": model.num_heads * model.head_dim,
            "K": model.num_kv_heads * model.head_dim,
            "H": model.head_dim,
        }
        return tuple(letters[letter] for letter in self.shape)

    def style_over(self, model: ModelConfig, tp: int) -> ParallelStyle:
        """With fewer KV heads than ranks, their projections are replicated."""
        return "replicate" if self.shape[0] == "K" and model.num_kv_heads < tp else self.style

    def local_sizes(self, model: ModelConfig, tp: int) -> tuple[int, ...]:
        """Of one of `tp` ranks."""
        cut = {"colwise": 0, "vocab": 0, "rowwise": 1}.get(self.style_over(model, tp))
        return tuple(size // tp if dim == cut else size for dim, size in enumerate(self.sizes(model)))


EMBEDDING = {"embed.weight": Parameter("VE", "vocab", "model.embed_tokens.weight")}
BLOCK = {
    "attention_norm.weight": Parameter("E", "replicate", "input_layernorm.weight", "ones"),
    "attention.q_proj.weight": Parameter("QE", "colwise", "self_attn.q_proj.weight"),
    "attention.k_proj.weight": Parameter("KE", "colwise", "self_attn.k_proj.weight"),
    "attention.v_proj.weight": Parameter("KE", "colwise", "self_attn.v_proj.weight"),
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


def block_parameters(model: ModelConfig) -> dict[str, Parameter]:
    """Of one block, by name within it."""
    return {name: each for name, each in BLOCK.items() if not each.option or getattr(model, each.option)}


def model_parameters(model: ModelConfig, layers: Iterable[int] | None = None) -> dict[str, Parameter]:
    """By name, in model order; a tied head is the embedding."""
    block, head = block_parameters(model), [name for name in HEAD if not (model.tie_embeddings and "proj" in name)]
    found = dict(EMBEDDING)
    for layer in range(model.num_layers) if layers is None else layers:
        for name, each in block.items():
            found[f"blocks.{layer}.{name}"] = each._replace(hf_name=f"model.layers.{layer}.{each.hf_name}")
    return found | {name: HEAD[name] for name in head}


def numel(model: ModelConfig, parameters: Iterable[Parameter]) -> int:
    return sum(prod(each.sizes(model)) for each in parameters)


def declared(name: str) -> Parameter | None:
    """By its name in the model or a pipeline stage; None if it is not declared."""
    return BLOCK.get(name.split(".", 2)[2]) if name.startswith("blocks.") else (EMBEDDING | HEAD).get(name)


def parameter_problems(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Every difference between the parameters of a model, or of a stage of it, and the declarations."""
    problems, layers = [], {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
    for name, shape in shapes.items():
        parameter = declared(name)
        if parameter is None:
            problems.append(f"parameter {name} {list(shape)} is not declared in models/parameters.py")
        elif parameter.sizes(model) != shape:
            problems.append(f"parameter {name} has shape {list(shape)}, declared as {list(parameter.sizes(model))}")
    expected = {f"blocks.{layer}.{name}" for layer in layers for name in block_parameters(model)}
    return problems + [
        f"parameter {name} is declared and not in the model" for name in sorted(expected - shapes.keys())
    ]
