"""Stages on several ranks compute what one process computes: every loss and every gradient, in double precision."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

from models.batch import Batch
from models.config import ModelConfig
from models.transformer import Transformer
from parallelisms import activation_checkpoint
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.activation_offload import HostActivationPool
from parallelisms.block_recompute import TileOps, Tiling, compile_tile_ops
from parallelisms.collectives import full_tensor
from parallelisms.context import ContextParallel
from parallelisms.mesh import Mesh
from parallelisms.parallel_dims import AXES
from parallelisms.parallelize import parallelize
from parallelisms.pipeline import Pipeline
from parallelisms.pipeline_plan import PipelinePlan
from tests.models.small_models import SMALL, largest_difference, packed, small_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

# Documents of two rows, and how many of their tokens are targets: unequal, and once none.
ROWS = [([20], [7, 13]), ([1] * 5 + [15], [20]), ([3, 17], [19, 1]), ([10, 10], [20]), ([2, 18], [6, 6, 8])]
TARGETS = [3, 38, 0, 17, 1, 30]
UPDATES = 2


@dataclass(frozen=True)
class Case:
    plan: PipelinePlan
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    policy: activation_checkpoint.RecomputePolicy = "none"
    compiled: bool = False
    tiled: bool = False
    every: int = 1
    groups: int = 1
    on_host: bool = False

    @property
    def config(self) -> ModelConfig:
        return replace(SMALL, num_layers=self.plan.num_layers, vocab_size=38)

    @property
    def data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        return self.plan.pp * self.data_ranks * self.cp * self.tp

    def mesh(self) -> Mesh:
        degrees = (self.plan.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)
        return Mesh("cpu", dict(zip(AXES, degrees, strict=True)), rank=distributed.get_rank())


@dataclass
class Course:
    """What one update came to: losses by number of the micro-batch in the global batch, and gradients by name."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    runs: set[int] = field(default_factory=set)
    """How often a stage ran."""


def micro_batches(count: int, update: int) -> list[Batch]:
    return [
        packed(*ROWS[number % len(ROWS)], seed=100 * update + number, targets=TARGETS[number % len(TARGETS)])
        for number in range(count)
    ]


@cache
def alone(config: ModelConfig, count: int) -> list[Course]:
    """The updates on one process, without a pipeline."""
    model, courses = small_model(config), []
    for update in range(UPDATES):
        model.zero_grad()
        batches, course = micro_batches(count, update), Course()
        for number, batch in enumerate(batches):
            losses = model(batch)
            (losses.sum() / sum(batch.num_targets() for batch in batches)).backward()
            course.losses[number] = losses.detach()
        course.gradients = {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
        }
        courses.append(course)
    return courses


def build(
    case: Case, mesh: Mesh, stage: int, core: ContextParallel | None, host: HostActivationPool | None
) -> Transformer:
    part, double = Transformer(case.config, stage=case.plan.stage_module(stage)).double(), torch.float64
    weights = small_model(case.config).state_dict()
    part.load_state_dict({name: weights[name] for name in part.state_dict()})
    if case.compiled:
        warnings.simplefilter("ignore")
    bodies = compile_tile_ops(backend="aot_eager") if case.compiled else TileOps()
    keep = RecomputeConfig(
        case.policy, host, host is not None, case.every, Tiling(case.groups, 2000 if case.tiled else None, bodies)
    )
    parallelize(
        part,
        mesh,
        core=core,
        recompute_config=keep if case.policy != "none" else RecomputeConfig(),
        param_dtype=double,
        reduce_dtype=double,
        reshard_after_forward=False,
    )
    return part


class Stages:
    """What one rank of a pipeline runs."""

    def __init__(self, case: Case) -> None:
        mesh, plan, model = case.mesh(), case.plan, case.config
        self.context = None
        if case.cp > 1:
            self.context = ContextParallel(
                mesh.cp_mesh,
                method="ring",
                heads=model.num_heads,
                kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
            )
        self.host = HostActivationPool(max_inputs=100) if case.on_host else None
        self.parts = {
            stage: build(case, mesh, stage, self.context, self.host) for stage in plan.stages_of(mesh.coordinate["pp"])
        }
        self.runs: Counter[int] = Counter()
        for stage, part in self.parts.items():
            part.register_forward_hook(lambda *_, stage=stage: self.runs.update([stage]))
        shape = (2, 20 // case.cp // case.tp, model.dim)
        self.pipeline = Pipeline(
            self.parts, plan, mesh.pp_group, device=torch.device("cpu"), shape=shape, dtype=torch.float64
        )
        self.count, self.mine = plan.num_micro_batches * case.data_ranks, slice(mesh.dp_rank, None, case.data_ranks)

    def update(self, number: int) -> Course:
        batches, course = micro_batches(self.count, number), Course()
        targets = torch.stack([batch.num_targets() for batch in batches]).sum()
        if self.context:
            batches = [self.context.shard_batch(batch) for batch in batches]
        numbers = {id(batch): number for number, batch in enumerate(batches)}

        def record(losses_BS: Tensor, batch: Batch) -> None:
            assert not losses_BS.requires_grad
            assert numbers[id(batch)] not in course.losses
            whole_row = self.context.unshard(losses_BS, batch.boundaries) if self.context else losses_BS
            course.losses[numbers[id(batch)]] = whole_row.clone()

        for part in self.parts.values():
            part.zero_grad()
        self.runs.clear()
        self.pipeline.run(batches[self.mine], targets, record)
        course.runs = set(self.runs.values())
        assert self.host is None or self.host.used_bytes.total() == 0
        course.gradients = {
            name: full_tensor(parameter.grad).clone()
            for part in self.parts.values()
            for name, parameter in part.named_parameters()
            if parameter.grad is not None
        }
        return course


def updates(case: Case) -> list[Course]:
    """What one rank of a pipeline knows of the updates."""
    stages = Stages(case)
    return [stages.update(number) for number in range(UPDATES)]


def require_equal(case: Case) -> None:
    """Runs the case, and compares all of it with one process."""
    found = run_ranks(updates, case.ranks, case)
    per_stage_rank = case.ranks // case.plan.pp
    for update, expected in enumerate(alone(case.config, case.plan.num_micro_batches * case.data_ranks)):
        losses: dict[int, Tensor] = {}
        # Each of the ranks that share a stage has the whole gradient.
        gradients: list[dict[str, Tensor]] = [{} for _ in range(per_stage_rank)]
        for rank, courses in enumerate(found):
            course = courses[update]
            assert course.runs == {case.plan.num_micro_batches}
            assert bool(course.losses) == (rank // per_stage_rank == case.plan.last_rank)
            assert not gradients[rank % per_stage_rank].keys() & course.gradients.keys()
            losses |= course.losses
            gradients[rank % per_stage_rank] |= course.gradients
        assert losses.keys() == expected.losses.keys()
        for number, losses_BS in losses.items():
            torch.testing.assert_close(losses_BS, expected.losses[number], rtol=1e-12, atol=1e-12)
        for whole_model in gradients:
            assert largest_difference(whole_model, expected.gradients) < 1e-12


# ---- schedules

PLANS = [
    PipelinePlan(pp=2, schedule="1F1B", num_layers=3, num_micro_batches=4),
    PipelinePlan(pp=2, schedule="GPipe", num_layers=3, num_micro_batches=4),
    PipelinePlan(pp=2, schedule="Interleaved1F1B", num_layers=5, num_micro_batches=6),
    PipelinePlan(pp=2, schedule="InterleavedZeroBubble", num_layers=5, num_micro_batches=6),
    PipelinePlan(pp=2, schedule="ZBVZeroBubble", num_layers=5, num_micro_batches=5),
    PipelinePlan(pp=2, schedule="DualPipeV", num_layers=5, num_micro_batches=5),
    PipelinePlan(pp=4, schedule="1F1B", num_layers=4, num_micro_batches=7),
    PipelinePlan(pp=4, schedule="InterleavedZeroBubble", num_layers=8, num_micro_batches=8),
    PipelinePlan(pp=4, schedule="DualPipeV", num_layers=8, num_micro_batches=8),
]
ODD_PLANS = {
    "only the embedding in the first": PipelinePlan(pp=2, num_layers=2, pp_layers=(0, 2), num_micro_batches=2),
    "only the head in the last": PipelinePlan(pp=2, num_layers=2, pp_layers=(2, 0), num_micro_batches=2),
    "three stages on each": PipelinePlan(
        pp=2,
        schedule="Interleaved1F1B",
        pp_stages_per_rank=3,
        num_layers=4,
        pp_layers=(0, 1, 1, 1, 1, 0),
        num_micro_batches=3,
    ),
    "fewer batches than ranks": PipelinePlan(pp=4, schedule="ZBVZeroBubble", num_layers=6, num_micro_batches=1),
}


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, marks=pytest.mark.slow if plan.pp == 4 else ()) for plan in PLANS],
    ids=lambda plan: f"{plan.schedule}-{plan.pp}",
)
def test_every_schedule_computes_what_one_process_computes(plan: PipelinePlan) -> None:
    require_equal(Case(plan))


@pytest.mark.parametrize("plan", ODD_PLANS.values(), ids=ODD_PLANS.keys())
def test_stages_may_be_cut_at_will(plan: PipelinePlan) -> None:
    require_equal(Case(plan))


@pytest.mark.parametrize("policy", ["full", "keep_attention"])
@pytest.mark.parametrize("plan", [PLANS[0], PLANS[2]], ids=lambda plan: plan.schedule)
def test_stages_may_recompute(plan: PipelinePlan, policy: activation_checkpoint.RecomputePolicy) -> None:
    require_equal(Case(replace(plan, recompute=policy), policy=policy))


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[2]], ids=lambda plan: plan.schedule)
def test_stages_may_keep_one_input_of_two_on_the_host_and_work_in_pieces(plan: PipelinePlan) -> None:
    policy: activation_checkpoint.RecomputePolicy = "keep_attention"
    require_equal(Case(replace(plan, recompute=policy), policy=policy, every=2, groups=2, tiled=True, on_host=True))


def test_stages_may_be_compiled() -> None:
    require_equal(Case(replace(PLANS[0], compiled=True, recompute="full"), policy="full", compiled=True))


# ---- with other axes


@pytest.mark.parametrize(
    "plan",
    [PLANS[5], *(pytest.param(plan, marks=pytest.mark.slow) for plan in (PLANS[0], *PLANS[2:5]))],
    ids=lambda plan: plan.schedule,
)
def test_stages_may_be_sharded(plan: PipelinePlan) -> None:
    require_equal(Case(plan, dp_shard=2))


class Reductions(TorchDispatchMode):
    """Counts how often gradients are reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in func.name()
        return func(*args, **(kwargs or {}))


def reductions(case: Case) -> tuple[int, int]:
    """Of one update; and how many shards of gradients there are to reduce."""
    stages = Stages(case)
    with Reductions() as seen:
        stages.update(0)
    units = [len(part.blocks) + (part.embed is not None) + (part.head is not None) for part in stages.parts.values()]
    return seen.count, sum(units)


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[3]], ids=lambda plan: plan.schedule)
def test_gradients_are_reduced_once_per_update(plan: PipelinePlan) -> None:
    for count, units in run_ranks(reductions, 4, Case(plan, dp_shard=2)):
        assert count == units


def test_stages_may_have_replicas() -> None:
    require_equal(Case(PLANS[0], dp_replicate=2))


@pytest.mark.parametrize(
    "plan", [PLANS[0], pytest.param(PLANS[3], marks=pytest.mark.slow)], ids=lambda plan: plan.schedule
)
@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (1, 2)])
def test_ranks_of_a_stage_may_share_rows_and_matrices(plan: PipelinePlan, cp: int, tp: int) -> None:
    require_equal(Case(plan, cp=cp, tp=tp))


# ---- misuse


def refusals() -> list[str]:
    plan = PipelinePlan(pp=2, num_layers=2, num_micro_batches=2)
    group = distributed.group.WORLD
    assert group is not None
    stage = group.rank()
    part = Transformer(SMALL, stage=plan.stage_module(stage)).double()
    found = []
    for parts, asked, count in (
        ({stage: part}, replace(plan, tie_embeddings=True, num_micro_batches=1), 1),
        ({1 - stage: part}, plan, 2),
        ({stage: part}, plan, 3),
    ):
        with pytest.raises(ValueError, match=r".") as refused:
            Pipeline(
                parts, asked, group, device=torch.device("cpu"), shape=(2, 20, SMALL.dim), dtype=torch.float64
            ).run(micro_batches(count, 0), torch.tensor(1), lambda _, __: None)
        found.append(str(refused.value))
    return found


def test_what_does_not_fit_is_refused_before_anything_runs() -> None:
    for rank, (plan, parts, batches) in enumerate(run_ranks(refusals, 2)):
        assert "at least as many as stages" in plan
        assert "model.tie_embeddings" in plan
        assert parts == f"rank {rank} of the pipeline has stages ({rank},), not ({1 - rank},)"
        assert batches == "3 micro-batches were given; the pipeline runs 2"
