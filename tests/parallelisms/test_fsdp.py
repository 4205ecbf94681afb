"""Sharded training is training on one process: losses, gradients and weights, in double precision."""

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

from models.batch import Batch
from models.config import ModelConfig
from models.transformer import Transformer
from parallelisms import activation_checkpoint, fsdp
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.collectives import all_reduce, full_tensor
from parallelisms.init_weights import initialize
from parallelisms.mesh import Mesh
from parallelisms.parallelize import parallelize
from tests.models.small_models import SMALL, TIED, largest_difference, packed
from tests.parallelisms.parallel_models import Plan, build, joined
from tests.ranks import run_ranks
from trainer.config.job_config import OptimizerSection
from trainer.optim.optimizer import Optimizer

pytestmark = pytest.mark.ranks

# Documents of twelve rows, and how many of a row's tokens are targets. The first four have none, so that the first of
# three ranks and the first of four have nothing to learn from.
ROWS = [[20], [7, 13], [1] * 5 + [15], [20], [3, 17], [20], [19, 1], [10, 10], [20], [2, 18], [6, 6, 8], [20]]
TARGETS = [0, 0, 0, 0, 18, 3, 18, 1, 19, 18, 0, 7]
UPDATES = 5
OPTIMIZER = OptimizerSection(lr=1e-2, max_grad_norm=0.5)


@dataclass
class Course:
    """What a run of a few updates came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def micro_batches(plan: Plan, rank: int, update: int) -> list[Batch]:
    mine = range(rank * len(ROWS) // plan.ranks, (rank + 1) * len(ROWS) // plan.ranks)
    rows = [packed(ROWS[row], seed=100 * update + row, targets=TARGETS[row]) for row in mine]
    return [joined(rows[start : start + plan.micro_batch]) for start in range(0, len(rows), plan.micro_batch)]


def train(plan: Plan) -> Course:
    mesh = plan.mesh()
    model = build(plan, mesh)
    optimizer = Optimizer([model], OPTIMIZER, all_reduce=partial(all_reduce, None))
    course = Course()
    for update in range(UPDATES):
        batches = micro_batches(plan, mesh.dp_rank, update)
        targets = all_reduce(mesh.dp_cp_group, sum((batch.num_targets() for batch in batches), torch.tensor(0)))
        loss = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            part = model(batch).sum() / targets
            part.backward()
            loss += part.detach()
        if update == 0:
            course.gradients = {
                name: full_tensor(parameter.grad).clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        norm, finite = optimizer.step(OPTIMIZER.lr)
        course.losses.append(float(all_reduce(mesh.dp_cp_group, loss)))
        course.norms.append(float(norm))
        course.finite.append(bool(finite))
    course.weights = {name: full_tensor(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    return course


@cache
def alone(config: ModelConfig) -> Course:
    (course,) = run_ranks(train, 1, Plan(config))
    return course


MESHES = [Plan(dp_shard=4), Plan(dp_replicate=2, dp_shard=2), Plan(dp_shard=3), Plan(dp_replicate=3)]
GRID = [
    replace(mesh, config=config, policy=policy, reshard=reshard, micro_batch=micro_batch)
    for mesh in MESHES
    for config in (SMALL, TIED)
    for policy in get_args(activation_checkpoint.RecomputePolicy)
    for reshard in (True, False)
    for micro_batch in (12, 1)
]
# Any two options meet in every pair of their values; the whole grid takes minutes.
PAIRS = [(SMALL, "none", True, 12), (SMALL, "full", False, 1), (TIED, "none", False, 1), (TIED, "full", True, 12)]


def name_of(plan: Plan) -> str:
    tied = "tied" if plan.config.tie_embeddings else "untied"
    kept = "resharded" if plan.reshard else "kept"
    return f"{plan.dp_replicate}x{plan.dp_shard}-{tied}-{plan.policy}-{kept}-{plan.micro_batch}"


def cases() -> list[ParameterSet]:
    found = []
    for number, plan in enumerate(GRID):
        choice = (plan.config, plan.policy, plan.reshard, plan.micro_batch)
        # Each mesh has half of the pairs, its neighbour the other half.
        fast = choice in PAIRS and PAIRS.index(choice) % 2 == number * len(MESHES) // len(GRID) % 2
        found.append(pytest.param(plan, id=name_of(plan), marks=() if fast else pytest.mark.slow))
    for config, policy in itertools.product((SMALL, TIED), get_args(activation_checkpoint.RecomputePolicy)):
        plan = Plan(config, dp_shard=2, policy=policy, compiled=True)
        fast = (config, policy) == (TIED, "full")
        found.append(pytest.param(plan, id=f"{name_of(plan)}-compiled", marks=() if fast else pytest.mark.slow))
    # A token in each tile; three blocks, of which the last is alone where two share an input.
    three = replace(SMALL, num_layers=3)
    tiled = [
        Plan(dp_shard=2, tile=0, policy="full", groups=2),
        Plan(dp_shard=2, tile=0, policy="keep_attention", compiled=True),
        Plan(three, dp_shard=2, every=2, policy="keep_attention", on_host=True),
        Plan(three, dp_shard=2, every=3, policy="keep_attention", reshard=False, micro_batch=1, groups=2),
        Plan(three, dp_shard=2, every=3, policy="keep_attention", micro_batch=1, tile=0, on_host=True),
    ]
    return [
        *found,
        *(pytest.param(plan, id=f"{name_of(plan)}-{plan.every}-in-pieces") for plan in tiled),
        *(pytest.param(Plan(config, micro_batch=5), id=f"alone-{config.tie_embeddings}") for config in (SMALL, TIED)),
    ]


@pytest.mark.parametrize("plan", cases())
def test_a_mesh_computes_what_one_process_computes(plan: Plan) -> None:
    expected = alone(plan.config)
    assert all(expected.finite)
    assert min(expected.norms) > OPTIMIZER.max_grad_norm
    for found in run_ranks(train, plan.ranks, plan):
        assert found.losses == pytest.approx(expected.losses, rel=1e-12, abs=0)
        assert found.norms == pytest.approx(expected.norms, rel=1e-12, abs=0)
        assert found.finite == expected.finite
        assert largest_difference(found.gradients, expected.gradients) < 1e-12
        assert largest_difference(found.weights, expected.weights) < 1e-11


def test_one_process_computes_the_mean_over_targets() -> None:
    expected = alone(SMALL)
    reference = run_ranks(plain_losses, 1)[0]
    assert expected.losses[0] == pytest.approx(reference, rel=1e-13)
    assert len(set(expected.losses)) == UPDATES


def plain_losses() -> float:
    plan = Plan()
    model = build(plan, plan.mesh())
    with torch.no_grad():
        sums = [model(batch).sum() for batch in micro_batches(replace(plan, micro_batch=1), 0, 0)]
    return float(sum(sums, torch.tensor(0.0)) / sum(TARGETS))


# ---- exchanges


class Exchanges(TorchDispatchMode):
    """What ranks exchange, by the operator's name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts[function.name()] += 1
        return function(*arguments, **(options or {}))


def exchanges(plan: Plan) -> dict[str, int]:
    model = build(plan, plan.mesh())
    with Exchanges() as seen:
        model(packed([20])).sum().backward()
    return dict(seen.counts)


@pytest.mark.parametrize("policy", [pytest.param("full", marks=pytest.mark.slow), "keep_attention"])
def test_weights_are_gathered_and_their_gradients_reduced_once_for_all_tiles_and_groups(
    policy: activation_checkpoint.RecomputePolicy,
) -> None:
    plain, tiled = (
        run_ranks(exchanges, 2, Plan(dp_shard=2, policy=policy, groups=groups, tile=tile))[0]
        for groups, tile in ((1, None), (2, 0))
    )
    assert sum(plain.values()) >= 3 * SMALL.num_layers
    assert tiled == plain


@pytest.mark.parametrize(
    ("layers", "every"),
    [(4, 1), (5, 3), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((4, 2), (4, 4), (5, 2)))],
)
@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_blocks_that_are_made_again_are_gathered_once_more(layers: int, every: int, *, reshard: bool) -> None:
    """Each once forward and once backward; and all but the last of those that share an input once more."""
    config = replace(SMALL, num_layers=layers)
    found, plain = (
        run_ranks(exchanges, 2, Plan(config, dp_shard=2, policy="keep_attention", every=one, reshard=reshard))[0]
        for one in (every, 1)
    )
    (gather,) = (name for name in plain if "allgather" in name.replace("_", ""))
    ends = 3 if reshard else 2  # The embedding's backward pass needs none.
    assert plain[gather] in range(layers * (1 + reshard), layers * (1 + reshard) + ends + 1)
    again = layers - -(-layers // every)
    assert found[gather] - plain[gather] == again * reshard
    assert {name: count for name, count in found.items() if name != gather} == {
        name: count for name, count in plain.items() if name != gather
    }


# ---- precision


@dataclass
class Seen:
    stored: set[torch.dtype] = field(default_factory=set)
    gradients: set[torch.dtype] = field(default_factory=set)
    weights: set[torch.dtype] = field(default_factory=set)
    stream: set[torch.dtype] = field(default_factory=set)
    tables: list[Tensor] = field(default_factory=list)
    losses: Tensor | None = None


def half_precision(ranks: int) -> Seen:
    plan = Plan(dp_shard=ranks)
    model = mixed(plan, plan.mesh(), torch.bfloat16)
    seen = Seen()

    def look(block: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        x_BSE, table, _ = arguments
        seen.stream.add(x_BSE.dtype)
        seen.tables.append(table)
        seen.weights |= {parameter.dtype for parameter in block.parameters()}

    for block in model.layers():
        # Inside the block, where the unit's own hook has gathered and cast its weights.
        block.attention.register_forward_pre_hook(look)
        block.attention.register_forward_hook(lambda _, __, out: seen.stream.add(out.dtype))
    batch = packed([300], seed=7)
    seen.losses = model(batch)
    (seen.losses.sum() / 299).backward()
    seen.losses = seen.losses.detach()
    seen.stored = {parameter.dtype for parameter in model.parameters()}
    seen.gradients = {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}
    return seen


def mixed(plan: Plan, mesh: Mesh, compute: torch.dtype) -> Transformer:
    with torch.device("meta"):
        model = Transformer(plan.config)
    fsdp.apply(
        model, mesh.fsdp_mesh, param_dtype=compute, reduce_dtype=torch.float32, reshard_after_forward=plan.reshard
    )
    initialize(model, seed=0, device=torch.device("cpu"))
    return model


def single_losses() -> Tensor:
    plan = Plan()
    losses: Tensor = mixed(plan, plan.mesh(), torch.float32)(packed([300], seed=7)).detach()
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_compute_in_half_precision_and_everything_that_lasts_is_single(ranks: int) -> None:
    (exact,) = run_ranks(single_losses, 1)
    for seen in run_ranks(half_precision, ranks, ranks):
        assert seen.stored == seen.gradients == {torch.float32}
        assert seen.weights == seen.stream == {torch.bfloat16}
        assert seen.losses is not None
        assert seen.losses.dtype == torch.float32
        torch.testing.assert_close(seen.losses, exact, rtol=0, atol=0.02)
        for table in seen.tables:
            assert table.dtype == torch.float32
            assert not torch.equal(table, table.bfloat16().float())


# ---- what stays gathered


def sharded_after_forward(plan: Plan) -> dict[str, bool]:
    model = build(plan, plan.mesh())
    model(packed([20]))
    return {name: isinstance(parameter, DTensor) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_the_head_stays_gathered_until_its_backward_pass(config: ModelConfig, reshard: bool) -> None:  # noqa: FBT001
    for sharded in run_ranks(sharded_after_forward, 2, Plan(config, dp_shard=2, reshard=reshard)):
        last = {name for name in sharded if name.startswith("head.")}
        if config.tie_embeddings:
            last.add("embed.weight")
        assert last
        assert {name for name, is_sharded in sharded.items() if not is_sharded} == (last if reshard else {*sharded})


def units(compute: torch.dtype) -> list[str]:
    with torch.device("meta"):
        model = Transformer(SMALL)
    parallelize(
        model,
        Plan().mesh(),
        recompute_config=RecomputeConfig(),
        param_dtype=compute,
        reduce_dtype=torch.float32,
        reshard_after_forward=True,
    )
    return [type(module).__name__ for module in model.modules()]


def test_one_process_is_wrapped_only_to_compute_in_another_dtype() -> None:
    (plain,), (cast,) = run_ranks(units, 1, torch.float32), run_ranks(units, 1, torch.bfloat16)
    assert not [name for name in plain if name.startswith("FSDP")]
    wrapped = {"FSDPTransformer": 1, "FSDPEmbedding": 1, "FSDPBlock": SMALL.num_layers, "FSDPHead": 1}
    assert {name: cast.count(name) for name in cast if name.startswith("FSDP")} == wrapped
