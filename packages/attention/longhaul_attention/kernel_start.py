"""The start-up check of attention kernels on CUDA devices: once per process, device, type and head
layout.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from models import kernel_check, kernels
from models.score_pairs import Scores
from parallelisms.mesh.context_plan import kv_head_repeats

_verified = set[tuple[object, ...]]()


def is_checked(device: torch.device) -> bool:
    """Whether kernels on this device are compared with matrix products in float64 before they are
    used.
    """
    return device.type == "cuda"


def verify_once(kernel: str, q_BSNH: Tensor, num_kv: int, *, ulysses: int, scores: Scores) -> None:
    """Compares the kernels that compute attention of these queries with matrix products. Takes
    seconds, the first time.

    `num_kv`: KV heads of a rank, of which Ulysses' ranks get a part each. With "auto", one that is
    wrong is left out from then on, with a warning. Raises ValueError if a named one is wrong.
    """
    if not is_checked(q_BSNH.device):
        return
    own_kv = num_kv * kv_head_repeats(ulysses, num_kv) // ulysses
    per_kv = q_BSNH.shape[2] // ulysses // own_kv
    # Few heads make the check fast, and two show a wrong stride between heads.
    few = min(2, own_kv)
    heads = kernel_check.Heads(few * per_kv, few, q_BSNH.shape[3])
    while True:
        choice = kernels.select_kernel(q_BSNH, kernel, scores=scores)
        key = (choice, q_BSNH.device, q_BSNH.dtype, heads, scores.window)
        try:
            if key not in _verified:
                _verify(choice, q_BSNH, heads, scores.window)
            _verified.add(key)
            return
        except (RuntimeError, ValueError) as error:
            if kernel != "auto" or choice in ("cpu", "plain"):
                raise ValueError(
                    f'kernel "{choice}" is wrong on {q_BSNH.device}: {error}; kernel="plain" takes matrix products'
                ) from error
            warnings.warn(
                f"attention kernel {choice} is left out on {q_BSNH.device}: {error}", stacklevel=4
            )
            kernels.left_out.add(choice)


def _verify(choice: str, q_BSNH: Tensor, heads: kernel_check.Heads, window: int | None) -> None:
    windows = () if window is None else (window,)
    with torch.enable_grad():
        kernel_check.verify_kernel(
            choice, q_BSNH.device, q_BSNH.dtype, heads=heads, windows=windows
        )
