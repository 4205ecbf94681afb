"""Context parallelism: ranks share the tokens of a row, and attention is exact over all of it.

    mesh = init_device_mesh("cpu", (4,))
    cp = ContextParallel(mesh, method="ring", heads=8, kv_heads=4)
    q, k, v = (cp.shard(x) for x in (q, k, v))  # [B, T, heads, width] -> this rank's tokens
    out = cp(q, k, v)
    out = cp.unshard(out)

Shape suffixes: B rows, S tokens of this rank, T tokens of the row, N query heads, K key/value heads, H head width,
D document starts and the row's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models import attention_op as documents
from models import kernels
from models.attention import LocalCore
from models.batch import IGNORE, Batch, padded
from models.transformer import Transformer
from parallelisms import collectives
from parallelisms.context import cp_attention_op, ulysses
from parallelisms.context.ring import Arriving
from parallelisms.context.shard_layout import SeqLayout
from parallelisms.parallel_dims import ContextPlan, Layout, Method, Rotation


class Started(NamedTuple):
    """Queries, keys and values on their way."""

    exchanges: list[ulysses.ToHeads] | None
    """To the ranks that have their heads."""
    given: Sequence[Tensor]
    """Unless they are exchanged, and held no longer than that."""
    arriving: Arriving | None = None
    """Keys and values of other ranks of the ring."""


class ContextParallel:
    """Attention over shared rows, and the way into it and out.

    `mesh` is one axis of ranks, or two for `hybrid`: first those among which keys and values rotate, then those that
    exchange heads. Other arguments are those of `ContextPlan`; `reduce_dtype` is the type in which gradients of
    keys and values travel in half precision. Raises ValueError, on all ranks, with everything that cannot be done
    exactly, and when ranks were given different plans.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        method: Method | str = "auto",
        layout: Layout | str = "auto",
        outer: Rotation | str = "auto",
        heads: int,
        kv_heads: int,
        head_dim: int = 128,
        reduce_dtype: torch.dtype = torch.float32,
        kernel: str = "auto",
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        hybrid = mesh.ndim == 2
        plan: Any = {"method": "hybrid" if hybrid and method == "auto" else method, "layout": layout, "outer": outer}
        self.plan = ContextPlan(
            cp=mesh.size(),
            cp_ulysses=mesh.size(1) if hybrid else None,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            node=mesh.size(),
            **plan,
        )
        refused = [*self.plan.problems(), *_unsupported(self.plan, causal=causal, window=window, dropout=dropout)]
        if self.plan.chosen == "hybrid" and not hybrid:
            refused.append('cp_method "hybrid" needs a mesh of two axes: ranks that rotate, ranks that exchange heads')
        if mesh.ndim > 2:
            refused.append(f"a mesh of {mesh.ndim} axes is not supported; take its one or two that share rows")
        if kernel not in kernels.KERNELS:
            refused.append(f'attention kernel "{kernel}" is unknown; there are {", ".join(kernels.KERNELS)}')
        self._groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        self._agree(vars(self.plan) | {"reduce_dtype": reduce_dtype, "refused": refused}, "plans")
        if refused:
            raise ValueError("; ".join(refused))
        self.rotation, self.layout = self.plan.rotation, self.plan.kind
        self.ring, self.ulysses = self.plan.ring, self.plan.ulysses
        self.ring_group = self._groups[0].group_name
        self.ulysses_group = self._groups[-1].group_name
        self.reduce_dtype, self.kernel = reduce_dtype, kernel
        self.heads, self.kv_heads = heads, kv_heads
        self.rank = mesh.get_local_rank() if mesh.ndim == 1 else _rank(mesh)

    def __call__(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor | None = None) -> Tensor:
        """Causal attention inside documents: [B, S, N, H]. Left out, `boundaries_BD` makes each row one document.

        Raises ValueError where shapes do not fit the plan, or boundaries the row.
        """
        self._require_shapes(q_BSNH, k_BSKH, v_BSKH)
        if boundaries_BD is None:
            row = torch.tensor([[0, q_BSNH.shape[1] * self.plan.cp]], dtype=torch.int32, device="cpu")
            boundaries_BD = row.repeat(q_BSNH.shape[0], 1)
        if self.ulysses > 1:
            q_BSNH, k_BSKH, v_BSKH = (
                ulysses.to_heads(x, self.ulysses_group, self.ulysses) for x in (q_BSNH, k_BSKH, v_BSKH)
            )
        out = self._attend(q_BSNH, k_BSKH, v_BSKH, boundaries_BD)
        return ulysses.to_tokens(out, self.ulysses_group, self.ulysses) if self.ulysses > 1 else out

    # ---- the same in steps, below autograd, of as many heads as are given

    def start(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Started:
        """Lets everything begin its way to the ranks that need it."""
        given = (q_BSNH, k_BSKH, v_BSKH)
        if self.ulysses > 1:
            return Started([ulysses.ToHeads(x, self.ulysses_group, self.ulysses) for x in given], ())
        return Started(None, given, self._rotate(k_BSKH, v_BSKH))

    def forward(self, started: Started, boundaries_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B, S, N, H] and log-sum-exp, of this rank's heads."""
        (q, k, v), arriving = self._arrived(started)
        if arriving is None or self.rotation is None:
            out, lse = documents.attention(q, k, v, boundaries_BD, kernel=self.kernel)
        else:
            options = (self.rotation, self.layout, self.ring_group, self.kernel)
            out, lse = cp_attention_op.forward(q, k, v, arriving, boundaries_BD, *options)
        return (ulysses.to_tokens(out, self.ulysses_group, self.ulysses) if self.ulysses > 1 else out), lse

    def backward(
        self, grad_BSNH: Tensor, started: Started, out_BSNH: Tensor, lse: Tensor, boundaries_BD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
        (q, k, v), arriving = self._arrived(started)
        if self.ulysses > 1:
            grad_BSNH, out_BSNH = (ulysses.to_heads(x, self.ulysses_group, self.ulysses) for x in (grad_BSNH, out_BSNH))
        if arriving is None or self.rotation is None:
            grads = documents.attention_backward(grad_BSNH, q, k, v, out_BSNH, lse, boundaries_BD, self.kernel)
        else:
            options = (self.rotation, self.layout, self.ring_group, self.reduce_dtype, self.kernel)
            grads = cp_attention_op.backward(grad_BSNH, q, k, v, arriving, out_BSNH, lse, boundaries_BD, *options)
        if started.exchanges is not None:
            del q, k, v, grad_BSNH, out_BSNH  # Before as much comes back.
            given = [*grads]
            del grads
            grads = tuple([exchange.backward(given.pop(0)) for exchange in started.exchanges])
        dq, dk, dv = grads
        return dq, dk, dv

    def _arrived(self, started: Started) -> tuple[Sequence[Tensor], Arriving | None]:
        if started.exchanges is None:
            return started.given, started.arriving
        given = [exchange.wait() for exchange in started.exchanges]
        return given, self._rotate(*given[1:])

    def _rotate(self, k_BSKH: Tensor, v_BSKH: Tensor) -> Arriving | None:
        if self.rotation is None or self.ring == 1:
            return None
        return cp_attention_op.start(k_BSKH, v_BSKH, self.rotation, self.ring_group)

    def _attend(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor) -> Tensor:
        if self.rotation is None or self.ring == 1:
            return documents.attention(q_BSNH, k_BSKH, v_BSKH, boundaries_BD, kernel=self.kernel)[0]
        return cp_attention_op.attention(
            q_BSNH,
            k_BSKH,
            v_BSKH,
            boundaries_BD,
            rotation=self.rotation,
            layout=self.layout,
            group_name=self.ring_group,
            wire=self.reduce_dtype,
            kernel=self.kernel,
        )[0]

    # ---- in and out

    def layouts(self, boundaries_BD: Tensor) -> list[SeqLayout]:
        """How the tokens of each row lie on the ring."""
        return [SeqLayout(self.layout, self.ring, tuple(row)) for row in boundaries_BD.tolist()]

    def shard(self, x_BT: Tensor, boundaries_BD: Tensor | None = None) -> Tensor:
        """The tokens of this rank, of any tensor [B, T, ...]; differentiable. Raises ValueError if T does not divide."""
        return _taken(x_BT, self._order(x_BT, boundaries_BD).chunk(self.plan.cp, dim=1)[self.rank])

    def unshard(self, x_BS: Tensor, boundaries_BD: Tensor | None = None) -> Tensor:
        """The whole rows on every rank, in their order: [B, T, ...]; no gradient flows through it."""
        with torch.no_grad():
            # Neighbours that exchange heads hold neighbouring parts, so they are joined first.
            for group in reversed(self._groups):
                x_BS = torch.cat(tuple(collectives.gather(x_BS, group).wait()), dim=1)
            return _taken(x_BS, self._order(x_BS, boundaries_BD).argsort(dim=1))

    def shard_batch(self, batch: Batch) -> Batch:
        """The tokens of this rank, everything per token cut alike; boundaries stay those of the whole rows.

        Rows that do not divide are padded at their end, with one more document that has no labels. Raises ValueError
        if labels are not the next tokens: shifted after the cut, they would be wrong wherever two pieces meet.
        """
        _require_shifted(batch)
        batch = padded(batch, self.plan.multiple)
        index_BS = self._order(batch.tokens, batch.boundaries).chunk(self.plan.cp, dim=1)[self.rank]
        return replace(
            batch,
            tokens=_taken(batch.tokens, index_BS),
            labels=_taken(batch.labels, index_BS),
            positions=_taken(batch.positions, index_BS),
            documents=_taken(batch.documents, index_BS),
            attended=self.work(documents.integers(batch.boundaries, len(batch.tokens))),
        )

    def padded(self, tokens: int) -> int:
        """The length of a row of so many tokens, made to divide among the ranks."""
        return self.plan.padded(tokens)

    def spans(self, boundaries: tuple[int, ...]) -> list[tuple[int, int]]:
        """(start, length) of what this rank holds of a row with these document starts and length, in its order."""
        pieces = SeqLayout(self.layout, self.ring, boundaries).pieces(self.rank // self.ulysses)
        # Neighbours that exchange heads hold neighbouring parts.
        tokens = boundaries[-1] // self.plan.cp
        first = self.rank % self.ulysses * tokens
        cuts = [(max(piece.local, first), min(piece.local + piece.length, first + tokens), piece) for piece in pieces]
        return [(piece.start + low - piece.local, high - low) for low, high, piece in cuts if low < high]

    def work(self, rows: Sequence[tuple[int, ...]]) -> int:
        """(query, key) pairs that this rank attends to in rows with these document starts and lengths."""
        layouts = (SeqLayout(self.layout, self.ring, boundaries) for boundaries in rows)
        return sum(layout.work()[self.rank // self.ulysses] for layout in layouts) // self.ulysses

    def require_agreement(self, boundaries_BD: Tensor) -> None:
        """Raises ValueError, on all ranks, if they were given different boundaries: a layout would not match."""
        self._agree({"boundaries": boundaries_BD.tolist()}, "documents")

    def _agree(self, mine: dict[str, Any], what: str) -> None:
        given = [mine]
        # Every rank learns what every other has before any raises, or some would wait for those that did.
        for group in reversed(self._groups):
            given = [one for some in collectives.gather_over(given, group) for one in some]
        found = [
            f"{key} is {given[0][key]} on rank 0 and {other[key]} on rank {rank}"
            for rank, other in enumerate(given)
            for key in mine
            if other[key] != given[0][key]
        ]
        if found:
            raise ValueError(f"context-parallel ranks were given different {what}: {'; '.join(found)}")

    def _order(self, x_BT: Tensor, boundaries_BD: Tensor | None) -> Tensor:
        """int64 [B, T] on the device of x: each row's tokens by rank."""
        tokens = x_BT.shape[1]
        if tokens % self.plan.multiple:
            raise ValueError(
                f'a row of {tokens} tokens must be a multiple of {self.plan.multiple} for layout "{self.layout}" over '
                f"{self.plan.cp} ranks"
            )
        if boundaries_BD is None:
            order = SeqLayout(self.layout, self.ring, (0, tokens)).order().expand(x_BT.shape[0], -1)
        else:
            documents.checked(documents.integers(boundaries_BD, x_BT.shape[0]), tokens)
            order = torch.stack([row.order() for row in self.layouts(boundaries_BD)])
        return order.to(x_BT.device)

    def _require_shapes(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> None:
        # Before anything is sent: a rank that raised later would leave the others with what they have on its way.
        if q_BSNH.ndim != 4 or k_BSKH.ndim != 4 or v_BSKH.ndim != 4:
            given = _spelled(q_BSNH, k_BSKH, v_BSKH)
            raise ValueError(f"queries, keys and values must be [rows, tokens, heads, width], not {given}")
        if q_BSNH.shape[2] != self.heads or k_BSKH.shape[2] != self.kv_heads:
            raise ValueError(
                f"the plan is for {self.heads} query and {self.kv_heads} key/value heads, not {q_BSNH.shape[2]} and "
                f"{k_BSKH.shape[2]}"
            )
        fits = q_BSNH.shape[:2] == k_BSKH.shape[:2] and q_BSNH.shape[3] == k_BSKH.shape[3]
        if not fits or k_BSKH.shape != v_BSKH.shape or not q_BSNH.dtype == k_BSKH.dtype == v_BSKH.dtype:
            given = _spelled(q_BSNH, k_BSKH, v_BSKH)
            raise ValueError(f"queries, keys and values must have the same rows, tokens, width and type, not {given}")


def _spelled(*tensors: Tensor) -> str:
    return ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors)


def install(model: Transformer, core: ContextParallel | None, *, kernel: str) -> None:
    """Puts context parallelism, or for None attention to whole rows, into every attention of the model."""
    for block in model.layers():
        block.attention.core = core or LocalCore(kernel)


def _unsupported(plan: ContextPlan, *, causal: bool, window: int | None, dropout: float) -> list[str]:
    found = []
    if not causal:
        found.append(f'attention without a causal mask is not supported by cp_method "{plan.chosen}"')
    if window is not None:
        found.append(f'sliding window {window} is not supported by cp_method "{plan.chosen}"')
    if dropout > 0:
        found.append(f'attention dropout {dropout} is not supported by cp_method "{plan.chosen}"')
    return found


def _rank(mesh: DeviceMesh) -> int:
    return mesh.get_local_rank(0) * mesh.size(1) + mesh.get_local_rank(1)


def _taken(x_BT: Tensor, index_BS: Tensor) -> Tensor:
    rows = torch.arange(x_BT.shape[0], device=x_BT.device)
    return x_BT[rows[:, None], index_BS]


def _require_shifted(batch: Batch) -> None:
    next_tokens = batch.tokens[:, 1:]
    labels = batch.labels[:, :-1]
    crosses = batch.documents[:, 1:] != batch.documents[:, :-1]
    if not bool(((labels == next_tokens) | (labels == IGNORE) | crosses).all()):
        raise ValueError("labels must be the next tokens of their documents, shifted on the whole row before it is cut")
