"""Models with windows, sinks, soft caps, norms of outputs and of all heads on every mesh, against
matrix operations.

Losses and every gradient in float64. What is compared with is `tests/models/dense_model.py`, which
shares no forward code with the model.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from models.attention_core import LocalAttentionCore
from models.batch import Batch
from models.config import ModelConfig
from models.tiling import bytes_per_token, eager
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.activation_offload import HostActivationPool
from parallelisms.block_recompute import Tiling, compiler
from parallelisms.fsdp import FSDPConfig
from parallelisms.mesh.collectives import full_tensor
from parallelisms.mesh.context_plan import CPMethod
from parallelisms.mesh.mesh import Mesh
from parallelisms.mesh.parallel_dims import AXES, head_groups_problem
from parallelisms.parallelize import parallelize
from tests.models import small_models
from tests.models.dense_model import RouterLosses, dense_gradients
from tests.models.small_models import largest_difference, packed, small_model
from tests.parallelisms.context.cores import build_core
from tests.parallelisms.context.whole_batches import shard_batch
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

SIZES: dict[str, Any] = {"vocab_size": 44, "num_heads": 8, "num_kv_heads": 4}
CONFIGS: dict[str, ModelConfig] = {
    "windowed": replace(small_models.WINDOWED, **SIZES),
    "gemma": replace(small_models.GEMMA, **SIZES, window=4, sink=True),
    "granite": replace(small_models.GRANITE, **SIZES),
    "olmo": replace(small_models.OLMO, **SIZES),
    # Fewer KV heads than four tensor-parallel ranks, which replicate the norm of all key heads.
    "windowed, two KV heads": replace(small_models.WINDOWED, **SIZES | {"num_kv_heads": 2}),
    "olmo, two KV heads": replace(
        small_models.OLMO, **SIZES | {"num_kv_heads": 2}, window=5, sink=True
    ),
    "gpt-oss": replace(small_models.GPT_OSS, **SIZES),
    "deepseek": replace(small_models.DEEPSEEK, **SIZES),
    "olmoe": replace(small_models.OLMOE, **SIZES),
}
ROUTER_LOSSES = {
    "deepseek": RouterLosses(0.7, balances_sequences=True),
    "olmoe": RouterLosses(0.3, z=0.2),
}
DOCUMENTS = [9, 1, 14], [1, 2, 3, 4, 5, 6, 3]
"""Of a token, shorter than the windows, as long, and longer; they differ between the sequences."""


@dataclass(frozen=True)
class Options:
    """Recomputation: its policy, and what it is combined with."""

    policy: Any = "none"
    blocks_per_checkpoint: int = 1
    head_groups: int = 1
    is_tiled: bool = False
    offloads: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        changed = {each.name: getattr(self, each.name) for each in fields(self)}
        return " ".join(
            f"{name}={value}" for name, value in changed.items() if value != getattr(Options, name)
        )


@dataclass(frozen=True)
class Case:
    config: str
    sizes: tuple[tuple[str, int], ...]
    cp_method: CPMethod = "ring"
    sequence_parallel: bool = True
    options: Options = Options()
    ep: int = 1

    @property
    def ranks(self) -> int:
        return prod(size for _, size in self.sizes)

    @property
    def degrees(self) -> dict[str, int]:
        return dict.fromkeys(AXES, 1) | dict(self.sizes)

    @property
    def is_valid(self) -> bool:
        """Head groups divide the KV heads of a tensor-parallel rank."""
        config = CONFIGS[self.config]
        groups = self.options.head_groups
        if self.ep > 1 and not config.has_experts:
            return False
        return (
            not head_groups_problem(config, groups)
            and config.num_kv_heads % (groups * self.degrees["tp"]) == 0
        )


MESHES: list[dict[str, Any]] = [
    {"sizes": {"tp": 2}},
    {"sizes": {"tp": 2}, "sequence_parallel": False},
    {"sizes": {"dp_shard": 2}},
    *(
        {"sizes": {"cp": 2}, "cp_method": method}
        for method in ("ring", "allgather", "alltoall", "ulysses")
    ),
    {"sizes": {"tp": 4}},
    {"sizes": {"tp": 4}, "sequence_parallel": False},
    {"sizes": {"dp_shard": 2, "tp": 2}},
    *(
        {"sizes": {"cp": 4}, "cp_method": method}
        for method in ("ring", "allgather", "alltoall", "ulysses", "hybrid")
    ),
    *(
        {"sizes": {"cp": 2, "tp": 2}, "cp_method": method}
        for method in ("ring", "allgather", "ulysses")
    ),
    {"sizes": {"dp_shard": 2, "cp": 2}, "cp_method": "allgather"},
    {"sizes": {"dp_shard": 2}, "ep": 2},
    {"sizes": {"cp": 2}, "cp_method": "ring", "ep": 2},
    {"sizes": {"dp_shard": 2, "cp": 2}, "cp_method": "ulysses", "ep": 4},
    {"sizes": {"dp_shard": 2, "cp": 2}, "cp_method": "alltoall", "ep": 2},
    {"sizes": {"dp_replicate": 2, "cp": 2}, "cp_method": "allgather", "ep": 2},
    {"sizes": {"cp": 4}, "cp_method": "hybrid", "ep": 4},
    {"sizes": {"dp_shard": 2, "tp": 2}, "ep": 2},
    {"sizes": {"cp": 2, "tp": 2}, "cp_method": "allgather", "ep": 2},
    {"sizes": {"cp": 2, "tp": 2}, "sequence_parallel": False, "ep": 2},
]
RECOMPUTATION = [
    Options(),
    Options("full"),
    Options("keep_attention", is_tiled=True),
    Options("full", head_groups=2, blocks_per_checkpoint=2),
    Options("keep_attention", blocks_per_checkpoint=2, offloads=True),
    Options("keep_attention", head_groups=2, is_tiled=True, offloads=True),
]


def cases(ranks: int, options: list[Options]) -> Iterator[Case]:
    """Every configuration on each mesh of so many ranks, with each of these options that it
    has.
    """
    for mesh in MESHES:
        for config in CONFIGS:
            for each in options:
                case = Case(config, options=each, **mesh | {"sizes": (*mesh["sizes"].items(),)})
                if case.ranks == ranks and case.is_valid:
                    yield case


def whole_batch() -> Batch:
    return packed(*DOCUMENTS, vocab_size=SIZES["vocab_size"])


@cache
def reference(config: str) -> tuple[Tensor, dict[str, Tensor]]:
    return dense_gradients(
        small_model(CONFIGS[config]), whole_batch(), ROUTER_LOSSES.get(config, RouterLosses())
    )


def errors(cases: list[Case]) -> list[float]:
    return [error(case) for case in cases]


def error(case: Case) -> float:
    """The largest difference of this rank's losses, and of the gradients over all ranks, from the
    reference.
    """
    config = CONFIGS[case.config]
    degrees = case.degrees
    core = None
    ulysses = 2 if case.cp_method == "hybrid" else None
    mesh = Mesh("cpu", degrees, rank=distributed.get_rank(), ulysses_degree=ulysses, ep=case.ep)
    if degrees["cp"] > 1:
        heads = {
            "heads": config.num_heads // degrees["tp"],
            "kv_heads": max(1, config.num_kv_heads // degrees["tp"]),
        }
        tp = degrees["tp"] if case.sequence_parallel else 1
        core = build_core(
            mesh.cp_mesh, method=case.cp_method, head_dim=config.head_dim, tp=tp, **heads
        )
    options = case.options
    model = small_model(config)
    host = HostActivationPool(max_inputs=config.num_layers) if options.offloads else None
    tile_bytes = 5 * bytes_per_token(config.dim, config.ffn_dim, 8) if options.is_tiled else None
    if options.compiled:
        warnings.simplefilter("ignore")  # torch may warn about its own code.
    compile_piece = compiler(backend="aot_eager") if options.compiled else eager
    tiling = Tiling(options.head_groups, tile_bytes, compile_piece)
    parallelize(
        model,
        mesh,
        core=core or LocalAttentionCore(),
        sequence_parallel=case.sequence_parallel,
        recompute_config=RecomputeConfig(
            options.policy, host, options.offloads, options.blocks_per_checkpoint, tiling
        ),
        fsdp_config=FSDPConfig(
            param_dtype=torch.float64, reduce_dtype=torch.float64, reshard_after_forward=True
        ),
    )
    if options.compiled and options.policy == "none":
        for block in model.transformer_blocks():
            block.compile(fullgraph=not config.has_experts, backend="aot_eager")
    # Gradients are gathered in an order that torch warns of.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    batch, (expected_losses, expected) = whole_batch(), reference(case.config)
    targets = batch.num_targets()
    losses_of = ROUTER_LOSSES.get(case.config, RouterLosses())
    model.router_step.balance_loss = losses_of.balance
    model.router_step.z_loss = losses_of.z
    model.router_step.balances_sequences = losses_of.balances_sequences
    model.router_step.num_targets = targets
    own = slice(mesh.dp_rank, None, mesh.dp_degree)
    batch = replace(batch.map_tokens(lambda x_BT: x_BT[own]), boundaries=batch.boundaries[own])
    losses = model(batch if core is None else shard_batch(core, batch))
    (losses.sum() / targets).backward()
    losses = losses.detach() if core is None else core.gather(losses.detach(), batch.boundaries)
    found = {
        name: full_tensor(each.grad)
        for name, each in model.named_parameters()
        if each.grad is not None
    }
    return max(
        largest_difference(found, expected), float((losses - expected_losses[own]).abs().max())
    )


def require_equal(cases: list[Case]) -> None:
    by_rank = run_ranks(errors, cases[0].ranks, cases, timeout=500)
    wrong = {
        case: each for case, *each in zip(cases, *by_rank, strict=True) if not max(each) <= 1e-11
    }
    assert wrong == {}


REPLICATED_NORM = Case(
    "olmo, two KV heads", (("tp", 4),), options=Options("keep_attention", is_tiled=True)
)


@pytest.mark.parametrize(
    ("ranks", "every", "more"),
    [(2, 13, []), pytest.param(4, 43, [REPLICATED_NORM], marks=pytest.mark.slow)],
)
def test_models_equal_the_reference(ranks: int, every: int, more: list[Case]) -> None:
    """A sample: each mesh, each configuration and each way to recompute, several times."""
    sample = [
        case for case in cases(ranks, RECOMPUTATION) if not CONFIGS[case.config].has_experts
    ][::every]
    require_equal(sample + more)


SHARED_EXPERT = Case("deepseek", (("tp", 2),))


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_mixtures_equal_the_reference(every: int) -> None:
    """Each on meshes of two ranks: a sample, or all."""
    chosen = [RECOMPUTATION[0], RECOMPUTATION[2]]
    sample = [case for case in cases(2, chosen) if CONFIGS[case.config].has_experts][::every]
    require_equal([*sample, SHARED_EXPERT])


EIGHT: list[tuple[tuple[tuple[str, int], ...], CPMethod, int]] = [
    ((("dp_shard", 2), ("cp", 4)), "ring", 8),
    ((("dp_shard", 2), ("cp", 4)), "allgather", 8),
    ((("cp", 4), ("tp", 2)), "ulysses", 4),
    ((("dp_shard", 2), ("cp", 2), ("tp", 2)), "alltoall", 4),
    ((("dp_replicate", 2), ("cp", 2), ("tp", 2)), "ring", 2),
]


@pytest.mark.slow
def test_mixtures_equal_the_reference_on_eight_ranks() -> None:
    chosen = [
        Case(config, sizes, method, options=options, ep=ep)
        for config in CONFIGS
        if CONFIGS[config].has_experts
        for sizes, method, ep in EIGHT
        for options in (RECOMPUTATION[0], RECOMPUTATION[2])
    ]
    require_equal(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("options", RECOMPUTATION, ids=lambda options: str(options) or "plain")
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_model_equals_the_reference_on_every_mesh(
    ranks: int, options: Options, config: str
) -> None:
    if chosen := [case for case in cases(ranks, [options]) if case.config == config]:
        require_equal(chosen)


COMPILED = [
    *(Case(config, (("tp", 2),), options=Options(compiled=True)) for config in CONFIGS),
    Case("windowed", (("cp", 2),), "allgather", options=Options(compiled=True)),
    Case("gemma", (("cp", 2),), "ulysses", options=Options(compiled=True)),
    Case("windowed", (("dp_shard", 2), ("tp", 2)), options=Options("full", compiled=True)),
    Case(
        "olmo, two KV heads", (("tp", 4),), sequence_parallel=False, options=Options(compiled=True)
    ),
    Case("olmo", (("tp", 2),), options=Options("keep_attention", is_tiled=True, compiled=True)),
    Case(
        "gemma",
        (("cp", 2), ("tp", 2)),
        "ring",
        options=Options("keep_attention", head_groups=2, compiled=True),
    ),
]


# The slow ones alone would let a release of torch or a change of ours break compilation unseen.
@pytest.mark.parametrize(
    "case",
    [COMPILED[0], *(pytest.param(each, marks=pytest.mark.slow) for each in COMPILED[1:])],
    ids=lambda case: f"{case.config} {dict(case.sizes)} {case.options}",
)
def test_compiled_models_equal_the_reference(case: Case) -> None:
    require_equal([case])
