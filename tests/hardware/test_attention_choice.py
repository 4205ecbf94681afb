"""One choice of attention kernels for a plan, an estimate and a run on the same device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from models.kernel_choice import (
    CUDNN_AND_FLASH,
    FASTEST_FIRST,
    FLASH_VERSIONS,
    USUAL_ORDER,
    AttentionNeeds,
    auto_choices,
)
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.errors import ConfigError, RankFailedError
from trainer.hardware import attention_kernels, device
from trainer.hardware.attention_choice import with_attention_choice
from trainer.hardware.attention_kernels import attention_choices, fastest_first
from trainer.hardware.device_specs import DeviceSpec, device_names, load_device
from trainer.hardware.spec_tables import table_attention_rates
from trainer.plan.run_plan import plan_stage
from trainer.trace.answers import traced_rank_steps

H100, A100, B200 = (load_device(name) for name in ("h100-80gb", "a100-80gb", "b200"))


def configured(*options: str) -> Config:
    return load(
        [
            "--data.corpus=copy",
            "--model.family=llama3",
            "--model.size=8b",
            "--training.dtype=bfloat16",
            *options,
        ]
    )


def choices(config: Config, device: DeviceSpec) -> list[str]:
    return attention_choices(config, device.generation, device.attention_flops)


@pytest.mark.parametrize("name", device_names())
def test_a_run_reads_the_rates_that_a_plan_reads(name: str) -> None:
    expected = {
        kernel: {width: tuple(rate / 1e12 for rate in both) for width, both in widths.items()}
        for kernel, widths in load_device(name).attention_flops.items()
    }
    assert {
        kernel: dict(widths) for kernel, widths in table_attention_rates(name).items()
    } == expected


@pytest.mark.parametrize("name", device_names())
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_device_without_a_table_takes_what_those_of_its_generation_take(
    name: str, head_dim: int
) -> None:
    known = load_device(name)
    needs = AttentionNeeds(dtype="bfloat16", head_dim=head_dim, generation=known.generation)
    in_torch = [
        kernel
        for kernel in fastest_first(known.attention_flops, head_dim)
        if kernel not in FLASH_VERSIONS
    ]
    usual = FASTEST_FIRST.get(known.generation, USUAL_ORDER)
    assert auto_choices(needs, in_torch)[0] == auto_choices(needs)[0]
    assert [kernel for kernel in in_torch if kernel in usual] == [*usual]


@pytest.mark.parametrize(
    ("table", "options", "choice", "of_full", "of_windows"),
    [
        ("h100-80gb", (), CUDNN_AND_FLASH, "cudnn", "flash"),
        pytest.param(
            "h100-80gb",
            ("--training.seq_len=2048",),
            CUDNN_AND_FLASH,
            "flash",
            "flash",
            marks=pytest.mark.slow,
        ),
        pytest.param("a100-80gb", (), "flash", "flash", "flash", marks=pytest.mark.slow),
        pytest.param(
            "h100-80gb",
            ("--training.dtype=float32",),
            "efficient",
            "efficient",
            "efficient",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_plan_and_trace_count_the_kernels_that_a_run_chooses(
    table: str, options: tuple[str, ...], choice: str, of_full: str, of_windows: str
) -> None:
    config = load(
        [
            "--config=gemma3_4b_128k",
            "--model.num_layers=6",
            "--training.compile=false",
            "--data.corpus=copy",
            f"--plan.device={table}",
            *options,
        ]
    )
    known = load_device(table)
    assert choices(config, known)[0] == choice
    assert plan_stage(config, 8, known).config.training.attention == choice
    found = defaultdict[bool, set[str]](set)
    (step,) = traced_rank_steps(with_attention_choice(config, known), 8)
    for index in step.order:
        piece = step.pieces[index]
        if isinstance(piece.place.unit, int):
            window = step.windows[piece.place.stage, piece.place.unit]
            found[window is None] |= {key.kernel for key in piece.work.attention}
    assert found == {True: {of_full}, False: {of_windows}}


def test_a_flash_version_is_chosen_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "is_installed", lambda kernel: kernel == "fa4")
    assert choices(configured(), B200)[:2] == ["fa4", CUDNN_AND_FLASH]
    assert choices(configured(), A100)[0] == "flash"


def test_a_named_kernel_is_the_only_choice_and_keeps_its_configuration() -> None:
    config = configured("--training.attention=efficient")
    assert choices(config, H100) == ["efficient"]
    assert with_attention_choice(config, H100) is config
    assert configured().training.attention == "auto"


@pytest.mark.parametrize(
    ("table", "kernel", "of"), [(B200, "fa3", "hopper"), (A100, "fa4", "hopper, blackwell")]
)
def test_a_plan_refuses_a_kernel_that_the_device_cannot_run(
    table: Any, kernel: str, of: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_stage(configured(f"--training.attention={kernel}"), 8, table)
    (problem,) = refused.value.problems
    words = f'training.attention = "{kernel}" runs on {of} devices, not on {table.generation}'
    assert problem == f"{table.name}: {words}"


def test_a_table_of_another_measurement_changes_the_choice(tmp_path: Path) -> None:
    """Someone whose cuDNN is slow gets flash."""
    path = tmp_path / "slow.toml"
    path.write_text(
        'extends = "h100-80gb"\n[attention.cudnn]\nwidth_128 = { forward = 100, backward = 100, source = "me" }\n'
    )
    config = configured(f"--plan.device={path}")
    assert plan_stage(config, 8, load_device(str(path))).config.training.attention == "flash"


# ---- on a device


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The choice of a run on a device of a name, where some kernels are wrong; with what was
    checked.
    """

    def choose(config: Config, name: str, wrong: dict[str, Exception], checked: list[str]) -> str:
        def verify(_: Config, kernel: str, __: torch.device) -> None:
            checked.append(kernel)
            active = activated[-1] if activated else kernel
            if error := wrong.get(active if kernel == "flash" else kernel):
                raise error

        activated = list[str]()
        monkeypatch.setattr(device, "verify_attention_kernel", verify)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(
            torch.nn.attention,
            "activate_flash_attention_impl",
            lambda name: activated.append(name),
        )
        monkeypatch.setattr(
            torch.nn.attention, "restore_flash_attention_impl", lambda: activated.clear()
        )
        with FakeTensorMode():
            return device.choose_attention_kernel(config, torch.device("cuda", 0))

    return choose


@pytest.mark.parametrize("name", ["NVIDIA H200", "A card of tomorrow"])
def test_auto_takes_the_fastest_right_kernels(name: str, chosen: Callable[..., str]) -> None:
    checked = list[str]()
    assert chosen(configured(), name, {}, checked) == CUDNN_AND_FLASH
    assert checked == [CUDNN_AND_FLASH]


def test_auto_leaves_out_a_wrong_kernel_with_one_line(
    chosen: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        chosen(configured(), "NVIDIA H200", {CUDNN_AND_FLASH: ValueError("dq is wrong")}, [])
        == "flash"
    )
    (line,) = (
        record.getMessage() for record in caplog.records if "left out" in record.getMessage()
    )
    assert line == "attention kernel cudnn+flash is left out on cuda:0: dq is wrong"
    both = {CUDNN_AND_FLASH: ValueError("a"), "flash": RuntimeError("b")}
    assert chosen(configured(), "NVIDIA H200", both, []) == "efficient"


def test_a_wrong_flash_version_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, chosen: Callable[..., str]
) -> None:
    monkeypatch.setattr(attention_kernels, "is_installed", lambda kernel: kernel == "fa3")
    assert chosen(configured(), "NVIDIA H100 80GB HBM3", {}, []) == "flash"
    wrong = {"FA3": AssertionError("no windows")}
    checked = list[str]()
    assert chosen(configured(), "NVIDIA H100 80GB HBM3", wrong, checked) == CUDNN_AND_FLASH
    assert checked == ["flash", CUDNN_AND_FLASH]


def test_a_named_kernel_that_is_wrong_ends_the_run(chosen: Callable[..., str]) -> None:
    config = configured("--training.attention=cudnn+flash")
    with pytest.raises(
        RankFailedError, match=r'training.attention = "cudnn\+flash" does not work on cuda:0: no'
    ):
        chosen(config, "NVIDIA H200", {CUDNN_AND_FLASH: ValueError("no")}, [])
    with pytest.raises(RankFailedError, match="hopper"):
        chosen(
            configured("--training.attention=fa4"),
            "NVIDIA H200",
            {"FA4": ValueError("hopper")},
            [],
        )
