"""Rules for context parallelism, and the choices of `auto`. Imports no torch.

The configuration is validated with these rules before any process starts; `ContextParallel` raises
them as errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm
from typing import Literal, get_args

CPMethod = Literal["allgather", "ring", "alltoall", "ulysses", "hybrid"]
RotateMethod = Literal["allgather", "ring", "alltoall"]
ShardLayout = Literal["contiguous", "headtail", "doc_headtail", "balanced"]
CP_METHODS: tuple[CPMethod, ...] = get_args(CPMethod)
ROTATE_METHODS: tuple[RotateMethod, ...] = get_args(RotateMethod)

# The first is the default. A ring runs in lock step, and `balanced` equalizes the total work but
# not each ring step.
LAYOUTS_BY_ROTATE_METHOD: dict[RotateMethod, tuple[ShardLayout, ...]] = {
    "allgather": ("balanced", "headtail", "doc_headtail", "contiguous"),
    "ring": ("doc_headtail", "headtail", "contiguous"),
    "alltoall": ("doc_headtail", "headtail", "contiguous"),
}

# Transient KV per layer above which `auto` prefers the ring to all-gather: the ring holds 1/cp of
# it.
ALL_GATHER_BUDGET_BYTES = 4 * 2**30
# Bytes per token, KV head and head_dim in the backward pass of all-gather, for K and V: gathered
# bfloat16, its copy in sequence order, and the float32 gradients of both.
ALL_GATHER_BYTES_PER_ELEMENT = 2 * (2 + 2 + 4 + 4)


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """How cp ranks share a sequence: `ulysses_degree` neighbours exchange heads, and `ring_degree`
    such groups rotate KV.

    `cp_ulysses` None lets the plan choose. `heads` and `kv_heads` count those of one tp rank,
    `ranks_per_node` the cp ranks joined by fast links. `seq_len` is in tokens of a micro-batch.
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
    windows: tuple[int | None, ...] = (None,)
    """Windows of the layers, each once; None: a layer without one."""
    ranks_per_node: int = 8
    tp: int = 1
    """The tp degree with sequence parallelism, else 1."""

    @property
    def resolved_method(self) -> CPMethod:
        return self._choice[0] if self.method == "auto" else self.method

    @property
    def reason(self) -> str:
        if self.method != "auto":
            return "as configured"
        is_mixed = None in self.windows and len(self.windows) > 1
        return (
            f"auto: {self._choice[1]}{'; the layers without a window decide' if is_mixed else ''}"
        )

    @property
    def ulysses_degree(self) -> int:
        """The number of ranks that exchange heads."""
        if self.resolved_method == "ulysses":
            return self.cp
        if self.resolved_method != "hybrid" or self.cp == 1:
            return 1
        return self.cp_ulysses or self._max_ulysses_in_node()

    @property
    def hybrid_ulysses_degree(self) -> int | None:
        """`ulysses_degree` if it splits the cp ranks into groups, else None."""
        return self.ulysses_degree if self.resolved_method == "hybrid" and self.cp > 1 else None

    @property
    def ring_degree(self) -> int:
        """The number of ranks, or of Ulysses groups, among which KV rotates or is gathered."""
        return max(1, self.cp // self.ulysses_degree)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The context-parallel mesh: one dimension or, for `hybrid`, two: ring, then Ulysses."""
        return (
            (self.ring_degree, self.ulysses_degree)
            if self.resolved_method == "hybrid"
            else (self.cp,)
        )

    @property
    def rotate_method(self) -> RotateMethod | None:
        """How KV reaches the other `ring_degree` ranks; None for "ulysses"."""
        if self.resolved_method == "hybrid":
            return (
                self.outer_method
                if self.outer_method != "auto"
                else "allgather"
                if self.packs_documents
                else "ring"
            )
        return None if self.resolved_method == "ulysses" else self.resolved_method

    @property
    def resolved_layout(self) -> ShardLayout:
        """The shard layout of tokens over the ring."""
        if self.layout != "auto":
            return self.layout
        return "contiguous" if self.cp == 1 else self._allowed_layouts()[0]

    @property
    def seq_len_divisor(self) -> int:
        """The padded sequence length must be a multiple of this."""
        # Layouts with heads and tails have two chunks a rank, and sequence parallelism cuts a
        # rank's tokens among its tp ranks.
        is_contiguous = self.cp == 1 or self.resolved_layout == "contiguous"
        return lcm(self.cp if is_contiguous else 2 * self.cp, self.cp * self.tp)

    def padded_length(self, tokens: int) -> int:
        return tokens + -tokens % self.seq_len_divisor

    def problems(self) -> list[str]:
        """Every broken rule, one message each."""
        layouts = LAYOUTS_BY_ROTATE_METHOD["allgather"]
        choices = {"method": CP_METHODS, "layout": layouts, "outer_method": ROTATE_METHODS}
        problems = [
            f'cp_{key} = "{getattr(self, key)}" must be one of auto, {", ".join(names)}'
            for key, names in choices.items()
            if getattr(self, key) not in ("auto", *names)
        ]
        if problems or self.cp == 1:
            return problems
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            problems.append(
                f"{self.heads} query heads must be a multiple of {self.kv_heads} KV heads"
            )
        if self.resolved_method != "hybrid":
            unused = f'is only used with cp_method = "hybrid", not "{self.resolved_method}"'
            if self.cp_ulysses is not None:
                problems.append(f"cp_ulysses = {self.cp_ulysses} {unused}")
            if self.outer_method != "auto":
                problems.append(f'cp_outer_method = "{self.outer_method}" {unused}')
        if self.cp % self.ulysses_degree:
            problems.append(f"cp_ulysses = {self.ulysses_degree} must divide cp = {self.cp}")
        if self.heads % self.ulysses_degree:
            problems.append(
                f'cp_method = "{self.resolved_method}" splits heads over {self.ulysses_degree} ranks, which must divide '
                f"the {self.heads} query heads of a rank"
            )
        if self.resolved_layout not in self._allowed_layouts():
            layout_names = ", ".join(f'"{name}"' for name in self._allowed_layouts())
            problems.append(
                f'cp_layout = "{self.resolved_layout}" is not supported by cp_method = "{self.resolved_method}"; '
                f"use {layout_names}"
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

    def _allowed_layouts(self) -> tuple[ShardLayout, ...]:
        return (
            ("contiguous",)
            if self.rotate_method is None
            else LAYOUTS_BY_ROTATE_METHOD[self.rotate_method]
        )

    def _max_ulysses_in_node(self) -> int:
        """The largest Ulysses degree inside a node: it divides the node, cp and the heads."""
        return gcd(self.ranks_per_node, self.cp, self.heads)

    @property
    def _halo_tokens(self) -> int | None:
        """Halo of the widest window, before each of a rank's two chunks; None if some layer has no
        window.
        """
        windows = [window for window in self.windows if window is not None]
        return 2 * (max(windows) - 1) if len(windows) == len(self.windows) else None

    @cached_property
    def _choice(self) -> tuple[CPMethod, str]:
        halo = self._halo_tokens
        remote_kv: float = self.cp - 1  # Relative to a rank's own.
        if halo is not None:
            # A halo has a fixed number of tokens, of which a rank's own are seq_len / cp.
            remote_kv = min(remote_kv, halo * self.cp / max(1, self.seq_len))
        # The ring sends float32 KV gradients, so an exchange of heads, of which 1 / cp stays, soon
        # sends fewer bytes.
        ulysses_sends_less = 2 * self.kv_heads * remote_kv * self.cp > (
            self.heads + self.kv_heads
        ) * (self.cp - 1)
        if halo is not None and not ulysses_sends_less:
            return (
                "allgather",
                f"every layer has a window: ranks send at most {halo:,} tokens of KV",
            )
        documents = "packed documents" if self.packs_documents else "one document per sequence"
        max_ulysses = self._max_ulysses_in_node()
        fits_in_node = self.ranks_per_node % self.cp == 0
        if not fits_in_node and max_ulysses > 1:
            return (
                "hybrid",
                f"cp {self.cp} spans nodes of {self.ranks_per_node} ranks; {max_ulysses} of them divide the heads",
            )
        can_split_heads = self.heads % self.cp == 0 and self.layout in ("auto", "contiguous")
        if fits_in_node and can_split_heads and (self.packs_documents or ulysses_sends_less):
            reason = documents if self.packs_documents else f"{documents}, fewer bytes than KV"
            return "ulysses", f"{self.heads} heads are divisible by {self.cp} ranks; {reason}"
        prefix = (
            ""
            if self.heads % self.cp == 0
            else f"{self.heads} heads are not divisible by {self.cp} ranks; "
        )
        if self.packs_documents:
            return "allgather", f"{prefix}{documents} balance best with all-gather"
        gathered_bytes = (
            self.seq_len
            * (1 + remote_kv)
            / self.cp
            * self.kv_heads
            * self.head_dim
            * ALL_GATHER_BYTES_PER_ELEMENT
        )
        gathered_gib = f"all-gather needs {gathered_bytes / 2**30:.1f} GiB per layer"
        if gathered_bytes <= ALL_GATHER_BUDGET_BYTES or self.layout == "balanced":
            return "allgather", f"{prefix}{documents}; {gathered_gib}"
        return (
            "ring",
            f"{prefix}{documents}; {gathered_gib}, more than {ALL_GATHER_BUDGET_BYTES / 2**30:.0f} GiB",
        )


def kv_head_repeats(ulysses_degree: int, kv_heads: int) -> int:
    """How often each KV head is repeated so that the heads are divisible by `ulysses_degree`."""
    # The fewest repeats after which `ulysses_degree` divides the heads.
    return ulysses_degree // gcd(ulysses_degree, kv_heads)
