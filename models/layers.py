"""A layer as data, and every parameter of the model, declared once. Imports no torch.

From a declaration follow a parameter's tensor-parallel cut, initial values, weight decay, Hugging
Face tensor, part of counts and FLOPs, and bytes in the memory estimate. A parameter that is not
declared ends the run when the model is built.

A kind of mixer or feed-forward is declared in `MIXERS` or `FEED_FORWARDS`. Its module, with the
forward function, has the same name in those of `models/transformer.py`.

Letters of a shape: V vocabulary, E model dim, G feed-forward dim, Q query heads x head dim, K KV
heads x head dim, H head dim, N query heads, X experts, M feed-forward dim of an expert, Z
feed-forward dim of the shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from models.score_pairs import Scores

LETTERS = "VEGQKHNXMZ"
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
Sizes = Mapping[str, int]
"""Size of every letter, in one model."""
Initial = Literal["normal", "residual", "ones", "zeros"]
ParallelStyle = Literal["replicate", "replicate_partial", "colwise", "rowwise", "vocab"]
"""Style of tensor parallelism, as torch's: colwise shards the outputs of a weight [outputs,
inputs], rowwise its inputs. Of `replicate_partial` each rank computes a part of the gradient, also
without sequence parallelism: that of its own heads.
"""


class Parameter(NamedTuple):
    """The declaration of a parameter.

    `option`: the field of `LayerKind` without which it does not exist. `weight_decay`: by default
    of matrices only.
    """

    shape: str
    style: ParallelStyle
    hf_name: str
    initial: Initial = "normal"
    """`residual`: normal, of a projection that writes to the residual stream."""
    option: str = ""
    weight_decay: bool | None = None
    per_expert: bool = False
    """Whether dimension 0 counts experts: the others are those of one expert, and `{}` in
    `hf_name` is its index.
    """

    def problems(self, widths: Mapping[str, int] = {}) -> list[str]:
        """Every broken rule, as a sentence whose subject is the parameter. `widths`: those of its
        kind alone.
        """
        problems = list[str]()
        if unknown := set(self.shape) - {*LETTERS, *widths}:
            problems.append(
                f"has a width that is unknown: {', '.join(sorted(unknown))}; there are {LETTERS} and "
                "those in `widths` of its SublayerKind"
            )
        if self.initial in ("normal", "residual") and not self.is_matrix:
            problems.append(
                f'is no matrix: its initial values are "ones" or "zeros", not "{self.initial}"'
            )
        for field, known in (("style", get_args(ParallelStyle)), ("initial", get_args(Initial))):
            if (value := getattr(self, field)) not in known:
                problems.append(f'has {field} "{value}"; there are {", ".join(known)}')
        if self.style == "rowwise" and not self.is_matrix:
            problems.append('is no matrix: its style cannot be "rowwise", which splits inputs')
        return problems

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix: all but the embedding are in matrix products."""
        return len(self.shape) == 2 + self.per_expert

    @property
    def decays(self) -> bool:
        return self.is_matrix if self.weight_decay is None else self.weight_decay

    def shape_of(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[letter] for letter in self.shape)

    def style_over(self, sizes: Sizes, tp: int) -> ParallelStyle:
        """Style over `tp` ranks: with fewer KV heads than ranks, their projections are replicated."""
        return "replicate" if self.shape[0] == "K" and sizes["K"] < tp * sizes["H"] else self.style

    def tp_dim(self, sizes: Sizes, tp: int) -> int | None:
        """The dimension that `tp` ranks shard."""
        dim = {"colwise": 0, "vocab": 0, "rowwise": 1}.get(self.style_over(sizes, tp))
        return None if dim is None else dim + self.per_expert

    def local_shape(self, sizes: Sizes, tp: int, ep: int = 1) -> tuple[int, ...]:
        """Shape on one of `tp` x `ep` ranks."""
        # `tp_dim` may be None, which is the index of no dimension.
        parts = {self.tp_dim(sizes, tp): tp} | ({0: ep} if self.per_expert else {})
        return tuple(size // parts.get(dim, 1) for dim, size in enumerate(self.shape_of(sizes)))


EMBEDDING_GRAD_BYTES = 256 << 20
"""Bytes of float32 numbers at once, where the embedding's gradient is summed by columns: each part
sorts the tokens again.
"""
EMBEDDING = {"embed.weight": Parameter("VE", "vocab", "model.embed_tokens.weight")}
HEAD = {
    "head.norm.weight": Parameter("E", "replicate", "model.norm.weight", "ones"),
    "head.proj.weight": Parameter("VE", "colwise", "lm_head.weight"),
}


def embedding_grad_columns(num_rows: int, num_tokens: int, dim: int) -> int:
    """How many columns of the embedding's gradient are summed in float32 at a time."""
    # 4 bytes per column for each row of the gradient and for each token's widened gradient.
    columns = EMBEDDING_GRAD_BYTES // (4 * (num_rows + num_tokens))
    return min(dim, max(64, columns // 64 * 64))


class SublayerKind(NamedTuple):
    """A kind of mixer or of feed-forward."""

    parameters: Mapping[str, Parameter]
    """By name within its module; their Hugging Face names are those within a layer."""
    buffers: Mapping[str, Parameter] = {}
    """Vectors that no gradient changes, in the dtype of sums; an empty Hugging Face name: it has
    none.
    """
    options: frozenset[str] = frozenset()
    """The fields of `LayerKind` that it reads, besides those that parameters depend on."""
    attends: bool = False
    """Whether it computes scores of token pairs: with matrix products all FLOPs that are
    counted.
    """
    in_pieces: bool = True
    """Whether recomputation runs it piece by piece (`models/sublayer.py`), rather than the whole
    block again.
    """
    widths: Mapping[str, int] = {}
    """Widths of its own, by a capital letter that is none of `LETTERS`."""

    def width_problems(self) -> list[str]:
        problems = list[str]()
        for letter, width in self.widths.items():
            is_letter = len(letter) == 1 and letter.isupper() and letter not in LETTERS
            is_width = type(width) is int and width > 0
            if not (is_letter and is_width):
                rule = f"a capital letter other than {LETTERS}, and a whole number above 0"
                problems.append(f'widths: "{letter}": {width!r} must be {rule}')
        return problems


def _norms(**names: str) -> dict[str, Parameter]:
    """Norms of the residual stream, by module name, with their Hugging Face names."""
    return {
        f"{ours}.weight": Parameter("E", "replicate", f"{theirs}.weight", "ones")
        for ours, theirs in names.items()
    }


NORMS = {
    "pre": {
        "attention": _norms(attention_norm="input_layernorm"),
        "feed_forward": _norms(ffn_norm="post_attention_layernorm"),
    },
    "post": {
        "attention": _norms(attention_post_norm="post_attention_layernorm"),
        "feed_forward": _norms(ffn_post_norm="post_feedforward_layernorm"),
    },
    "sandwich": {
        "attention": _norms(
            attention_norm="input_layernorm", attention_post_norm="post_attention_layernorm"
        ),
        "feed_forward": _norms(
            ffn_norm="pre_feedforward_layernorm", ffn_post_norm="post_feedforward_layernorm"
        ),
    },
}
"""Norms by placement and module: of the input of a sublayer, or, if a name ends in `_post_norm`,
of its output.
"""


def _expert(
    shape: str,
    style: ParallelStyle,
    name: str,
    initial: Literal["normal", "residual", "zeros"] = "normal",
    option: str = "",
) -> Parameter:
    """A parameter of every expert."""
    return Parameter(shape, style, f"mlp.experts.{{}}.{name}", initial, option, per_expert=True)


def _shared(
    shape: str, style: ParallelStyle, name: str, initial: Literal["normal", "residual"] = "normal"
) -> Parameter:
    """A parameter of the shared expert."""
    return Parameter(shape, style, f"mlp.shared_experts.{name}", initial, "shared_expert")


MIXERS = {
    "attention": SublayerKind(
        {
            "q_proj.weight": Parameter("QE", "colwise", "self_attn.q_proj.weight"),
            "q_proj.bias": Parameter("Q", "colwise", "self_attn.q_proj.bias", "zeros", "qkv_bias"),
            "k_proj.weight": Parameter("KE", "colwise", "self_attn.k_proj.weight"),
            "k_proj.bias": Parameter("K", "colwise", "self_attn.k_proj.bias", "zeros", "qkv_bias"),
            "v_proj.weight": Parameter("KE", "colwise", "self_attn.v_proj.weight"),
            "v_proj.bias": Parameter("K", "colwise", "self_attn.v_proj.bias", "zeros", "qkv_bias"),
            "o_proj.weight": Parameter("EQ", "rowwise", "self_attn.o_proj.weight", "residual"),
            "o_proj.bias": Parameter("E", "replicate", "self_attn.o_proj.bias", "zeros", "o_bias"),
            # Ranks hold different heads, so each has a part of the gradient of a norm that they
            # share.
            "q_norm.weight": Parameter(
                "H", "replicate_partial", "self_attn.q_norm.weight", "ones", "qk_norm"
            ),
            "k_norm.weight": Parameter(
                "H", "replicate_partial", "self_attn.k_norm.weight", "ones", "qk_norm"
            ),
            "wide_q_norm.weight": Parameter(
                "Q", "colwise", "self_attn.q_norm.weight", "ones", "full_qk_norm"
            ),
            "wide_k_norm.weight": Parameter(
                "K", "colwise", "self_attn.k_norm.weight", "ones", "full_qk_norm"
            ),
            "sinks": Parameter("N", "colwise", "self_attn.sinks", "zeros", "sink"),
        },
        options=frozenset({"rope", "window", "softcap"}),
        attends=True,
    )
}
FEED_FORWARDS = {
    "gated": SublayerKind(
        {
            "gate_proj.weight": Parameter("GE", "colwise", "mlp.gate_proj.weight"),
            "up_proj.weight": Parameter("GE", "colwise", "mlp.up_proj.weight"),
            "down_proj.weight": Parameter("EG", "rowwise", "mlp.down_proj.weight", "residual"),
        },
        options=frozenset({"activation"}),
    ),
    "moe": SublayerKind(
        {
            "router.weight": Parameter("XE", "replicate", "mlp.gate.weight"),
            "router.bias": Parameter("X", "replicate", "mlp.gate.bias", "zeros", "router_bias"),
            "experts.gate_proj": _expert("XME", "colwise", "gate_proj.weight"),
            "experts.gate_bias": _expert(
                "XM", "colwise", "gate_proj.bias", "zeros", "expert_bias"
            ),
            "experts.up_proj": _expert("XME", "colwise", "up_proj.weight"),
            "experts.up_bias": _expert("XM", "colwise", "up_proj.bias", "zeros", "expert_bias"),
            "experts.down_proj": _expert("XEM", "rowwise", "down_proj.weight", "residual"),
            # Each tp rank adds its share of this bias (`Options.bias_scale`), and has that of its
            # gradient.
            "experts.down_bias": _expert(
                "XE", "replicate_partial", "down_proj.bias", "zeros", "expert_bias"
            ),
            "shared_gate_proj.weight": _shared("ZE", "colwise", "gate_proj.weight"),
            "shared_up_proj.weight": _shared("ZE", "colwise", "up_proj.weight"),
            "shared_down_proj.weight": _shared("EZ", "rowwise", "down_proj.weight", "residual"),
        },
        buffers={
            # A statistic of training, for which Hugging Face's format has no tensor.
            "last_load": Parameter("X", "replicate", "", "ones"),
            "correction_bias": Parameter(
                "X", "replicate", "mlp.gate.e_score_correction_bias", "zeros", "correction_bias"
            ),
        },
        options=frozenset({"activation"}),
    ),
}


EXPERT_OPTIONS = ("router_bias", "expert_bias", "shared_expert", "correction_bias")
"""The options of layers with experts only."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """One layer. Options that its mixer and feed-forward do not read must keep their defaults."""

    mixer: str = "attention"
    feed_forward: str = "gated"
    norms: str = "pre"
    """Placement of norms: the inputs of attention and feed-forward, their outputs (OLMo 2), or
    both (Gemma 2).
    """
    rope: Literal["global", "local", "none"] = "global"
    """`model.rope`, `model.local_rope` (Gemma 3), or no rotation (NoPE, Kazemnejad et al.,
    2023).
    """
    qk_norm: bool = False
    """Whether each query and key head is normed (Qwen3)."""
    full_qk_norm: bool = False
    """Whether all query heads are normed at once, and all key heads (OLMo 2)."""
    qkv_bias: bool = False
    o_bias: bool = False
    """Whether attention's output projection has a bias (gpt-oss)."""
    window: int | None = None
    """Keys that a query sees at most, its own included; None: all of its document up to itself."""
    sink: bool = False
    """Whether each query head has a learned logit that takes part in the softmax's sum and has no
    value.
    """
    softcap: float | None = None
    """c of the scores c tanh(score / c) (Gemma 2)."""
    activation: Activation = "silu"
    router_bias: bool = False
    """Whether the router's logits have a bias (gpt-oss)."""
    expert_bias: bool = False
    """Whether the products of experts have biases (gpt-oss)."""
    shared_expert: bool = False
    """Whether an expert sees every token, beside those that the router chooses."""
    correction_bias: bool = False
    """Whether a bias that no gradient changes is added to the scores where experts are chosen
    (DeepSeek-V3).
    """

    def problems(self) -> list[str]:
        """Every broken rule, with its values."""
        for name, known in (("mixer", MIXERS), ("feed_forward", FEED_FORWARDS), ("norms", NORMS)):
            if getattr(self, name) not in known:
                return [
                    f'{name} = "{getattr(self, name)}" is unknown; there are {", ".join(known)}'
                ]
        options = {each.option for each in (self._declared | self._declared_buffers).values()} - {
            ""
        }
        problems = [
            f'{each.name} is read neither by mixer "{self.mixer}" nor by feed_forward "{self.feed_forward}"'
            for each in fields(self)
            if each.name not in self.readable and getattr(self, each.name) != each.default
        ]
        problems += [
            f"{name} is no option of LayerKind"
            for name in sorted(options - {each.name for each in fields(self)})
        ]
        if self.qk_norm and self.full_qk_norm:
            problems.append("full_qk_norm = true excludes qk_norm = true")
        limits = {"window": self.window, "softcap": self.softcap}
        problems += [
            f"{name} = {limit} must be above 0"
            for name, limit in limits.items()
            if not (limit is None or limit > 0)
        ]
        return problems + [
            f"{name} {problem}"
            for name, each in self._declared.items()
            for problem in each.problems(self.widths)
        ]

    @property
    def widths(self) -> dict[str, int]:
        """Widths that its mixer and feed-forward have of their own."""
        widths = dict[str, int]()
        for kind in self.sublayers.values():
            widths.update(kind.widths)
        return widths

    @property
    def readable(self) -> set[str]:
        """The fields that its mixer and feed-forward read, or on which their parameters depend."""
        declared = (self._declared | self._declared_buffers).values()
        names = {"mixer", "feed_forward", "norms"}.union(
            *(kind.options for kind in self.sublayers.values())
        )
        return names | {each.option for each in declared} - {""}

    @property
    def sublayers(self) -> dict[str, SublayerKind]:
        """Its mixer and its feed-forward, by the name of their module."""
        return {"attention": MIXERS[self.mixer], "feed_forward": FEED_FORWARDS[self.feed_forward]}

    @cached_property
    def scores(self) -> Scores:
        """How its attention forms scores."""
        return Scores(self.window, self.softcap)

    @cached_property
    def attends(self) -> bool:
        return any(each.attends for each in self.sublayers.values())

    @property
    def in_pieces(self) -> bool:
        return all(each.in_pieces for each in self.sublayers.values())

    @property
    def _declared(self) -> dict[str, Parameter]:
        """Parameters with every option."""
        declared = dict[str, Parameter]()
        for module, kind in self.sublayers.items():
            declared |= NORMS[self.norms][module] | {
                f"{module}.{name}": each for name, each in kind.parameters.items()
            }
        return declared

    @property
    def _declared_buffers(self) -> dict[str, Parameter]:
        """Buffers with every option."""
        kinds = self.sublayers.items()
        return {
            f"{module}.{name}": each
            for module, kind in kinds
            for name, each in kind.buffers.items()
        }

    @cached_property
    def buffers(self) -> dict[str, Parameter]:
        """Buffers by name within the block."""
        return self._with_option(self._declared_buffers)

    def _with_option(self, declared: Mapping[str, Parameter]) -> dict[str, Parameter]:
        return {
            name: each
            for name, each in declared.items()
            if not each.option or getattr(self, each.option)
        }

    def has_post_norm(self, module: str) -> bool:
        """Whether the output of a sublayer is normed."""
        return any(name.endswith("_post_norm.weight") for name in NORMS[self.norms][module])

    def parameters_of(self, module: str) -> dict[str, Parameter]:
        """Parameters by name within a module of the block."""
        prefix = f"{module}."
        return {
            name.removeprefix(prefix): each
            for name, each in self.parameters.items()
            if name.startswith(prefix)
        }

    def buffers_of(self, module: str) -> dict[str, Parameter]:
        """Buffers by name within a module of the block."""
        prefix = f"{module}."
        return {
            name.removeprefix(prefix): each
            for name, each in self.buffers.items()
            if name.startswith(prefix)
        }

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters by name within the block."""
        return self._with_option(self._declared)
