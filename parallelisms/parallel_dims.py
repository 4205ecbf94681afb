"""What may be asked of a mesh, and what `auto` makes of it: numbers and words only, without torch.

A configuration is checked with these rules before any process starts, and the public interface of
`parallelisms/context` raises them as errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import Literal

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

CPMethod = Literal["allgather", "ring", "alltoall", "ulysses", "hybrid"]
RotateMethod = Literal["allgather", "ring", "alltoall"]
ShardLayout = Literal["contiguous", "headtail", "doc_headtail", "balanced"]
CP_METHODS: tuple[CPMethod, ...] = ("allgather", "ring", "alltoall", "ulysses", "hybrid")
ROTATE_METHODS: tuple[RotateMethod, ...] = ("allgather", "ring", "alltoall")

# By rotation, the default first. A ring runs in lock step: `balanced`, which evens totals but not steps, is no use to it.
LAYOUTS_BY_ROTATE_METHOD: dict[RotateMethod, tuple[ShardLayout, ...]] = {
    "allgather": ("balanced", "headtail", "doc_headtail", "contiguous"),
    "ring": ("doc_headtail", "headtail", "contiguous"),
    "alltoall": ("doc_headtail", "headtail", "contiguous"),
}

# What all-gather may hold in passing per layer, before `auto` prefers the ring, which holds 1/cp of it.
ALL_GATHER_BUDGET_BYTES = 4 * 2**30
# Bytes per token, head and unit of width in its backward pass: the gathered keys and values in half precision, their
# copy in row order, and the float32 gradients of both.
ALL_GATHER_BYTES_PER_ELEMENT = 2 * (2 + 2 + 4 + 4)


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """How cp ranks share rows: `ulysses` neighbours exchange heads, `ring` such groups rotate keys and values.

    `method`, `layout` and `outer` may be "auto"; `ulysses` None chooses it. `heads` and `kv_heads` are those of one
    tensor-parallel rank, `node` the cp ranks joined by fast links. `packed` says that rows hold several documents.
    """

    cp: int
    method: CPMethod | Literal["auto"] = "auto"
    layout: ShardLayout | Literal["auto"] = "auto"
    cp_ulysses: int | None = None
    outer_method: RotateMethod | Literal["auto"] = "auto"
    heads: int
    kv_heads: int
    head_dim: int = 128
    seq_len: int = 0
    packs_documents: bool = True
    ranks_per_node: int = 8
    tp: int = 1
    """Ranks that share each rank's tokens further (sequence parallelism)."""

    @property
    def resolved_method(self) -> CPMethod:
        return self._choose_method()[0] if self.method == "auto" else self.method

    @property
    def reason(self) -> str:
        return f"auto: {self._choose_method()[1]}" if self.method == "auto" else "as configured"

    @property
    def ulysses_degree(self) -> int:
        """Ranks that exchange heads."""
        if self.resolved_method == "ulysses":
            return self.cp
        if self.resolved_method != "hybrid":
            return 1
        return self.cp_ulysses or self._max_ulysses_in_node()

    @property
    def ring_degree(self) -> int:
        """Ranks, or groups of `ulysses` ranks, among which keys and values rotate."""
        return max(1, self.cp // self.ulysses_degree)

    @property
    def rotate_method(self) -> RotateMethod | None:
        """How keys and values reach the other `ring` ranks; None where they need not."""
        if self.resolved_method == "hybrid":
            return self.outer_method if self.outer_method != "auto" else "allgather" if self.packs_documents else "ring"
        return None if self.resolved_method == "ulysses" else self.resolved_method

    @property
    def resolved_layout(self) -> ShardLayout:
        """The layout of tokens over the ring."""
        if self.layout != "auto":
            return self.layout
        if self.cp == 1:
            return "contiguous"
        return "contiguous" if self.rotate_method is None else LAYOUTS_BY_ROTATE_METHOD[self.rotate_method][0]

    @property
    def seq_len_divisor(self) -> int:
        """Rows must be a multiple of this many tokens."""
        is_undivided = self.cp == 1 or self.resolved_layout == "contiguous"
        return lcm(self.cp if is_undivided else 2 * self.cp, self.cp * self.tp)

    def padded_length(self, tokens: int) -> int:
        """The length of a row of so many tokens, made to divide."""
        return tokens + -tokens % self.seq_len_divisor

    def problems(self) -> list[str]:
        """Every rule that is broken, in words; empty when the plan can run."""
        layouts = LAYOUTS_BY_ROTATE_METHOD["allgather"]
        settings: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("method", self.method, CP_METHODS),
            ("layout", self.layout, layouts),
            ("outer_method", self.outer_method, ROTATE_METHODS),
        )
        problems = [
            f'cp_{key} "{name}" is unknown; there are auto, {", ".join(choices)}'
            for key, name, choices in settings
            if name not in ("auto", *choices)
        ]
        if problems or self.cp == 1:
            return problems
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            problems.append(f"{self.heads} query heads must be a multiple of {self.kv_heads} key/value heads")
        if self.cp_ulysses is not None and self.resolved_method != "hybrid":
            problems.append(
                f'cp_ulysses = {self.cp_ulysses} has no use with cp_method "{self.resolved_method}"; use "hybrid"'
            )
        if self.outer_method != "auto" and self.resolved_method != "hybrid":
            problems.append(
                f'cp_outer_method = "{self.outer_method}" has no use with cp_method "{self.resolved_method}"; use "hybrid"'
            )
        if self.cp % self.ulysses_degree:
            problems.append(f"cp_ulysses = {self.ulysses_degree} must divide cp = {self.cp}")
        if self.heads % self.ulysses_degree:
            problems.append(
                f'cp_method "{self.resolved_method}" gives heads to {self.ulysses_degree} ranks, which must divide the '
                f"{self.heads} query heads of a rank"
            )
        allowed = ("contiguous",) if self.rotate_method is None else LAYOUTS_BY_ROTATE_METHOD[self.rotate_method]
        if self.resolved_layout not in allowed:
            layout_names = ", ".join(f'"{name}"' for name in allowed)
            problems.append(
                f'cp_layout "{self.resolved_layout}" does not fit cp_method "{self.resolved_method}"; it takes {layout_names}'
            )
        return problems

    def summary(self) -> str:
        """One line for the log."""
        degrees = (
            f"{self.ulysses_degree} x {self.ring_degree}, {self.rotate_method} across"
            if self.resolved_method == "hybrid"
            else f"{self.cp} ranks"
        )
        return f"{self.resolved_method} ({degrees}), layout {self.resolved_layout} ({self.reason})"

    def _max_ulysses_in_node(self) -> int:
        """The most ranks that can exchange heads without leaving a node: those that divide it, cp and the heads."""
        return gcd(self.ranks_per_node, self.cp, self.heads)

    def _choose_method(self) -> tuple[CPMethod, str]:
        documents = "packed documents" if self.packs_documents else "one document per row"
        max_ulysses, fits_in_node = self._max_ulysses_in_node(), self.ranks_per_node % self.cp == 0
        if not fits_in_node and max_ulysses > 1:
            return (
                "hybrid",
                f"cp {self.cp} spans nodes of {self.ranks_per_node} ranks, {max_ulysses} of which divide the heads",
            )
        # Where a ring must carry float32 gradients, heads are fewer bytes from this many ranks on.
        heads_are_cheaper = 2 * self.kv_heads * self.cp > self.heads + self.kv_heads
        can_split_heads = self.heads % self.cp == 0 and self.layout in ("auto", "contiguous")
        if fits_in_node and can_split_heads and (self.packs_documents or heads_are_cheaper):
            reason = documents if self.packs_documents else f"{documents}, fewer bytes than keys and values"
            return "ulysses", f"{self.heads} heads divide among {self.cp} ranks; {reason}"
        prefix = "" if self.heads % self.cp == 0 else f"{self.heads} heads do not divide among {self.cp} ranks; "
        if self.packs_documents:
            return "allgather", f"{prefix}{documents} balance best when gathered"
        gathered_bytes = self.seq_len * self.kv_heads * self.head_dim * ALL_GATHER_BYTES_PER_ELEMENT
        gathered_gib = f"gathering would hold {gathered_bytes / 2**30:.1f} GiB per layer"
        if gathered_bytes <= ALL_GATHER_BUDGET_BYTES or self.layout == "balanced":
            return "allgather", f"{prefix}{documents}; {gathered_gib}"
        return "ring", f"{prefix}{documents}; {gathered_gib}, more than {ALL_GATHER_BUDGET_BYTES / 2**30:.0f}"


def kv_head_repeats(ulysses_degree: int, kv_heads: int) -> int:
    """How often each key/value head is repeated so that they divide among `ulysses` ranks."""
    return ulysses_degree // gcd(ulysses_degree, kv_heads)


def tensor_parallel_problems(
    tp: int, *, heads: int, kv_heads: int, ffn_dim: int, vocab_size: int, replicated_vocabulary: bool = False
) -> list[str]:
    """Every rule that a cut of the model over `tp` ranks breaks, in words."""
    sizes = {"model.num_heads": heads, "model.ffn_dim": ffn_dim}
    if not replicated_vocabulary:
        sizes["model.vocab_size"] = vocab_size
    problems = [f"parallelism.tp = {tp} must divide {name} = {size}" for name, size in sizes.items() if size % tp]
    if kv_heads % tp and tp % kv_heads:
        problems.append(
            f"parallelism.tp = {tp} must divide model.num_kv_heads = {kv_heads}, or be a multiple of it: each rank then "
            "has one of them, as its neighbours do"
        )
    return problems
