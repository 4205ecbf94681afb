"""Context parallelism: ranks hold shards of each sequence, and attention is exact over the full sequence.

    mesh = init_device_mesh("cpu", (4,))
    cp = ContextParallel(mesh, method="ring", heads=8, kv_heads=4)
    q, k, v = (cp.shard(x) for x in (q, k, v))  # [B, T, heads, head_dim] -> [B, S, heads, head_dim]
    out = cp(q, k, v)
    out = cp.unshard(out)

Shape suffixes: B batch, S tokens of this rank, T tokens of the full sequence, N query heads, K KV heads, H head dim,
D document boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models import attention_op, kernels
from models.attention import LocalAttentionCore
from models.batch import IGNORE_INDEX, Batch, pad_batch
from models.transformer import Transformer
from parallelisms import collectives
from parallelisms.context import cp_attention_op, ulysses
from parallelisms.context.ring import Waitable
from parallelisms.context.shard_layout import SeqLayout
from parallelisms.parallel_dims import ContextPlan, CPMethod, RotateMethod, ShardLayout


class InFlightQKV(NamedTuple):
    """What `ContextParallel.start` has started to send."""

    all_to_alls: list[ulysses.SeqToHeads] | None
    """All-to-all of q, k and v; None without Ulysses."""
    qkv: Sequence[Tensor]
    """q, k and v; empty with Ulysses."""
    pending_kv: Waitable | None = None
    """The first KV exchange of the ring; with Ulysses it starts after the all-to-all."""


class ContextParallel:
    """Context-parallel attention core (`models.attention.AttentionCore`), with sharding and unsharding of tensors.

    `mesh` has one dimension or, for `hybrid`, two: ring, then Ulysses. `method`, `layout`, `outer_method`, `heads`,
    `kv_heads` and `head_dim` are those of `ContextPlan`. 16-bit gradients of keys and values are sent in
    `reduce_dtype`. Raises ValueError on all ranks, for everything that cannot be computed exactly and if the ranks'
    arguments differ.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        method: CPMethod | str = "auto",
        layout: ShardLayout | str = "auto",
        outer_method: RotateMethod | str = "auto",
        heads: int,
        kv_heads: int,
        head_dim: int = 128,
        reduce_dtype: torch.dtype = torch.float32,
        kernel: str = "auto",
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        is_hybrid = mesh.ndim == 2
        choices: Any = {
            "method": "hybrid" if is_hybrid and method == "auto" else method,
            "layout": layout,
            "outer_method": outer_method,
        }
        self.plan = ContextPlan(
            cp=mesh.size(),
            cp_ulysses=mesh.size(1) if is_hybrid else None,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ranks_per_node=mesh.size(),
            **choices,
        )
        problems = [*self.plan.problems(), *_unsupported(self.plan, causal=causal, window=window, dropout=dropout)]
        if self.plan.resolved_method == "hybrid" and not is_hybrid:
            problems.append('cp_method "hybrid" needs a mesh with 2 dimensions: ring, Ulysses')
        if mesh.ndim > 2:
            problems.append(
                f"the mesh has {mesh.ndim} dimensions; pass the submesh of the 1 or 2 context-parallel ones"
            )
        if kernel not in kernels.KERNELS:
            problems.append(f'attention kernel "{kernel}" is unknown; choose from {", ".join(kernels.KERNELS)}')
        self._groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        self._require_same(vars(self.plan) | {"reduce_dtype": reduce_dtype, "problems": problems}, "plans")
        if problems:
            raise ValueError("; ".join(problems))
        self.layout, self.kernel = self.plan.resolved_layout, kernel
        self.ring_degree, self.ulysses_degree = self.plan.ring_degree, self.plan.ulysses_degree
        self.ulysses_group = self._groups[-1].group_name
        self._ring: cp_attention_op.CPAttentionOptions | None = None
        if self.plan.rotate_method is not None and self.ring_degree > 1:
            group_name = self._groups[0].group_name
            self._ring = cp_attention_op.CPAttentionOptions(
                self.plan.rotate_method, self.layout, group_name, reduce_dtype, kernel
            )
        self.heads, self.kv_heads = heads, kv_heads
        self.rank = mesh.get_local_rank() if mesh.ndim == 1 else _flat_rank(mesh)

    def __call__(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor | None = None) -> Tensor:
        """Causal attention inside documents: [B, S, N, H]. Without `boundaries_BD` each sequence is one document.

        Raises ValueError for shapes that do not match the plan, and boundaries that do not match the sequence.
        """
        self._require_shapes(q_BSNH, k_BSKH, v_BSKH)
        if boundaries_BD is None:
            boundaries_1D = torch.tensor([[0, q_BSNH.shape[1] * self.plan.cp]], dtype=torch.int32, device="cpu")
            boundaries_BD = boundaries_1D.repeat(q_BSNH.shape[0], 1)
        if self.ulysses_degree > 1:
            q_BSNH, k_BSKH, v_BSKH = (
                ulysses.seq_to_heads(x, self.ulysses_group, self.ulysses_degree) for x in (q_BSNH, k_BSKH, v_BSKH)
            )
        out = self._attend(q_BSNH, k_BSKH, v_BSKH, boundaries_BD)
        return ulysses.heads_to_seq(out, self.ulysses_group, self.ulysses_degree) if self.ulysses_degree > 1 else out

    # ---- below autograd, for any number of heads

    def start(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> InFlightQKV:
        """Starts the all-to-all of q, k and v or, without Ulysses, the ring's first KV exchange."""
        qkv = (q_BSNH, k_BSKH, v_BSKH)
        if self.ulysses_degree > 1:
            return InFlightQKV([ulysses.SeqToHeads(x, self.ulysses_group, self.ulysses_degree) for x in qkv], ())
        return InFlightQKV(None, qkv, self._start_kv_exchange(k_BSKH, v_BSKH))

    def forward(self, pending: InFlightQKV, boundaries_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B, S, N, H] and, for the heads that this rank computes, the log-sum-exp."""
        (q, k, v), pending_kv = self._wait_inputs(pending)
        if pending_kv is None or self._ring is None:
            out, lse = attention_op.attention(q, k, v, boundaries_BD, self.kernel)
        else:
            out, lse = cp_attention_op.forward(q, k, v, pending_kv, boundaries_BD, self._ring)
        return (
            ulysses.heads_to_seq(out, self.ulysses_group, self.ulysses_degree) if self.ulysses_degree > 1 else out
        ), lse

    def backward(
        self, grad_BSNH: Tensor, pending: InFlightQKV, out_BSNH: Tensor, lse: Tensor, boundaries_BD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv."""
        (q, k, v), pending_kv = self._wait_inputs(pending)
        if self.ulysses_degree > 1:
            grad_BSNH, out_BSNH = (
                ulysses.seq_to_heads(x, self.ulysses_group, self.ulysses_degree) for x in (grad_BSNH, out_BSNH)
            )
        if pending_kv is None or self._ring is None:
            grads = attention_op.attention_backward(grad_BSNH, q, k, v, out_BSNH, lse, boundaries_BD, self.kernel)
        else:
            grads = cp_attention_op.backward(grad_BSNH, q, k, v, pending_kv, out_BSNH, lse, boundaries_BD, self._ring)
        if pending.all_to_alls is not None:
            del q, k, v, grad_BSNH, out_BSNH  # Freed before the all-to-all of the gradients allocates as much.
            pending_grads = [*grads]
            del grads
            grads = tuple([all_to_all.backward(pending_grads.pop(0)) for all_to_all in pending.all_to_alls])
        dq, dk, dv = grads
        return dq, dk, dv

    def _wait_inputs(self, pending: InFlightQKV) -> tuple[Sequence[Tensor], Waitable | None]:
        if pending.all_to_alls is None:
            return pending.qkv, pending.pending_kv
        qkv = [all_to_all.wait() for all_to_all in pending.all_to_alls]
        return qkv, self._start_kv_exchange(*qkv[1:])

    def _start_kv_exchange(self, k_BSKH: Tensor, v_BSKH: Tensor) -> Waitable | None:
        return None if self._ring is None else cp_attention_op.start_kv_exchange(k_BSKH, v_BSKH, self._ring)

    def _attend(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor) -> Tensor:
        if self._ring is None:
            out_BSNH: Tensor = attention_op.attention(q_BSNH, k_BSKH, v_BSKH, boundaries_BD, self.kernel)[0]
            return out_BSNH
        return cp_attention_op.attention(q_BSNH, k_BSKH, v_BSKH, boundaries_BD, self._ring)[0]

    # ---- sharding

    def layouts(self, boundaries_BD: Tensor) -> list[SeqLayout]:
        """The ring layout of each sequence."""
        return [SeqLayout(self.layout, self.ring_degree, tuple(boundaries)) for boundaries in boundaries_BD.tolist()]

    def shard(self, x_BT: Tensor, boundaries_BD: Tensor | None = None) -> Tensor:
        """Selects this rank's tokens of a tensor [B, T, ...]; differentiable. Raises ValueError if T is not divisible."""
        return _select_tokens(x_BT, self._permutation(x_BT, boundaries_BD).chunk(self.plan.cp, dim=1)[self.rank])

    def unshard(self, x_BS: Tensor, boundaries_BD: Tensor | None = None) -> Tensor:
        """All-gathers the full sequences, in order: [B, T, ...]. Not differentiable."""
        with torch.no_grad():
            # Ulysses ranks hold adjacent parts of a ring rank's tokens, so they are gathered first.
            for group in reversed(self._groups):
                x_BS = torch.cat(tuple(collectives.all_gather_async(x_BS, group).wait()), dim=1)
            return _select_tokens(x_BS, self._permutation(x_BS, boundaries_BD).argsort(dim=1))

    def shard_batch(self, batch: Batch) -> Batch:
        """Shards every per-token tensor; the boundaries stay those of the full sequences.

        Sequences are padded to a divisible length with one more document, which has no labels. Raises ValueError if
        labels are not the next tokens: shifting them after sharding would be wrong at every shard boundary.
        """
        _require_shifted_labels(batch)
        batch = pad_batch(batch, self.plan.seq_len_divisor)
        index_BS = self._permutation(batch.tokens, batch.boundaries).chunk(self.plan.cp, dim=1)[self.rank]
        return replace(
            batch,
            tokens=_select_tokens(batch.tokens, index_BS),
            labels=_select_tokens(batch.labels, index_BS),
            positions=_select_tokens(batch.positions, index_BS),
            document_ids=_select_tokens(batch.document_ids, index_BS),
            num_computed_pairs=self.attention_pairs(attention_op.boundary_tuples(batch.boundaries, len(batch.tokens))),
        )

    def padded_length(self, seq_len: int) -> int:
        """`seq_len` rounded up to a length that the layout can shard."""
        return self.plan.padded_length(seq_len)

    def spans(self, boundaries: tuple[int, ...]) -> list[tuple[int, int]]:
        """(start, length) of this rank's tokens of a sequence with these boundaries, in the order held."""
        token_spans = SeqLayout(self.layout, self.ring_degree, boundaries).spans(self.rank // self.ulysses_degree)
        # Ulysses ranks hold adjacent parts of a ring rank's tokens.
        tokens = boundaries[-1] // self.plan.cp
        local_start = self.rank % self.ulysses_degree * tokens
        clipped = [
            (max(span.local_start, local_start), min(span.local_start + span.length, local_start + tokens), span)
            for span in token_spans
        ]
        return [(span.start + low - span.local_start, high - low) for low, high, span in clipped if low < high]

    def attention_pairs(self, boundaries_per_sequence: Sequence[tuple[int, ...]]) -> int:
        """(query, key) pairs that this rank computes in sequences with these boundaries."""
        layouts = (SeqLayout(self.layout, self.ring_degree, boundaries) for boundaries in boundaries_per_sequence)
        return (
            sum(layout.pairs_per_rank()[self.rank // self.ulysses_degree] for layout in layouts) // self.ulysses_degree
        )

    def require_same_boundaries(self, boundaries_BD: Tensor) -> None:
        """Raises ValueError on all ranks if their boundaries differ, because their layouts would not match."""
        self._require_same({"boundaries": boundaries_BD.tolist()}, "documents")

    def _require_same(self, values: dict[str, Any], description: str) -> None:
        per_rank = [values]
        # All ranks compare before any raises; otherwise the others would wait in a collective for the failed ones.
        for group in reversed(self._groups):
            per_rank = [value for gathered in collectives.all_gather_object(per_rank, group) for value in gathered]
        mismatches = [
            f"{key} is {per_rank[0][key]} on rank 0 and {other[key]} on rank {rank}"
            for rank, other in enumerate(per_rank)
            for key in values
            if other[key] != per_rank[0][key]
        ]
        if mismatches:
            raise ValueError(f"context-parallel ranks have different {description}: {'; '.join(mismatches)}")

    def _permutation(self, x_BT: Tensor, boundaries_BD: Tensor | None) -> Tensor:
        """int64 [B, T] on the device of x: each sequence's tokens, rank by rank."""
        tokens = x_BT.shape[1]
        if tokens % self.plan.seq_len_divisor:
            raise ValueError(
                f"sequence length {tokens} must be a multiple of {self.plan.seq_len_divisor} for layout "
                f'"{self.layout}" over {self.plan.cp} ranks'
            )
        if boundaries_BD is None:
            permutation = SeqLayout(self.layout, self.ring_degree, (0, tokens)).permutation().expand(x_BT.shape[0], -1)
        else:
            attention_op.validate_boundaries(attention_op.boundary_tuples(boundaries_BD, x_BT.shape[0]), tokens)
            permutation = torch.stack([layout.permutation() for layout in self.layouts(boundaries_BD)])
        return permutation.to(x_BT.device)

    def _require_shapes(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> None:
        # Checked before sending: a rank that raises later would leave the others waiting.
        if q_BSNH.ndim != 4 or k_BSKH.ndim != 4 or v_BSKH.ndim != 4:
            shapes = _format_shapes(q_BSNH, k_BSKH, v_BSKH)
            raise ValueError(f"queries, keys and values must be [batch, tokens, heads, head_dim], not {shapes}")
        if q_BSNH.shape[2] != self.heads or k_BSKH.shape[2] != self.kv_heads:
            raise ValueError(
                f"{q_BSNH.shape[2]} query heads and {k_BSKH.shape[2]} KV heads do not match ContextParallel(heads="
                f"{self.heads}, kv_heads={self.kv_heads})"
            )
        shapes_match = q_BSNH.shape[:2] == k_BSKH.shape[:2] and q_BSNH.shape[3] == k_BSKH.shape[3]
        if not shapes_match or k_BSKH.shape != v_BSKH.shape or not q_BSNH.dtype == k_BSKH.dtype == v_BSKH.dtype:
            shapes = _format_shapes(q_BSNH, k_BSKH, v_BSKH)
            raise ValueError(
                f"queries, keys and values must have equal batch, tokens, head_dim and dtype, not {shapes}"
            )


def _format_shapes(*tensors: Tensor) -> str:
    return ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors)


def set_attention_core(model: Transformer, core: ContextParallel | None, *, kernel: str) -> None:
    """Sets the attention core of every block; None means full sequences on each rank."""
    for block in model.layers():
        block.attention.core = core or LocalAttentionCore(kernel)


def _unsupported(plan: ContextPlan, *, causal: bool, window: int | None, dropout: float) -> list[str]:
    problems = []
    if not causal:
        problems.append(f'attention without a causal mask is not supported by cp_method "{plan.resolved_method}"')
    if window is not None:
        problems.append(f'sliding window {window} is not supported by cp_method "{plan.resolved_method}"')
    if dropout > 0:
        problems.append(f'attention dropout {dropout} is not supported by cp_method "{plan.resolved_method}"')
    return problems


def _flat_rank(mesh: DeviceMesh) -> int:
    return mesh.get_local_rank(0) * mesh.size(1) + mesh.get_local_rank(1)


def _select_tokens(x_BT: Tensor, index_BS: Tensor) -> Tensor:
    batch_indices = torch.arange(x_BT.shape[0], device=x_BT.device)
    return x_BT[batch_indices[:, None], index_BS]


def _require_shifted_labels(batch: Batch) -> None:
    next_tokens = batch.tokens[:, 1:]
    labels = batch.labels[:, :-1]
    crosses_documents = batch.document_ids[:, 1:] != batch.document_ids[:, :-1]
    if not bool(((labels == next_tokens) | (labels == IGNORE_INDEX) | crosses_documents).all()):
        raise ValueError("labels must be the next tokens of their documents, shifted before the sequence is sharded")
