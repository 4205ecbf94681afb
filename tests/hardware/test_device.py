"""Device helpers on a CPU, and NUMA binding on a faked CUDA machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.hardware.device import (
    AsyncHostCopy,
    Stopwatch,
    bind_to_numa_node,
    peak_device_memory,
    peak_flops,
    peak_host_memory,
)
from trainer.hardware.host import GIB

CPU = torch.device("cpu")


def test_a_cpu_has_no_peak_flops_and_no_device_memory() -> None:
    assert peak_flops(CPU) is None
    assert peak_device_memory(CPU) is None


def test_peak_host_memory_is_in_bytes() -> None:
    before = peak_host_memory()
    assert 0.05 * GIB < before < 64 * GIB
    torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_host_memory() >= before


def test_a_stopwatch_measures_from_start_to_stop() -> None:
    stopwatch = Stopwatch(CPU)
    stopwatch.start()
    time.sleep(0.02)
    stopwatch.stop()
    time.sleep(0.05)
    assert 0.02 <= stopwatch.seconds() < 0.045
    assert stopwatch.seconds() == stopwatch.seconds()


def test_async_copy_is_exact() -> None:
    values = [1 / 3, float("inf"), -0.0, 1e300]
    assert AsyncHostCopy(torch.tensor(values, dtype=torch.float64)).read() == values


# ---- NUMA binding


class Node:
    """Fakes a machine with two CUDA devices on buses 0x1b and 0xc3."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        root: Path,
        *lists: str,
        allowed: set[int],
        threads: int = 1,
    ) -> None:
        self.root = root
        self.bound = list[set[int]]()
        self.threads = threads
        for bus, listed in zip((0x1B, 0xC3), lists, strict=False):
            folder = root / f"0000:{bus:02x}:00.0"
            folder.mkdir()
            (folder / "local_cpulist").write_text(listed)
        patch.setattr(os, "sched_getaffinity", lambda _: allowed)
        patch.setattr(os, "sched_setaffinity", lambda _, cpus: self.bound.append(cpus))
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "get_device_properties", self.properties)
        patch.setattr(torch, "get_num_threads", lambda: self.threads)
        patch.setattr(torch, "set_num_threads", lambda number: setattr(self, "threads", number))

    def properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=(0x1B, 0xC3)[index], pci_device_id=0)

    def bind(self, index: int = 1) -> list[set[int]]:
        bind_to_numa_node(torch.device("cuda", index), self.root)
        return self.bound


@pytest.mark.parametrize(
    ("listed", "allowed", "bound"),
    [
        ("4-7\n", set(range(8)), {4, 5, 6, 7}),
        ("2-3,6-7,9\n", set(range(16)), {2, 3, 6, 7, 9}),
        ("5\n", {1, 5}, {5}),
        ("4-7\n", {0, 1, 5, 6}, {5, 6}),
    ],
)
def test_a_process_is_bound_to_the_allowed_cpus_of_its_numa_node(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    listed: str,
    allowed: set[int],
    bound: set[int],
) -> None:
    assert Node(monkeypatch, tmp_path, "0-1\n", listed, allowed=allowed).bind() == [bound]


@pytest.mark.parametrize(
    ("lists", "allowed"),
    [
        ((), {0, 1}),
        (("0-1\n",), {0, 1}),
        (("0-1\n", "\n"), {0, 1}),
        (("0-1\n", "none\n"), {0, 1}),
        (("0-1\n", "4-7\n"), {0, 1}),
        (("0-1\n", "0-7\n"), {2, 3}),
    ],
    ids=[
        "no files",
        "another's file",
        "empty",
        "garbled",
        "allowed elsewhere",
        "all allowed are local",
    ],
)
def test_binding_is_skipped_without_a_proper_subset_of_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lists: tuple[str, ...], allowed: set[int]
) -> None:
    node = Node(monkeypatch, tmp_path, *lists, allowed=allowed, threads=8)
    assert node.bind() == []
    assert node.threads == 8


def test_a_cpu_process_is_not_bound(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    bind_to_numa_node(CPU, tmp_path)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("lists", "threads", "after"),
    [
        (("0-3\n", "4-7\n"), 4, 4),
        (("4-7\n", "4-7\n"), 4, 2),
        (("4\n", "4\n"), 4, 1),
        (("0-3\n", "4-7\n"), 1, 1),
    ],
    ids=["one device each", "both on one node", "more devices than CPUs", "one is enough"],
)
def test_processes_on_one_numa_node_share_its_threads(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    lists: tuple[str, ...],
    threads: int,
    after: int,
) -> None:
    node = Node(monkeypatch, tmp_path, *lists, allowed=set(range(8)), threads=threads)
    node.bind()
    assert node.threads == after


def test_binding_is_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="trainer"):
        Node(monkeypatch, tmp_path, "0-3\n", "4-7\n", allowed=set(range(8))).bind()
    assert caplog.messages == ["bound to the 4 of 8 CPUs on the NUMA node of cuda:1"]
