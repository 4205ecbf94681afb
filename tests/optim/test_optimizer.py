"""AdamW held to a few lines of arithmetic, and updates that skip themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainer.config.job_config import OptimizerSection
from trainer.optim.optimizer import Optimizer

SECTION = OptimizerSection(lr=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.25, max_grad_norm=1.0)


class Model(nn.Module):
    """A matrix and a vector."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(3, 4, dtype=dtype, generator=generator))
        self.norm = nn.Parameter(torch.randn(4, dtype=dtype, generator=generator))


def give_gradients(model: nn.Module, scale: float, *, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def state(optimizer: Optimizer) -> dict[str, Tensor]:
    weights = {name: parameter.detach().clone() for name, parameter in optimizer.parameters_by_name.items()}
    return weights | {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}


@pytest.mark.parametrize("scale", [0.01, 100.0], ids=["below the limit", "clipped"])
def test_three_updates_are_those_of_the_paper(scale: float) -> None:
    model = Model()
    optimizer = Optimizer([model], SECTION)
    wanted = [parameter.detach().clone() for parameter in model.parameters()]
    first = [torch.zeros_like(weight) for weight in wanted]
    second = [torch.zeros_like(weight) for weight in wanted]
    for step, lr in enumerate((0.5, 0.1, 0.02), 1):
        gradients = give_gradients(model, scale, seed=step)
        norm, finite = optimizer.step(lr)
        expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        torch.testing.assert_close(norm, expected)
        assert finite
        for index, (gradient, decay) in enumerate(zip(gradients, (0.25, 0.0), strict=True)):
            clipped = gradient * (1 / (expected + 1e-6)).clamp(max=1)
            first[index] = 0.8 * first[index] + 0.2 * clipped
            second[index] = 0.9 * second[index] + 0.1 * clipped**2
            ratio = first[index] / (1 - 0.8**step) / ((second[index] / (1 - 0.9**step)).sqrt() + 1e-6)
            wanted[index] = wanted[index] * (1 - lr * decay) - lr * ratio
        for parameter, weight in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.detach(), weight, rtol=1e-9, atol=1e-12)
            assert parameter.grad is None


def test_matrices_decay_and_vectors_do_not() -> None:
    model = Model()
    optimizer = Optimizer([model], SECTION)
    before = state(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.5)
    torch.testing.assert_close(model.matrix.detach(), before["matrix"] * (1 - 0.5 * 0.25))
    assert torch.equal(model.norm.detach(), before["norm"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_update_with_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = Model()
    optimizer = Optimizer([model], SECTION)
    give_gradients(model, 1.0)
    optimizer.step(0.5)
    before = state(optimizer)
    give_gradients(model, 1.0, seed=2)
    assert model.norm.grad is not None
    model.norm.grad[1] = bad
    norm, finite = optimizer.step(0.5)
    assert not finite
    assert not norm.isfinite()
    after = state(optimizer)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_update_after_a_skipped_one_is_as_if_that_had_not_been() -> None:
    skipping, plain = Model(), Model()
    optimizers = [Optimizer([skipping], SECTION), Optimizer([plain], SECTION)]
    for step in range(3):
        if step == 1:
            give_gradients(skipping, float("nan"))
            optimizers[0].step(0.5)
        for model, optimizer in zip((skipping, plain), optimizers, strict=True):
            give_gradients(model, 1.0, seed=step)
            optimizer.step(0.1)
    ours, theirs = map(state, optimizers)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_the_state_exists_from_the_start_under_the_parameters_names() -> None:
    found = Optimizer([Model()], SECTION).state_dict()
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()} == {
        "matrix.step": ((), torch.float32),
        "matrix.exp_avg": ((3, 4), torch.float64),
        "matrix.exp_avg_sq": ((3, 4), torch.float64),
        "norm.step": ((), torch.float32),
        "norm.exp_avg": ((4,), torch.float64),
        "norm.exp_avg_sq": ((4,), torch.float64),
    }
    assert not any(tensor.any() for tensor in found.values())


def test_tensors_are_the_state_itself_so_that_loading_writes_into_it() -> None:
    model = Model()
    optimizer = Optimizer([model], SECTION)
    held = optimizer.state_dict()
    give_gradients(model, 1.0)
    optimizer.step(0.5)
    assert held["matrix.step"] == 1
    assert held["matrix.exp_avg"].any()


# ---- moments in bfloat16


def narrow_and_wide(**changes: object) -> tuple[list[Model], list[Optimizer]]:
    """Two models in float32, the moments of the first in bfloat16."""
    models, section = [Model(torch.float32), Model(torch.float32)], SECTION.model_copy(update=changes)
    return models, [Optimizer([models[0]], section, moment_dtype=torch.bfloat16), Optimizer([models[1]], section)]


@pytest.mark.parametrize("piece", [1, 5, 1 << 22])
def test_an_update_changes_in_float32_and_rounds_what_it_keeps(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr("trainer.optim.optimizer.OPTIMIZER_CHUNK_ELEMENTS", piece)
    models, optimizers = narrow_and_wide()
    for update in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            give_gradients(model, 0.1 if update == 1 else 100.0, seed=update)
            optimizer.step(0.1)
        narrow, wide = map(state, optimizers)
        for name, tensor in narrow.items():
            kept = wide[name].bfloat16() if "exp_avg" in name else wide[name]
            assert torch.equal(tensor, kept), name
        # From the same moments the next update is the same.
        for name, tensor in optimizers[1].state_dict().items():
            tensor.copy_(narrow[name])
    assert {float(tensor) for name, tensor in optimizers[0].state_dict().items() if name.endswith("step")} == {4.0}


def test_a_skipped_update_leaves_moments_in_bfloat16_as_they_are() -> None:
    (model, _), (optimizer, _) = narrow_and_wide()
    give_gradients(model, 1.0)
    optimizer.step(0.5)
    before = state(optimizer)
    give_gradients(model, float("inf"), seed=2)
    assert not optimizer.step(0.5)[1]
    assert [name for name, tensor in state(optimizer).items() if not torch.equal(before[name], tensor)] == []


def test_a_parameter_without_a_gradient_keeps_its_moments_in_bfloat16() -> None:
    (model, _), (optimizer, _) = narrow_and_wide()
    give_gradients(model, 1.0)
    model.norm.grad = None
    before = state(optimizer)
    optimizer.step(0.5)
    assert {
        name.split(".")[0] for name, tensor in state(optimizer).items() if not torch.equal(before[name], tensor)
    } == {"matrix"}


def forgotten(beta: float) -> float:
    """What is left of a second moment of 1, kept in bfloat16, after 100 updates without gradients."""
    (model, _), (optimizer, _) = narrow_and_wide(betas=(0.9, beta))
    moment = optimizer.state_dict()["matrix.exp_avg_sq"].fill_(1.0)
    for _ in range(100):
        give_gradients(model, 0.0)
        optimizer.step(0.1)
    return float(moment.float().mean())


@pytest.mark.parametrize("beta", [0.95, 0.99])
def test_moments_that_change_by_more_than_rounding_forget(beta: float) -> None:
    assert forgotten(beta) == pytest.approx(beta**100, rel=0.25)


def test_slower_moments_would_never_forget_which_is_why_they_are_refused() -> None:
    assert forgotten(0.998) > 0.95 > 0.998**100


def test_training_with_moments_in_bfloat16_follows_that_in_float32() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 4, generator=generator)
    targets = torch.tanh(inputs @ torch.randn(4, 3, generator=generator))
    losses: list[list[float]] = [[], []]
    models, optimizers = narrow_and_wide(weight_decay=0.0)
    for _ in range(150):
        for model, optimizer, found in zip(models, optimizers, losses, strict=True):
            loss = (torch.tanh((inputs * model.norm) @ model.matrix.T) - targets).square().mean()
            loss.backward()
            found.append(float(loss.detach()))
            optimizer.step(0.02)
    narrow, wide = losses
    assert narrow != wide
    assert wide[-1] < 0.1 * wide[0]
    assert max(abs(ours - theirs) for ours, theirs in zip(*losses, strict=True)) < 0.01 * wide[0]


# ---- units that are updated when they next run


class Units(nn.Module):
    """Two units, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x)) * self.scale
        return y


def late(model: Units) -> Optimizer:
    return Optimizer([model], SECTION, deferred_modules=[model, model.first, model.second])


def trained(model: Units, optimizer: Optimizer, updates: int) -> None:
    for update in range(updates):
        x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(update))
        for part in x.split(3):
            model(part).square().sum().backward()
        if update == 2:
            model.first.weight.grad = torch.full_like(model.first.weight, torch.nan)
        optimizer.step(0.1 / (update + 1))


def test_units_that_are_updated_late_end_bitwise_where_others_do() -> None:
    torch.manual_seed(0)
    lately, model = Units(), Units()
    lately.load_state_dict(model.state_dict())
    optimizers = [late(lately), Optimizer([model], SECTION)]
    for one, optimizer in zip((lately, model), optimizers, strict=True):
        trained(one, optimizer, 5)
    assert not torch.equal(lately.second.weight, model.second.weight)
    optimizers[0].flush_deferred_updates()
    ours, theirs = map(state, optimizers)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert all(parameter.grad is None for parameter in lately.parameters())


def test_a_unit_is_updated_before_it_runs_and_not_earlier() -> None:
    model = Units()
    optimizer = late(model)
    trained(model, optimizer, 1)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    seen: list[list[str]] = []

    def look(*_: object) -> None:
        seen.append([name for name, x in model.named_parameters() if not torch.equal(x, weights[name])])

    model.first.register_forward_pre_hook(look)
    model.second.register_forward_pre_hook(look)
    model(torch.ones(1, 3, dtype=torch.float64))
    assert seen == [["scale", "first.weight"], ["scale", "first.weight", "second.weight"]]


def test_asking_for_the_state_updates_what_waits() -> None:
    model = Units()
    optimizer = late(model)
    trained(model, optimizer, 1)
    assert {float(tensor) for name, tensor in optimizer.state_dict().items() if name.endswith("step")} == {1.0}


def test_a_unit_that_did_not_run_between_two_updates_misses_none() -> None:
    torch.manual_seed(0)
    lately, model = Units(), Units()
    lately.load_state_dict(model.state_dict())
    optimizers = [late(lately), Optimizer([model], SECTION)]
    for one, optimizer in zip((lately, model), optimizers, strict=True):
        trained(one, optimizer, 1)
        one.first(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        optimizer.step(0.05)
    ours, theirs = (optimizer.state_dict() for optimizer in optimizers)
    assert {name: float(x) for name, x in ours.items() if name.endswith("step")} == {
        "scale.step": 1.0,
        "first.weight.step": 2.0,
        "second.weight.step": 1.0,
    }
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
