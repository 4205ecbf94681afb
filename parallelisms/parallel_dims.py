"""What may be asked of a mesh, and what `auto` makes of it: numbers and words only, without torch.

A configuration is checked with these rules before any process starts, and the public interface of
`parallelisms/context` raises them as errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import Literal

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

Method = Literal["allgather", "ring", "alltoall", "ulysses", "hybrid"]
Rotation = Literal["allgather", "ring", "alltoall"]
Layout = Literal["contiguous", "headtail", "doc_headtail", "balanced"]
METHODS: tuple[Method, ...] = ("allgather", "ring", "alltoall", "ulysses", "hybrid")
ROTATIONS: tuple[Rotation, ...] = ("allgather", "ring", "alltoall")

# By rotation, the default first. A ring runs in lock step: `balanced`, which evens totals but not steps, is no use to it.
LAYOUTS: dict[Rotation, tuple[Layout, ...]] = {
    "allgather": ("balanced", "headtail", "doc_headtail", "contiguous"),
    "ring": ("doc_headtail", "headtail", "contiguous"),
    "alltoall": ("doc_headtail", "headtail", "contiguous"),
}

# What all-gather may hold in passing per layer, before `auto` prefers the ring, which holds 1/cp of it.
GATHER_BUDGET = 4 * 2**30
# Bytes per token, head and unit of width in its backward pass: the gathered keys and values in half precision, their
# copy in row order, and the float32 gradients of both.
GATHER_BYTES = 2 * (2 + 2 + 4 + 4)


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """How cp ranks share rows: `ulysses` neighbours exchange heads, `ring` such groups rotate keys and values.

    `method`, `layout` and `outer` may be "auto"; `ulysses` None chooses it. `heads` and `kv_heads` are those of one
    tensor-parallel rank, `node` the cp ranks joined by fast links. `packed` says that rows hold several documents.
    """

    cp: int
    method: Method | Literal["auto"] = "auto"
    layout: Layout | Literal["auto"] = "auto"
    cp_ulysses: int | None = None
    outer: Rotation | Literal["auto"] = "auto"
    heads: int
    kv_heads: int
    head_dim: int = 128
    row_tokens: int = 0
    packed: bool = True
    node: int = 8
    tp: int = 1
    """Ranks that share each rank's tokens further (sequence parallelism)."""

    @property
    def chosen(self) -> Method:
        return self._choice()[0] if self.method == "auto" else self.method

    @property
    def reason(self) -> str:
        return f"auto: {self._choice()[1]}" if self.method == "auto" else "as configured"

    @property
    def ulysses(self) -> int:
        """Ranks that exchange heads."""
        if self.chosen == "ulysses":
            return self.cp
        if self.chosen != "hybrid":
            return 1
        return self.cp_ulysses or self._inside_node()

    @property
    def ring(self) -> int:
        """Ranks, or groups of `ulysses` ranks, among which keys and values rotate."""
        return max(1, self.cp // self.ulysses)

    @property
    def rotation(self) -> Rotation | None:
        """How keys and values reach the other `ring` ranks; None where they need not."""
        if self.chosen == "hybrid":
            return self.outer if self.outer != "auto" else "allgather" if self.packed else "ring"
        return None if self.chosen == "ulysses" else self.chosen

    @property
    def kind(self) -> Layout:
        """The layout of tokens over the ring."""
        if self.layout != "auto":
            return self.layout
        if self.cp == 1:
            return "contiguous"
        return "contiguous" if self.rotation is None else LAYOUTS[self.rotation][0]

    @property
    def multiple(self) -> int:
        """Rows must be a multiple of this many tokens."""
        alone = self.cp == 1 or self.kind == "contiguous"
        return lcm(self.cp if alone else 2 * self.cp, self.cp * self.tp)

    def padded(self, tokens: int) -> int:
        """The length of a row of so many tokens, made to divide."""
        return tokens + -tokens % self.multiple

    def problems(self) -> list[str]:
        """Every rule that is broken, in words; empty when the plan can run."""
        kinds = LAYOUTS["allgather"]
        asked: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("method", self.method, METHODS),
            ("layout", self.layout, kinds),
            ("outer", self.outer, ROTATIONS),
        )
        found = [
            f'cp_{key} "{name}" is unknown; there are auto, {", ".join(known)}'
            for key, name, known in asked
            if name not in ("auto", *known)
        ]
        if found or self.cp == 1:
            return found
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            found.append(f"{self.heads} query heads must be a multiple of {self.kv_heads} key/value heads")
        if self.cp_ulysses is not None and self.chosen != "hybrid":
            found.append(f'cp_ulysses = {self.cp_ulysses} has no use with cp_method "{self.chosen}"; use "hybrid"')
        if self.outer != "auto" and self.chosen != "hybrid":
            found.append(f'cp_outer = "{self.outer}" has no use with cp_method "{self.chosen}"; use "hybrid"')
        if self.cp % self.ulysses:
            found.append(f"cp_ulysses = {self.ulysses} must divide cp = {self.cp}")
        if self.heads % self.ulysses:
            found.append(
                f'cp_method "{self.chosen}" gives heads to {self.ulysses} ranks, which must divide the '
                f"{self.heads} query heads of a rank"
            )
        allowed = ("contiguous",) if self.rotation is None else LAYOUTS[self.rotation]
        if self.kind not in allowed:
            names = ", ".join(f'"{name}"' for name in allowed)
            found.append(f'cp_layout "{self.kind}" does not fit cp_method "{self.chosen}"; it takes {names}')
        return found

    def summary(self) -> str:
        """One line for the log."""
        parts = (
            f"{self.ulysses} x {self.ring}, {self.rotation} across" if self.chosen == "hybrid" else f"{self.cp} ranks"
        )
        return f"{self.chosen} ({parts}), layout {self.kind} ({self.reason})"

    def _inside_node(self) -> int:
        """The most ranks that can exchange heads without leaving a node: those that divide it, cp and the heads."""
        return gcd(self.node, self.cp, self.heads)

    def _choice(self) -> tuple[Method, str]:
        documents = "packed documents" if self.packed else "one document per row"
        inside, one_node = self._inside_node(), self.node % self.cp == 0
        if not one_node and inside > 1:
            return "hybrid", f"cp {self.cp} spans nodes of {self.node} ranks, {inside} of which divide the heads"
        # Where a ring must carry float32 gradients, heads are fewer bytes from this many ranks on.
        fewer_bytes = 2 * self.kv_heads * self.cp > self.heads + self.kv_heads
        whole_heads = self.heads % self.cp == 0 and self.layout in ("auto", "contiguous")
        if one_node and whole_heads and (self.packed or fewer_bytes):
            why = documents if self.packed else f"{documents}, fewer bytes than keys and values"
            return "ulysses", f"{self.heads} heads divide among {self.cp} ranks; {why}"
        undivided = "" if self.heads % self.cp == 0 else f"{self.heads} heads do not divide among {self.cp} ranks; "
        if self.packed:
            return "allgather", f"{undivided}{documents} balance best when gathered"
        held = self.row_tokens * self.kv_heads * self.head_dim * GATHER_BYTES
        gib = f"gathering would hold {held / 2**30:.1f} GiB per layer"
        if held <= GATHER_BUDGET or self.layout == "balanced":
            return "allgather", f"{undivided}{documents}; {gib}"
        return "ring", f"{undivided}{documents}; {gib}, more than {GATHER_BUDGET / 2**30:.0f}"


def repeats(ulysses: int, kv_heads: int) -> int:
    """How often each key/value head is repeated so that they divide among `ulysses` ranks."""
    return ulysses // gcd(ulysses, kv_heads)


def tensor_problems(
    tp: int, *, heads: int, kv_heads: int, ffn_dim: int, vocab_size: int, whole_vocabulary: bool = False
) -> list[str]:
    """Every rule that a cut of the model over `tp` ranks breaks, in words."""
    sizes = {"model.num_heads": heads, "model.ffn_dim": ffn_dim}
    if not whole_vocabulary:
        sizes["model.vocab_size"] = vocab_size
    found = [f"parallelism.tp = {tp} must divide {name} = {size}" for name, size in sizes.items() if size % tp]
    if kv_heads % tp and tp % kv_heads:
        found.append(
            f"parallelism.tp = {tp} must divide model.num_kv_heads = {kv_heads}, or be a multiple of it: each rank then "
            "has one of them, as its neighbours do"
        )
    return found
