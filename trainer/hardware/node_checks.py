"""Checks of a node before it trains: what it has, whether it computes right, and how fast it
copies.

Each check returns what it found, and raises `CheckFailedError` with what is wrong. Every one ends
within seconds on a good node.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from models.kernel_check import Heads, verify_kernel
from models.kernels import select_kernel
from trainer.hardware.device import Stopwatch
from trainer.hardware.host import GIB

MIB = 1 << 20
MIN_FREE_SHARE = 0.9
"""Least free share of a device's memory. If less is free, a process of an earlier job holds the
rest.
"""
PRODUCT_ROUNDS = 100
SLOW = 0.7
"""Share of the median rate of a node's devices below which a device counts as slow."""
MAX_CLOCK_SECONDS = 30.0
"""Largest difference between the clocks of this node and of the file system, both of which the
lease depends on.
"""
FILE_BYTES = 64 * MIB
SHM_BYTES = 64 * MIB
COPY_BYTES = 256 * MIB
SHM = Path("/dev/shm")
ATTENTION = Heads(4, 2, 64)


class CheckFailedError(Exception):
    """The node fails a check; the message says how."""


@dataclass(frozen=True)
class Node:
    """A node under test."""

    path: Path
    """A folder on the disk that the run uses."""
    devices: int | None = None
    """Number of GPUs that the node must have; None: as many as it lists."""
    product_size: int = 0
    """Dimension of the square matrices that are multiplied; 0: 4096 on a GPU, 512 on a CPU."""

    @property
    def compute_devices(self) -> list[torch.device]:
        """The GPUs, or the CPU if there are none."""
        found = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return found or [torch.device("cpu")]


# ---- what the node has


def devices(node: Node) -> str:
    """All devices are visible."""
    visible = torch.cuda.device_count()
    listed = listed_gpus()
    expected = listed if node.devices is None else node.devices
    if visible != expected:
        raise CheckFailedError(f"{visible} of {expected} GPUs are visible")
    return f"{visible} GPUs"


def listed_gpus() -> int:
    """GPUs that the driver lists, before any selection by CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return torch.cuda.device_count()
    with suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False
        ).stdout
        return sum(line.startswith("GPU ") for line in said.splitlines())
    return 0


def memory(node: Node) -> str:
    """The memory of every device is free."""
    smallest = float("inf")
    for device in node.compute_devices:
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            smallest = min(smallest, free)
            if free < MIN_FREE_SHARE * total:
                raise CheckFailedError(
                    f"{device} has {free / GIB:.1f} of {total / GIB:.1f} GiB free: another process holds the rest"
                )
    return "no GPUs" if smallest == float("inf") else f"at least {smallest / GIB:.1f} GiB free"


# ---- whether it computes right


def product(node: Node) -> str:
    """Products of integers are exact and repeatable, and no device takes far longer than the
    others.
    """
    seconds = {
        device: _product_seconds(device, node.product_size) for device in node.compute_devices
    }
    return "exact, " + _rates(seconds, "ms", 1e3)


def _product_seconds(device: torch.device, size: int) -> float:
    on_gpu = device.type == "cuda"
    size = size or (4096 if on_gpu else 512)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, (size, size), generator=generator) for _ in range(2))
    # Some rows are compared with float64; all others only with the first product.
    rows = torch.arange(0, size, max(1, size // 16))
    # Sums of integers below 2^24 are exact in float32; only the last rounding is not.
    expected = (a[rows].double() @ b.double()).bfloat16()
    a, b = (x.to(device, torch.bfloat16) for x in (a, b))
    # Not timed: the first product also loads kernels and raises clocks.
    first = a @ b
    watch = Stopwatch(device)
    watch.start()
    others = [_differs(a @ b, first) for _ in range(PRODUCT_ROUNDS if on_gpu else 2)]
    watch.stop()
    if bool((first[rows.to(device)].cpu() != expected).any()):
        raise CheckFailedError(f"{device} computes a wrong product")
    if any(bool(differs) for differs in others):
        raise CheckFailedError(f"{device} computes another product the second time")
    return watch.seconds() / len(others)


def _differs(x: Tensor, y: Tensor) -> Tensor:
    return (x != y).any()


def attention(node: Node) -> str:
    """Attention by the kernel that runs here agrees with float64, forward and backward, and each
    time.
    """
    kernel = ""
    for device in node.compute_devices:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        kernel = select_kernel(torch.empty(0, device=device, dtype=dtype), "auto")
        try:
            verify_kernel(kernel, device, dtype, heads=ATTENTION, lengths=(1, 63, 200))
        except ValueError as error:
            raise CheckFailedError(f"{device}: {error}") from None
    return f"right, {kernel}"


# ---- how it copies


def copies(node: Node) -> str:
    """Every device copies from and to pinned memory as fast as the others, without an error."""
    seconds = {
        device: _copy_seconds(device) for device in node.compute_devices if device.type == "cuda"
    }
    return _rates(seconds, "GB/s", COPY_BYTES * 2 / 1e9, inverse=True) if seconds else "no GPUs"


def _copy_seconds(device: torch.device) -> float:
    host = torch.arange(COPY_BYTES // 4, dtype=torch.int32).pin_memory()
    back = torch.empty_like(host, pin_memory=True)
    watch = Stopwatch(device)
    with torch.cuda.device(device):
        there = host.to(device, non_blocking=True)  # The first copy is not timed.
        watch.start()
        there.copy_(host, non_blocking=True)
        back.copy_(there, non_blocking=True)
        watch.stop()
        seconds = watch.seconds()
    if not torch.equal(host, back):
        raise CheckFailedError(f"{device} returns other bytes than were copied to it")
    return seconds


def links(node: Node) -> str:
    """Every device's data arrive unchanged at the next one, as fast as the others'."""
    found = [device for device in node.compute_devices if device.type == "cuda"]
    if len(found) < 2:
        return "one device"
    seconds = {}
    for device, following in zip(found, found[1:] + found[:1], strict=True):
        source = torch.arange(COPY_BYTES // 4, dtype=torch.int32, device=device)
        # The first transfer sets up peer access, so it is not timed.
        source.to(following)
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        there = source.to(following)
        torch.cuda.synchronize(following)
        seconds[device] = time.perf_counter() - began
        if not torch.equal(there.cpu(), source.cpu()):
            raise CheckFailedError(f"{device} sends other bytes to {following} than it has")
    return _rates(seconds, "GB/s", COPY_BYTES / 1e9, inverse=True)


def _rates(
    seconds: dict[torch.device, float], unit: str, factor: float, *, inverse: bool = False
) -> str:
    """The slowest device's rate. Raises `CheckFailedError` if it is far slower than the median."""
    slowest = max(seconds, key=seconds.__getitem__)
    usual = median(seconds.values())
    shown = {
        name: factor / value if inverse else factor * value
        for name, value in (("slowest", seconds[slowest]), ("median", usual))
    }
    if usual < SLOW * seconds[slowest]:
        raise CheckFailedError(
            f"{slowest} is slow: {shown['slowest']:.3g} {unit}, the median {shown['median']:.3g}"
        )
    return f"{shown['slowest']:.3g} {unit}"


# ---- clock, disk and shared memory


def clock(node: Node) -> str:
    """The clocks of the node and of the file system agree."""
    with _file_in(node.path) as file:
        file.write(b"now")
        file.flush()
        # The file system stamps a written file, on a network file system by the server's clock.
        apart = abs(time.time() - os.fstat(file.fileno()).st_mtime)
    if apart > MAX_CLOCK_SECONDS:
        raise CheckFailedError(f"its clock and that of {node.path} are {apart:.0f} s apart")
    return f"{apart:.1f} s apart"


def disk(node: Node) -> str:
    """The run's disk returns what was written to it."""
    return _write_and_read(node.path, FILE_BYTES)


def shared_memory(node: Node) -> str:
    """Shared memory takes files, and gives them back."""
    del node
    return _write_and_read(SHM, SHM_BYTES) if SHM.is_dir() else "none"


def _write_and_read(folder: Path, size: int) -> str:
    content = os.urandom(MIB) * (size // MIB)
    began = time.perf_counter()
    with _file_in(folder) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            reason = (
                "is full"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else f"cannot be written: {error.strerror}"
            )
            raise CheckFailedError(f"{folder} {reason}") from None
        seconds = time.perf_counter() - began
        file.seek(0)
        if hashlib.file_digest(file, "sha256").digest() != hashlib.sha256(content).digest():
            raise CheckFailedError(f"{folder} returns other bytes than were written to it")
    return f"{size / MIB / seconds:.0f} MiB/s"


def _file_in(folder: Path) -> tempfile._TemporaryFileWrapper[bytes]:
    try:
        return tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-")
    except OSError as error:
        raise CheckFailedError(f"{folder} cannot be written: {error.strerror}") from None


CHECKS: dict[str, Callable[[Node], str]] = {
    "devices": devices,
    "memory": memory,
    "product": product,
    "attention": attention,
    "copies": copies,
    "links": links,
    "clock": clock,
    "disk": disk,
    "shared memory": shared_memory,
}
"""Checks by name, in the order in which they run."""
