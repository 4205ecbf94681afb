"""Memory that a plan leaves unused. Imports no torch."""

from __future__ import annotations

from trainer.hardware.device_specs import DeviceSpec
from trainer.hardware.host import GIB

DEVICE_FRACTION = 0.9
"""Usable share of device memory; the rest is for allocator fragmentation, workspaces of kernels
and NCCL, and the driver. The same for `memory.recompute = "auto"`.
"""
HOST_FRACTION = 0.9
"""Usable share of node memory; the rest is for the operating system and the page cache."""
HOST_BYTES_PER_PROCESS = 5 * GIB
"""Host memory of a rank outside the estimate: torch, CUDA context, NCCL buffers, data workers."""
PINNED_OVERHEAD = 17 / 16
"""Upper bound of pinned bytes allocated per byte stored."""


def usable_device_bytes(device: DeviceSpec) -> float:
    return device.memory * DEVICE_FRACTION


def usable_host_bytes(device: DeviceSpec) -> float:
    """Usable bytes of a node."""
    return device.host_memory * HOST_FRACTION
