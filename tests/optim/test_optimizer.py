"""AdamW against a few lines of arithmetic; skipped steps; bfloat16 moments; deferred num_steps."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import layers
from models.config import ModelConfig
from models.layers import Parameter
from tests.models.small_models import SMALL
from trainer.config.sections import OptimizerSection
from trainer.errors import EXIT_NO_RETRY, RankFailedError
from trainer.step import optimizer as optimizer_module
from trainer.step.optimizer import AdamW, Optimizer

SECTION = OptimizerSection(
    lr=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.25, max_grad_norm=1.0
)


@pytest.fixture(autouse=True)
def declare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters of the models below."""
    for name, shape in {
        "matrix": "VE",
        "norm": "E",
        "first.weight": "EE",
        "second.weight": "EE",
        "scale": "E",
    }.items():
        monkeypatch.setitem(layers.HEAD, name, Parameter(shape, "replicate", name))


def configured() -> ModelConfig:
    """Another object for every model: it remembers the declarations of the test that first asks
    for them.
    """
    return replace(SMALL)


class Model(nn.Module):
    """A matrix and a vector."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.config = configured()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(3, 4, dtype=dtype, generator=generator))
        self.norm = nn.Parameter(torch.randn(4, dtype=dtype, generator=generator))


def give_gradients(model: nn.Module, scale: float, *, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(
            parameter.shape, dtype=parameter.dtype, generator=generator
        )
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def state(optimizer: Optimizer) -> dict[str, Tensor]:
    weights = {
        name: parameter.detach().clone()
        for name, parameter in optimizer.parameters_by_name.items()
    }
    return weights | {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [0.01, 100.0], ids=["not clipped", "clipped"])
def test_three_steps_follow_the_adamw_paper(scale: float, dtype: torch.dtype) -> None:
    model = Model(dtype)
    optimizer = Optimizer([model], SECTION)
    expected_weights = [parameter.detach().clone() for parameter in model.parameters()]
    first = [torch.zeros_like(weight) for weight in expected_weights]
    second = [torch.zeros_like(weight) for weight in expected_weights]
    for step, lr in enumerate((0.5, 0.1, 0.02), 1):
        gradients = give_gradients(model, scale, seed=step)
        norm, finite = optimizer.step(lr)
        expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        torch.testing.assert_close(norm, expected, check_dtype=False)
        assert finite
        for index, (gradient, decay) in enumerate(zip(gradients, (0.25, 0.0), strict=True)):
            clipped = gradient * (1 / (expected + 1e-6)).clamp(max=1)
            first[index] = 0.8 * first[index] + 0.2 * clipped
            second[index] = 0.9 * second[index] + 0.1 * clipped**2
            ratio = (
                first[index] / (1 - 0.8**step) / ((second[index] / (1 - 0.9**step)).sqrt() + 1e-6)
            )
            expected_weights[index] = expected_weights[index] * (1 - lr * decay) - lr * ratio
        for parameter, weight in zip(model.parameters(), expected_weights, strict=True):
            rtol, atol = (1e-9, 1e-12) if dtype == torch.float64 else (1e-5, 1e-6)
            torch.testing.assert_close(parameter.detach(), weight, rtol=rtol, atol=atol)
            assert parameter.grad is None


@pytest.mark.parametrize(("norm", "max_norm"), [(2e-5, 1e-5), (0.5, 1.0), (1.0, 1.0), (7.0, 0.5)])
def test_the_kernel_divides_by_what_torch_multiplies_by(norm: float, max_norm: float) -> None:
    weight = torch.ones(1, dtype=torch.float64)
    weight.grad = torch.ones(1, dtype=torch.float64)
    total = torch.tensor(norm, dtype=torch.float64)
    nn.utils.clip_grads_with_norm_([weight], max_norm, total)
    scale = optimizer_module._clipping([torch.ones(1)], max_norm, total)["grad_scale"]
    torch.testing.assert_close(1 / scale.double(), weight.grad[0], rtol=1e-6, atol=0.0)


def test_gradients_are_clipped_in_the_pass_that_updates_the_weights() -> None:
    model = Model(torch.float32)
    optimizer = Optimizer([model], SECTION)
    give_gradients(model, 100.0)
    with Passes() as passes:
        optimizer.step(0.5)
    assert passes.names == {"aten::_fused_adamw_"}


def test_a_rule_that_does_not_clip_gets_clipped_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[Tensor]()

    class Seen(AdamW):
        clips = False

        def update(self, weights: list[Tensor], *_: Any, **_options: Any) -> None:
            given.extend(cast(Tensor, weight.grad).clone() for weight in weights)

    monkeypatch.setitem(optimizer_module.RULES, "adamw", Seen)
    model = Model()
    optimizer = Optimizer([model], SECTION)
    give_gradients(model, 100.0)
    optimizer.step(0.5)
    assert abs(torch.cat([each.flatten() for each in given]).norm().item() - 1) < 1e-6


class Passes(TorchDispatchMode):
    """Names the operators that change tensors of more than one element."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        changed = (
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        if any(isinstance(each, Tensor) and each.numel() > 1 for each in tree_leaves([*changed])):
            self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def step_of_decay() -> tuple[Model, dict[str, Tensor]]:
    """A model after a step whose gradients are zero, and its weights before."""
    model = Model()
    optimizer = Optimizer([model], SECTION)
    before = state(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.5)
    return model, before


def test_only_matrices_have_weight_decay() -> None:
    model, before = step_of_decay()
    torch.testing.assert_close(model.matrix.detach(), before["matrix"] * (1 - 0.5 * 0.25))
    assert torch.equal(model.norm.detach(), before["norm"])


def test_a_declaration_may_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, decays in {"matrix": False, "norm": True}.items():
        monkeypatch.setitem(layers.HEAD, name, layers.HEAD[name]._replace(weight_decay=decays))
    model, before = step_of_decay()
    assert torch.equal(model.matrix.detach(), before["matrix"])
    torch.testing.assert_close(model.norm.detach(), before["norm"] * (1 - 0.5 * 0.25))


def test_a_parameter_that_is_not_declared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(layers.HEAD, "norm")
    with pytest.raises(ValueError, match=r"parameter norm is not declared in models/layers\.py"):
        Optimizer([Model()], SECTION)


@pytest.mark.parametrize("moment_dtype", [None, torch.bfloat16])
def test_a_parameter_without_gradient_is_named_before_anything_is_updated(
    moment_dtype: torch.dtype | None,
) -> None:
    model = Model()
    optimizer = Optimizer([model], SECTION, moment_dtype=moment_dtype)
    before = state(optimizer)
    give_gradients(model, 1.0)
    model.norm.grad = None
    with pytest.raises(
        RankFailedError,
        match=r"^the backward pass computed no gradient of 1 of 2 parameters: norm$",
    ):
        optimizer.step(0.5)
    assert [
        name for name, tensor in state(optimizer).items() if not torch.equal(before[name], tensor)
    ] == []


def test_a_few_parameters_without_gradient_are_named_and_all_are_counted() -> None:
    model = nn.ModuleDict(
        {
            "blocks": nn.ModuleList(
                nn.ModuleDict({"ffn_norm": nn.LayerNorm(2, bias=False)}) for _ in range(10)
            )
        }
    )
    cast(Any, model).config = replace(SMALL, num_layers=10)
    named = ", ".join(f"blocks.{layer}.ffn_norm.weight" for layer in range(8))
    with pytest.raises(
        RankFailedError, match=re.escape(f"of 10 of 10 parameters: {named}, ...")
    ) as failed:
        Optimizer([model], SECTION).step(0.5)
    assert failed.value.status == EXIT_NO_RETRY


def test_gradients_of_other_strides_update_alike() -> None:
    models = [Model(), Model()]
    for model, strided in zip(models, (False, True), strict=True):
        optimizer = Optimizer([model], OptimizerSection())
        give_gradients(model, 1)
        for parameter in model.parameters():
            if strided and parameter.grad is not None and parameter.ndim > 1:
                parameter.grad = parameter.grad.T.contiguous().T
        optimizer.step(0.1)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_step_with_a_non_finite_gradient_changes_nothing(bad: float) -> None:
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


def test_skipped_step_leaves_no_trace() -> None:
    skipping = Model()
    plain = Model()
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


def test_state_exists_from_construction_under_parameter_names() -> None:
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


def test_state_dict_returns_the_live_tensors() -> None:
    model = Model()
    optimizer = Optimizer([model], SECTION)
    state_tensors = optimizer.state_dict()
    give_gradients(model, 1.0)
    optimizer.step(0.5)
    assert state_tensors["matrix.step"] == 1
    assert state_tensors["matrix.exp_avg"].any()


# ---- moments in bfloat16


def bf16_and_fp32_moments(**changes: object) -> tuple[list[Model], list[Optimizer]]:
    """Two float32 models; the first has bfloat16 moments."""
    models = [Model(torch.float32), Model(torch.float32)]
    section = SECTION.model_copy(update=changes)
    return models, [
        Optimizer([models[0]], section, moment_dtype=torch.bfloat16),
        Optimizer([models[1]], section),
    ]


@pytest.mark.parametrize("chunk_elements", [1, 5, 1 << 22])
def test_bf16_moments_are_updated_in_float32_and_then_rounded(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int
) -> None:
    monkeypatch.setattr("trainer.step.optimizer.OPTIMIZER_CHUNK_ELEMENTS", chunk_elements)
    models, optimizers = bf16_and_fp32_moments()
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            give_gradients(model, 0.1 if step == 1 else 100.0, seed=step)
            optimizer.step(0.1)
        bf16, fp32 = map(state, optimizers)
        for name, tensor in bf16.items():
            rounded = fp32[name].bfloat16() if "exp_avg" in name else fp32[name]
            assert torch.equal(tensor, rounded), name
        # With the same moments, the next step is the same.
        for name, tensor in optimizers[1].state_dict().items():
            tensor.copy_(bf16[name])
    assert {
        float(tensor)
        for name, tensor in optimizers[0].state_dict().items()
        if name.endswith("step")
    } == {4.0}


def test_skipped_step_does_not_change_bf16_moments() -> None:
    (model, _), (optimizer, _) = bf16_and_fp32_moments()
    give_gradients(model, 1.0)
    optimizer.step(0.5)
    before = state(optimizer)
    give_gradients(model, float("inf"), seed=2)
    assert not optimizer.step(0.5)[1]
    assert [
        name for name, tensor in state(optimizer).items() if not torch.equal(before[name], tensor)
    ] == []


def remaining_moment(beta: float) -> float:
    """What remains of a bfloat16 second moment of 1 after 100 steps with zero gradients."""
    (model, _), (optimizer, _) = bf16_and_fp32_moments(betas=(0.9, beta))
    moment = optimizer.state_dict()["matrix.exp_avg_sq"].fill_(1.0)
    for _ in range(100):
        give_gradients(model, 0.0)
        optimizer.step(0.1)
    return float(moment.float().mean())


@pytest.mark.parametrize("beta", [0.95, 0.99])
def test_bf16_moments_decay_for_betas_above_rounding(beta: float) -> None:
    assert remaining_moment(beta) == pytest.approx(beta**100, rel=0.25)


def test_bf16_moments_never_decay_for_slow_betas() -> None:
    assert remaining_moment(0.998) > 0.95 > 0.998**100


def test_training_with_bf16_moments_follows_float32() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 4, generator=generator)
    targets = torch.tanh(inputs @ torch.randn(4, 3, generator=generator))
    losses: list[list[float]] = [[], []]
    models, optimizers = bf16_and_fp32_moments(weight_decay=0.0)
    for _ in range(150):
        for model, optimizer, found in zip(models, optimizers, losses, strict=True):
            loss = (torch.tanh((inputs * model.norm) @ model.matrix.T) - targets).square().mean()
            loss.backward()
            found.append(float(loss.detach()))
            optimizer.step(0.02)
    bf16, fp32 = losses
    assert bf16 != fp32
    assert fp32[-1] < 0.1 * fp32[0]
    assert max(abs(ours - theirs) for ours, theirs in zip(*losses, strict=True)) < 0.01 * fp32[0]


# ---- deferred num_steps


class TwoLayers(nn.Module):
    """Two submodules and one direct parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.config = configured()
        self.first, self.second = (
            nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x)) * self.scale
        return y


def deferred_optimizer(model: TwoLayers) -> Optimizer:
    return Optimizer([model], SECTION, deferred_modules=[model, model.first, model.second])


def run_steps(model: TwoLayers, optimizer: Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for part in x.split(3):
            model(part).square().sum().backward()
        if step == 2:
            model.first.weight.grad = torch.full_like(model.first.weight, torch.nan)
        optimizer.step(0.1 / (step + 1))


def test_deferred_updates_are_bitwise_equal() -> None:
    torch.manual_seed(0)
    deferred = TwoLayers()
    model = TwoLayers()
    deferred.load_state_dict(model.state_dict())
    optimizers = [deferred_optimizer(deferred), Optimizer([model], SECTION)]
    for one, optimizer in zip((deferred, model), optimizers, strict=True):
        run_steps(one, optimizer, 5)
    assert not torch.equal(deferred.second.weight, model.second.weight)
    optimizers[0].flush_deferred_updates()
    ours, theirs = map(state, optimizers)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert all(parameter.grad is None for parameter in deferred.parameters())


def test_module_is_updated_just_before_its_forward() -> None:
    model = TwoLayers()
    optimizer = deferred_optimizer(model)
    run_steps(model, optimizer, 1)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    updated: list[list[str]] = []

    def record_updated(*_: object) -> None:
        updated.append(
            [name for name, x in model.named_parameters() if not torch.equal(x, weights[name])]
        )

    model.first.register_forward_pre_hook(record_updated)
    model.second.register_forward_pre_hook(record_updated)
    model(torch.ones(1, 3, dtype=torch.float64))
    assert updated == [["scale", "first.weight"], ["scale", "first.weight", "second.weight"]]


def test_state_dict_flushes_deferred_updates() -> None:
    model = TwoLayers()
    optimizer = deferred_optimizer(model)
    run_steps(model, optimizer, 1)
    assert {
        float(tensor) for name, tensor in optimizer.state_dict().items() if name.endswith("step")
    } == {1.0}


def test_module_that_did_not_run_between_two_steps_misses_no_update_and_is_named() -> None:
    torch.manual_seed(0)
    deferred = TwoLayers()
    model = TwoLayers()
    deferred.load_state_dict(model.state_dict())
    optimizers = [deferred_optimizer(deferred), Optimizer([model], SECTION)]
    for one, optimizer in zip((deferred, model), optimizers, strict=True):
        run_steps(one, optimizer, 1)
        one.first(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        with pytest.raises(RankFailedError, match=r"of 2 of 3 parameters: scale, second\.weight$"):
            optimizer.step(0.05)
    ours, theirs = map(state, optimizers)
    assert {float(tensor) for name, tensor in ours.items() if name.endswith("step")} == {1.0}
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
