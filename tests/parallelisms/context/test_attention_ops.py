"""The attention operators: opcheck, compilation, recomputation and communication."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, cast

import pytest
import torch
from torch import Tensor, distributed
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from models.attention import Attention
from models.transformer import Transformer
from parallelisms import activation_checkpoint
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.block_recompute import Tiling, compiler
from parallelisms.context import ring, ulysses
from parallelisms.context.context_parallel import ContextParallel
from parallelisms.mesh.collectives import all_reduce
from parallelisms.parallelize import set_attention_core
from tests.models.dense_attention import dense, inputs, run
from tests.models.small_models import SMALL, gradients, packed, small_model, starts
from tests.parallelisms.context.cores import build_core
from tests.parallelisms.context.test_exact import shared
from tests.parallelisms.context.whole_batches import shard_batch
from tests.ranks import run_ranks

BATCH = packed([9, 1, 14], [24])
CPU_KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
METHODS = {"ring": (2,), "alltoall": (2,), "allgather": (2,), "ulysses": (2,), "hybrid": (2, 2)}

POLICIES = ("none", "full", "keep_attention", "one input of two", "groups")
# The others are made of the same bodies.
COMPILED = POLICIES[:3]
FAST = [("ring", False, POLICIES[:3])]
NUM_LAYERS = {False: SMALL.num_layers, True: 1}  # Each block compiles anew.


def mark_slow_except(names: Iterable[str], *fast: str) -> list[Any]:
    """Marks all parameters but `fast` slow: they share the code and differ only in the
    transport.
    """
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


def core_of(method: str, heads: tuple[int, int] = (4, 2), **scores: Any) -> ContextParallel:
    mesh = init_device_mesh("cpu", METHODS[method])
    return build_core(mesh, method=method, heads=heads[0], kv_heads=heads[1], **scores)


def opcheck_results(name: str) -> set[str]:
    """Opcheck's results for an operator on this rank."""
    warnings.simplefilter("ignore")
    core = core_of(name if name in METHODS else "ulysses")
    boundaries_BD = starts([9, 1, 14], [24], width=6)
    q, k, v = (core.shard(x.detach(), boundaries_BD) for x in inputs(boundaries_BD))
    if name == "to_heads":
        arguments: tuple[Any, ...] = (q.requires_grad_(), *core.ulysses_group)
        return set(torch.library.opcheck(ulysses._seq_to_heads, arguments).values())
    if name == "to_tokens":
        heads = core.ulysses_group.seq_to_heads(q)
        return set(
            torch.library.opcheck(
                ulysses._heads_to_seq, (heads.requires_grad_(), *core.ulysses_group)
            ).values()
        )
    sink_N = torch.randn(q.shape[2], dtype=q.dtype, generator=torch.Generator().manual_seed(3))
    ring_core = ring.RingAttentionCore(
        name, core.layout, core.groups[0].group_name, torch.float32, "auto"
    )
    options = (3, None, ring_core.options)
    out, lse = ring.attention(q, k, v, boundaries_BD, sink_N, *options)
    backward = (torch.ones_like(out), [q, k, v, out, lse], boundaries_BD, sink_N, *options)
    found = set(torch.library.opcheck(ring.attention_backward, backward).values())
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    given_sink = sink_N.requires_grad_()
    return found | set(
        torch.library.opcheck(
            ring.attention, (*given, boundaries_BD, given_sink, *options)
        ).values()
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    mark_slow_except(
        ["ring", "alltoall", "allgather", "to_heads", "to_tokens"], "ring", "to_heads"
    ),
)
def test_every_operator_passes_opcheck(name: str) -> None:
    assert run_ranks(opcheck_results, 2, name) == [{"SUCCESS"}] * 2


def compilations(method: str) -> tuple[int, float]:
    """Number of compilations for three batches with different documents, and the largest error."""
    warnings.simplefilter("ignore")
    core = core_of(method)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(core.__call__, backend=counter, fullgraph=True)
    worst = 0.0
    for boundaries_BD in (
        starts([64], width=6),
        starts([7, 1, 56], width=6),
        starts([1, 2, 3, 50, 8]),
    ):
        given = inputs(boundaries_BD)
        *expected, _ = run(dense, given, boundaries_BD)
        for ours, right in zip(
            shared(ReplacedCall(core, compiled), given, boundaries_BD),  # type: ignore[arg-type]
            expected,
            strict=True,
        ):
            worst = max(worst, abs(ours - right).max().item())
    return counter.frame_count, worst


class ReplacedCall:
    """A core with a replaced `__call__`."""

    def __init__(self, core: ContextParallel, function: Any) -> None:
        self.shard = core.shard
        self.gather = core.gather
        self.function = function

    def __call__(self, *arguments: Tensor) -> Tensor:
        out: Tensor = self.function(*arguments)
        return out


@pytest.mark.ranks
@pytest.mark.parametrize("method", mark_slow_except(METHODS, "ring"))
def test_three_document_layouts_compile_once_without_graph_break(method: str) -> None:
    for compiled, error in run_ranks(compilations, prod(METHODS[method]), method):
        assert compiled == 1
        assert error <= 1e-12


def kernel_calls_and_error(
    method: str, *, compiled: bool, policies: tuple[str, ...]
) -> dict[str, tuple[int, float]]:
    """For each recomputation policy: attention kernel calls in one step, and the largest error."""
    warnings.simplefilter("ignore")
    config = replace(SMALL, num_layers=NUM_LAYERS[compiled])
    losses, expected = gradients(small_model(config), BATCH)
    core = core_of(method, (SMALL.num_heads, SMALL.num_kv_heads))
    cut = Tiling(compile=compiler(backend="aot_eager")) if compiled else Tiling(tile_bytes=8000)
    kept = {
        "none": RecomputeConfig(),
        "full": RecomputeConfig("full", tiling=cut),
        "keep_attention": RecomputeConfig("keep_attention", tiling=cut),
        "one input of two": RecomputeConfig("keep_attention", blocks_per_checkpoint=2, tiling=cut),
        "groups": RecomputeConfig("keep_attention", tiling=replace(cut, head_groups=2)),
    }
    found = {}
    for name in policies:
        model = small_model(config)
        set_attention_core(model, core)
        activation_checkpoint.apply(model, kept[name])
        if compiled and name == "none":
            for block in model.transformer_blocks():
                block.compile(fullgraph=True, backend="aot_eager")
        if compiled:
            forward_backward(model, core)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            ours = forward_backward(model, core)
        worst = abs(core.gather(ours, BATCH.boundaries) - losses).max().item()
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None
            distributed.all_reduce(parameter.grad)
            worst = max(worst, abs(parameter.grad - expected[parameter_name]).max().item())
        found[name] = sum(event.name == CPU_KERNEL for event in profiler.events() or ()), worst
    return found


def forward_backward(model: Transformer, core: ContextParallel) -> Tensor:
    model.zero_grad()
    losses: Tensor = model(shard_batch(core, BATCH))
    (losses.sum() / BATCH.num_targets()).backward()
    return losses.detach()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("method", "compiled", "policies"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in (
            *FAST,
            *((method, False, POLICIES) for method in METHODS),
            *((method, True, COMPILED) for method in METHODS),
            ("ring", True, ("none",)),
        )
    ],
    ids=lambda value: None if isinstance(value, str | bool) else f"{len(value)} policies",
)
def test_attention_runs_once_with_keep_attention_and_twice_with_full_recompute(
    method: str, *, compiled: bool, policies: tuple[str, ...]
) -> None:
    task = partial(kernel_calls_and_error, compiled=compiled, policies=policies)
    for found in run_ranks(task, prod(METHODS[method]), method, timeout=240):
        kernels = {policy: count for policy, (count, _) in found.items()}
        assert max(error for _, error in found.values()) <= 1e-12
        assert kernels["none"] >= NUM_LAYERS[compiled]
        once = kernels["none"]
        expected = {"none": 1, "full": 2, "keep_attention": 1, "one input of two": 1, "groups": 2}
        assert kernels == {name: expected[name] * once for name in kernels}


# ---- communication volume


class Sent(TorchDispatchMode):
    """Records every collective and the bytes that it sends to other ranks."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.removeprefix("c10d::")
        if name == "send":
            self.calls.append((name, args[0][0].nbytes))
        elif name == "alltoall_base_":
            # With split sizes everything goes to one other rank; without, this rank keeps its
            # part.
            self.calls.append(
                (
                    name,
                    args[1].nbytes if args[4] else args[1].nbytes * (self.ranks - 1) // self.ranks,
                )
            )
        elif name == "_allgather_base_":
            self.calls.append((name, args[1].nbytes * (self.ranks - 1)))
        elif name == "_reduce_scatter_base_":
            self.calls.append((name, args[1].nbytes * (self.ranks - 1) // self.ranks))
        return function(*args, **(kwargs or {}))


def collectives_of_layer(
    method: str, dtype: torch.dtype, tokens: int, wire: torch.dtype
) -> list[list[tuple[str, int]]]:
    """Collectives of one layer, forward and backward."""
    ranks = distributed.get_world_size()
    boundaries_BD = starts([tokens])
    core = build_core(
        init_device_mesh("cpu", (ranks,)), method=method, heads=8, kv_heads=2, reduce_dtype=wire
    )
    q, k, v = (
        core.shard(x.detach().to(dtype), boundaries_BD) for x in inputs(boundaries_BD, (8, 2))
    )
    for name in ("_seq_to_heads", "_heads_to_seq"):  # A mode does not look into operators.
        setattr(ulysses, name, getattr(ulysses, name)._init_fn)
    with Sent(ranks) as forward:
        out, lse = core.forward(core.start(q, k, v, boundaries_BD), boundaries_BD)
    with Sent(ranks) as backward:
        core.backward(out, core.start(q, k, v, boundaries_BD), out, lse, boundaries_BD)
    return [forward.calls, backward.calls]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ring_makes_ranks_minus_one_transfers_forward_and_three_times_as_many_in_total(
    ranks: int,
) -> None:
    tokens = 64
    kv_heads = 2
    width = 8
    hop = 2 * (tokens // ranks) * kv_heads * width
    for method, name in (("ring", "send"), ("alltoall", "alltoall_base_")):
        for forward, backward in run_ranks(
            collectives_of_layer, ranks, method, torch.bfloat16, tokens, torch.float32
        ):
            assert forward == [(name, hop * 2)] * (ranks - 1)
            assert sorted(backward) == sorted([(name, hop * 2), (name, hop * 4)] * (ranks - 1))


@pytest.mark.ranks
def test_kv_gradients_are_sent_in_reduce_dtype() -> None:
    for wire, size in ((torch.bfloat16, 2), (torch.float32, 4)):
        _, backward = run_ranks(collectives_of_layer, 2, "ring", torch.bfloat16, 64, wire)[0]
        assert [sent for _, sent in backward] == [2 * 32 * 2 * 8 * 2, 2 * 32 * 2 * 8 * size]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_allgather_runs_one_collective_forward_two_backward_and_sends_as_many_bytes_as_a_ring(
    ranks: int,
) -> None:
    tokens = 64
    kv_heads = 2
    width = 8
    others = 2 * tokens * kv_heads * width * (ranks - 1) // ranks
    for forward, backward in run_ranks(
        collectives_of_layer, ranks, "allgather", torch.bfloat16, tokens, torch.float32
    ):
        assert forward == [("_allgather_base_", others * 2)]
        assert backward == [
            ("_allgather_base_", others * 2),
            ("_reduce_scatter_base_", others * 4),
        ]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_ulysses_sends_the_bytes_of_its_formula(ranks: int) -> None:
    tokens = 64
    heads = 8
    kv_heads = 2
    width = 8
    for forward, backward in run_ranks(
        collectives_of_layer, ranks, "ulysses", torch.bfloat16, tokens, torch.float32
    ):
        sent = sum(size for _, size in forward)
        assert (
            sent
            == (2 * heads + 2 * max(kv_heads, ranks))
            * (tokens // ranks)
            * width
            * 2
            * (ranks - 1)
            // ranks
        )
        # Below autograd, backward resends q, k and v, sends out and its gradient, and returns dq,
        # dk and dv.
        again = (
            (4 * heads + 4 * max(kv_heads, ranks))
            * (tokens // ranks)
            * width
            * 2
            * (ranks - 1)
            // ranks
        )
        assert sum(size for _, size in backward) == again


# ---- below autograd


def errors_below_autograd(method: str) -> dict[str, float]:
    """The largest differences between the core below autograd and autograd through it, by head
    counts.
    """
    found = {}
    for heads, some in (
        ((8, 4), (8, 4)),
        ((8, 4), (4, 2)),
        ((8, 4), (2, 1)),
        ((8, 2), (4, 1)),
        ((12, 6), (6, 3)),
    ):
        plain = core_of(method, heads)
        windowed = core_of(method, heads, window=5, softcap=2.0)
        for core, boundaries_BD in (
            (plain, starts([9, 1, 54], [64])),
            (windowed, starts([5, 3, 40, 16], [32, 32])),
        ):
            q, k, v = (core.shard(x.detach(), boundaries_BD) for x in inputs(boundaries_BD, heads))
            sink_N = torch.linspace(-1, 2, heads[0], dtype=torch.float64)
            leaves = [x.clone().requires_grad_() for x in (q, k, v, sink_N)]
            out = core(leaves[0], leaves[1], leaves[2], boundaries_BD, leaves[3])
            grad = torch.randn(
                out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64
            )
            expected = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
            worst = 0.0
            # One head group after the other, with the next one in flight.
            groups = heads[0] // some[0]
            cut = [
                [x.chunk(groups, dim=2)[group].contiguous() for x in (q, k, v)] + [boundaries_BD]
                for group in range(groups)
            ]
            sinks = sink_N.chunk(groups)
            pieces = []
            started = [core.start(*part) for part in cut]
            outs = [
                core.forward(one, boundaries_BD, sink)
                for one, sink in zip(started, sinks, strict=True)
            ]
            started = [core.start(*part) for part in cut]
            for one, sink, (part, lse), grad_part in zip(
                started, sinks, outs, grad.chunk(groups, dim=2), strict=True
            ):
                pieces.append(
                    [part, *core.backward(grad_part, one, part, lse, boundaries_BD, sink)]
                )
            *grads, sink_grads = zip(*pieces, strict=True)
            for parts, right in zip(grads, expected[:-1], strict=True):
                worst = max(worst, abs(torch.cat(parts, dim=2) - right).max().item())
            # Ulysses ranks have other heads of a group than of all groups at once.
            sums = [all_reduce(None, each) for each in (torch.cat(sink_grads), expected[-1])]
            worst = max(worst, (abs(sums[0] - sums[1]).max() / abs(sums[1]).max()).item())
            found[f"{heads} {some} {boundaries_BD[0].tolist()}"] = worst
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("method", mark_slow_except(METHODS, "ring", "hybrid"))
def test_core_below_autograd_equals_autograd_for_head_groups(method: str) -> None:
    for found in run_ranks(errors_below_autograd, prod(METHODS[method]), method):
        assert len(found) == 10
        assert {name: error for name, error in found.items() if not error <= 1e-13} == {}


def qkv_alive(method: str) -> list[bool]:
    """Whether q, k and v are still alive when attention runs, after the exchange."""
    core = core_of(method)
    boundaries_BD = starts([64])
    q, k, v = (core.shard(x.detach()).clone() for x in inputs(boundaries_BD))
    refs = [weakref.ref(x) for x in (q, k, v)]
    started = core.start(q, k, v, boundaries_BD)
    del q, k, v
    given = core._wait_heads(started, boundaries_BD)
    del given
    return [one() is not None for one in refs]


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["ulysses", "hybrid"])
def test_qkv_are_freed_after_the_all_to_all(method: str) -> None:
    assert run_ranks(qkv_alive, prod(METHODS[method]), method) == [[False] * 3] * prod(
        METHODS[method]
    )


def sent_by_a_model(
    method: str, groups: int, policy: activation_checkpoint.RecomputePolicy
) -> dict[str, list[int]]:
    """Message sizes of a block by collective: forward, and in total."""
    ranks = prod(METHODS[method])
    core = core_of(method, (SMALL.num_heads, SMALL.num_kv_heads))
    model = small_model()
    set_attention_core(model, core)
    activation_checkpoint.apply(model, RecomputeConfig(policy, tiling=Tiling(groups)))
    with Sent(ranks) as forward:
        losses = model(shard_batch(core, BATCH))
    with Sent(ranks) as backward:
        losses.sum().backward()
    return {
        "forward": [size for _, size in forward.calls],
        "backward": [size for _, size in backward.calls],
    }


@pytest.mark.ranks
@pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("method", mark_slow_except(["ring", "alltoall"], "ring"))
def test_keep_attention_rotates_kv_once_forward_and_once_backward(
    method: str, groups: int
) -> None:
    """On two ranks: one KV transfer forward; one of KV and one of its gradients backward, per head
    group.
    """
    hop = 2 * (BATCH.tokens.numel() // 2) * (SMALL.num_kv_heads // groups) * SMALL.head_dim * 8
    once = groups * SMALL.num_layers
    for kept in run_ranks(sent_by_a_model, 2, method, groups, "keep_attention"):
        assert kept == {"forward": [hop] * once, "backward": [hop] * 2 * once}
    for again in run_ranks(sent_by_a_model, 2, method, groups, "full"):
        assert again == {"forward": [hop] * once, "backward": [hop] * 3 * once}


def order_of_calls(method: str, groups: int) -> tuple[list[str], list[str]]:
    """The core's calls in a block's forward and backward pass."""
    core = core_of(method, (8, 4))
    told: list[str] = []

    class Told:
        def __getattr__(self, name: str) -> Any:
            def call(*given: Any) -> Any:
                told.append(name)
                return getattr(core, name)(*given)

            return call

    model = small_model(replace(SMALL, num_layers=1, num_heads=8, num_kv_heads=4))
    activation_checkpoint.apply(model, RecomputeConfig("keep_attention", tiling=Tiling(groups)))
    cast(Attention, model.transformer_blocks()[0].attention).core = Told()
    losses = model(shard_batch(core, BATCH))
    forward = [*told]
    told[:] = []
    losses.sum().backward()
    return forward, told


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_next_head_group_is_in_flight_during_attention_of_the_current_one(method: str) -> None:
    for forward, backward in run_ranks(order_of_calls, 2, method, 4):
        assert forward == ["start", *["start", "forward"] * 3, "forward"]
        assert backward == ["start", *["start", "backward"] * 3, "backward"]
    for forward, backward in run_ranks(order_of_calls, 2, method, 1):
        assert (forward, backward) == (["start", "forward"], ["start", "backward"])


def calls_through_the_core(method: str) -> list[str]:
    warnings.simplefilter("ignore")
    core = core_of(method)
    q, k, v = (core.shard(x.detach()).requires_grad_() for x in inputs(starts([64])))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        core(q, k, v).sum().backward()
    return [event.name for event in profiler.events() or () if event.name.startswith("c10d::")]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("ring", {"c10d::send": 3, "c10d::recv_": 3}),
        ("alltoall", {"c10d::alltoall_base_": 3}),
        ("allgather", {"c10d::_allgather_base_": 2, "c10d::_reduce_scatter_base_": 1}),
        ("ulysses", {"c10d::alltoall_base_": 8}),
    ],
)
def test_no_other_collectives_run_on_two_ranks(method: str, expected: dict[str, int]) -> None:
    for names in run_ranks(calls_through_the_core, 2, method):
        assert {name: names.count(name) for name in names} == expected


def is_repeatable(method: str) -> bool:
    core = core_of(method)
    boundaries_BD = starts([20, 44])
    given = inputs(boundaries_BD)
    first, second = (shared(core, given, boundaries_BD) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("method", METHODS)
def test_repeated_input_gives_bitwise_equal_results(method: str) -> None:
    assert all(run_ranks(is_repeatable, prod(METHODS[method]), method))
