"""Attention without a causal mask, and `scaled_dot_product_attention` in unchanged code, against a softmax over all pairs.

Shape suffixes: B sequences, T query and U key tokens of the full sequences, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from longhaul_attention import ContextParallel
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

HEADS = ((12, 12), (12, 4), (12, 1))
# Of two sequences, by their documents' lengths: query documents that fewer ranks hold than there are, keys without queries.
DOCUMENTS: dict[str, tuple[list[list[int]], list[list[int]]]] = {
    "equal": ([[1, 30, 17], [5, 3, 40]], [[1, 30, 17], [5, 3, 40]]),
    "unlike": ([[1, 30, 17, 0], [48, 0, 0, 0]], [[9, 1, 60, 2], [3, 69, 0, 0]]),
    "few keys": ([[47, 1], [20, 28]], [[1, 23], [22, 2]]),
}
LENGTHS = {"equal": 48, "unlike": 72, "few keys": 24}
"""Of the keys; there are 48 queries."""


@dataclass(frozen=True)
class Case:
    method: str
    layout: str
    heads: tuple[int, int]
    causal: bool
    keys: str
    packed: bool
    door: str
    """`attention`, or `sdpa`: unchanged code."""


def cases(ranks: int) -> Iterator[Case]:
    methods = [("allgather", "balanced"), ("ring", "doc_headtail"), ("alltoall", "headtail"), ("ulysses", "contiguous")]
    methods += [("ring", "contiguous"), ("allgather", "doc_headtail")]
    if ranks == 4:
        methods += [("hybrid", "doc_headtail"), ("hybrid", "contiguous")]
    for (method, layout), *rest in product(methods, HEADS, (False, True), LENGTHS, (False, True), ("attention", "sdpa")):
        case = Case(method, layout, *rest)
        if not (case.causal and case.keys != "equal") and not (case.packed and case.door == "sdpa"):
            yield case


# ---- the truth


def truth(
    q_BTNH: Tensor, k_BUKH: Tensor, v_BUKH: Tensor, documents: Any, *, causal: bool, sink_N: Tensor | None, softcap: float | None
) -> Tensor:
    """[B, T, N, H]: a softmax over all keys, of which some are hidden."""
    groups = q_BTNH.shape[2] // k_BUKH.shape[2]
    k_BUNH, v_BUNH = (x.repeat_interleave(groups, dim=2) for x in (k_BUKH, v_BUKH))
    scores_BNTU = torch.einsum("btnh,bunh->bntu", q_BTNH, k_BUNH) / q_BTNH.shape[-1] ** 0.5
    if softcap is not None:
        scores_BNTU = softcap * torch.tanh(scores_BNTU / softcap)
    ids_BT, ids_BU = (torch.stack([torch.tensor(numbers(row)) for row in side]) for side in documents)
    sees_BTU = ids_BT[:, :, None] == ids_BU[:, None, :]
    if causal:
        sees_BTU = sees_BTU & torch.ones_like(sees_BTU).tril()
    scores_BNTU = scores_BNTU.masked_fill(~sees_BTU[:, None], -torch.inf)
    if sink_N is not None:
        logits = sink_N.view(1, -1, 1, 1).expand(*scores_BNTU.shape[:3], 1)
        scores_BNTU = torch.cat((scores_BNTU, logits), dim=3)
    weights_BNTU = scores_BNTU.softmax(3)[..., : k_BUNH.shape[1]]
    return torch.einsum("bntu,bunh->btnh", weights_BNTU, v_BUNH)


def numbers(lengths: list[int]) -> list[int]:
    """The document of each token."""
    return [number for number, length in enumerate(lengths) for _ in range(length)]


def boundaries(side: list[list[int]]) -> Tensor:
    return torch.tensor([[0, *accumulate(row)] for row in side], dtype=torch.int32)


def drawn(case: Case) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the output."""
    generator = torch.Generator().manual_seed(len(repr(case)))
    queries, keys = (2, 48, case.heads[0], 8), (2, LENGTHS[case.keys], case.heads[1], 8)
    shapes = (queries, keys, keys, queries)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


# ---- errors


def errors(every: int) -> dict[str, float]:
    """The largest error of output and gradients of one case in so many; soft caps and sinks take turns."""
    found, contexts, ranks = {}, {}, distributed.get_world_size()
    meshes = {False: init_device_mesh("cpu", (ranks,))}
    for number, case in enumerate(cases(ranks)):
        if number % every != ranks % every:
            continue
        is_hybrid = case.method == "hybrid"
        if is_hybrid and True not in meshes:
            meshes[True] = init_device_mesh("cpu", (2, 2))
        key = (case.method, case.layout, number % 3 == 0)
        if key not in contexts:
            method, layout, packs = key
            contexts[key] = ContextParallel(meshes[is_hybrid], method=method, layout=layout, packs_documents=packs)
        scores = {} if case.door == "sdpa" else [{}, {}, {"sink": True}, {"softcap": 1.5}][number % 4]
        found[f"{case} {scores}"] = error(contexts[key], case, scores)
    return found


def error(cp: ContextParallel, case: Case, scores: dict[str, Any]) -> float:
    *given, weights = drawn(case)
    lengths = DOCUMENTS[case.keys] if case.packed else ([[48]] * 2, [[LENGTHS[case.keys]]] * 2)
    sinks = [torch.linspace(-1, 2, case.heads[0], dtype=torch.float64, requires_grad=True)] * ("sink" in scores)
    full = [x.requires_grad_() for x in given]
    out = truth(
        *full, lengths, causal=case.causal, sink_N=sinks[0] if sinks else None, softcap=scores.get("softcap")
    )
    expected = [out, *torch.autograd.grad(out, (*full, *sinks), weights)]
    sides = [boundaries(side) for side in lengths]
    of_q, of_k = sides
    q, k, v = (cp.shard(x.detach(), side).requires_grad_() for x, side in zip(full, (of_q, of_k, of_k), strict=True))
    if case.door == "sdpa":
        ours = unchanged(cp, q, k, v, is_causal=case.causal)
    else:
        options: dict[str, Any] = {"softcap": scores.get("softcap"), "sink": sinks[0] if sinks else None}
        if not case.causal:
            options["kv_boundaries"] = of_k if case.packed else None
        documents = of_q if case.packed or case.causal else None
        ours = cp.attention(q, k, v, documents, causal=case.causal, **options)
    grads = torch.autograd.grad(ours, (q, k, v, *sinks), cp.shard(weights, of_q))
    ours = [cp.gather(x, side) for x, side in zip((ours, *grads), (of_q, of_q, of_k, of_k), strict=False)]
    for grad_N in grads[3:]:
        distributed.all_reduce(grad_N)
        ours.append(grad_N)
    return max((a - b).abs().max().item() for a, b in zip(ours, expected, strict=True))


def unchanged(cp: ContextParallel, *qkv: Tensor, **options: Any) -> Tensor:
    """Code that knows nothing of ranks, inside the context."""
    q, k, v = (x.transpose(1, 2) for x in qkv)
    with cp.sdpa():
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options).transpose(1, 2)


@pytest.mark.parametrize(
    ("ranks", "every"), [(2, 23), (3, 23), (4, 23), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (2, 3, 4))]
)
def test_output_and_gradients_equal_one_process(ranks: int, every: int) -> None:
    for found in run_ranks(errors, ranks, every, timeout=300):
        assert len(found) >= 200 // every
        assert {case: error for case, error in found.items() if not error <= 1e-11} == {}
