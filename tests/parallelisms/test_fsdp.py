"""FSDP and HSDP equal one process in float64: losses, gradients and weights."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, get_args

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.attention_core import LocalAttentionCore
from models.batch import Batch
from models.config import ModelConfig
from models.transformer import Transformer
from parallelisms import activation_checkpoint, fsdp
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.fsdp import FSDPConfig
from parallelisms.init_weights import initialize
from parallelisms.mesh.collectives import all_reduce, full_tensor, to_local
from parallelisms.mesh.mesh import Mesh
from parallelisms.parallelize import parallelize
from tests.models.small_models import SMALL, TIED, largest_difference, packed
from tests.parallelisms.parallel_models import Plan, build, concat_batches
from tests.ranks import run_ranks
from trainer.config.sections import OptimizerSection
from trainer.step.optimizer import Optimizer

pytestmark = pytest.mark.ranks

# Document lengths and number of targets of twelve sequences. The first four have no targets, so
# the first rank of three or four has no loss.
DOCUMENTS = [
    [20],
    [7, 13],
    [1] * 5 + [15],
    [20],
    [3, 17],
    [20],
    [19, 1],
    [10, 10],
    [20],
    [2, 18],
    [6, 6, 8],
    [20],
]
TARGETS = [0, 0, 0, 0, 18, 3, 18, 1, 19, 18, 0, 7]
NUM_STEPS = 3
OPTIMIZER = OptimizerSection(lr=1e-2, max_grad_norm=0.5)


@dataclass
class RunResult:
    """The results of a few steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def micro_batches(plan: Plan, rank: int, step: int) -> list[Batch]:
    sequence_indices = range(
        rank * len(DOCUMENTS) // plan.ranks, (rank + 1) * len(DOCUMENTS) // plan.ranks
    )
    sequences = [
        packed(DOCUMENTS[i], seed=100 * step + i, targets=TARGETS[i]) for i in sequence_indices
    ]
    return [
        concat_batches(sequences[start : start + plan.micro_batch_size])
        for start in range(0, len(sequences), plan.micro_batch_size)
    ]


def train(plan: Plan) -> RunResult:
    mesh = plan.mesh()
    model = build(plan, mesh)
    optimizer = Optimizer([model], OPTIMIZER, all_reduce=partial(all_reduce, None))
    result = RunResult()
    for step in range(NUM_STEPS):
        batches = micro_batches(plan, mesh.dp_rank, step)
        targets = all_reduce(
            mesh.dp_cp_group, sum((batch.num_targets() for batch in batches), torch.tensor(0))
        )
        loss = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            part = model(batch).sum() / targets
            part.backward()
            loss += part.detach()
        if step == 0:
            result.gradients = {
                name: full_tensor(parameter.grad).clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        norm, finite = optimizer.step(OPTIMIZER.lr)
        result.losses.append(float(all_reduce(mesh.dp_cp_group, loss)))
        result.norms.append(float(norm))
        result.finite.append(bool(finite))
    result.weights = {
        name: full_tensor(parameter.detach()).clone()
        for name, parameter in model.named_parameters()
    }
    return result


@cache
def single_process(config: ModelConfig) -> RunResult:
    (result,) = run_ranks(train, 1, Plan(config))
    return result


MESHES = [
    Plan(dp_shard=4),
    Plan(dp_replicate=2, dp_shard=2),
    Plan(dp_shard=3),
    Plan(dp_replicate=3),
]
GRID = [
    replace(
        mesh,
        config=config,
        policy=policy,
        reshard_after_forward=reshard,
        micro_batch_size=micro_batch,
    )
    for mesh in MESHES
    for config in (SMALL, TIED)
    for policy in get_args(activation_checkpoint.RecomputePolicy)
    for reshard in (True, False)
    for micro_batch in (12, 1)
]
# Pairwise coverage of the options; the whole grid takes minutes.
PAIRS = [
    (SMALL, "none", True, 12),
    (SMALL, "full", False, 1),
    (TIED, "none", False, 1),
    (TIED, "full", True, 12),
]


def name_of(plan: Plan) -> str:
    tied = "tied" if plan.config.tie_embeddings else "untied"
    kept = "resharded" if plan.reshard_after_forward else "gathered"
    return (
        f"{plan.dp_replicate}x{plan.dp_shard}-{tied}-{plan.policy}-{kept}-{plan.micro_batch_size}"
    )


# Tiles of one token; three blocks, the last of which is alone with blocks_per_checkpoint = 2.
THREE = replace(SMALL, num_layers=3)
TILED = [
    Plan(dp_shard=2, tile_bytes=0, policy="full", head_groups=2),
    Plan(dp_shard=2, tile_bytes=0, policy="keep_attention", compiled=True),
    Plan(THREE, dp_shard=2, blocks_per_checkpoint=2, policy="keep_attention", offload=True),
    Plan(
        THREE,
        dp_shard=2,
        blocks_per_checkpoint=3,
        policy="keep_attention",
        reshard_after_forward=False,
        micro_batch_size=2,
        head_groups=2,
    ),
    Plan(
        THREE,
        dp_shard=2,
        blocks_per_checkpoint=3,
        policy="keep_attention",
        micro_batch_size=3,
        tile_bytes=0,
        offload=True,
    ),
]


def together() -> list[ParameterSet]:
    """Groups of plans for one set of ranks; each compiled plan alone."""
    groups: dict[str, list[Plan]] = {}
    for number, plan in enumerate(GRID):
        choice = (plan.config, plan.policy, plan.reshard_after_forward, plan.micro_batch_size)
        # Each mesh runs half of the pairs, the next mesh the other half.
        fast = choice in PAIRS and PAIRS.index(choice) % 2 == number * len(MESHES) // len(GRID) % 2
        fast = fast and (plan.dp_replicate, plan.dp_shard) == (2, 2)
        groups.setdefault(
            f"{'' if fast else 'slow '}{plan.dp_replicate}x{plan.dp_shard}", []
        ).append(plan)
    for config, policy in itertools.product(
        (SMALL, TIED), get_args(activation_checkpoint.RecomputePolicy)
    ):
        plan = Plan(config, dp_shard=2, policy=policy, compiled=True)
        groups[f"slow {name_of(plan)}-compiled"] = [plan]
    groups["slow tiled"] = [plan for plan in TILED if not plan.compiled]
    groups["slow tiled-compiled"] = [plan for plan in TILED if plan.compiled]
    groups["single_process"] = [Plan(config, micro_batch_size=5) for config in (SMALL, TIED)]
    return [
        pytest.param(plans, id=name, marks=[pytest.mark.slow] * name.startswith("slow"))
        for name, plans in groups.items()
    ]


def train_each(plans: list[Plan]) -> list[RunResult]:
    return [train(plan) for plan in plans]


@pytest.mark.parametrize("plans", together())
def test_mesh_equals_one_process(plans: list[Plan]) -> None:
    for plan, *by_rank in zip(
        plans, *run_ranks(train_each, plans[0].ranks, plans, timeout=240), strict=True
    ):
        expected = single_process(plan.config)
        name = name_of(plan)
        assert all(expected.finite)
        assert min(expected.norms) > OPTIMIZER.max_grad_norm
        for found in by_rank:
            assert found.losses == pytest.approx(expected.losses, rel=1e-12, abs=0), name
            assert found.norms == pytest.approx(expected.norms, rel=1e-12, abs=0), name
            assert found.finite == expected.finite, name
            assert largest_difference(found.gradients, expected.gradients) < 1e-12, name
            assert largest_difference(found.weights, expected.weights) < 1e-11, name


def test_loss_is_the_mean_over_targets() -> None:
    expected = single_process(SMALL)
    reference = run_ranks(plain_losses, 1)[0]
    assert expected.losses[0] == pytest.approx(reference, rel=1e-13)
    assert len(set(expected.losses)) == NUM_STEPS


def plain_losses() -> float:
    plan = Plan()
    model = build(plan, plan.mesh())
    with torch.no_grad():
        sums = [
            model(batch).sum() for batch in micro_batches(replace(plan, micro_batch_size=1), 0, 0)
        ]
    return float(sum(sums, torch.tensor(0.0)) / sum(TARGETS))


# ---- collectives


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by operator name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts[function.name()] += 1
        return function(*arguments, **(options or {}))


def count_collectives(plans: list[Plan]) -> list[dict[str, int]]:
    found = []
    for plan in plans:
        model = build(plan, plan.mesh())
        with CollectiveCounter() as seen:
            model(packed([20])).sum().backward()
        found.append(dict(seen.counts))
    return found


class Float32Passes(TorchDispatchMode):
    """Counts divisions and copies of float32 tensors as large as weights."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        tensors = [
            x
            for x in arguments
            if isinstance(x, Tensor) and x.dtype == torch.float32 and x.numel() > 512
        ]
        if function.overloadpacket == torch.ops.aten.div:
            self.count += len(tensors)
        elif function.overloadpacket == torch.ops.aten.copy_:
            self.count += len(tensors) == 2 and tensors[0] is not tensors[1]
        return function(*arguments, **(options or {}))


def gradients_of_a_single_rank() -> tuple[int, bool]:
    """Passes over them, and whether those of two equal backward passes are twice those of one."""
    model = Transformer(SMALL).float()
    fsdp.apply(
        model,
        Plan().mesh().fsdp_mesh,
        FSDPConfig(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, reshard_after_forward=True
        ),
    )
    initialize(model, seed=0, device=torch.device("cpu"))
    seen = Float32Passes()
    found = list[list[Tensor]]()
    for _ in range(2):
        loss = model(packed([20])).sum()
        with seen:
            loss.backward()
        found.append([to_local(x.grad).clone() for x in model.parameters() if x.grad is not None])
    return seen.count, all(
        torch.equal(2 * once, twice) for once, twice in zip(*found, strict=True)
    )


def test_gradients_of_a_single_rank_are_neither_copied_nor_divided() -> None:
    assert run_ranks(gradients_of_a_single_rank, 1) == [(0, True)]


@pytest.mark.parametrize(
    "policy", [pytest.param("full", marks=pytest.mark.slow), "keep_attention"]
)
def test_tiles_and_head_groups_add_no_collectives(
    policy: activation_checkpoint.RecomputePolicy,
) -> None:
    plain, tiled = run_ranks(
        count_collectives,
        2,
        [
            Plan(dp_shard=2, policy=policy, head_groups=groups, tile_bytes=tile)
            for groups, tile in ((1, None), (2, 0))
        ],
    )[0]
    assert sum(plain.values()) >= 3 * SMALL.num_layers
    assert tiled == plain


@pytest.mark.parametrize(
    ("layers", "every"),
    [
        (4, 1),
        (5, 3),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((4, 2), (4, 4), (5, 2))),
    ],
)
@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_recomputed_blocks_are_gathered_once_more(
    layers: int, every: int, *, reshard: bool
) -> None:
    """Once in forward, once in backward, and once more for each block whose output is
    recomputed.
    """
    config = replace(SMALL, num_layers=layers)
    found, plain = run_ranks(
        count_collectives,
        2,
        [
            Plan(
                config,
                dp_shard=2,
                policy="keep_attention",
                blocks_per_checkpoint=one,
                reshard_after_forward=reshard,
            )
            for one in (every, 1)
        ],
    )[0]
    (gather,) = (name for name in plain if "allgather" in name.replace("_", ""))
    # The backward of the embedding needs no weights.
    ends = 3 if reshard else 2
    assert plain[gather] in range(layers * (1 + reshard), layers * (1 + reshard) + ends + 1)
    again = layers - -(-layers // every)
    assert found[gather] - plain[gather] == again * reshard
    assert {name: count for name, count in found.items() if name != gather} == {
        name: count for name, count in plain.items() if name != gather
    }


# ---- precision


@dataclass
class Dtypes:
    stored: set[torch.dtype] = field(default_factory=set)
    gradients: set[torch.dtype] = field(default_factory=set)
    weights: set[torch.dtype] = field(default_factory=set)
    stream: set[torch.dtype] = field(default_factory=set)
    tables: list[Tensor] = field(default_factory=list)
    losses: Tensor | None = None


def half_precision(ranks: int) -> Dtypes:
    plan = Plan(dp_shard=ranks)
    model = mixed(plan, plan.mesh(), torch.bfloat16)
    dtypes = Dtypes()

    def record_dtypes(block: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        x_BSE, table, _ = arguments
        dtypes.stream.add(x_BSE.dtype)
        dtypes.tables.append(table)
        dtypes.weights |= {parameter.dtype for parameter in block.parameters()}

    for block in model.transformer_blocks():
        # Inside the block, after FSDP has gathered and cast its weights.
        block.attention.register_forward_pre_hook(record_dtypes)
        block.attention.register_forward_hook(lambda _, __, out: dtypes.stream.add(out.dtype))
    batch = packed([300], seed=7)
    dtypes.losses = model(batch)
    (dtypes.losses.sum() / 299).backward()
    dtypes.losses = dtypes.losses.detach()
    dtypes.stored = {parameter.dtype for parameter in model.parameters()}
    dtypes.gradients = {
        parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None
    }
    return dtypes


def mixed(plan: Plan, mesh: Mesh, compute: torch.dtype) -> Transformer:
    with torch.device("meta"):
        model = Transformer(plan.config)
    fsdp_config = FSDPConfig(
        param_dtype=compute,
        reduce_dtype=torch.float32,
        reshard_after_forward=plan.reshard_after_forward,
    )
    fsdp.apply(model, mesh.fsdp_mesh, fsdp_config)
    initialize(model, seed=0, device=torch.device("cpu"))
    return model


def single_losses() -> Tensor:
    plan = Plan()
    losses: Tensor = mixed(plan, plan.mesh(), torch.float32)(packed([300], seed=7)).detach()
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_compute_in_bfloat16_and_store_float32(ranks: int) -> None:
    (exact,) = run_ranks(single_losses, 1)
    for dtypes in run_ranks(half_precision, ranks, ranks):
        assert dtypes.stored == dtypes.gradients == {torch.float32}
        assert dtypes.weights == dtypes.stream == {torch.bfloat16}
        assert dtypes.losses is not None
        assert dtypes.losses.dtype == torch.float32
        torch.testing.assert_close(dtypes.losses, exact, rtol=0, atol=0.02)
        for table in dtypes.tables:
            assert table.dtype == torch.float32
            assert not torch.equal(table, table.bfloat16().float())


# ---- resharding


def sharded_after_forward(plan: Plan) -> dict[str, bool]:
    model = build(plan, plan.mesh())
    model(packed([20]))
    return {name: isinstance(parameter, DTensor) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_loss_head_stays_gathered_until_its_backward(config: ModelConfig, reshard: bool) -> None:  # noqa: FBT001
    for sharded in run_ranks(
        sharded_after_forward, 2, Plan(config, dp_shard=2, reshard_after_forward=reshard)
    ):
        last = {name for name in sharded if name.startswith("head.")}
        if config.tie_embeddings:
            last.add("embed.weight")
        assert last
        assert {name for name, is_sharded in sharded.items() if not is_sharded} == (
            last if reshard else {*sharded}
        )


def module_types(compute: torch.dtype) -> list[str]:
    with torch.device("meta"):
        model = Transformer(SMALL)
    parallelize(
        model,
        Plan().mesh(),
        core=LocalAttentionCore(),
        recompute_config=RecomputeConfig(),
        fsdp_config=FSDPConfig(
            param_dtype=compute, reduce_dtype=torch.float32, reshard_after_forward=True
        ),
    )
    return [type(module).__name__ for module in model.modules()]


def test_one_process_uses_fsdp_only_for_mixed_precision() -> None:
    (plain,), (cast,) = (
        run_ranks(module_types, 1, torch.float32),
        run_ranks(module_types, 1, torch.bfloat16),
    )
    assert not [name for name in plain if name.startswith("FSDP")]
    wrapped = {
        "FSDPTransformer": 1,
        "FSDPEmbedding": 1,
        "FSDPTransformerBlock": SMALL.num_layers,
        "FSDPLossHead": 1,
    }
    assert {name: cast.count(name) for name in cast if name.startswith("FSDP")} == wrapped
