"""Recomputation changes what is saved and where, and the results only by rounding."""

from __future__ import annotations

import gc
import itertools
import re
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import tiling
from models.attention import Attention
from models.attention_core import LocalAttentionCore, QKVGrads
from models.config import ModelConfig
from models.norm import RMSNorm
from models.sublayer import Sublayer
from models.transformer import Transformer
from parallelisms import activation_checkpoint
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.activation_offload import HostActivationPool
from parallelisms.block_recompute import Tiling, compiler
from tests.models import small_models
from tests.models.small_models import (
    MIXED,
    SMALL,
    TIED,
    feed_forward_tokens,
    gradients,
    largest_difference,
    packed,
    small_model,
)

BATCH = packed([9, 1, 14], [24])
DOCUMENTS = 4
OTHER = packed([24], [20, 4], seed=3)
BATCHES = [BATCH, OTHER, packed([12, 12], [1, 23], seed=5)]
POLICIES: tuple[activation_checkpoint.RecomputePolicy, ...] = ("full", "keep_attention")
# Three blocks: with blocks_per_checkpoint = 2 the last is alone. Four KV heads: a head group may
# have several.
DEEP = replace(SMALL, num_layers=3, num_heads=8, num_kv_heads=4)
NORMED = replace(MIXED, num_heads=8, num_kv_heads=4)
BIASED = replace(DEEP, qkv_bias=True)
WINDOWED, GEMMA, GRANITE, OLMO = (
    replace(each, num_heads=8, num_kv_heads=4)
    for each in (
        small_models.WINDOWED,
        small_models.GEMMA,
        small_models.GRANITE,
        small_models.OLMO,
    )
)
# Five tokens of 24, in double precision.
TILE = 5 * tiling.bytes_per_token(SMALL.dim, SMALL.ffn_dim, 8)
TILINGS = [(1, None), (1, TILE), (2, None), (2, TILE), (4, TILE), (2, 0)]


def model_with(
    recompute_config: RecomputeConfig, config: ModelConfig = SMALL, **options: Any
) -> Transformer:
    model = small_model(config, **options)
    activation_checkpoint.apply(model, recompute_config)
    return model


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


class Calls(TorchDispatchMode):
    """Counts how often attention runs in BATCH, whose documents take a kernel call each."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = Counter[Any]()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        self.kernels[function] += 1
        return function(*arguments, **(options or {}))

    @property
    def forward(self) -> float:
        return (
            self.kernels[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
            / DOCUMENTS
        )

    @property
    def backward(self) -> float:
        return (
            self.kernels[
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            ]
            / DOCUMENTS
        )


# ---- equal results


@cache
def autograd_result(config: ModelConfig = DEEP) -> tuple[Tensor, dict[str, Tensor]]:
    return gradients(small_model(config), BATCH)


CONFIGS = {
    "plain": DEEP,
    "normed": NORMED,
    "biased": BIASED,
    "windowed": WINDOWED,
    "gemma": GEMMA,
    "granite": GRANITE,
    "olmo": OLMO,
}


def recomputed() -> Iterator[Any]:
    """Every policy and tiling; slow, but for one number of blocks and, unless the blocks are
    plain, one tiling.
    """
    for name, policy, tiles in itertools.product(CONFIGS, POLICIES, TILINGS):
        for every in (1, 2, 3) if name == "plain" else (2,):
            is_quick = every == 2 and (name == "plain" or tiles == TILINGS[3])
            marks = [] if is_quick else [pytest.mark.slow]
            yield pytest.param(
                CONFIGS[name],
                policy,
                every,
                *tiles,
                marks=marks,
                id=f"{name}-{every}-{policy}-{tiles}",
            )


@pytest.mark.parametrize(
    ("config", "policy", "blocks_per_checkpoint", "head_groups", "tile_bytes"), [*recomputed()]
)
def test_losses_and_gradients_equal_autograd(
    config: ModelConfig,
    policy: activation_checkpoint.RecomputePolicy,
    blocks_per_checkpoint: int,
    head_groups: int,
    tile_bytes: int | None,
) -> None:
    if config.full_qk_norm and head_groups > 1:
        with pytest.raises(
            ValueError,
            match=rf"memory\.head_groups = {head_groups} must be 1: queries and keys are",
        ):
            model_with(RecomputeConfig(policy, tiling=Tiling(head_groups)), config)
        return
    losses, expected = autograd_result(config)
    found_losses, found = gradients(
        model_with(
            RecomputeConfig(
                policy,
                blocks_per_checkpoint=blocks_per_checkpoint,
                tiling=Tiling(head_groups, tile_bytes),
            ),
            config,
        ),
        BATCH,
    )
    torch.testing.assert_close(found_losses, losses, rtol=1e-12, atol=1e-12)
    assert largest_difference(found, expected) < 1e-12


def with_post_norms(config: ModelConfig, placement: str) -> Transformer:
    """A model whose sublayers norm their outputs ("post"), or inputs and outputs ("sandwich")."""
    model = small_model(config)
    generator = torch.Generator().manual_seed(1)
    for block in model.transformer_blocks():
        sublayers = []
        for index, sublayer in enumerate(block.sublayers):
            post_norm = RMSNorm(config.dim, eps=config.norm_eps).double()
            post_norm.weight.data = (
                1 + torch.randn(config.dim, generator=generator, dtype=torch.float64) / 5
            )
            block.add_module(f"post_norm_{index}", post_norm)
            norm = None if placement == "post" else sublayer.norm
            sublayers.append(Sublayer(sublayer.module, norm=norm, post_norm=post_norm))
        if placement == "post":
            del block.attention_norm, block.ffn_norm
        block.sublayers = (sublayers[0], sublayers[1])
    return model


@pytest.mark.parametrize(("head_groups", "tile_bytes"), [(1, None), (2, TILE)])
@pytest.mark.parametrize("placement", ["post", "sandwich"])
def test_norms_of_outputs_have_the_gradients_of_autograd(
    placement: str, head_groups: int, tile_bytes: int | None
) -> None:
    losses, expected = gradients(with_post_norms(NORMED, placement), BATCH)
    model = with_post_norms(NORMED, placement)
    tiling_config = Tiling(head_groups, tile_bytes)
    activation_checkpoint.apply(
        model, RecomputeConfig("keep_attention", blocks_per_checkpoint=2, tiling=tiling_config)
    )
    found_losses, found = gradients(model, BATCH)
    torch.testing.assert_close(found_losses, losses, rtol=1e-12, atol=1e-12)
    assert largest_difference(found, expected) < 1e-12


class Shift(nn.Module):
    """A sublayer that is not given in pieces: each token gets something of the one before it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, dim, dtype=torch.float64))

    def forward(self, x_BSE: Tensor, *_: object) -> Tensor:
        return (x_BSE.roll(1, dims=1) * self.scale).sin()


def with_another_kind(config: ModelConfig) -> Transformer:
    """The second of three blocks has another sublayer in place of attention."""
    model = small_model(config)
    block = model.transformer_blocks()[1]
    shift = Shift(config.dim)
    block.add_module("shift", shift)
    block.sublayers = (
        Sublayer(cast(Any, shift), norm=block.sublayers[0].norm),
        block.sublayers[1],
    )
    del block.attention
    return model


@pytest.mark.parametrize("blocks_per_checkpoint", [1, 2])
def test_a_block_of_another_kind_is_checkpointed_whole(blocks_per_checkpoint: int) -> None:
    losses, expected = gradients(with_another_kind(DEEP), BATCH)
    model = with_another_kind(DEEP)
    inputs = list[Tensor]()
    activation_checkpoint.apply(
        model,
        RecomputeConfig(
            "keep_attention", blocks_per_checkpoint=blocks_per_checkpoint, tiling=Tiling(2, TILE)
        ),
    )
    shift = model.transformer_blocks()[1].get_submodule("shift")
    shift.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    found_losses, found = gradients(model, BATCH)
    torch.testing.assert_close(found_losses, losses, rtol=1e-12, atol=1e-12)
    assert found.keys() == expected.keys()
    assert largest_difference(found, expected) < 1e-12
    assert len(inputs) == 2, "once forward, once in the backward pass"


@pytest.mark.parametrize(
    ("config", "dtype", "tile_bytes"),
    [
        (SMALL, torch.float64, TILE),
        pytest.param(TIED, torch.float32, None, marks=pytest.mark.slow),
        (SMALL, torch.bfloat16, None),
        pytest.param(MIXED, torch.bfloat16, TILE, marks=pytest.mark.slow),
        pytest.param(TIED, torch.bfloat16, TILE, marks=pytest.mark.slow),
    ],
)
def test_results_are_bitwise_equal_for_every_policy_and_placement(
    config: ModelConfig, dtype: torch.dtype, tile_bytes: int | None
) -> None:
    tiling_config = Tiling(head_groups=2, tile_bytes=tile_bytes)
    losses, expected = gradients(
        model_with(RecomputeConfig("full", tiling=tiling_config), config, dtype=dtype), BATCH
    )
    for policy, blocks_per_checkpoint, host, offload_attention in itertools.product(
        POLICIES, (1, 2), (False, True), (False, True)
    ):
        host_pool = HostActivationPool(max_inputs=2) if host else None
        recompute_config = RecomputeConfig(
            policy, host_pool, offload_attention, blocks_per_checkpoint, tiling_config
        )
        found_losses, found = gradients(model_with(recompute_config, config, dtype=dtype), BATCH)
        assert torch.equal(found_losses, losses)
        assert_same_bits(found, expected)


def test_policy_none_leaves_blocks_to_autograd() -> None:
    losses, expected = gradients(small_model(), BATCH)
    found_losses, found = gradients(model_with(RecomputeConfig("none")), BATCH)
    assert torch.equal(found_losses, losses)
    assert_same_bits(found, expected)


@pytest.mark.parametrize(
    ("head_groups", "tile_bytes"),
    [
        (2, TILE),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, None), (1, TILE), (2, None))
        ),
    ],
)
@pytest.mark.parametrize("config", [DEEP, NORMED, BIASED], ids=["plain", "normed", "biased"])
def test_bfloat16_error_is_comparable_to_autograd(
    config: ModelConfig, head_groups: int, tile_bytes: int | None
) -> None:
    half = torch.bfloat16
    rounded = small_model(config, dtype=half).double()
    plain = small_model(config, dtype=half)
    recomputed = model_with(
        RecomputeConfig("keep_attention", tiling=Tiling(head_groups, tile_bytes)),
        config,
        dtype=half,
    )
    # Over several batches and blocks: the roundings of a few numbers are luck.
    squares = [defaultdict[str, float](float), defaultdict[str, float](float)]
    for batch in BATCHES:
        losses, exact = gradients(rounded, batch)
        for model, total in zip((plain, recomputed), squares, strict=True):
            found_losses, found = gradients(model, batch)
            total["losses"] += float((found_losses - losses).square().sum())
            for name, right in exact.items():
                assert found[name].dtype == half
                total[re.sub(r"\d+", "*", name)] += float((found[name] - right).square().sum())
    for name, plain_square in squares[0].items():
        assert squares[1][name] <= 1.5**2 * plain_square, name


def test_backward_does_not_overwrite_its_output_gradient() -> None:
    """The gradient of the last block may be shared, or an expanded view."""
    model = model_with(RecomputeConfig("keep_attention"))
    x = torch.randn(2, 24, SMALL.dim, dtype=torch.float64, requires_grad=True)
    table = torch.ones(2, 2, 24, 1, SMALL.head_dim // 2, dtype=torch.float64)
    grad = torch.randn(2, 24, SMALL.dim, dtype=torch.float64)
    before = grad.clone()
    for given in (grad, torch.ones(1, dtype=torch.float64).expand(2, 24, SMALL.dim)):
        model.transformer_blocks()[0](x, table, BATCH.boundaries).backward(given)
    assert torch.equal(grad, before)


# ---- number of runs


@pytest.mark.parametrize("head_groups", [1, 2])
@pytest.mark.parametrize(
    ("policy", "blocks_per_checkpoint", "runs"),
    [
        ("none", 1, 1),
        ("full", 1, 2),
        ("keep_attention", 1, 1),
        ("keep_attention", 2, 1),
        ("keep_attention", 3, 1),
    ],
)
def test_attention_is_recomputed_only_if_not_saved(
    policy: activation_checkpoint.RecomputePolicy,
    blocks_per_checkpoint: int,
    runs: int,
    head_groups: int,
) -> None:
    head_groups = 1 if policy == "none" else head_groups
    model = model_with(
        RecomputeConfig(
            policy, blocks_per_checkpoint=blocks_per_checkpoint, tiling=Tiling(head_groups)
        ),
        DEEP,
    )
    with Calls() as calls:
        model(BATCH).sum().backward()
    assert (calls.forward, calls.backward) == (
        runs * head_groups * DEEP.num_layers,
        head_groups * DEEP.num_layers,
    )


def test_each_block_is_recomputed_at_most_once() -> None:
    """Of five blocks the first and the fourth save their input; the others recompute theirs."""
    tokens: list[int] = []
    model = model_with(
        RecomputeConfig(
            "keep_attention",
            blocks_per_checkpoint=3,
            tiling=Tiling(compile=feed_forward_tokens(tokens)),
        ),
        replace(SMALL, num_layers=5),
    )
    losses = model(BATCH)
    assert len(tokens) == 5
    losses.sum().backward()
    # The backward passes need the gate of every block, and the output of three.
    assert len(tokens) == 5 + 3 + 5


@pytest.mark.parametrize(
    ("config", "head_groups", "tile_bytes"),
    [
        pytest.param(DEEP, 1, None, marks=pytest.mark.slow),
        pytest.param(NORMED, 2, TILE, marks=pytest.mark.slow),
    ],
    ids=["plain", "normed"],
)
def test_tile_operations_are_compiled_once_for_all_blocks(
    config: ModelConfig, head_groups: int, tile_bytes: int | None
) -> None:
    warnings.simplefilter("ignore")
    losses, expected = autograd_result(config)
    compilations = []
    for layers in (3, 6):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        tiling_config = Tiling(head_groups, tile_bytes, compiler(backend=counter))
        model = model_with(
            RecomputeConfig("keep_attention", blocks_per_checkpoint=2, tiling=tiling_config),
            replace(config, num_layers=layers),
        )
        found_losses, found = gradients(model, BATCH)
        compilations.append(counter.frame_count)
        gradients(model, OTHER)
        compilations.append(counter.frame_count)
        if layers == 3:
            torch.testing.assert_close(found_losses, losses, rtol=1e-12, atol=1e-12)
            assert largest_difference(found, expected) < 1e-12
    # Three pieces, with and without a graph, and again for other tile lengths.
    assert 6 <= compilations[0] <= 10
    assert set(compilations) == {compilations[0]}


# ---- saved activations


class LiveAllocations(TorchDispatchMode):
    """Tracks the live allocations of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        given = {
            x.untyped_storage()._cdata
            for x in tree_leaves((arguments, options))
            if isinstance(x, Tensor)
        }
        outputs = function(*arguments, **(options or {}))
        for out in tree_leaves(outputs):
            if isinstance(out, Tensor) and out.untyped_storage()._cdata not in given:
                self.seen[out.untyped_storage()._cdata] = weakref.ref(out.untyped_storage())
        return outputs

    def live_bytes(self) -> int:
        """Bytes."""
        gc.collect()
        found = [storage() for storage in self.seen.values()]
        return sum({one._cdata: one.nbytes() for one in found if one is not None}.values())


def saved_bytes(recompute_config: RecomputeConfig, *, layers: int) -> int:
    """Bytes saved by `layers` blocks between forward and backward, without their output."""
    model = model_with(recompute_config, replace(SMALL, num_layers=layers))
    x = torch.randn(2, 24, SMALL.dim, dtype=torch.float64).requires_grad_()
    table = torch.ones(2, 2, 24, 1, SMALL.head_dim // 2, dtype=torch.float64)
    with LiveAllocations() as live:
        out = x * 1
        for block in model.transformer_blocks():
            out = block(out, table, BATCH.boundaries)
    found = live.live_bytes() - out.nbytes
    out.sum().backward()
    del out
    assert x.grad is not None
    return int(found)


INPUT = 2 * 24 * SMALL.dim * 8
OUTPUT = 2 * 24 * SMALL.num_heads * (SMALL.head_dim + 1) * 8


@pytest.mark.parametrize(("head_groups", "tile_bytes"), [(1, None), (2, TILE)])
@pytest.mark.parametrize(
    ("policy", "blocks_per_checkpoint", "inputs", "outputs"),
    [
        pytest.param("full", 1, 6, 0, marks=pytest.mark.slow),
        ("full", 2, 3, 0),
        pytest.param("keep_attention", 1, 6, 6, marks=pytest.mark.slow),
        pytest.param("keep_attention", 2, 3, 6, marks=pytest.mark.slow),
        ("keep_attention", 4, 2, 6),
        pytest.param("keep_attention", 6, 1, 6, marks=pytest.mark.slow),
    ],
)
def test_blocks_save_only_inputs_and_attention_outputs(
    policy: activation_checkpoint.RecomputePolicy,
    blocks_per_checkpoint: int,
    inputs: int,
    outputs: int,
    head_groups: int,
    tile_bytes: int | None,
) -> None:
    recompute_config = RecomputeConfig(
        policy, blocks_per_checkpoint=blocks_per_checkpoint, tiling=Tiling(head_groups, tile_bytes)
    )
    assert saved_bytes(recompute_config, layers=6) == inputs * INPUT + outputs * OUTPUT


@pytest.mark.parametrize(
    ("blocks_per_checkpoint", "offload_attention", "outputs"),
    [(1, True, 0), (2, True, 0), (1, False, 6)],
)
def test_offloaded_activations_leave_the_device(
    *,
    blocks_per_checkpoint: int,
    offload_attention: bool,
    outputs: int,
) -> None:
    host_pool = HostActivationPool(max_inputs=6)
    recompute_config = RecomputeConfig(
        "keep_attention", host_pool, offload_attention, blocks_per_checkpoint
    )
    found = saved_bytes(recompute_config, layers=6)
    assert (
        found - 6 // blocks_per_checkpoint * INPUT - 6 * OUTPUT * offload_attention
        == outputs * OUTPUT
    ), "host memory is counted too"


def test_nothing_is_saved_without_gradients() -> None:
    for blocks_per_checkpoint, policy in itertools.product((1, 2), POLICIES):
        host_pool = HostActivationPool(max_inputs=2)
        model = model_with(
            RecomputeConfig(policy, host_pool, True, blocks_per_checkpoint, Tiling(2, TILE))  # noqa: FBT003
        )
        with torch.no_grad(), LiveAllocations() as live:
            losses = model(BATCH)
        torch.testing.assert_close(losses, small_model()(BATCH).detach(), rtol=1e-12, atol=1e-12)
        assert live.live_bytes() - losses.nbytes <= 2 * BATCH.tokens.numel() * 8
        assert host_pool.used_bytes.total() == 0


@pytest.mark.parametrize("blocks_per_checkpoint", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_backward_frees_all_saved_activations(
    policy: activation_checkpoint.RecomputePolicy, blocks_per_checkpoint: int
) -> None:
    for host_pool in (None, HostActivationPool(max_inputs=5)):
        model = model_with(
            RecomputeConfig(
                policy, host_pool, host_pool is not None, blocks_per_checkpoint, Tiling(2)
            ),
            DEEP,
        )
        with LiveAllocations() as live:
            model(BATCH).sum().backward()
        model.zero_grad()
        assert live.live_bytes() - (0 if host_pool is None else host_pool.reserved_bytes) <= 512
        assert host_pool is None or host_pool.used_bytes.total() == 0


# ---- transient activations


class CountingCore(LocalAttentionCore):
    """Counts the live head groups of Q, K and V whenever one starts or runs."""

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

    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        self._look("forward")
        return super().forward(*given)

    def backward(self, *given: Any) -> QKVGrads:
        self._look("backward")
        return super().backward(*given)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("head_groups", "max_live"), [(1, 1), (2, 2), (4, 2)])
def test_at_most_two_head_groups_are_live(
    head_groups: int, max_live: int, policy: activation_checkpoint.RecomputePolicy
) -> None:
    model = model_with(RecomputeConfig(policy, tiling=Tiling(head_groups)), DEEP)
    cores = [CountingCore() for _ in model.transformer_blocks()]
    for block, core in zip(model.transformer_blocks(), cores, strict=True):
        cast(Attention, block.attention).core = core
    gradients(model, BATCH)
    for core in cores:
        assert core.found == dict.fromkeys(("start", "forward", "backward"), max_live)  # type: ignore[attr-defined]


class LargestAllocation(TorchDispatchMode):
    """The largest allocation of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        out = function(*arguments, **(options or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, Tensor):
                name = function.name()
                self.by_name[name] = max(self.by_name.get(name, 0), one.numel())
        return out


def test_feed_forward_allocates_at_most_a_tile() -> None:
    config = replace(SMALL, ffn_dim=320)
    for tile_bytes, tokens in (
        (None, 24),
        (5 * tiling.bytes_per_token(SMALL.dim, 320, 8), 2),
    ):  # For each of two sequences.
        model = model_with(
            RecomputeConfig("keep_attention", tiling=Tiling(tile_bytes=tile_bytes)), config
        )
        with LargestAllocation() as largest:
            model(BATCH).sum().backward()
        assert largest.by_name["aten::silu"] == 2 * tokens * 320


# ---- several batches


@cache
def gradient_sums(config: ModelConfig) -> dict[str, Tensor]:
    plain = small_model(config)
    for batch in BATCHES:
        plain(batch).sum().backward()
    return {
        name: parameter.grad
        for name, parameter in plain.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize(
    "order",
    [
        (1, 2, 0),
        *(pytest.param(order, marks=pytest.mark.slow) for order in ((0, 2, 1), (2, 1, 0))),
    ],
    ids=str,
)
@pytest.mark.parametrize("blocks_per_checkpoint", [1, 2])
@pytest.mark.parametrize("offload", [False, True])
def test_pending_batches_may_run_backward_in_any_order(
    *,
    order: tuple[int, ...],
    blocks_per_checkpoint: int,
    offload: bool,
) -> None:
    host_pool = HostActivationPool(max_inputs=9) if offload else None
    model = model_with(
        RecomputeConfig(
            "keep_attention", host_pool, offload, blocks_per_checkpoint, Tiling(2, TILE)
        ),
        DEEP,
    )
    losses = [model(batch) for batch in BATCHES]
    for index in order:
        losses[index].sum().backward()
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert largest_difference(found, gradient_sums(DEEP)) < 1e-12
    if host_pool is not None:
        assert host_pool.used_bytes.total() == 0


@pytest.mark.parametrize("blocks_per_checkpoint", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("offload", [False, True])
def test_second_backward_is_refused(
    *, policy: activation_checkpoint.RecomputePolicy, blocks_per_checkpoint: int, offload: bool
) -> None:
    model = model_with(
        RecomputeConfig(
            policy,
            HostActivationPool(max_inputs=2) if offload else None,
            offload,
            blocks_per_checkpoint,
        )
    )
    losses = model(BATCH)
    losses.sum().backward(retain_graph=True)
    with pytest.raises(
        RuntimeError,
        match="the saved activations of this block were already used by a backward pass",
    ):
        losses.sum().backward()
