"""A calibrated device table: the planner returns the seconds that were measured."""

from __future__ import annotations

import pytest

from trainer.config.job_config import Config
from trainer.hardware.device_specs import DeviceSpec, load_device
from trainer.hardware.host import node_memory_bytes
from trainer.plan import calibrate
from trainer.plan.interconnect import group_topologies
from trainer.plan.memory_estimate import rank_memory
from trainer.plan.rank_workload import rank_workload
from trainer.plan.step_time import RankTimeModel

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


def time_model(device: DeviceSpec, **training: object) -> RankTimeModel:
    """Of one Llama 3.2 1B, whose width is SIDE."""
    sections = {"model": {"family": "llama3.2", "size": "1b"}, "memory": {"loss_chunk_mib": 4096}}
    values = {
        "seq_len": TOKENS,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "compile": False,
    } | training
    config = Config.model_validate(sections | {"training": values})
    return RankTimeModel(config, 1, 0, device, group_topologies(config, 1, device))


def test_a_product_of_the_measured_size_takes_the_measured_seconds(device: DeviceSpec) -> None:
    model = time_model(device)
    assert (model.rank.model.dim, model.rank.tokens >= SIDE) == (SIDE, True)
    assert 2 * SIDE**3 / model.head_rate == pytest.approx(SECONDS, rel=1e-3)


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "plain"])
def test_attention_of_the_measured_length_takes_the_measured_seconds(
    device: DeviceSpec, kernel: str
) -> None:
    rates = time_model(device, attention=kernel).attention_rates(None)
    heads = 8
    head_dim = 64
    pairs = TOKENS * (TOKENS + 1) / 2
    for phase, products in (("forward", 2), ("backward", 5)):
        assert products * 2 * heads * head_dim * pairs / rates[phase] == pytest.approx(
            SECONDS, rel=1e-3
        )


def test_bytes_move_at_the_measured_rate(device: DeviceSpec) -> None:
    model = time_model(device)
    moved = rank_workload(rank_memory(model.config, 1, 0)).memory_traffic["forward"]
    assert model.memory_seconds("forward") == pytest.approx(
        moved / (2 * BYTES) * SECONDS, rel=1e-3
    )


def test_a_cpu_has_the_memory_of_its_machine(device: DeviceSpec) -> None:
    assert device.memory == pytest.approx(node_memory_bytes(), rel=1e-3)
    assert device.host_memory == pytest.approx(node_memory_bytes(), rel=1e-3)
