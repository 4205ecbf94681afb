"""The start-up check of attention kernels on CUDA devices: once per process, device, type and head layout."""

from __future__ import annotations

import torch
from torch import Tensor

from models import kernel_check, kernels
from parallelisms.context.context_plan import kv_head_repeats

_verified = set[tuple[object, ...]]()


def is_checked(device: torch.device) -> bool:
    """Whether kernels on this device are compared with matrix products in float64 before they are used."""
    return device.type == "cuda"


def verify_once(
    kernel: str, q_BSNH: Tensor, num_kv: int, *, ulysses: int, window: int | None, softcap: float | None
) -> None:
    """Raises ValueError if the kernel that computes attention of these queries is wrong on their device.

    `num_kv`: KV heads of a rank, of which Ulysses' ranks get a part each. Takes seconds, the first time.
    """
    if not is_checked(q_BSNH.device):
        return
    name = kernels.select_kernel(q_BSNH, kernel, softcap=softcap)
    own_kv = num_kv * kv_head_repeats(ulysses, num_kv) // ulysses
    per_kv = q_BSNH.shape[2] // ulysses // own_kv
    few = min(2, own_kv)
    heads = kernel_check.Heads(few * per_kv, few, q_BSNH.shape[3])
    key = (name, q_BSNH.device, q_BSNH.dtype, heads, window)
    if key in _verified:
        return
    windows = () if window is None else (window,)
    try:
        with torch.enable_grad():
            kernel_check.verify_kernel(name, q_BSNH.device, q_BSNH.dtype, heads=heads, windows=windows)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f'kernel "{name}" is wrong on {q_BSNH.device}: {error}; kernel="plain" takes matrix products'
        ) from error
    _verified.add(key)
