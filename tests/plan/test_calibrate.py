"""A calibrated device table: the planner returns the seconds that were measured."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from trainer.config.job_config import Config
from trainer.hardware.device_specs import DeviceSpec, load_device
from trainer.hardware.host import node_memory_bytes
from trainer.plan import calibrate
from trainer.plan.rank_clock import DeviceRates
from trainer.trace.pieces import AttentionKey, ProductKey, Work

SIDE = 2048
TOKENS = 1024
BYTES = 1 << 20
SECONDS = 0.02
"""Of every call."""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> DeviceSpec:
    """The device of a table that was calibrated where every call takes SECONDS."""
    path = tmp_path_factory.mktemp("tables") / "mine.toml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "SMALL", (SIDE, TOKENS, BYTES))
        patch.setattr(calibrate, "_min_seconds", lambda *_: SECONDS)
        path.write_text(calibrate.measure_device_toml("h100-80gb"))
    return load_device(str(path))


def seconds(device: DeviceSpec, *, kernel: str = "auto", **work: Counter[Any]) -> float:
    """Of kernels on the device."""
    config = Config.model_validate({"training": {"attention": kernel}})
    return sum(DeviceRates(config, device, {}).compute(Work(**work)).seconds.values())


def test_a_product_of_the_measured_size_takes_the_measured_seconds(device: DeviceSpec) -> None:
    products = Counter({ProductKey("forward", SIDE): 2 * SIDE**3})
    assert seconds(device, products=products) == pytest.approx(SECONDS, rel=1e-3)


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "plain"])
@pytest.mark.parametrize(("phase", "products"), [("forward", 2), ("backward", 5)])
def test_attention_of_the_measured_length_takes_the_measured_seconds(
    device: DeviceSpec, kernel: str, phase: str, products: int
) -> None:
    heads = 8
    head_dim = 64
    pairs = TOKENS * (TOKENS + 1) // 2
    key = AttentionKey(phase, kernel, TOKENS, head_dim)
    attention = Counter({key: products * 2 * heads * head_dim * pairs})
    assert seconds(device, kernel=kernel, attention=attention) == pytest.approx(SECONDS, rel=1e-3)


def test_bytes_move_at_the_measured_rate(device: DeviceSpec) -> None:
    moved = Counter({"forward": 2 * BYTES})
    assert seconds(device, moved_bytes=moved) == pytest.approx(SECONDS, rel=1e-3)


def test_a_cpu_has_the_memory_of_its_machine(device: DeviceSpec) -> None:
    assert device.memory == pytest.approx(node_memory_bytes(), rel=1e-3)
    assert device.host_memory == pytest.approx(node_memory_bytes(), rel=1e-3)
