"""Recomputation changes what is kept and where it lies, and of what is computed nothing but its last digits."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import tiling
from models.attention import LocalAttentionCore
from models.config import ModelConfig
from models.transformer import Transformer
from parallelisms import activation_checkpoint
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.activation_offload import HostActivationPool
from parallelisms.block_recompute import TileOps, Tiling, compile_tile_ops
from tests.models.small_models import MIXED, SMALL, TIED, gradients, largest_difference, packed, small_model

BATCH = packed([9, 1, 14], [24])
OTHER = packed([24], [20, 4], seed=3)
BATCHES = [BATCH, OTHER, packed([12, 12], [1, 23], seed=5)]
POLICIES: tuple[activation_checkpoint.RecomputePolicy, ...] = ("full", "keep_attention")
# Three blocks: of two that share an input, the last is then alone. Four key/value heads: groups may have several.
DEEP = replace(SMALL, num_layers=3, num_heads=8, num_kv_heads=4)
NORMED = replace(MIXED, num_heads=8, num_kv_heads=4)
TILE = 5 * tiling.bytes_per_token(SMALL.dim, SMALL.ffn_dim, 8)  # Five tokens of 24, in double precision.
CUTS = [(1, None), (1, TILE), (2, None), (2, TILE), (4, TILE), (2, 0)]


def kept_by(recompute_: RecomputeConfig, config: ModelConfig = SMALL, **options: Any) -> Transformer:
    model = small_model(config, **options)
    activation_checkpoint.apply(model, recompute_)
    return model


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


class Calls(TorchDispatchMode):
    """How often attention ran, forward and backward."""

    forward = 0
    backward = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.forward += function is torch.ops.longhaul.attention.default
        self.backward += function is torch.ops.longhaul.attention_backward.default
        return function(*arguments, **(options or {}))


# ---- the same numbers


@cache
def by_autograd(config: ModelConfig = DEEP) -> tuple[Tensor, dict[str, Tensor]]:
    return gradients(small_model(config), BATCH)


@pytest.mark.parametrize(("groups", "tile"), CUTS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("config", "every"), [*((DEEP, every) for every in (1, 2, 3)), (NORMED, 2)], ids=["1", "2", "3", "normed-2"]
)
def test_losses_and_gradients_are_those_of_autograd(
    config: ModelConfig, policy: activation_checkpoint.RecomputePolicy, every: int, groups: int, tile: int | None
) -> None:
    losses, expected = by_autograd(config)
    found_losses, found = gradients(
        kept_by(RecomputeConfig(policy, blocks_per_checkpoint=every, tiling=Tiling(groups, tile)), config), BATCH
    )
    torch.testing.assert_close(found_losses, losses, rtol=1e-12, atol=1e-12)
    assert largest_difference(found, expected) < 1e-12


@pytest.mark.parametrize(
    ("config", "dtype", "tile"),
    [
        (SMALL, torch.float64, TILE),
        (TIED, torch.float32, None),
        (SMALL, torch.bfloat16, None),
        (MIXED, torch.bfloat16, TILE),
        (TIED, torch.bfloat16, TILE),
    ],
)
def test_what_is_kept_and_where_changes_no_bit(config: ModelConfig, dtype: torch.dtype, tile: int | None) -> None:
    pieces = Tiling(head_groups=2, tile_bytes=tile)
    losses, expected = gradients(kept_by(RecomputeConfig("full", tiling=pieces), config, dtype=dtype), BATCH)
    for policy, every, host, attention_on_host in itertools.product(POLICIES, (1, 2), (False, True), (False, True)):
        memory = HostActivationPool(max_inputs=2) if host else None
        kept = RecomputeConfig(policy, memory, attention_on_host, every, pieces)
        found_losses, found = gradients(kept_by(kept, config, dtype=dtype), BATCH)
        assert torch.equal(found_losses, losses)
        assert_same_bits(found, expected)


def test_without_recomputation_blocks_run_as_autograd_does_it() -> None:
    losses, expected = gradients(small_model(), BATCH)
    found_losses, found = gradients(kept_by(RecomputeConfig("none")), BATCH)
    assert torch.equal(found_losses, losses)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("tile", [None, TILE])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("config", [DEEP, NORMED], ids=["plain", "normed"])
def test_half_precision_is_as_near_to_double_as_autograd_is(config: ModelConfig, groups: int, tile: int | None) -> None:
    half = torch.bfloat16
    rounded = small_model(config, dtype=half).double()
    losses, exact = gradients(rounded, BATCH)
    plain_losses, plain = gradients(small_model(config, dtype=half), BATCH)
    found_losses, found = gradients(
        kept_by(RecomputeConfig("keep_attention", tiling=Tiling(groups, tile)), config, dtype=half), BATCH
    )
    assert (found_losses - losses).norm() <= 1.5 * (plain_losses - losses).norm()
    for name, right in exact.items():
        assert found[name].dtype == half
        assert (found[name] - right).norm() <= 1.5 * (plain[name] - right).norm(), name


def test_gradients_of_matrices_are_summed_over_tiles_in_single_precision() -> None:
    """Of 256 tiles. A sum in half precision would lose much of them."""
    half, batch = torch.bfloat16, packed([200, 56])
    _, exact = gradients(small_model(dtype=half).double(), batch)
    _, plain = gradients(kept_by(RecomputeConfig("full"), dtype=half), batch)
    _, found = gradients(kept_by(RecomputeConfig("full", tiling=Tiling(tile_bytes=0)), dtype=half), batch)
    for name, right in exact.items():
        assert (found[name] - right).norm() <= 1.25 * (plain[name] - right).norm(), name


def test_a_gradient_that_is_given_is_only_read() -> None:
    """What enters the last block's backward pass may be somebody else's, and be no memory of its own."""
    model = kept_by(RecomputeConfig("keep_attention"))
    x = torch.randn(2, 24, SMALL.dim, dtype=torch.float64, requires_grad=True)
    table = torch.ones(2, 2, 24, 1, SMALL.head_dim // 2, dtype=torch.float64)
    grad = torch.randn(2, 24, SMALL.dim, dtype=torch.float64)
    before = grad.clone()
    for given in (grad, torch.ones(1, dtype=torch.float64).expand(2, 24, SMALL.dim)):
        model.layers()[0](x, table, BATCH.boundaries).backward(given)
    assert torch.equal(grad, before)


# ---- how often


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("policy", "every", "runs"),
    [("none", 1, 1), ("full", 1, 2), ("keep_attention", 1, 1), ("keep_attention", 2, 1), ("keep_attention", 3, 1)],
)
def test_attention_runs_once_more_where_it_is_not_kept(
    policy: activation_checkpoint.RecomputePolicy, every: int, runs: int, groups: int
) -> None:
    groups = 1 if policy == "none" else groups
    model = kept_by(RecomputeConfig(policy, blocks_per_checkpoint=every, tiling=Tiling(groups)), DEEP)
    with Calls() as calls:
        model(BATCH).sum().backward()
    assert (calls.forward, calls.backward) == (runs * groups * DEEP.num_layers, groups * DEEP.num_layers)


def test_a_block_that_is_made_again_is_so_once() -> None:
    """Of five blocks the first and the fourth keep their input; those of the second, third and fifth are made again."""
    fed: list[int] = []

    def feed(x_BCE: Tensor, *weights: Tensor, activation: str) -> Tensor:
        fed.append(x_BCE.shape[1])
        return tiling.feed_forward(x_BCE, *weights, activation=activation)

    bodies = TileOps(feed_forward=feed)
    model = kept_by(
        RecomputeConfig("keep_attention", blocks_per_checkpoint=3, tiling=Tiling(ops=bodies)),
        replace(SMALL, num_layers=5),
    )
    losses = model(BATCH)
    assert len(fed) == 5
    losses.sum().backward()
    assert len(fed) == 5 + 3


@pytest.mark.parametrize(
    ("config", "groups", "tile"),
    [pytest.param(DEEP, 1, None, marks=pytest.mark.slow), pytest.param(NORMED, 2, TILE, marks=pytest.mark.slow)],
    ids=["plain", "normed"],
)
def test_compiled_bodies_give_the_same_and_are_compiled_for_all_blocks_at_once(
    config: ModelConfig, groups: int, tile: int | None
) -> None:
    warnings.simplefilter("ignore")
    losses, expected = by_autograd(config)
    compilations = []
    for layers in (3, 6):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        pieces = Tiling(groups, tile, compile_tile_ops(backend=counter))
        model = kept_by(
            RecomputeConfig("keep_attention", blocks_per_checkpoint=2, tiling=pieces),
            replace(config, num_layers=layers),
        )
        found_losses, found = gradients(model, BATCH)
        compilations.append(counter.frame_count)
        gradients(model, OTHER)
        compilations.append(counter.frame_count)
        if layers == 3:
            torch.testing.assert_close(found_losses, losses, rtol=1e-12, atol=1e-12)
            assert largest_difference(found, expected) < 1e-12
    # What differs is whether autograd knows of a tensor, and how long a tile is.
    assert len(TileOps()) <= compilations[0] <= len(TileOps()) * (2 if tile is None else 4)
    assert set(compilations) == {compilations[0]}


# ---- what is kept


class Born(TorchDispatchMode):
    """What operators allocate, as long as somebody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)}
        outputs = function(*arguments, **(options or {}))
        for out in tree_leaves(outputs):
            if isinstance(out, Tensor) and out.untyped_storage()._cdata not in given:
                self.seen[out.untyped_storage()._cdata] = weakref.ref(out.untyped_storage())
        return outputs

    def alive(self) -> int:
        """Bytes."""
        gc.collect()
        found = [storage() for storage in self.seen.values()]
        return sum({one._cdata: one.nbytes() for one in found if one is not None}.values())


def kept_bytes(kept: RecomputeConfig, *, layers: int) -> int:
    """Of so many blocks between their passes, their output left out."""
    model = kept_by(kept, replace(SMALL, num_layers=layers))
    x = torch.randn(2, 24, SMALL.dim, dtype=torch.float64).requires_grad_()
    table = torch.ones(2, 2, 24, 1, SMALL.head_dim // 2, dtype=torch.float64)
    with Born() as born:
        out = x * 1
        for block in model.layers():
            out = block(out, table, BATCH.boundaries)
    found = born.alive() - out.nbytes
    out.sum().backward()
    del out
    assert x.grad is not None
    return int(found)


INPUT = 2 * 24 * SMALL.dim * 8
OUTPUT = 2 * 24 * SMALL.num_heads * (SMALL.head_dim + 1) * 8


@pytest.mark.parametrize("tile", [None, TILE])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("policy", "every", "inputs", "outputs"),
    [
        ("full", 1, 6, 0),
        ("full", 2, 3, 0),
        ("keep_attention", 1, 6, 6),
        ("keep_attention", 2, 3, 6),
        ("keep_attention", 4, 2, 6),
        ("keep_attention", 6, 1, 6),
    ],
)
def test_nothing_of_a_block_is_kept_but_inputs_and_what_attention_gave(
    policy: activation_checkpoint.RecomputePolicy, every: int, inputs: int, outputs: int, groups: int, tile: int | None
) -> None:
    kept = RecomputeConfig(policy, blocks_per_checkpoint=every, tiling=Tiling(groups, tile))
    assert kept_bytes(kept, layers=6) == inputs * INPUT + outputs * OUTPUT


@pytest.mark.parametrize(("every", "attention_on_host", "outputs"), [(1, True, 0), (2, True, 0), (1, False, 6)])
def test_nothing_of_a_block_stays_on_the_device_that_lies_on_the_host(
    *,
    every: int,
    attention_on_host: bool,
    outputs: int,
) -> None:
    memory = HostActivationPool(max_inputs=6)
    kept = RecomputeConfig("keep_attention", memory, attention_on_host, every)
    found = kept_bytes(kept, layers=6)
    assert found - 6 // every * INPUT - 6 * OUTPUT * attention_on_host == outputs * OUTPUT, "host memory is counted too"


def test_without_gradients_nothing_is_kept() -> None:
    for every, policy in itertools.product((1, 2), POLICIES):
        memory = HostActivationPool(max_inputs=2)
        model = kept_by(RecomputeConfig(policy, memory, True, every, Tiling(2, TILE)))  # noqa: FBT003
        with torch.no_grad(), Born() as born:
            losses = model(BATCH)
        torch.testing.assert_close(losses, small_model()(BATCH).detach(), rtol=1e-12, atol=1e-12)
        assert born.alive() - losses.nbytes <= 2 * BATCH.tokens.numel() * 8
        assert memory.used_bytes.total() == 0


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_left_after_the_backward_pass(policy: activation_checkpoint.RecomputePolicy, every: int) -> None:
    for memory in (None, HostActivationPool(max_inputs=5)):
        model = kept_by(RecomputeConfig(policy, memory, memory is not None, every, Tiling(2)), DEEP)
        with Born() as born:
            model(BATCH).sum().backward()
        model.zero_grad()
        assert born.alive() - (0 if memory is None else memory.reserved_bytes) <= 512
        assert memory is None or memory.used_bytes.total() == 0


# ---- what lives in passing


class Watched(LocalAttentionCore):
    """Counts groups of queries, keys and values that are alive whenever one is at work or the next is made."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "sent", [])
        object.__setattr__(self, "found", {"start": 0, "forward": 0, "backward": 0})

    def _look(self, name: str) -> None:
        found: Any = self.found  # type: ignore[attr-defined]
        found[name] = max(found[name], sum(one() is not None for one in self.sent))  # type: ignore[attr-defined]

    def start(self, *given: Tensor) -> tuple[Tensor, ...]:
        self.sent.append(weakref.ref(given[0].untyped_storage()))  # type: ignore[attr-defined]
        self._look("start")
        return super().start(*given)

    def forward(self, started: Any, boundaries_BD: Tensor) -> tuple[Tensor, Tensor]:
        self._look("forward")
        return super().forward(started, boundaries_BD)

    def backward(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        self._look("backward")
        return super().backward(*given)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("groups", "alive"), [(1, 1), (2, 2), (4, 2)])
def test_while_a_group_is_at_work_no_other_is_there_but_the_next(
    groups: int, alive: int, policy: activation_checkpoint.RecomputePolicy
) -> None:
    model = kept_by(RecomputeConfig(policy, tiling=Tiling(groups)), DEEP)
    cores = [Watched() for _ in model.layers()]
    for block, core in zip(model.layers(), cores, strict=True):
        block.attention.core = core
    gradients(model, BATCH)
    for core in cores:
        assert core.found == dict.fromkeys(("start", "forward", "backward"), alive)  # type: ignore[attr-defined]


class Most(TorchDispatchMode):
    """The largest allocation of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        out = function(*arguments, **(options or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, Tensor):
                name = function.name()
                self.by_name[name] = max(self.by_name.get(name, 0), one.numel())
        return out


def test_nothing_of_a_feed_forward_is_larger_than_a_tile() -> None:
    config = replace(SMALL, ffn_dim=320)
    for tile, tokens in ((None, 24), (5 * tiling.bytes_per_token(SMALL.dim, 320, 8), 2)):  # Of each of two rows.
        model = kept_by(RecomputeConfig("keep_attention", tiling=Tiling(tile_bytes=tile)), config)
        with Most() as most:
            model(BATCH).sum().backward()
        assert most.by_name["aten::silu"] == 2 * tokens * 320


# ---- several batches


@cache
def summed(config: ModelConfig) -> dict[str, Tensor]:
    plain = small_model(config)
    for batch in BATCHES:
        plain(batch).sum().backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("hosted", [False, True])
def test_several_batches_may_be_between_their_passes_and_go_back_in_any_order(
    *,
    order: tuple[int, ...],
    every: int,
    hosted: bool,
) -> None:
    memory = HostActivationPool(max_inputs=9) if hosted else None
    model = kept_by(RecomputeConfig("keep_attention", memory, hosted, every, Tiling(2, TILE)), DEEP)
    losses = [model(batch) for batch in BATCHES]
    for index in order:
        losses[index].sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert largest_difference(found, summed(DEEP)) < 1e-12
    if memory is not None:
        assert memory.used_bytes.total() == 0


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("hosted", [False, True])
def test_a_second_backward_pass_is_refused(
    *, policy: activation_checkpoint.RecomputePolicy, every: int, hosted: bool
) -> None:
    model = kept_by(RecomputeConfig(policy, HostActivationPool(max_inputs=2) if hosted else None, hosted, every))
    losses = model(BATCH)
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="what a block kept for its backward pass has been taken already"):
        losses.sum().backward()
