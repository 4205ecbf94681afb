"""The optimizer on a mesh: a non-finite gradient on one rank skips the step on all; clipping and
decay equal torch's.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.transformer import Transformer
from parallelisms.mesh.collectives import all_reduce
from tests.models.small_models import packed, small_model
from tests.parallelisms.parallel_models import Plan, build, concat_batches
from tests.ranks import run_ranks
from trainer.config.sections import OptimizerSection
from trainer.step.optimizer import Optimizer

BATCH = packed([9, 1, 14], [24])
Poison = Literal["gradient", "infinite gradient", "loss"]


def state_of(model: Transformer, optimizer: Optimizer) -> dict[str, Tensor]:
    """Local shards of everything that a step may change."""
    tensors = dict(model.named_parameters()) | optimizer.state_dict()
    return {name: local(x.detach()).clone() for name, x in tensors.items()}


def skip(plan: Plan, poison: Poison) -> tuple[list[bool], list[str], list[str], list[float]]:
    """Whether steps were finite; what changed in a step with bad values on the last rank, and in
    the next one.
    """
    mesh = plan.mesh()
    model = build(plan, mesh)
    optimizer = Optimizer([model], OptimizerSection(lr=1e-2), all_reduce=partial(all_reduce, None))
    rank = mesh.rank
    finite: list[bool] = []
    states: list[dict[str, Tensor]] = []
    for step in range(4):
        # Reduced gradients are bitwise equal on all replicas, so every rank with the last shard
        # gets the bad value.
        last = (
            rank == plan.ranks - 1
            if poison == "loss"
            else mesh.coordinate["dp_shard"] == plan.dp_shard - 1
        )
        bad = step == 2 and last
        losses = model(concat_batches([packed([20], seed=10 * step + rank)]))
        if bad and poison == "loss":
            losses = losses * torch.nan
        (losses.sum() / 19).backward()
        if bad and poison != "loss":
            gradient = model.blocks["1"].get_parameter("attention.o_proj.weight").grad
            assert gradient is not None
            local(gradient).view(-1)[0] = torch.nan if poison == "gradient" else torch.inf
        states.append(state_of(model, optimizer))
        finite.append(bool(optimizer.step(1e-2)[1]))
    states.append(state_of(model, optimizer))
    assert all(parameter.grad is None for parameter in model.parameters())
    skipped, after = (
        [name for name in new if not torch.equal(new[name], old[name])]
        for old, new in ((states[2], states[3]), (states[3], states[4]))
    )
    steps = [float(tensor) for name, tensor in states[4].items() if name.endswith(".step")]
    return finite, skipped, after, steps


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@pytest.mark.ranks
@pytest.mark.parametrize("poison", ["gradient", "infinite gradient", "loss"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        pytest.param(Plan(dp_shard=3), marks=pytest.mark.slow),
        Plan(dp_replicate=2, dp_shard=2),
    ],
    ids=["1", "3", "2x2"],
)
def test_non_finite_values_on_one_rank_skip_the_step_on_all(plan: Plan, poison: Poison) -> None:
    for finite, skipped, after, steps in run_ranks(skip, plan.ranks, plan, poison):
        assert finite == [True, True, False, True]
        assert skipped == []
        assert set(steps) == {3.0}
        assert {name.split(".")[-1] for name in after} == {
            "weight",
            "exp_avg",
            "exp_avg_sq",
            "step",
        }


@pytest.mark.parametrize("limit", [1e-3, 1e6])
def test_steps_of_one_process_equal_torch(limit: float) -> None:
    our_model = small_model()
    torch_model = small_model()
    options = OptimizerSection(
        lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, max_grad_norm=limit
    )
    optimizer = Optimizer([our_model], options)
    matrices = [parameter for parameter in torch_model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in torch_model.parameters() if parameter.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.8, 0.9),
        eps=1e-6,
        foreach=False,
    )
    for lr in (1e-2, 1e-3, 5e-2):
        for model in (our_model, torch_model):
            (model(BATCH).sum() / BATCH.num_targets()).backward()
        expected = nn.utils.clip_grad_norm_(torch_model.parameters(), limit)
        norm, finite = optimizer.step(lr)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        reference.zero_grad()
        assert bool(finite)
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
        for our_parameter, torch_parameter in zip(
            our_model.parameters(), torch_model.parameters(), strict=True
        ):
            torch.testing.assert_close(our_parameter, torch_parameter, rtol=0, atol=1e-13)


def test_norms_have_no_weight_decay() -> None:
    model = small_model()
    optimizer = Optimizer([model], OptimizerSection(weight_decay=0.25))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1)
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.25 if parameter.ndim == 2 else 1
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-15, atol=0)


def test_state_exists_before_the_first_step_under_parameter_names() -> None:
    model = small_model()
    optimizer = Optimizer([model], OptimizerSection())
    names = {name for name, _ in model.named_parameters()}
    keys = {"step", "exp_avg", "exp_avg_sq"}
    before = optimizer.state_dict()
    assert before.keys() == {f"{name}.{key}" for name in names for key in keys}
    assert not any(tensor.any() for tensor in before.values())
    (model(BATCH).sum() / BATCH.num_targets()).backward()
    optimizer.step(1e-3)
    after = optimizer.state_dict()
    assert all(after[name] is tensor for name, tensor in before.items())
    assert {float(tensor) for name, tensor in after.items() if name.endswith(".step")} == {1.0}


def test_step_frees_gradients_and_returns_the_norm_before_clipping() -> None:
    model = small_model()
    (model(BATCH).sum() / BATCH.num_targets()).backward()
    squares = sum(
        float(parameter.grad.square().sum())
        for parameter in model.parameters()
        if parameter.grad is not None
    )
    norm, _ = Optimizer([model], OptimizerSection(max_grad_norm=1e-3)).step(1e-3)
    assert float(norm) == pytest.approx(squares**0.5, rel=1e-13)
    assert all(parameter.grad is None for parameter in model.parameters())
