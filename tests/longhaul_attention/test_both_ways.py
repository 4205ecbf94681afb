"""Attention without a causal mask, and `scaled_dot_product_attention` in unchanged code, against a
softmax over all pairs.

Shape suffixes: B sequences, T query and U key tokens of the full sequences, N query heads, K KV
heads, H head dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

from longhaul_attention import ContextParallel
from parallelisms.mesh.collectives import all_reduce
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

HEADS = ((12, 12), (12, 4), (12, 1))
Sides = tuple[list[list[int]], list[list[int]]]
"""The lengths of each sequence's documents, of queries and of keys."""
# Documents that fewer ranks hold than there are, and keys without queries.
DOCUMENTS: dict[str, Sides] = {
    "equal": ([[1, 30, 17], [5, 3, 40]], [[1, 30, 17], [5, 3, 40]]),
    "others": ([[1, 30, 17], [5, 3, 40]], [[40, 1, 7], [2, 45, 1]]),
    "unlike": ([[1, 30, 17, 0], [48, 0, 0, 0]], [[9, 1, 60, 2], [3, 69, 0, 0]]),
    "few keys": ([[47, 1], [20, 28]], [[1, 23], [22, 2]]),
}
LENGTHS = {"equal": 48, "others": 48, "unlike": 72, "few keys": 24}
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
    methods = [
        ("allgather", "balanced"),
        ("ring", "doc_headtail"),
        ("alltoall", "headtail"),
        ("ulysses", "contiguous"),
    ]
    methods += [("ring", "contiguous"), ("allgather", "doc_headtail")]
    if ranks == 4:
        methods += [("hybrid", "doc_headtail"), ("hybrid", "contiguous")]
    for (method, layout), heads, causal, keys, packed, door in product(
        methods, HEADS, (False, True), LENGTHS, (False, True), ("attention", "sdpa")
    ):
        is_possible = keys == "equal" or not causal
        is_new = packed or keys != "others"
        if is_possible and is_new and not (packed and door == "sdpa"):
            yield Case(method, layout, heads, causal, keys, packed, door)


# ---- the truth


def truth(
    q_BTNH: Tensor,
    k_BUKH: Tensor,
    v_BUKH: Tensor,
    sink_N: Tensor | None = None,
    *,
    documents: Sides,
    causal: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """[B, T, N, H]: a softmax over all keys, of which some are hidden."""
    groups = q_BTNH.shape[2] // k_BUKH.shape[2]
    k_BUNH, v_BUNH = (x.repeat_interleave(groups, dim=2) for x in (k_BUKH, v_BUKH))
    scores_BNTU = torch.einsum("btnh,bunh->bntu", q_BTNH, k_BUNH) / q_BTNH.shape[-1] ** 0.5
    if softcap is not None:
        scores_BNTU = softcap * torch.tanh(scores_BNTU / softcap)
    ids_BT, ids_BU = (
        torch.stack([torch.tensor(numbers(row)) for row in side]) for side in documents
    )
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
    queries = (2, 48, case.heads[0], 8)
    keys = (2, LENGTHS[case.keys], case.heads[1], 8)
    shapes = (queries, keys, keys, queries)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


# ---- errors


def errors(every: int) -> dict[str, float]:
    """The largest error of output and gradients of one case in so many; soft caps and sinks take
    turns.
    """
    found: dict[str, float] = {}
    contexts: dict[tuple[Any, ...], ContextParallel] = {}
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    ranks = distributed.get_world_size()
    for number, case in enumerate(cases(ranks)):
        if number % every != ranks % every:
            continue
        shape = (2, 2) if case.method == "hybrid" else (ranks,)
        if shape not in meshes:
            meshes[shape] = init_device_mesh("cpu", shape)
        options: dict[str, Any] = {
            "method": case.method,
            "layout": case.layout,
            "packs_documents": number % 3 == 0,
        }
        key = tuple(options.values())
        if key not in contexts:
            contexts[key] = ContextParallel(meshes[shape], **options)
        turns: list[dict[str, Any]] = [{}, {}, {"has_sink": True}, {"softcap": 1.5}]
        scores = {} if case.door == "sdpa" else turns[number % 4]
        found[f"{case} {scores}"] = error(contexts[key], case, **scores)
    return found


def error(
    cp: ContextParallel, case: Case, *, has_sink: bool = False, softcap: float | None = None
) -> float:
    q, k, v, weights = drawn(case)
    whole: Sides = [[48]] * 2, [[LENGTHS[case.keys]]] * 2
    documents = DOCUMENTS[case.keys] if case.packed else whole
    sinks = [torch.linspace(-1, 2, case.heads[0], dtype=torch.float64)] if has_sink else []
    full = [x.clone().requires_grad_() for x in (q, k, v, *sinks)]
    right = truth(*full, documents=documents, causal=case.causal, softcap=softcap)
    expected = [right.detach(), *torch.autograd.grad(right, full, weights)]

    of_queries, of_keys = map(boundaries, documents)
    sides = (of_queries, of_keys, of_keys)
    q, k, v = (
        cp.shard(x, side).requires_grad_() for x, side in zip((q, k, v), sides, strict=True)
    )
    scores: dict[str, Any] = {
        "sink": sinks[0].requires_grad_() if sinks else None,
        "softcap": softcap,
    }
    if case.door == "sdpa":
        out = unchanged(cp, q, k, v, is_causal=case.causal)
    elif case.causal:
        out = cp.attention(q, k, v, of_queries, **scores)
    elif case.packed:
        out = cp.attention(q, k, v, of_queries, causal=False, kv_boundaries=of_keys, **scores)
    else:
        out = cp.attention(q, k, v, None, causal=False, **scores)
    grads = torch.autograd.grad(out, (q, k, v, *sinks), cp.shard(weights, of_queries))
    found = [
        cp.gather(x, side) for x, side in zip((out, *grads[:3]), (of_queries, *sides), strict=True)
    ]
    found += [all_reduce(None, grad_N) for grad_N in grads[3:]]
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def unchanged(cp: ContextParallel, *shards_BSNH: Tensor, is_causal: bool) -> Tensor:
    """Code that knows nothing of ranks, inside the context."""
    q, k, v = (x.transpose(1, 2) for x in shards_BSNH)
    with cp.sdpa():
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


@pytest.mark.parametrize(
    ("ranks", "every"),
    [(2, 31), (3, 31), (4, 31), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (2, 3, 4))],
)
def test_output_and_gradients_equal_one_process(ranks: int, every: int) -> None:
    for found in run_ranks(errors, ranks, every, timeout=300):
        assert len(found) >= 200 // every
        assert {case: error for case, error in found.items() if not error <= 1e-11} == {}


# ---- one process: which calls are ours


def qkv(*, keys: int = 8, kv_heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    return drawn(2, 4, 8, 16), drawn(2, kv_heads, keys, 16), drawn(2, kv_heads, keys, 16)


def is_ours() -> bool:
    """Dropout is refused by ours alone."""
    try:
        F.scaled_dot_product_attention(*qkv(), dropout_p=0.5)
    except ValueError:
        return True
    return False


def test_calls_outside_of_the_context_are_not_touched() -> None:
    cp, other = (ContextParallel(None, method="ring") for _ in range(2))
    before = F.scaled_dot_product_attention
    with cp.sdpa():
        assert is_ours()
        with other.sdpa():
            assert is_ours()
        assert is_ours()
        with pytest.raises(KeyError), other.sdpa():
            raise KeyError
        assert is_ours()
        assert F.softmax(torch.zeros(2), 0).tolist() == [0.5, 0.5]
    assert not is_ours()
    with pytest.raises(ValueError, match="dropout_p"), cp.sdpa():
        F.scaled_dot_product_attention(*qkv(), dropout_p=0.5)
    assert not is_ours()
    assert F.scaled_dot_product_attention is before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"is_causal": True, "scale": 2.0},
        {"enable_gqa": True},
    ],
    ids=str,
)
def test_options_are_those_of_torch(options: dict[str, Any]) -> None:
    given = qkv(kv_heads=2 if options.get("enable_gqa") else 4)
    expected = F.scaled_dot_product_attention(*given, **options)
    with ContextParallel(None, method="ring").sdpa():
        found = F.scaled_dot_product_attention(*given, **options)
        q, k, v = (x.detach().float() for x in given)
        with torch.autocast("cpu", torch.bfloat16):
            assert (
                F.scaled_dot_product_attention(q, k, v.bfloat16(), **options).dtype
                == torch.bfloat16
            )
            assert F.scaled_dot_product_attention(*given, **options).dtype == torch.float64
    pairs = zip(
        torch.autograd.grad(found.sin().sum(), given),
        torch.autograd.grad(expected.sin().sum(), given),
        strict=True,
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    assert max((a - b).abs().max().item() for a, b in pairs) < 1e-13


def test_recomputation_is_exact_or_refused() -> None:
    cp = ContextParallel(None, method="ring")
    contexts: Any = lambda: (cp.sdpa(), cp.sdpa())  # noqa: E731
    given = qkv()
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*given).square().sum(), given)
    with cp.sdpa():
        out = checkpoint(
            F.scaled_dot_product_attention, *given, use_reentrant=False, context_fn=contexts
        )
        with pytest.raises(
            ValueError, match="a re-entrant checkpoint would call it again outside"
        ):
            checkpoint(F.scaled_dot_product_attention, *given, use_reentrant=True)
        with torch.no_grad():
            torch.testing.assert_close(F.scaled_dot_product_attention(*given), out, rtol=0, atol=0)
        without = checkpoint(F.scaled_dot_product_attention, *given, use_reentrant=False)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), given), expected, rtol=0, atol=1e-12
    )
    with pytest.raises(CheckpointError, match="different number of tensors was saved"):
        without.sum().backward()


def refusals() -> Iterator[tuple[str, Callable[[], object]]]:
    cp = ContextParallel(None, method="ring")
    q, k, v = qkv(keys=6, kv_heads=2)
    called = F.scaled_dot_product_attention
    yield (
        "attn_mask: which pairs it allows is not known",
        lambda: called(q, q, q, torch.ones(8, 8, dtype=torch.bool)),
    )
    yield (
        "dropout_p = 0.1: ranks would drop other pairs than one process",
        lambda: called(q, q, q, dropout_p=0.1),
    )
    yield (
        "is_causal = True needs as many keys as queries",
        lambda: called(q, k, v, is_causal=True, enable_gqa=True),
    )
    yield "enable_gqa = False needs as many key heads as query heads", lambda: called(q, k, v)
    yield "key and value must have the same shape", lambda: called(q, q, q[..., :8])
    yield (
        "query, key and value must be [batch, heads, tokens of a rank, width]",
        lambda: called(q[0], q[0], q[0]),
    )
    yield (
        "nn.MultiheadAttention would attend to the tokens of this rank",
        lambda: nn.MultiheadAttention(16, 2)(*[q[0, 0].float()] * 3),
    )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    whole, unlike = (torch.tensor([[0, tokens]] * 2, dtype=torch.int32) for tokens in (8, 6))
    two = torch.tensor([[0, 4, 8]] * 2, dtype=torch.int32)
    # Which is known to be right from now on.
    cp.attention(q, q, q, whole, window=3)
    yield (
        "sliding window 3 needs a causal mask",
        lambda: cp.attention(q, q, q, None, causal=False, window=3),
    )
    yield "attention needs documents or boundaries, not None", lambda: cp.attention(q, q, q, None)
    yield (
        "kv_boundaries are those of attention without a causal mask",
        lambda: cp.attention(q, q, q, whole, kv_boundaries=whole),
    )
    yield "must have equal batch, tokens, head_dim and dtype", lambda: cp.attention(q, k, v, whole)
    yield (
        "must have equal batch, head_dim and dtype",
        lambda: cp.attention(q, k[..., :8], v[..., :8], None, causal=False),
    )
    yield (
        "document 1 of sequence 0 has queries and no keys",
        lambda: cp.attention(q, k, v, two, causal=False),
    )
    yield (
        "boundaries end at 8, and 1 ranks have 6 tokens each: keys are",
        lambda: cp.attention(q, k, v, None, causal=False, kv_boundaries=whole),
    )
    yield (
        "boundaries have batch size 1; q, k and v have 2",
        lambda: cp.attention(q, k, v, None, causal=False, kv_boundaries=unlike[:1]),
    )
    yield (
        "boundaries must have 2 dimensions",
        lambda: cp.attention(q, q, q, torch.stack((whole, whole))),
    )
    yield (
        "boundaries must be int32 on the CPU",
        lambda: cp.attention(q, q, q, whole.long(), causal=False),
    )


def test_what_cannot_be_exact_is_refused_by_name() -> None:
    cp = ContextParallel(None, method="ring")
    for told, call in refusals():
        with pytest.raises((ValueError, TypeError), match=re.escape(told)), cp.sdpa():
            call()


def test_the_documents_of_a_batch_may_be_seen_both_ways() -> None:
    cp = ContextParallel(None, method="ring")
    lengths = [[5, 1, 2], [8]]
    q, k, v = (x.transpose(1, 2) for x in qkv())
    documents = cp.shard_batch(
        {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}, [[0, 5, 6, 8], [0, 8]]
    )["documents"]
    expected = truth(q, k, v, documents=(lengths, lengths))
    torch.testing.assert_close(
        cp.attention(q, k, v, documents, causal=False), expected, rtol=0, atol=1e-13
    )


# ---- torch.compile


def compiled(method: str, backend: str, *lengths: int) -> tuple[float, int]:
    """The largest error of gradients of self and cross attention, and the graphs of these
    lengths.
    """
    cp = ContextParallel(init_device_mesh("cpu", (2,)), method=method)
    counter = CompileCounterWithBackend(backend)

    def layers(q: Tensor, kv: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.4)
        with cp.sdpa():  # Entered again, inside of the graph.
            return F.scaled_dot_product_attention(out, kv, kv, enable_gqa=True)

    graph = torch.compile(layers, backend=counter, fullgraph=True)
    worst = 0.0
    for tokens in lengths:
        generator = torch.Generator().manual_seed(distributed.get_rank())
        shapes = ((2, 4, tokens, 8), (2, 2, tokens // 2, 8))
        given = [
            torch.randn(x, generator=generator, dtype=torch.float64, requires_grad=True)
            for x in shapes
        ]
        with cp.sdpa():
            outs = [function(*given) for function in (graph, layers)]
        found, expected = ([out, *torch.autograd.grad(out.sin().sum(), given)] for out in outs)
        worst = max(
            worst, *((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
        )
    return worst, counter.frame_count


@pytest.mark.parametrize(
    ("method", "backend"),
    [
        ("ring", "eager"),
        *(
            pytest.param(method, "aot_eager", marks=pytest.mark.slow)
            for method in ("ring", "ulysses")
        ),
    ],
)
def test_compiled_code_has_the_same_gradients_without_a_graph_break(
    method: str, backend: str
) -> None:
    lengths = (8,) if backend == "eager" else (8, 12, 20)
    for error, graphs in run_ranks(compiled, 2, method, backend, *lengths, timeout=120):
        assert error < 1e-13
        assert graphs == min(2, len(lengths)), "one for the first length, and one for all others"


def messages_of_other_boundaries() -> list[str]:
    """Of keys that were sharded with other documents than attention is given, and of boundaries in
    a list.
    """
    from longhaul_attention import ContextParallel

    cp = ContextParallel(init_device_mesh("cpu", (distributed.get_world_size(),)), method="ring")
    x = torch.ones(1, 8, 2, 4)
    whole, padded = (torch.tensor([ends], dtype=torch.int32) for ends in ([0, 8], [0, 7, 8]))
    queries = cp.shard(x)
    keys = cp.shard(x)
    messages = []
    for boundaries in (padded, whole):
        try:
            cp.attention(queries, keys, keys, whole, causal=False, kv_boundaries=boundaries)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    both = cp.shard(x, padded)
    cp.attention(queries, both, both, whole, causal=False, kv_boundaries=padded)
    try:
        cp.shard(x, [[0, 7, 8]])  # type: ignore[arg-type]
    except TypeError as error:
        messages.append(str(error))
    return messages


def test_keys_that_were_sharded_with_other_documents_are_refused() -> None:
    for messages in run_ranks(messages_of_other_boundaries, 2):
        assert messages == [
            "keys of 8 tokens were sharded with other boundaries than [[0, 7, 8]]: give cp.shard and cp.attention the same",
            "",
            "boundaries must be a tensor, int32 [batch, documents + 1], not list",
        ]
