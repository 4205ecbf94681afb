"""What differs between devices: their peak, their memory, and how time is read on them."""

from __future__ import annotations

import logging
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from models import kernels
from trainer.config.job_config import Config
from trainer.errors import BAD_CONFIGURATION, RankError
from trainer.hardware.device_specs import Device, device_called, load_device

GIB = 1 << 30
log = logging.getLogger(__name__)


def choose_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A scheduler may show each task its own device only, which is then number 0.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def stay_near(device: torch.device, pci: Path = Path("/sys/bus/pci/devices")) -> None:
    """Binds this process to the CPUs beside a CUDA device, of those it may use: memory comes from where they are."""
    if device.type != "cuda":
        return
    allowed = os.sched_getaffinity(0)
    near = [_beside(torch.cuda.get_device_properties(other), pci) for other in range(torch.cuda.device_count())]
    mine = near[device.index] & allowed
    if mine and mine != allowed:
        os.sched_setaffinity(0, mine)
        # Whoever started this process dealt threads out for all CPUs of the machine.
        torch.set_num_threads(max(1, min(torch.get_num_threads(), len(mine) // near.count(near[device.index]))))
        log.info("bound to the %d of %d CPUs that are beside %s", len(mine), len(allowed), device)


def _beside(properties: Any, pci: Path) -> set[int]:
    """CPUs of the same NUMA node; none where nobody says."""
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        listed = (pci / address / "local_cpulist").read_text()  # 0-27,56-83
        ends = [[int(end) for end in part.split("-")] for part in listed.split(",") if part.strip()]
    except (OSError, ValueError):
        return set()
    return {cpu for first, *last in ends for cpu in range(first, (last or [first])[0] + 1)}


def refuse_nondeterminism() -> None:
    """From here on, operators without a deterministic kernel raise; cuBLAS is told by the launcher."""
    torch.use_deterministic_algorithms(True)  # noqa: FBT003


def require_peers(device: torch.device) -> None:
    """Raises RankError unless the devices of this host reach each other's memory."""
    others = range(torch.cuda.device_count() if device.type == "cuda" else 0)
    lone = [other for other in others if other != device.index and not _reach(device, other)]
    if lone or len(others) < 2:
        found = f"{device} does not reach {lone}" if lone else f"this process sees {device} alone"
        message = f"parallelism.async_tp = true needs several CUDA devices that reach each other's memory; {found}"
        raise RankError(BAD_CONFIGURATION, message)


def _reach(device: torch.device, other: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(device, other))


def attention_kernel(config: Config, device: torch.device) -> str:
    """The kernel of attention on this device, shown there to compute what matrix products do.

    Activates FlashAttention 3 or 4 where asked for. Raises RankError where a kernel is missing, or wrong: devices
    may differ.
    """
    wanted, compute = config.training.attention, getattr(torch, config.training.dtype)
    asked = "flash" if wanted in ("fa3", "fa4") else wanted
    name = kernels.choose(torch.empty(0, dtype=compute, device=device), asked)
    if device.type == "cpu":
        return name
    try:
        if wanted in ("fa3", "fa4"):
            torch.nn.attention.activate_flash_attention_impl(wanted.upper())
        kernels.check(name, device, compute, width=config.model.build().head_dim)
    except (ImportError, RuntimeError, ValueError) as error:
        message = f'training.attention = "{wanted}" does not work on {device}: {error}'
        raise RankError(BAD_CONFIGURATION, message) from error
    return name


def peak_flops(device: torch.device) -> float | None:
    """Peak of the device, None where it is unknown: a CPU has none, and another device's would be a lie."""
    if device.type != "cuda":
        return None
    known = device_called(torch.cuda.get_device_name(device))
    return None if known is None else known.peak


def planned_device(config: Config, device: torch.device) -> Device | None:
    """What updates are predicted for: `plan.device`, else the device itself, if a table knows it."""
    if config.plan.device is not None:
        return load_device(config.plan.device)
    return device_called(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def device_memory(device: torch.device) -> tuple[float, float] | None:
    """Peak bytes allocated and reserved on the device since the process began; None on a CPU."""
    if device.type != "cuda":
        return None
    return float(torch.cuda.max_memory_allocated(device)), float(torch.cuda.max_memory_reserved(device))


def host_memory() -> float:
    """Bytes of this process that were resident at once, at their peak."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


class Stopwatch:
    """Seconds of work on a device between `start` and `stop`; reading them waits for that work, nothing before does."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._cuda else []
        self._times = [0.0, 0.0]

    def start(self) -> None:
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def seconds(self) -> float:
        if not self._cuda:
            return self._times[1] - self._times[0]
        self._events[1].synchronize()
        milliseconds: float = self._events[0].elapsed_time(self._events[1])
        return milliseconds / 1000

    def _mark(self, end: int) -> None:
        if self._cuda:
            self._events[end].record()
        else:
            self._times[end] = time.perf_counter()


class Work:
    """What this rank does by itself, apart from waiting for others, in seconds that can be compared among ranks.

    On a CPU that is the process's own time. A CUDA device is asked for a product of two matrices, which is the same on
    all of them and takes a slow one longer; it is read at the next call, so that nothing waits.
    """

    def __init__(self, device: torch.device, size: int = 4096) -> None:
        self._since = time.process_time()
        self._product: Stopwatch | None = None
        cuda = device.type == "cuda"
        self._matrix = torch.ones(size, size, device=device, dtype=torch.bfloat16) if cuda else None

    def seconds(self) -> float:
        """Since the call before."""
        if self._matrix is None:
            before, self._since = self._since, time.process_time()
            return self._since - before
        found = 0.0 if self._product is None else self._product.seconds()
        self._product = Stopwatch(self._matrix.device)
        self._product.start()
        torch.mm(self._matrix, self._matrix)
        self._product.stop()
        return found


class Numbers:
    """A vector on its way from the device: the copy starts at once, `read` waits for it."""

    def __init__(self, vector: Tensor) -> None:
        self._vector = vector
        self._copied: torch.cuda.Event | None = None
        if vector.device.type == "cuda":
            self._vector = torch.empty_like(vector, device="cpu", pin_memory=True).copy_(vector, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._vector.tolist()
