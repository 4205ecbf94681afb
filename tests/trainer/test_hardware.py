"""What is known of devices, on the one device that every machine has."""

from __future__ import annotations

import time

import pytest
import torch

from trainer.hardware import GIB, PEAK_FLOPS, Numbers, Stopwatch, device_memory, host_memory, peak_flops

CPU = torch.device("cpu")
# As torch.cuda.get_device_name gives them.
DEVICES = {
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H20": 148e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA L40S": 362e12,
    "AMD Instinct MI300X": 1300e12,
}


@pytest.mark.parametrize(("name", "peak"), DEVICES.items())
def test_the_first_part_of_a_name_that_matches_is_the_right_one(name: str, peak: float) -> None:
    assert next(found for part, found in PEAK_FLOPS.items() if part in name) == peak


def test_no_entry_hides_another() -> None:
    parts = list(PEAK_FLOPS)
    hidden = [(part, later) for place, part in enumerate(parts) for later in parts[place + 1 :] if part in later]
    assert hidden == []


def test_a_cpu_has_no_peak_and_no_device_memory() -> None:
    assert peak_flops(CPU) is None
    assert device_memory(CPU) is None


def test_host_memory_is_a_peak_in_bytes() -> None:
    before = host_memory()
    assert 0.05 * GIB < before < 64 * GIB
    torch.ones(64 << 20, dtype=torch.uint8)
    assert host_memory() >= before


def test_a_stopwatch_measures_between_its_marks() -> None:
    stopwatch = Stopwatch(CPU)
    stopwatch.start()
    time.sleep(0.02)
    stopwatch.stop()
    time.sleep(0.05)
    assert 0.02 <= stopwatch.seconds() < 0.045
    assert stopwatch.seconds() == stopwatch.seconds()


def test_numbers_are_read_exactly() -> None:
    values = [1 / 3, float("inf"), -0.0, 1e300]
    assert Numbers(torch.tensor(values, dtype=torch.float64)).read() == values
