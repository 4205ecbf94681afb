"""Device-dependent parts of training: kernels, peak FLOP/s, memory and timing."""

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

from models import kernel_check, kernel_choice, kernels
from models.kernel_choice import FLASH_VERSIONS
from parallelisms.mesh.context_plan import kv_head_repeats
from trainer.config.job_config import Config
from trainer.errors import EXIT_BAD_CONFIG, RankFailedError
from trainer.hardware.attention_kernels import attention_choices
from trainer.hardware.spec_tables import find_table, table_attention_rates, table_peak_flops

log = logging.getLogger(__name__)


def choose_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A scheduler may expose only one device per task, which then has index 0.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def bind_to_numa_node(
    device: torch.device, pci_devices: Path = Path("/sys/bus/pci/devices")
) -> None:
    """Binds this process to the allowed CPUs on the NUMA node of a CUDA device, so that host
    memory is local.
    """
    if device.type != "cuda":
        return
    allowed = os.sched_getaffinity(0)
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    local_cpus = [_numa_cpus(each, pci_devices) for each in properties]
    bound_cpus = local_cpus[device.index] & allowed
    if bound_cpus and bound_cpus != allowed:
        os.sched_setaffinity(0, bound_cpus)
        # The thread count was set for all CPUs of the machine. Devices of one NUMA node share its
        # CPUs, with one rank each.
        num_cpus = len(bound_cpus) // local_cpus.count(local_cpus[device.index])
        torch.set_num_threads(max(1, min(torch.get_num_threads(), num_cpus)))
        log.info(
            "bound to the %d of %d CPUs on the NUMA node of %s",
            len(bound_cpus),
            len(allowed),
            device,
        )


def _numa_cpus(properties: Any, pci_devices: Path) -> set[int]:
    """CPUs on the device's NUMA node; empty if unknown."""
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        cpu_list = (pci_devices / address / "local_cpulist").read_text()  # 0-27,56-83
        cpu_ranges = [
            [int(end) for end in part.split("-")] for part in cpu_list.split(",") if part.strip()
        ]
    except (OSError, ValueError):
        return set()
    return {cpu for first, *last in cpu_ranges for cpu in range(first, (last or [first])[0] + 1)}


def require_peer_access(device: torch.device) -> None:
    """Raises RankFailedError unless the devices of this host have peer-to-peer memory access."""
    others = range(torch.cuda.device_count() if device.type == "cuda" else 0)
    unreachable = [
        other
        for other in others
        if other != device.index and not torch.cuda.can_device_access_peer(device, other)
    ]
    if unreachable or len(others) < 2:
        reason = (
            f"{device} cannot access devices {unreachable}"
            if unreachable
            else f"this process only sees {device}"
        )
        message = (
            f"parallelism.async_tp = true needs several CUDA devices with peer access: {reason}"
        )
        raise RankFailedError(EXIT_BAD_CONFIG, message)


def choose_attention_kernel(config: Config, device: torch.device) -> str:
    """The attention kernels for this device, verified there against plain matmuls with the run's
    heads and dtype.

    `training.attention = "auto"` takes the fastest choice that is right, and logs why others are
    left out. Activates FlashAttention 3 or 4 if chosen. Raises RankFailedError if a configured
    kernel is missing or wrong on this device.
    """
    configured = config.training.attention
    softcap = config.model.build().score_softcap
    if device.type == "cpu":
        return "plain" if softcap is not None or configured == "plain" else "cpu"
    choices = _choices(config, device)
    for choice in choices:
        try:
            return _verified(choice, config, device)
        # FlashAttention 4 refuses arguments by assertions.
        except (AssertionError, ImportError, RuntimeError, ValueError) as error:
            if choice == choices[-1]:
                message = f'training.attention = "{configured}" does not work on {device}: {error}'
                raise RankFailedError(EXIT_BAD_CONFIG, message) from error
            log.warning("attention kernel %s is left out on %s: %s", choice, device, error)
    raise AssertionError("there is always a choice")


def _choices(config: Config, device: torch.device) -> list[str]:
    table = find_table(torch.cuda.get_device_name(device)) if torch.cuda.is_available() else None
    rates = None if table is None else table_attention_rates(table)
    return attention_choices(config, kernels.device_generation(device), rates)


def _verified(choice: str, config: Config, device: torch.device) -> str:
    """The choice as `models.kernels` names it.

    Raises an error if one of its kernels is missing or wrong.
    """
    problems = kernel_choice.problems(
        choice, config.attention_needs(kernels.device_generation(device))
    )
    if problem := next(problems, None):
        raise ValueError(problem)
    is_flash_version = choice in FLASH_VERSIONS
    # FlashAttention 3 and 4 replace torch's `flash` for the whole process, so one that fails is
    # deactivated again below.
    if is_flash_version:
        torch.nn.attention.activate_flash_attention_impl(choice.upper())
    try:
        verify_attention_kernel(config, "flash" if is_flash_version else choice, device)
    except BaseException:
        if is_flash_version:
            torch.nn.attention.restore_flash_attention_impl()
        raise
    # The run has other shapes than the check, whose cached blocks would only fragment its memory.
    torch.cuda.empty_cache()
    return "flash" if is_flash_version else choice


def verify_attention_kernel(config: Config, kernel: str, device: torch.device) -> None:
    """Raises ValueError unless the kernel, or pair of kernels, is right for the heads, dtype and
    tensor sizes of this run.
    """
    plan = config.context_plan()
    dtype = getattr(torch, config.training.dtype)
    groups = config.memory.head_groups
    ulysses = plan.ulysses_degree
    num_kv = plan.kv_heads // groups
    # Ulysses replicates KV heads where its ranks outnumber them.
    num_kv = num_kv * kv_head_repeats(ulysses, num_kv) // ulysses
    heads = kernel_check.Heads(plan.heads // groups // ulysses, num_kv, plan.head_dim)
    # Values depend on the ratio of query to KV heads, not on their number: two KV heads check them
    # at little cost. Offsets of wide tensors need all heads (`verify_wide`).
    few = heads._replace(num=min(2, num_kv) * heads.num // num_kv, kv=min(2, num_kv))
    options: Any = {
        "windows": config.model.build().windows,
        "deterministic": config.training.deterministic,
    }
    kernel_check.verify_kernel(kernel, device, dtype, heads=few, **options)
    num_tokens = (
        config.training.micro_batch_size
        * plan.padded_length(config.training.seq_len)
        // plan.ring_degree
    )
    try:
        kernel_check.verify_wide(kernel, device, dtype, heads=heads, num_tokens=num_tokens)
    except torch.OutOfMemoryError:
        log.warning(
            "attention kernel %s is not checked on tensors of more than 2^31 elements: out of memory",
            kernel,
        )


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s; None on a CPU or an unknown device."""
    if device.type != "cuda":
        return None
    table = find_table(torch.cuda.get_device_name(device))
    return None if table is None else table_peak_flops(table)


def peak_device_memory(device: torch.device) -> tuple[float, float] | None:
    """(allocated, reserved) peak bytes since the process started; None on a CPU."""
    if device.type != "cuda":
        return None
    return float(torch.cuda.max_memory_allocated(device)), float(
        torch.cuda.max_memory_reserved(device)
    )


def peak_host_memory() -> float:
    """Peak resident bytes of this process."""
    # Linux counts ru_maxrss in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


class Stopwatch:
    """Measures device time between `start` and `stop`. Only `seconds` synchronizes."""

    def __init__(self, device: torch.device) -> None:
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            if device.type == "cuda"
            else []
        )
        self._times = [0.0, 0.0]

    def start(self) -> None:
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def seconds(self) -> float:
        if not self._events:
            return self._times[1] - self._times[0]
        started, stopped = self._events
        stopped.synchronize()
        return float(started.elapsed_time(stopped)) / 1000

    def _mark(self, index: int) -> None:
        if self._events:
            self._events[index].record()
        else:
            self._times[index] = time.perf_counter()


class ComputeProbe:
    """Compute speed of this rank, comparable among ranks because it excludes waiting.

    On a CPU, the process time since the last call. On CUDA, the time of a fixed matmul, read at
    the next call to avoid a synchronization.
    """

    def __init__(self, device: torch.device, size: int = 4096) -> None:
        self._last_time = time.process_time()
        self._probe_timer: Stopwatch | None = None
        cuda = device.type == "cuda"
        self._matrix = (
            torch.ones(size, size, device=device, dtype=torch.bfloat16) if cuda else None
        )

    def seconds(self) -> float:
        """Seconds of work since the last call (CPU), or of the last probe (CUDA); 0 at first."""
        if self._matrix is None:
            previous_time = self._last_time
            self._last_time = time.process_time()
            return self._last_time - previous_time
        # The previous probe ended long ago, so reading its events does not stall the device.
        elapsed = 0.0 if self._probe_timer is None else self._probe_timer.seconds()
        self._probe_timer = Stopwatch(self._matrix.device)
        self._probe_timer.start()
        torch.mm(self._matrix, self._matrix)
        self._probe_timer.stop()
        return elapsed


class AsyncHostCopy:
    """Starts an asynchronous device-to-host copy; `read` waits for it."""

    def __init__(self, vector: Tensor) -> None:
        self._vector = vector
        self._copy_event: torch.cuda.Event | None = None
        if vector.device.type == "cuda":
            # Only a copy to pinned memory is asynchronous. The event lets `read` wait for this
            # copy alone, not for later work of the stream.
            self._vector = torch.empty_like(vector, device="cpu", pin_memory=True).copy_(
                vector, non_blocking=True
            )
            self._copy_event = torch.cuda.Event()
            self._copy_event.record()

    def read(self) -> list[float]:
        if self._copy_event is not None:
            self._copy_event.synchronize()
        return self._vector.tolist()
