"""Context parallelism: ranks hold shards of each sequence, and attention is exact over the full
sequence.

    mesh = init_device_mesh("cpu", (4,))
    cp = ContextParallel(mesh, ContextPlan(cp=4, method="ring", heads=8, kv_heads=4))
    q, k, v = (cp.shard(x) for x in (q, k, v))  # [B, T, heads, head_dim] -> [B, S, heads, head_dim]
    out = cp(q, k, v)
    out = cp.gather(out)

Shape suffixes: B batch, S tokens of this rank, T tokens of the full sequence, N query heads, K KV
heads, H head dim, D document boundaries.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models import kernels
from models.attention_core import LocalAttentionCore, QKVGrads
from models.batch import require_ascending, require_boundaries
from models.score_pairs import FULL_SCORES, Scores
from parallelisms.context.batch_layout import BatchLayout, batch_layout
from parallelisms.context.ring import RingAttentionCore
from parallelisms.context.ulysses import SeqToHeads, UlyssesGroup
from parallelisms.mesh import collectives
from parallelisms.mesh.context_plan import ContextPlan

T = TypeVar("T")


class ContextParallel:
    """Context-parallel attention core (`models.attention_core.AttentionCore`), with sharding and
    gathering of tensors.

    `mesh` has one dimension or, for `hybrid`, two: ring, then Ulysses; None is a single rank.
    16-bit gradients of keys and values are sent in `reduce_dtype`. Raises ValueError on all ranks,
    for everything that cannot be computed exactly and if the ranks' arguments differ.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        plan: ContextPlan,
        *,
        reduce_dtype: torch.dtype = torch.float32,
        kernel: str = "auto",
        causal: bool = True,
        scores: Scores = FULL_SCORES,
        dropout: float = 0.0,
    ) -> None:
        self.plan = plan
        unsupported = {
            "attention without a causal mask": not causal,
            f"attention dropout {dropout}": dropout > 0,
        }
        suffix = f'is not supported by cp_method "{plan.resolved_method}"'
        problems = [
            *plan.problems(),
            *(f"{name} {suffix}" for name, given in unsupported.items() if given),
        ]
        if scores.window is not None and scores.window < 1:
            problems.append(f"sliding window {scores.window} must be at least 1")
        if scores.softcap is not None and not scores.softcap > 0:
            problems.append(f"soft cap {scores.softcap} must be above 0")
        # Of a plan with problems, the mesh is not known.
        shape = (1,) if mesh is None else tuple(mesh.shape)
        if not plan.problems() and shape != plan.mesh_shape:
            problems.append(
                f'cp_method "{plan.resolved_method}" over {plan.cp} ranks needs a mesh of shape {plan.mesh_shape}, not {shape}'
            )
        if kernel not in kernels.KERNELS:
            problems.append(
                f'attention kernel "{kernel}" is unknown; choose from {", ".join(kernels.KERNELS)}'
            )
        self.kernel = kernel
        self.groups = [] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
        own_options = {"reduce_dtype": reduce_dtype, **scores._asdict()}
        self._require_same(vars(plan) | own_options | {"problems": problems})
        if problems:
            raise ValueError("; ".join(problems))
        self.layout = plan.resolved_layout
        self.ring_degree = plan.ring_degree
        self.seq_len_divisor = plan.seq_len_divisor
        name = self.groups[-1].group_name if self.groups else ""
        self.ulysses_group = UlyssesGroup(name, plan.ulysses_degree)
        self._core: LocalAttentionCore | RingAttentionCore = LocalAttentionCore(kernel, scores)
        """Attention to the tokens of all Ulysses ranks, once heads are exchanged."""
        if plan.rotate_method is not None and self.ring_degree > 1:
            options = (self.layout, self.groups[0].group_name, reduce_dtype, kernel, scores)
            self._core = RingAttentionCore(plan.rotate_method, *options)
        # The ring is the outer dimension, so that Ulysses ranks are neighbours inside a node.
        self.rank = 0
        for group in self.groups:
            self.rank = self.rank * group.size() + group.rank()

    def with_scores(self, scores: Scores) -> ContextParallel:
        """The same ranks and layout, for layers with other scores."""
        # A shallow copy shares the process groups and the plan.
        other = copy(self)
        other._core = replace(self._core, scores=scores)
        return other

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        boundaries_BD: Tensor | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Causal attention inside documents: [B, S, N, H]. Without `boundaries_BD` each sequence
        is one document.

        Raises ValueError for shapes that do not match the plan, and boundaries that do not match
        the sequence.
        """
        self._require_shapes(q_BSNH, k_BSKH, v_BSKH, self.plan.heads, self.plan.kv_heads)
        if boundaries_BD is None:
            boundaries_BD = one_document(q_BSNH.shape[0], q_BSNH.shape[1] * self.plan.cp)
        return self._attend(self._core.scores, q_BSNH, k_BSKH, v_BSKH, boundaries_BD, sink_N)

    def _attend(self, scores: Scores, *inputs: Any) -> Tensor:
        *qkv, boundaries_BD, sink_N = inputs
        if self.ulysses_group.size == 1:
            return self._core.attend(scores, *inputs)
        qkv = [self.ulysses_group.seq_to_heads(x) for x in qkv]
        out_BTMH = self._core.attend(scores, *qkv, boundaries_BD, self._own_heads(sink_N))
        return self.ulysses_group.heads_to_seq(out_BTMH)

    def prepare(self, boundaries_BD: Tensor) -> object:
        return self._core.prepare(boundaries_BD)

    # ---- below autograd, for any number of heads

    def start(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor) -> Any:
        """Starts the all-to-all of q, k and v or, without Ulysses, the ring's first KV
        exchange.
        """
        if self.ulysses_group.size == 1:
            return self._core.start(q_BSNH, k_BSKH, v_BSKH, boundaries_BD)
        return [SeqToHeads(x, self.ulysses_group) for x in (q_BSNH, k_BSKH, v_BSKH)]

    def forward(
        self, pending: Any, boundaries_BD: Tensor, sink_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, S, N, H] and, for the heads that this rank computes, the log-sum-exp."""
        if self.ulysses_group.size == 1:
            return self._core.forward(pending, boundaries_BD, sink_N)
        out, lse = self._core.forward(
            self._wait_heads(pending, boundaries_BD), boundaries_BD, self._own_heads(sink_N)
        )
        return self.ulysses_group.heads_to_seq(out), lse

    def backward(
        self,
        grad_BSNH: Tensor,
        pending: Any,
        out_BSNH: Tensor,
        lse: Tensor,
        boundaries_BD: Tensor,
        sink_N: Tensor | None = None,
    ) -> QKVGrads:
        if self.ulysses_group.size == 1:
            return self._core.backward(grad_BSNH, pending, out_BSNH, lse, boundaries_BD, sink_N)
        core_pending = self._wait_heads(pending, boundaries_BD)
        own_sink = self._own_heads(sink_N)
        grad_BSNH, out_BSNH = (self.ulysses_group.seq_to_heads(x) for x in (grad_BSNH, out_BSNH))
        *grads, grad_sink = self._core.backward(
            grad_BSNH, core_pending, out_BSNH, lse, boundaries_BD, own_sink
        )
        # Freed before the all-to-all of the gradients allocates as much.
        del core_pending, grad_BSNH, out_BSNH
        dq, dk, dv = [all_to_all.backward(grads.pop(0)) for all_to_all in pending]
        # Other ranks have the gradients of the other heads.
        if sink_N is not None:
            own = grad_sink
            grad_sink = torch.zeros_like(sink_N)
            self._own_heads(grad_sink).copy_(own)
        return dq, dk, dv, grad_sink

    def _wait_heads(self, pending: list[SeqToHeads], boundaries_BD: Tensor) -> Any:
        """Starts the core, once the heads are received."""
        q, k, v = (all_to_all.wait() for all_to_all in pending)
        return self._core.start(q, k, v, boundaries_BD)

    def _own_heads(self, sink_N: Any) -> Any:
        """The part of the heads that this rank computes."""
        return (
            None
            if sink_N is None
            else sink_N.chunk(self.ulysses_group.size)[self.rank % self.ulysses_group.size]
        )

    # ---- sharding

    def shard(self, x_BT: Tensor, boundaries_BD: Tensor | None = None, *, dim: int = 1) -> Tensor:
        """Selects this rank's tokens of a tensor [B, T, ...], or with T in another dimension;
        differentiable.

        Raises ValueError if T is not divisible.
        """
        x_BT = x_BT.movedim(dim, 1)
        index_BS = self._permutation(x_BT, boundaries_BD).chunk(self.plan.cp, dim=1)[self.rank]
        return select_tokens(x_BT, index_BS).movedim(1, dim)

    def gather(self, x_BS: Tensor, boundaries_BD: Tensor | None = None, *, dim: int = 1) -> Tensor:
        """All-gathers the full sequences, in order: [B, T, ...], T in dimension `dim`.

        Not differentiable.
        """
        with torch.no_grad():
            x_BT = self.all_gather(x_BS.movedim(dim, 1)).movedim(0, 1).flatten(1, 2)
            return select_tokens(
                x_BT, self._permutation(x_BT, boundaries_BD).argsort(dim=1)
            ).movedim(1, dim)

    def spans(self, boundaries_D: Tensor) -> tuple[Tensor, Tensor]:
        """int64: starts and lengths of this rank's parts of a sequence with these boundaries, in
        the order held.
        """
        # Ulysses ranks hold adjacent parts of a ring rank's tokens.
        ring_rank, ulysses_rank = divmod(self.rank, self.ulysses_group.size)
        tokens = int(boundaries_D[-1]) // self.plan.cp
        first = ulysses_rank * tokens
        spans = self._batch_layout(boundaries_D[None]).of_rank(ring_rank)
        low = spans.local_start.clamp(min=first)
        high = spans.local_end.clamp(max=first + tokens)
        return (spans.start + low - spans.local_start)[low < high], (high - low)[low < high]

    def attention_pairs(self, boundaries_BD: Tensor, window: int | None = None) -> int:
        """(query, key) pairs that this rank computes in sequences with these boundaries."""
        ring_rank = self.rank // self.ulysses_group.size
        ulysses_degree = self.ulysses_group.size
        # Ulysses ranks divide the heads of a ring rank's pairs.
        return (
            self._batch_layout(boundaries_BD).pairs_per_rank(window)[ring_rank] // ulysses_degree
        )

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's tensor, by rank: [ranks, *x.shape]."""
        # Ulysses ranks are neighbours, so they are gathered first.
        x = x[None]
        for group in reversed(self.groups):
            x = collectives.all_gather_async(x, group).wait().flatten(0, 1)
        return x

    def all_gather_values(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        per_rank = [value]
        for group in reversed(self.groups):
            per_rank = [
                each
                for gathered in collectives.all_gather_values(per_rank, group)
                for each in gathered
            ]
        return per_rank

    def _require_same(self, values: dict[str, Any]) -> None:
        # All ranks compare before any raises; otherwise the others would wait in a collective for
        # the failed ones.
        per_rank = self.all_gather_values({key: str(value) for key, value in values.items()})
        mismatches = [
            f"{key} is {per_rank[0][key]} on rank 0 and {other[key]} on rank {rank}"
            for rank, other in enumerate(per_rank)
            for key in values
            if other[key] != per_rank[0][key]
        ]
        if mismatches:
            raise ValueError(
                f"context-parallel ranks have different plans: {'; '.join(mismatches)}"
            )

    def _permutation(self, x_BT: Tensor, boundaries_BD: Tensor | None) -> Tensor:
        """int64 [B, T] on the device of x: each sequence's tokens, rank by rank."""
        tokens = x_BT.shape[1]
        if tokens % self.seq_len_divisor:
            raise ValueError(
                f"sequence length {tokens} must be a multiple of {self.seq_len_divisor} for layout "
                f'"{self.layout}" over {self.plan.cp} ranks'
            )
        if boundaries_BD is None:
            boundaries_BD = one_document(len(x_BT), tokens)
        require_boundaries(boundaries_BD, len(x_BT))
        require_ascending(boundaries_BD, tokens)
        return self._batch_layout(boundaries_BD).permutation().to(x_BT.device)

    def _batch_layout(self, boundaries_BD: Tensor) -> BatchLayout:
        seq_len = int(boundaries_BD[0, -1])
        return batch_layout(
            boundaries_BD, len(boundaries_BD), seq_len, self.layout, self.ring_degree
        )

    @staticmethod
    def _require_shapes(
        q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int, *, causal: bool = True
    ) -> None:
        # Checked before sending: a rank that raises later would leave the others waiting.
        common = 2 if causal else 1  # Batch and tokens, or the batch.
        is_same_size = (
            q.shape[:common] == k.shape[:common]
            and q.shape[-1] == k.shape[-1]
            and k.shape == v.shape
        )
        if not q.ndim == k.ndim == v.ndim == 4:
            problem = "queries, keys and values must be [batch, tokens, heads, head_dim], not"
        elif (q.shape[2], k.shape[2]) != (heads, kv_heads):
            raise ValueError(
                f"{q.shape[2]} query heads and {k.shape[2]} KV heads do not match the plan's heads = {heads} and "
                f"kv_heads = {kv_heads}"
            )
        elif not is_same_size or not q.dtype == k.dtype == v.dtype:
            problem = f"queries, keys and values must have equal batch, {'tokens, ' * causal}head_dim and dtype, not"
        else:
            return
        raise ValueError(
            f"{problem} {', '.join(f'{tuple(x.shape)} {x.dtype}' for x in (q, k, v))}"
        )


def one_document(batch_size: int, seq_len: int) -> Tensor:
    """int32 [B, 2]: the boundaries of sequences of one document."""
    return torch.tensor([[0, seq_len]] * batch_size, dtype=torch.int32, device="cpu")


def select_tokens(x_BT: Tensor, index_BS: Tensor) -> Tensor:
    """Selects tokens of each sequence, in this order: [B, S, ...]."""
    batch_indices = torch.arange(x_BT.shape[0], device=x_BT.device)
    return x_BT[batch_indices[:, None], index_BS]
