"""What is known of devices, on the one device that every machine has."""

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


def test_a_cpu_has_no_peak_and_no_device_memory() -> None:
    assert peak_flops(CPU) is None
    assert peak_device_memory(CPU) is None


def test_host_memory_is_a_peak_in_bytes() -> None:
    before = peak_host_memory()
    assert 0.05 * GIB < before < 64 * GIB
    torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_host_memory() >= before


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
    assert AsyncHostCopy(torch.tensor(values, dtype=torch.float64)).read() == values


# ---- beside a device


class Node:
    """A machine of two CUDA devices, bus 0x1b and 0xc3, as far as binding sees it."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path, *lists: str, allowed: set[int], threads: int = 1) -> None:
        self.root, self.bound, self.threads = root, list[set[int]](), threads
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

    def stay(self, index: int = 1) -> list[set[int]]:
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
def test_a_process_stays_beside_its_device_on_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listed: str, allowed: set[int], bound: set[int]
) -> None:
    assert Node(monkeypatch, tmp_path, "0-1\n", listed, allowed=allowed).stay() == [bound]


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
    ids=["no files", "another's file", "empty", "garbled", "given elsewhere", "given no others"],
)
def test_nothing_is_bound_where_it_is_not_known_or_would_take_all_or_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lists: tuple[str, ...], allowed: set[int]
) -> None:
    node = Node(monkeypatch, tmp_path, *lists, allowed=allowed, threads=8)
    assert node.stay() == []
    assert node.threads == 8


def test_a_process_without_a_device_stays_where_it_is(tmp_path: Path) -> None:
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
    ids=["one device each", "both on one side", "more devices than CPUs", "one is enough"],
)
def test_threads_of_processes_on_one_side_find_room_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lists: tuple[str, ...], threads: int, after: int
) -> None:
    node = Node(monkeypatch, tmp_path, *lists, allowed=set(range(8)), threads=threads)
    node.stay()
    assert node.threads == after


def test_it_is_told_once_where_a_process_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="trainer"):
        Node(monkeypatch, tmp_path, "0-3\n", "4-7\n", allowed=set(range(8))).stay()
    assert caplog.messages == ["bound to the 4 of 8 CPUs that are beside cuda:1"]
