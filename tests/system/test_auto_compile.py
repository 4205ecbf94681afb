"""`training.compile = "auto"` is on where a GPU compiles blocks rightly, off elsewhere, and says
so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallelisms import gradient_check
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.run import auto_compile
from trainer.run.auto_compile import resolve_auto_compile
from trainer.step import build
from trainer.step.process_group import World
from trainer.trace.answers import traced_rank_steps

CUDA = World(0, 1, torch.device("cuda", 0))
CPU = World(0, 1, torch.device("cpu"))


def configured(*options: str) -> Config:
    return load(["--data.corpus=copy", "--training.compile=auto", *options])


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_compile, "all_gather_values", lambda value: [value])


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is checked before blocks are compiled; nothing is wrong."""
    seen = list[str]()
    monkeypatch.setattr(
        auto_compile, "verify_code_generation", lambda device: seen.append(str(device))
    )
    monkeypatch.setattr(
        build,
        "verify_gradients",
        lambda _, policy, tiling: seen.append(f"{policy} {tiling.head_groups}"),
    )
    return seen


def outcome(config: Config, world: World, caplog: pytest.LogCaptureFixture) -> tuple[Any, str]:
    with caplog.at_level(logging.INFO):
        resolved = resolve_auto_compile(config, world)
    return resolved.training.compile, caplog.records[-1].getMessage() if caplog.records else ""


def test_auto_is_on_on_cuda_after_the_checks_and_says_the_seconds(
    checks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    is_on, line = outcome(configured("--memory.recompute=full"), CUDA, caplog)
    assert is_on is True
    assert line.startswith('training.compile = "auto": on; compiled gradients were compared in ')
    assert checks == ["cuda:0", "full 1"]


def test_every_recomputation_that_may_be_chosen_is_checked(
    checks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    outcome(configured("--memory.recompute=auto"), CUDA, caplog)
    assert checks == ["cuda:0", "none 1", "keep_attention 1", "full 1"]


@pytest.mark.parametrize(
    ("options", "world", "reason"),
    [
        ((), CPU, "there is no GPU"),
        (("--training.deterministic=true",), CUDA, "training.deterministic = true, and"),
    ],
)
def test_auto_is_off_with_its_reason(
    options: tuple[str, ...],
    world: World,
    reason: str,
    checks: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_on, line = outcome(configured(*options), world, caplog)
    assert is_on is False
    assert line.startswith(f'training.compile = "auto": off, because {reason}')
    assert checks == []


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize("name", ["verify_gradients", "verify_code_generation"])
def test_a_compiler_that_changes_a_gradient_or_fails_is_left_off(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no C compiler\nfound")

    monkeypatch.setattr(build if name == "verify_gradients" else auto_compile, name, refuse)
    is_on, line = outcome(configured(), CUDA, caplog)
    assert is_on is False
    assert line.endswith("no C compiler found")


@pytest.mark.usefixtures("checks")
def test_one_rank_that_cannot_compile_leaves_it_off_on_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        auto_compile,
        "all_gather_values",
        lambda value: [value, "torch.compile fails on cuda:1", ""],
    )
    assert outcome(configured(), CUDA, caplog) == (
        False,
        'training.compile = "auto": off, because torch.compile fails on cuda:1',
    )


@pytest.mark.parametrize("value", [True, False])
def test_a_value_that_is_given_stays_and_is_not_checked_here(
    *, value: bool, checks: list[str]
) -> None:
    config = configured(f"--training.compile={str(value).lower()}")
    assert resolve_auto_compile(config, CUDA) is config
    assert checks == []


def test_a_plan_counts_compiled_blocks_and_a_cpus_trace_does_not() -> None:
    def kernels(*options: str, on_gpu: bool) -> int:
        config = configured("--training.attention=flash", "--model.num_layers=1", *options)
        (step,) = traced_rank_steps(config, 1, on_gpu=on_gpu)
        return sum(step.pieces[index].work.kernels.total() for index in step.order)

    eager = kernels("--training.compile=false", on_gpu=True)
    assert kernels(on_gpu=True) < eager
    assert kernels("--training.deterministic=true", on_gpu=True) == eager
    on_cpu = kernels(on_gpu=False)
    assert on_cpu == kernels("--training.compile=false", on_gpu=False)
    assert kernels("--training.compile=true", on_gpu=False) < on_cpu


@pytest.mark.slow
def test_the_compiler_of_this_machine_passes_or_is_named() -> None:
    try:
        gradient_check.verify_code_generation(torch.device("cpu"))
    except RuntimeError as error:
        assert str(error).startswith("torch.compile fails on cpu: ")


def test_a_compiler_that_gives_other_numbers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return lambda x: function(x) * 1.01

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(RuntimeError, match=r"torch\.compile gives other numbers on cpu"):
        gradient_check.verify_code_generation(torch.device("cpu"))
