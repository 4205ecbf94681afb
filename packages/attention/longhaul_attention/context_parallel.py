"""`ContextParallel`: the ranks that share a sequence. Shards batches, and computes attention over
the full sequences.

Shape suffixes: B sequences, S tokens of this rank, U its keys where they may be more or fewer, T
tokens of the full sequence, N query heads, K KV heads, H head dim, D document boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from longhaul_attention import batch as batches
from longhaul_attention.batch import Documents
from longhaul_attention.kernel_start import verify_once
from longhaul_attention.sdpa import ScaledDotProductAttention
from models.batch import IGNORE_INDEX, require_boundaries
from models.score_pairs import Scores
from parallelisms.context import context_parallel
from parallelisms.mesh.context_plan import ContextPlan

REMEMBERED_DEALS = 64
"""How many different documents of tensors of one length are remembered; with more, they are not
compared.
"""
VERIFIED_BATCHES = 3
"""How many of the first batches are compared between the ranks, before anything is computed from
them.
"""
# Not a WeakValueDictionary: the compiler does not know it.
_contexts: dict[int, ref[ContextParallel]] = {}
_keys = count()


class ContextParallel(context_parallel.ContextParallel):
    """Exact attention over sequences sharded over the ranks of `mesh`. Collective.

    A mesh with one dimension; with two, ring x Ulysses, for the method `hybrid`; None for a single
    rank. `method`: allgather, ring, alltoall, ulysses, hybrid, or auto, which chooses by `heads`
    and `kv_heads`, those of a rank, and by whether sequences are packed (`packs_documents`).
    `layout`: how tokens are dealt to the ranks. `kernel`: that of torch which computes attention.
    16-bit gradients of keys and values are summed in `reduce_dtype`. Raises ValueError on all
    ranks, with every broken rule, and if the ranks' arguments differ.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        heads: int | None = None,
        kv_heads: int | None = None,
        method: Any = "auto",
        layout: Any = "auto",
        kernel: str = "auto",
        packs_documents: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        if mesh is not None and not hasattr(mesh, "ndim"):
            raise TypeError(
                f"mesh must be a DeviceMesh, such as init_device_mesh makes, not {type(mesh).__name__}"
            )
        ranks, dimensions = (1, 1) if mesh is None else (mesh.size(), mesh.ndim)
        if method == "auto" and dimensions == 2:
            method = "hybrid"
        if method == "hybrid" and dimensions != 2:
            raise ValueError(
                f'method "hybrid" needs a mesh of two dimensions, ring and Ulysses, not {dimensions}'
            )
        if method == "auto" and heads is None:
            raise ValueError(
                'method "auto" chooses by the heads of a rank: give heads and kv_heads, or a method'
            )
        plan = ContextPlan(
            cp=ranks,
            method=method,
            layout=layout,
            cp_ulysses=mesh.size(1) if mesh is not None and dimensions == 2 else None,
            heads=ranks if heads is None else heads,
            kv_heads=kv_heads or heads or ranks,
            packs_documents=packs_documents,
            # A mesh of one dimension has no Ulysses groups.
            ranks_per_node=ranks,
        )
        super().__init__(mesh, plan, reduce_dtype=reduce_dtype, kernel=kernel)
        # Layers may have other heads than these; what was chosen by them stays.
        self.plan = replace(plan, method=plan.resolved_method, layout=plan.resolved_layout)
        self._known = set[tuple[Any, ...]]()
        """Scores, heads and masks of layers that were checked."""
        self._dealt = dict[int, set[tuple[Any, ...]]]()
        """Documents of tensors that `shard` dealt to the ranks, by length."""
        self._num_verified = {True: 0, False: 0}  # In training, and in evaluation.
        # Batches name their `ContextParallel` by a number, which survives the pickling between a
        # data loader's worker and the training process.
        self.key = next(_keys)
        _contexts[self.key] = ref(self)

    def attention(
        self,
        q_BSNH: Tensor,
        k_BUKH: Tensor,
        v_BUKH: Tensor,
        boundaries: Documents | Tensor | None,
        *,
        causal: bool = True,
        kv_boundaries: Documents | Tensor | None = None,
        window: int | None = None,
        sink: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention inside documents, scale H ** -0.5: [B, S, N, H]. Queries and keys are rotated
        already.

        `boundaries`: the batch's "documents" or int32 [B, D] on the CPU, document starts of the
        *full* sequences and their length, repeated in rows with fewer documents. `causal=False`:
        each query sees all keys of its document. Keys and values may then have another length
        (cross attention), and `kv_boundaries` of their own: document i of a sequence's queries
        sees document i of its keys, and keys of a document without queries, such as padding, are
        not seen. `boundaries=None` is one document per sequence there. `window`: how many keys a
        query sees at most, its own included. `sink`: a logit per query head without a key, [N];
        sum its gradient over the ranks, like that of any parameter. `softcap`: scores are c
        tanh(score / c). Raises ValueError for shapes, heads and boundaries that do not fit, and
        for a window without a causal mask.
        """
        q_BSNH, k_BUKH, v_BUKH = _in_autocast_dtype(q_BSNH, k_BUKH, v_BUKH)
        if not causal:
            boundaries_BD = self._paired_boundaries(q_BSNH, k_BUKH, boundaries, kv_boundaries)
        elif kv_boundaries is None:
            boundaries_BD = self._boundaries_of(q_BSNH, boundaries, "queries")
        else:
            raise ValueError(
                "kv_boundaries are those of attention without a causal mask: they need causal=False"
            )
        heads = q_BSNH.shape[2]
        kv_heads = k_BUKH.shape[2]
        if sink is not None and sink.shape != (heads,):
            raise ValueError(
                f"a sink is a logit per query head, [{heads}], not {list(sink.shape)}"
            )
        scores = Scores(window, softcap)
        key = (scores, heads, kv_heads, causal)
        if key not in self._known:
            self._require_layer(scores, heads, kv_heads, causal=causal)
            # Which cannot keep it inside a checkpoint.
            if not torch.compiler.is_compiling():
                self._known.add(key)
        self._require_shapes(q_BSNH, k_BUKH, v_BUKH, heads, kv_heads, causal=causal)
        if not torch.compiler.is_compiling():
            verify_once(
                self.kernel, q_BSNH, kv_heads, ulysses=self.ulysses_group.size, scores=scores
            )
        with torch.autocast(q_BSNH.device.type, enabled=False):  # Sums are in float32.
            return self._attend(scores, q_BSNH, k_BUKH, v_BUKH, boundaries_BD, sink)

    def sdpa(self) -> ScaledDotProductAttention:
        """A context in which unchanged code computes attention over all ranks.

            with cp.sdpa():
                F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads, S, width] of cp.shard(x, dim=2)

        Each sequence is one document. `is_causal`, `scale` and `enable_gqa` are those of torch;
        without `is_causal`, keys may have another length (cross attention), sharded in the same
        way. Shard positions and rotary tables like tokens. Calls outside of the context, and other
        functions, are not touched. An activation checkpoint takes the context along by
        use_reentrant=False and context_fn=lambda: (cp.sdpa(), cp.sdpa()). Raises ValueError for a
        mask, dropout, shapes that do not fit, a re-entrant checkpoint and nn.MultiheadAttention.
        """
        return ScaledDotProductAttention(self.attention, self.plan.cp)

    def _paired_boundaries(
        self, q_BSNH: Tensor, k_BUKH: Tensor, boundaries: Any, kv_boundaries: Any
    ) -> Tensor:
        """[2, B, D], of queries and of keys: those of fewer documents repeat their end."""
        if kv_boundaries is None and q_BSNH.shape[1] == k_BUKH.shape[1]:
            kv_boundaries = boundaries
        pair = []
        for x, given, role in ((q_BSNH, boundaries, "queries"), (k_BUKH, kv_boundaries, "keys")):
            each = (
                context_parallel.one_document(len(x), x.shape[1] * self.plan.cp)
                if given is None
                else given
            )
            pair.append(self._boundaries_of(x, each, role))
            self._require_dealt(pair[-1], role)
        width = max(each.shape[1] for each in pair)
        return torch.stack(
            [
                torch.cat((each, each[:, -1:].expand(-1, width - each.shape[1])), dim=1)
                for each in pair
            ]
        )

    def _require_dealt(self, boundaries_BD: Tensor, role: str) -> None:
        """Raises ValueError for documents with which no tensor of this length was sharded, if
        others were.
        """
        if torch.compiler.is_compiling() or self.layout != "doc_headtail":
            return
        dealt = self._dealt.get(int(boundaries_BD[0, -1]), set())
        if 0 < len(dealt) < REMEMBERED_DEALS and _documents_of(boundaries_BD) not in dealt:
            raise ValueError(
                f"{role} of {int(boundaries_BD[0, -1])} tokens were sharded with other boundaries than {boundaries_BD.tolist()}: "
                "give cp.shard and cp.attention the same"
            )

    def _boundaries_of(self, x_BSNH: Tensor, boundaries: Any, role: str) -> Tensor:
        """[B, D], of these queries or keys.

        Raises TypeError and ValueError for other boundaries.
        """
        if isinstance(boundaries, Documents):
            self._verify(boundaries)
            boundaries = boundaries.boundaries_BD
        if not isinstance(boundaries, Tensor):
            raise TypeError(
                f"attention needs documents or boundaries, not {boundaries}; those of one document are [[0, tokens]]"
            )
        require_boundaries(boundaries, len(x_BSNH))
        # Which cannot look at the boundaries; the operator does.
        is_compiling = torch.compiler.is_compiling()
        if (
            x_BSNH.ndim == 4
            and not is_compiling
            and x_BSNH.shape[1] * self.plan.cp != boundaries[0, -1]
        ):
            raise ValueError(
                f"boundaries end at {int(boundaries[0, -1])}, and {self.plan.cp} ranks have {x_BSNH.shape[1]} tokens each: "
                f"{role} are [batch, tokens, heads, width], not {list(x_BSNH.shape)}, and boundaries those of padded sequences"
            )
        return boundaries

    def _require_layer(self, scores: Scores, heads: int, kv_heads: int, *, causal: bool) -> None:
        """Raises ValueError for heads that the method cannot split, and for a window or cap that
        is none.
        """
        window, softcap = scores
        problems = replace(self.plan, heads=heads, kv_heads=kv_heads).problems()
        if window is not None and not (isinstance(window, int) and window >= 1):
            problems.append(f"sliding window {window} must be a number of keys, at least 1")
        if window is not None and not causal:
            problems.append(
                f"sliding window {window} needs a causal mask: a window to both sides is not known"
            )
        if softcap is not None and not softcap > 0:
            problems.append(f"soft cap {softcap} must be above 0")
        if problems:
            raise ValueError("; ".join(problems))

    # ---- batches

    def shard_batch(self, batch: Mapping[str, Any], boundaries: Any = None) -> dict[str, Any]:
        """The tokens of this rank of a batch of full sequences, the same on all ranks of the mesh:
        for any model of transformers.

        `input_ids` [B, T], with any of `labels` (those of transformers: each at its own token),
        `shift_labels`, `position_ids`, `attention_mask` (padding) and further tensors [B, T, ...].
        Documents are `boundaries`, starts and T, for all sequences or for each, else what
        `position_ids` say; a length that the layout cannot split is padded.

        Returns the tensors [B, S, ...], labels shifted before they are sharded, `documents`, and
        `num_items_in_batch`: with it, the mean over the ranks of the loss and of every gradient is
        that of one process. Raises ValueError for what it does not understand. Not collective, and
        does no arithmetic on a device: call it in the collator.
        """
        tokens_BT = _input_ids(batch)
        seq_len = tokens_BT.shape[1]
        boundaries_BD = batches.find_boundaries(batch, boundaries)
        padded_length = self.plan.padded_length(seq_len)
        padded_BD = batches.pad_boundaries(boundaries_BD, seq_len, padded_length)
        full = dict(batch)
        for key in ("attention_mask", *batches.VARLEN_KEYS):
            full.pop(key, None)  # The documents say as much.
        if full.get("position_ids") is None:
            full["position_ids"] = _positions(
                tokens_BT, None if boundaries is None else boundaries_BD
            )
        full["position_ids"] = full["position_ids"].expand(len(tokens_BT), -1)
        self._shift_labels(full, batch.get("attention_mask"))
        full = {key: self._padded(key, value, seq_len, padded_BD) for key, value in full.items()}
        # Once for all tensors, because it takes as long as they do together.
        by_rank = self._permutation(full["input_ids"], padded_BD).unflatten(1, (self.plan.cp, -1))
        own_BS = by_rank[:, self.rank]
        shards = {
            key: context_parallel.select_tokens(value, own_BS)
            if isinstance(value, Tensor) and value.ndim
            else value
            for key, value in full.items()
        }
        if "shift_labels" in shards:
            # In front one more, as before a shift: a loss that shifts labels itself is refused by
            # their length.
            shards["labels"] = F.pad(shards["shift_labels"], (1, 0), value=IGNORE_INDEX)
        # One column more, and hidden: a model that takes another attention for this batch, or
        # none, fails by its shape, unless it makes a cache, which would have the shape of the
        # tokens.
        shards.setdefault("use_cache", False)
        shards["attention_mask"] = F.pad(torch.ones_like(shards["input_ids"]), (1, 0))
        shards["documents"] = Documents(
            padded_BD,
            seq_len=seq_len,
            checksum=batches.checksum(tokens_BT, padded_BD),
            longest=_longest(full["position_ids"], by_rank),
            context_key=self.key,
            plan=self._sharding,
            positions_given=boundaries is not None or batch.get("position_ids") is not None,
            keys={*shards, "documents"},
        )
        return shards

    @property
    def _sharding(self) -> tuple[Any, ...]:
        """All that must be the same where a batch is sharded and where attention is computed."""
        return self.plan.resolved_method, self.layout, self.plan.mesh_shape, self.rank

    def __getstate__(self) -> dict[str, Any]:
        """State for a data loader's worker, which shards batches: no process groups."""
        return vars(self) | {"groups": [], "_core": None}

    def _shift_labels(self, full: dict[str, Any], mask_BT: Tensor | None) -> None:
        labels_BT = full.pop("labels", None)
        shifted_BT = full.get("shift_labels")
        if labels_BT is not None and shifted_BT is not None:
            raise ValueError(
                "labels and shift_labels are both given: labels are shifted here, shift_labels are already"
            )
        if labels_BT is not None:
            if labels_BT.shape != full["input_ids"].shape:
                shapes = f"labels {list(labels_BT.shape)} must have the shape of input_ids {list(full['input_ids'].shape)}"
                raise ValueError(shapes)
            full["shift_labels"] = shifted_BT = batches.shift(labels_BT)
        if shifted_BT is None:
            return
        batches.require_shift(full["input_ids"], shifted_BT, mask_BT)
        num_items = full.get("num_items_in_batch")
        if num_items is None:
            num_items = (shifted_BT != IGNORE_INDEX).sum()
        # Whatever torch's default type is: it may not count that far.
        full["num_items_in_batch"] = torch.as_tensor(num_items, dtype=torch.float64) / self.plan.cp

    def _padded(self, key: str, value: Any, seq_len: int, boundaries_BD: Tensor) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if value.shape[:2] != (len(boundaries_BD), seq_len):
            raise ValueError(
                f"{key} has shape {list(value.shape)}; a batch holds tensors [{len(boundaries_BD)}, {seq_len}, ...]"
            )
        return _pad(value, int(boundaries_BD[0, -1]), batches.PADDING.get(key, 0))

    def shard(self, x_BT: Tensor, boundaries_BD: Tensor | None = None, *, dim: int = 1) -> Tensor:
        """The tokens of this rank of a tensor [B, T, ...], with T in dimension `dim`: [B, S, ...].
        Differentiable.

        `boundaries_BD`: int32 [B, D] on the CPU, those that attention is given; None is one
        document per sequence. Raises ValueError if T is not divisible.
        """
        if boundaries_BD is not None and not isinstance(boundaries_BD, Tensor):
            raise TypeError(
                f"boundaries must be a tensor, int32 [batch, documents + 1], not {type(boundaries_BD).__name__}"
            )
        if not torch.compiler.is_compiling():
            length = x_BT.shape[dim]
            given = (
                context_parallel.one_document(1, length)
                if boundaries_BD is None
                else boundaries_BD
            )
            dealt = self._dealt.setdefault(length, set())
            if len(dealt) < REMEMBERED_DEALS:
                dealt.add(_documents_of(given))
        return super().shard(x_BT, boundaries_BD, dim=dim)

    def gather(
        self, x_BS: Tensor, boundaries: Documents | Tensor | None = None, *, dim: int = 1
    ) -> Tensor:
        """The full sequences of a sharded tensor [B, S, ...], in order and without padding: [B, T,
        ...]. Not differentiable.

        `boundaries`: the batch's "documents", or what `shard_batch` was given. `dim`: that of the
        tokens. Collective.
        """
        if not isinstance(boundaries, Documents):
            return super().gather(x_BS, boundaries, dim=dim)
        if context_of(boundaries) is not self:
            raise ValueError("the batch was sharded by another ContextParallel")
        return (
            super()
            .gather(x_BS, boundaries.boundaries_BD, dim=dim)
            .narrow(dim, 0, boundaries.seq_len)
        )

    def own_tokens(self, x_BT: Tensor, documents: Documents) -> Tensor:
        """The tokens of this rank, [B, S, ...], of full sequences [B, T, ...] that `gather`
        returned; padding is 0.
        """
        padded_BT = _pad(x_BT, int(documents.boundaries_BD[0, -1]))
        by_rank = self._permutation(padded_BT, documents.boundaries_BD).unflatten(
            1, (self.plan.cp, -1)
        )
        return context_parallel.select_tokens(padded_BT, by_rank[:, self.rank])

    def _verify(self, documents: Documents) -> None:
        """Raises ValueError on all ranks if they shard different batches: the commonest mistake,
        and a silent one.
        """
        if torch.compiler.is_compiling() or documents.is_verified:
            return
        # Layers ask in turn: the first compares, and so a batch is compared once.
        documents.is_verified = True
        training = torch.is_grad_enabled()
        self._num_verified[training] += 1
        if self._num_verified[training] > VERIFIED_BATCHES:
            return
        per_rank = self.all_gather_values(documents.checksum.tolist())
        others = [rank for rank, each in enumerate(per_rank) if each != per_rank[0]]
        if others:
            raise ValueError(
                f"the ranks of a context-parallel group must be given the same batch; those of ranks {others} differ from "
                "rank 0's (does a sampler give every rank other sequences?)"
            )


def _input_ids(batch: Mapping[str, Any]) -> Tensor:
    """The tokens of a batch. Raises ValueError unless they are [B, T], and not empty."""
    tokens_BT = batch.get("input_ids")
    if tokens_BT is None:
        raise ValueError("a batch needs input_ids [batch, tokens]")
    if tokens_BT.ndim != 2:
        raise ValueError(f"a batch needs input_ids [batch, tokens], not {list(tokens_BT.shape)}")
    if not tokens_BT.numel():
        raise ValueError(f"input_ids {list(tokens_BT.shape)} hold no tokens")
    return cast(Tensor, tokens_BT)


def _positions(tokens_BT: Tensor, boundaries_BD: Tensor | None) -> Tensor:
    """Positions [B or 1, T] that restart at each document; None is one document."""
    seq_len = tokens_BT.shape[1]
    if boundaries_BD is None:
        boundaries_BD = context_parallel.one_document(1, seq_len)
    return batches.positions_of(boundaries_BD, seq_len).to(tokens_BT.device)


def _documents_of(boundaries_BD: Tensor) -> tuple[Any, ...]:
    """Documents as a hashable value: the same however often an end is repeated, and for equal
    sequences.
    """
    rows = [tuple(sorted({*row})) for row in boundaries_BD.tolist()]
    return (rows[0],) if len({*rows}) == 1 else (*rows,)


def _in_autocast_dtype(*tensors: Tensor) -> list[Tensor]:
    """Casts tensors to autocast's type, unless they are float64, like
    scaled_dot_product_attention.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return [*tensors]
    dtype = torch.get_autocast_dtype(device)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def _pad(x_BT: Tensor, length: int, value: int = 0) -> Tensor:
    """Pads dimension 1 at its end: [B, length, ...]."""
    if x_BT.shape[1] == length:
        return x_BT
    return F.pad(x_BT, ((0,) * 2 * (x_BT.ndim - 2)) + (0, length - x_BT.shape[1]), value=value)


def _longest(positions_BT: Tensor, by_rank: Tensor) -> tuple[int, int]:
    """One more than the last position, of the batch and of the rank where it is the smallest."""
    positions = positions_BT.gather(1, by_rank.flatten(1)).view_as(by_rank)
    last = (positions.amax((0, 2)) + 1).tolist()
    return max(last), min(last)


def context_of(documents: Documents) -> ContextParallel:
    """The `ContextParallel` that sharded a batch.

    Raises ValueError if it does not exist in this process any more.
    """
    found = _contexts[documents.context_key]() if documents.context_key in _contexts else None
    if found is None:
        raise ValueError(
            "the ContextParallel that sharded this batch does not exist any more; keep a reference to it"
        )
    if found._sharding != documents.plan:
        raise ValueError(
            f"the batch was sharded by {documents.plan}, and attention by {found._sharding}"
        )
    return found
