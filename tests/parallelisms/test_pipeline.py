"""A pipeline equals one process in float64: every loss and every gradient."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.attention_core import LocalAttentionCore
from models.batch import Batch
from models.config import ModelConfig
from models.tiling import eager
from models.transformer import Transformer
from parallelisms import activation_checkpoint
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.activation_offload import HostActivationPool
from parallelisms.block_recompute import Tiling, compiler
from parallelisms.context.context_parallel import ContextParallel
from parallelisms.fsdp import FSDPConfig
from parallelisms.mesh import collectives
from parallelisms.mesh.collectives import full_tensor
from parallelisms.mesh.context_plan import CPMethod
from parallelisms.mesh.mesh import Mesh
from parallelisms.mesh.parallel_dims import AXES
from parallelisms.mesh.pipeline_plan import PipelinePlan
from parallelisms.parallelize import parallelize
from parallelisms.pipeline import Pipeline
from tests.models.small_models import (
    GEMMA,
    GRANITE,
    OLMO,
    SMALL,
    WINDOWED,
    largest_difference,
    packed,
    small_model,
)
from tests.parallelisms.context.cores import build_core
from tests.parallelisms.context.whole_batches import shard_batch
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

# Document lengths of two sequences, and their number of targets: unequal, and once 0.
DOCUMENTS = [
    ([20], [7, 13]),
    ([1] * 5 + [15], [20]),
    ([3, 17], [19, 1]),
    ([10, 10], [20]),
    ([2, 18], [6, 6, 8]),
]
TARGETS = [3, 38, 0, 17, 1, 30]
NUM_STEPS = 2


@dataclass(frozen=True)
class Case:
    plan: PipelinePlan
    model: ModelConfig = SMALL
    """But for the number of its layers, and tokens in the vocabulary."""
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    cp_method: CPMethod = "ring"
    tp: int = 1
    policy: activation_checkpoint.RecomputePolicy = "none"
    compiled: bool = False
    tiled: bool = False
    blocks_per_checkpoint: int = 1
    head_groups: int = 1
    offload: bool = False

    @property
    def config(self) -> ModelConfig:
        return replace(self.model, num_layers=self.plan.num_layers, vocab_size=38)

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
class StepOutcome:
    """The results of a step: losses by index in the global batch, gradients by name."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    runs: set[int] = field(default_factory=set)
    """Forward calls per stage."""


def micro_batches(count: int, step: int) -> list[Batch]:
    return [
        packed(
            *DOCUMENTS[number % len(DOCUMENTS)],
            seed=100 * step + number,
            targets=TARGETS[number % len(TARGETS)],
        )
        for number in range(count)
    ]


@cache
def single_process(config: ModelConfig, count: int) -> list[StepOutcome]:
    """The steps on one process, without a pipeline."""
    model = small_model(config)
    outcomes = []
    for step in range(NUM_STEPS):
        model.zero_grad()
        batches = micro_batches(count, step)
        outcome = StepOutcome()
        for number, batch in enumerate(batches):
            losses = model(batch)
            (losses.sum() / sum(batch.num_targets() for batch in batches)).backward()
            outcome.losses[number] = losses.detach()
        outcome.gradients = {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        outcomes.append(outcome)
    return outcomes


def build(
    case: Case,
    mesh: Mesh,
    stage: int,
    core: ContextParallel | None,
    host: HostActivationPool | None,
) -> Transformer:
    module = Transformer(case.config, stage=case.plan.stage_module(stage)).double()
    double = torch.float64
    weights = small_model(case.config).state_dict()
    module.load_state_dict({name: weights[name] for name in module.state_dict()})
    if case.compiled:
        warnings.simplefilter("ignore")
    compile_piece = compiler(backend="aot_eager") if case.compiled else eager
    recompute_config = RecomputeConfig(
        case.policy,
        host,
        host is not None,
        case.blocks_per_checkpoint,
        Tiling(case.head_groups, 2000 if case.tiled else None, compile_piece),
    )
    parallelize(
        module,
        mesh,
        core=core or LocalAttentionCore(),
        recompute_config=recompute_config if case.policy != "none" else RecomputeConfig(),
        fsdp_config=FSDPConfig(
            param_dtype=double, reduce_dtype=double, reshard_after_forward=False
        ),
    )
    return module


class PipelineRank:
    """The stages of one pipeline rank."""

    def __init__(self, case: Case) -> None:
        mesh = case.mesh()
        plan = case.plan
        model = case.config
        self.context = None
        if case.cp > 1:
            self.context = build_core(
                mesh.cp_mesh,
                method=case.cp_method,
                heads=model.num_heads // case.tp,
                kv_heads=model.num_kv_heads // case.tp,
                head_dim=model.head_dim,
            )
        self.host = HostActivationPool(max_inputs=100) if case.offload else None
        self.modules = {
            stage: build(case, mesh, stage, self.context, self.host)
            for stage in plan.stages_of(mesh.coordinate["pp"])
        }
        self.runs: Counter[int] = Counter()
        for stage, module in self.modules.items():
            module.register_forward_hook(lambda *_, stage=stage: self.runs.update([stage]))
        shape = (2, 20 // case.cp // case.tp, model.dim)
        self.pipeline = Pipeline(
            self.modules,
            plan,
            mesh.pp_group,
            device=torch.device("cpu"),
            shape=shape,
            dtype=torch.float64,
        )
        self.count = plan.num_micro_batches * case.data_ranks
        self.mine = slice(mesh.dp_rank, None, case.data_ranks)

    def step(self, number: int) -> StepOutcome:
        batches = micro_batches(self.count, number)
        outcome = StepOutcome()
        targets = torch.stack([batch.num_targets() for batch in batches]).sum()
        if self.context:
            batches = [shard_batch(self.context, batch) for batch in batches]
        numbers = {id(batch): number for number, batch in enumerate(batches)}

        def record(losses_BS: Tensor, batch: Batch) -> None:
            assert not losses_BS.requires_grad
            assert numbers[id(batch)] not in outcome.losses
            full_losses = (
                self.context.gather(losses_BS, batch.boundaries) if self.context else losses_BS
            )
            outcome.losses[numbers[id(batch)]] = full_losses.clone()

        for module in self.modules.values():
            module.zero_grad()
        self.runs.clear()
        self.pipeline.run(batches[self.mine], targets, record)
        outcome.runs = set(self.runs.values())
        assert self.host is None or self.host.used_bytes.total() == 0
        outcome.gradients = {
            name: full_tensor(parameter.grad).clone()
            for module in self.modules.values()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        return outcome


def run_steps(case: Case) -> list[StepOutcome]:
    """The step results of one pipeline rank."""
    stages = PipelineRank(case)
    return [stages.step(number) for number in range(NUM_STEPS)]


def require_equal(case: Case) -> None:
    """Compares every loss and gradient of the case with one process."""
    found = run_ranks(run_steps, case.ranks, case)
    per_stage_rank = case.ranks // case.plan.pp
    for step, expected in enumerate(
        single_process(case.config, case.plan.num_micro_batches * case.data_ranks)
    ):
        losses: dict[int, Tensor] = {}
        # Each rank of a stage has the full gradient.
        gradients: list[dict[str, Tensor]] = [{} for _ in range(per_stage_rank)]
        for rank, outcomes in enumerate(found):
            outcome = outcomes[step]
            assert outcome.runs == {case.plan.num_micro_batches}
            assert bool(outcome.losses) == (rank // per_stage_rank == case.plan.stage_ranks[-1])
            assert not gradients[rank % per_stage_rank].keys() & outcome.gradients.keys()
            losses |= outcome.losses
            gradients[rank % per_stage_rank] |= outcome.gradients
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
    PipelinePlan(pp=4, schedule="1F1B", num_layers=4, num_micro_batches=7),
    PipelinePlan(pp=4, schedule="Interleaved1F1B", num_layers=8, num_micro_batches=8),
]
ODD_PLANS = {
    "embedding-only first stage": PipelinePlan(
        pp=2, num_layers=2, pp_layers=(0, 2), num_micro_batches=2
    ),
    "head-only last stage": PipelinePlan(
        pp=2, num_layers=2, pp_layers=(2, 0), num_micro_batches=2
    ),
    "three stages per rank": PipelinePlan(
        pp=2,
        schedule="Interleaved1F1B",
        pp_stages_per_rank=3,
        num_layers=4,
        pp_layers=(0, 1, 1, 1, 1, 0),
        num_micro_batches=3,
    ),
    "fewer micro-batches than ranks": PipelinePlan(
        pp=4, schedule="Interleaved1F1B", num_layers=6, num_micro_batches=1
    ),
}


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, marks=() if plan == PLANS[0] else pytest.mark.slow) for plan in PLANS],
    ids=lambda plan: f"{plan.schedule}-{plan.pp}",
)
def test_every_schedule_equals_one_process(plan: PipelinePlan) -> None:
    require_equal(Case(plan))


@pytest.mark.parametrize("plan", ODD_PLANS.values(), ids=ODD_PLANS.keys())
def test_uneven_stages_equal_one_process(plan: PipelinePlan) -> None:
    require_equal(Case(plan))


@pytest.mark.parametrize(
    "policy", ["full", pytest.param("keep_attention", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("plan", [PLANS[0], PLANS[2]], ids=lambda plan: plan.schedule)
def test_recomputation_in_stages_equals_one_process(
    plan: PipelinePlan, policy: activation_checkpoint.RecomputePolicy
) -> None:
    require_equal(Case(plan, policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [pytest.param(PLANS[0], marks=pytest.mark.slow), PLANS[2]],
    ids=lambda plan: plan.schedule,
)
def test_offload_and_tiling_in_stages_equal_one_process(plan: PipelinePlan) -> None:
    require_equal(
        Case(
            plan,
            policy="keep_attention",
            blocks_per_checkpoint=2,
            head_groups=2,
            tiled=True,
            offload=True,
        )
    )


@pytest.mark.slow
def test_compiled_stages_equal_one_process() -> None:
    require_equal(Case(PLANS[0], policy="full", compiled=True))


# ---- other families

FAMILIES: dict[str, Case] = {
    "windowed": Case(PLANS[0], WINDOWED, policy="full"),
    "gemma": Case(PLANS[0], replace(GEMMA, window=4, sink=True)),
    "olmo": Case(
        PLANS[0], OLMO, policy="keep_attention", blocks_per_checkpoint=2, tiled=True, offload=True
    ),
    "granite": Case(PLANS[2], GRANITE, policy="keep_attention", head_groups=2),
    "windowed, interleaved": Case(
        PLANS[2],
        WINDOWED,
        policy="keep_attention",
        blocks_per_checkpoint=2,
        head_groups=2,
        tiled=True,
        offload=True,
    ),
    "windowed, cp": Case(PLANS[0], WINDOWED, cp=2, cp_method="ulysses"),
    "gemma, interleaved, cp": Case(
        PLANS[2], replace(GEMMA, window=4, sink=True), cp=2, cp_method="allgather"
    ),
    "olmo, tp": Case(PLANS[0], OLMO, tp=2),
    "gemma, tp": Case(PLANS[2], GEMMA, tp=2, policy="full"),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * (number > 1))
        for number, (name, case) in enumerate(FAMILIES.items())
    ],
)
def test_stages_of_every_family_equal_one_process(case: Case) -> None:
    require_equal(case)


# ---- with other mesh dimensions


@pytest.mark.parametrize(
    "plan",
    [PLANS[2], pytest.param(PLANS[0], marks=pytest.mark.slow)],
    ids=lambda plan: plan.schedule,
)
def test_fsdp_stages_equal_one_process(plan: PipelinePlan) -> None:
    require_equal(Case(plan, dp_shard=2))


class ReduceScatterCounter(TorchDispatchMode):
    """Counts gradient reduce-scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in func.name()
        return func(*args, **(kwargs or {}))


def count_reductions(case: Case) -> tuple[int, int]:
    """Reduce-scatters of one step, and the number of FSDP units."""
    stages = PipelineRank(case)
    with ReduceScatterCounter() as seen:
        stages.step(0)
    units = [
        len(module.blocks) + (module.embed is not None) + (module.head is not None)
        for module in stages.modules.values()
    ]
    return seen.count, sum(units)


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[2]], ids=lambda plan: plan.schedule)
def test_gradients_are_reduced_once_per_step(plan: PipelinePlan) -> None:
    for count, units in run_ranks(count_reductions, 4, Case(plan, dp_shard=2)):
        assert count == units


PER_MICRO_BATCH = [replace(PLANS[number], reduces_per_micro_batch=True) for number in (0, 2)]


@pytest.mark.parametrize(
    "plan",
    [PER_MICRO_BATCH[1], pytest.param(PER_MICRO_BATCH[0], marks=pytest.mark.slow)],
    ids=lambda plan: plan.schedule,
)
def test_gradients_that_are_reduced_per_micro_batch_equal_one_process(plan: PipelinePlan) -> None:
    require_equal(Case(plan, dp_shard=2))


def test_gradients_may_be_reduced_per_micro_batch() -> None:
    plan = PER_MICRO_BATCH[0]
    for count, units in run_ranks(count_reductions, 4, Case(plan, dp_shard=2)):
        assert count == plan.num_micro_batches * units


def gathered_after_step(case: Case) -> list[str]:
    stages = PipelineRank(case)
    stages.step(0)
    return [
        name
        for module in stages.modules.values()
        for name, parameter in module.named_parameters()
        if not isinstance(parameter, DTensor)
    ]


def test_weights_are_resharded_after_the_step() -> None:
    assert run_ranks(gathered_after_step, 4, Case(PLANS[0], dp_shard=2)) == [[]] * 4


def messages_not_awaited(case: Case) -> int:
    """The sends and receives of a step that are started and not awaited."""
    stages = PipelineRank(case)
    awaiting = Counter[str]()
    original = collectives.AsyncHandle.wait

    def started(start: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            awaiting["messages"] += 1
            return start(*args, **options)

        return counted

    def wait(handle: Any) -> Tensor:
        awaiting["messages"] -= 1
        return original(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "send_async", started(collectives.send_async))
        patch.setattr(collectives, "receive_async", started(collectives.receive_async))
        patch.setattr(collectives.AsyncHandle, "wait", wait)
        stages.step(0)
    return awaiting["messages"]


def test_messages_are_kept_until_they_are_sent() -> None:
    for plan in (PLANS[0], PLANS[2]):
        assert run_ranks(messages_not_awaited, 2, Case(plan)) == [0, 0]


@pytest.mark.slow
def test_replicated_stages_equal_one_process() -> None:
    require_equal(Case(PLANS[0], dp_replicate=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [PLANS[0], pytest.param(PLANS[2], marks=pytest.mark.slow)],
    ids=lambda plan: plan.schedule,
)
@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (1, 2)])
def test_context_and_tensor_parallel_stages_equal_one_process(
    plan: PipelinePlan, cp: int, tp: int
) -> None:
    require_equal(Case(plan, cp=cp, tp=tp))


# ---- misuse


def error_messages() -> list[str]:
    plan = PipelinePlan(pp=2, num_layers=2, num_micro_batches=2)
    group = distributed.group.WORLD
    assert group is not None
    stage = group.rank()
    module = Transformer(SMALL, stage=plan.stage_module(stage)).double()
    found = []
    for modules, asked, count in (
        ({stage: module}, replace(plan, tie_embeddings=True, num_micro_batches=1), 1),
        ({1 - stage: module}, plan, 2),
        ({stage: module}, plan, 3),
    ):
        with pytest.raises(ValueError, match=r".") as refused:
            Pipeline(
                modules,
                asked,
                group,
                device=torch.device("cpu"),
                shape=(2, 20, SMALL.dim),
                dtype=torch.float64,
            ).run(micro_batches(count, 0), torch.tensor(1), lambda _, __: None)
        found.append(str(refused.value))
    return found


def test_invalid_plans_stages_and_batches_are_refused() -> None:
    for rank, (plan, modules, batches) in enumerate(run_ranks(error_messages, 2)):
        assert "needs at least 2, the number of stages" in plan
        assert "model.tie_embeddings" in plan
        assert modules == f"pipeline rank {rank} must have stages ({rank},), not ({1 - rank},)"
        assert batches == "the pipeline plan needs 2 micro-batches, not 3"
