"""Measures this machine's device and prints a device table for `--device`.

Takes about a minute. Every rate is the best of several repetitions on random data, and stands in
the table with the size at which it was measured and a share of 1, so that the planner returns the
seconds that were measured. The network is not measured; its rates come from the extended table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial

import torch

from models import kernel_check, kernels
from models.score_blocks import ScoreBlock, ScoreBlocks
from trainer.hardware.device import Stopwatch, choose_device
from trainer.hardware.host import GIB, node_memory_bytes

REPEATS = 5
WARMUPS = 2
HEAD_DIMS = (64, 128)
LARGE = (8192, 16384, 2 * GIB)
SMALL = (1024, 1024, GIB // 4)
"""(matrix side, attention tokens, bytes copied), on a GPU and on a CPU."""

GPU_KERNELS = ("flash", "cudnn", "efficient")
CPU_KERNELS = ("flash", "cudnn", "efficient", "plain")
"""A CPU has one kernel, whatever name a configuration gives it."""

Measurements = dict[str, dict[str, float | dict[str, float]]]
"""Measured rates by section and key, in the units of a device table."""


def measure_device_toml(extends: str) -> str:
    """A device table in TOML that extends `extends` with the measured rates."""
    device = choose_device(0)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    source = f"measured by longhaul plan calibrate on {name}, {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}"
    lines = [
        f"extends = {json.dumps(extends)}",
        f"description = {json.dumps(f'{name}, as measured')}",
    ]
    for section, figures in _measure_device(device).items():
        lines += ["", f"[{section}]"]
        for key, figure in figures.items():
            values = figure if isinstance(figure, dict) else {"value": figure}
            fields = ", ".join(f"{field} = {_format(value)}" for field, value in values.items())
            lines.append(f"{key} = {{ {fields}, source = {json.dumps(source)} }}")
    return "\n".join(lines) + "\n"


def _format(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _measure_device(device: torch.device) -> Measurements:
    cuda = device.type == "cuda"
    side, tokens, size = LARGE if cuda else SMALL
    dtype = torch.bfloat16
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    one, other = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    measurements: Measurements = {
        "device": {
            "memory_gib": _memory_gib(device),
            "matmul_tflops": 2 * side**3 / _min_seconds(device, partial(torch.mm, a, b)) / 1e12,
            "matmul_share": 1.0,
            "matmul_size": side,
            # A copy reads and writes each byte.
            "memory_gbps": 2 * size / _min_seconds(device, partial(other.copy_, one)) / 1e9,
            "memory_share": 1.0,
            "launch_us": 1e6 * _launch_seconds(device),
        }
    }
    if cuda:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        measurements["host"] = {
            "gbps": size / _min_seconds(device, partial(host.copy_, one, non_blocking=True)) / 1e9
        }
        if torch.cuda.device_count() > 1:
            peer = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", 1))
            rate = size / _min_seconds(device, partial(peer.copy_, one, non_blocking=True)) / 1e9
            measurements["link"] = {"gbps": rate, "share": 1.0}
    else:
        measurements["host"] = {"memory_gib": _memory_gib(device)}
    return measurements | _measure_kernels(device, tokens, dtype)


def _memory_gib(device: torch.device) -> float:
    """Memory of the GPU, or of the machine."""
    is_gpu = device.type == "cuda"
    return (
        torch.cuda.get_device_properties(device).total_memory if is_gpu else node_memory_bytes()
    ) / GIB


def _measure_kernels(device: torch.device, tokens: int, dtype: torch.dtype) -> Measurements:
    if device.type == "cpu":
        # A run on a CPU ignores the kernel's name, so one measurement serves every name.
        on_cpu = dict(_measure_attention(device, "cpu", tokens, dtype))
        measured = dict.fromkeys(CPU_KERNELS, on_cpu)
    else:
        measured = {
            kernel: dict(_measure_attention(device, kernel, tokens, dtype))
            for kernel in GPU_KERNELS
        }
    return {f"attention.{kernel}": {**rates} for kernel, rates in measured.items() if rates}


def _measure_attention(
    device: torch.device, kernel: str, tokens: int, dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, float]]]:
    """Causal attention with 32 query and 8 KV heads; omits head dimensions that the kernel does
    not support here.
    """
    heads, kv_heads = (32, 8) if device.type == "cuda" else (8, 2)
    work = ScoreBlocks([ScoreBlock(0, tokens, 0, tokens)], causal=True)
    pairs = tokens * (tokens + 1) / 2
    for head_dim in HEAD_DIMS:
        shapes = ((tokens, heads, head_dim),) * 2 + ((tokens, kv_heads, head_dim),) * 2
        grad, q, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        try:
            # A kernel that computes wrong values must not enter a table as the fastest.
            lengths = kernel_check.LENGTHS if device.type == "cuda" else kernel_check.SHORT_LENGTHS
            kernel_check.verify_kernel(
                kernel,
                device,
                dtype,
                heads=kernel_check.Heads(2 * heads // kv_heads, 2, head_dim),
                lengths=lengths,
            )
            ((_, out, lse),) = kernels.attend_blocks(q, k, v, work, kernel=kernel)
        except (AssertionError, RuntimeError, ValueError):
            continue
        forward = _min_seconds(
            device, partial(_exhaust, kernels.attend_blocks, q, k, v, work, kernel=kernel)
        )
        backward = _min_seconds(
            device,
            partial(
                _exhaust,
                kernels.attend_blocks_backward,
                grad,
                q,
                k,
                v,
                out,
                lse,
                work,
                kernel=kernel,
            ),
        )
        # FLOPs: two products forward and five backward, each of 2 * heads * head_dim * pairs.
        flops = heads * head_dim * pairs / 1e12
        yield (
            f"width_{head_dim}",
            {"forward": 4 * flops / forward, "backward": 10 * flops / backward, "tokens": tokens},
        )


def _exhaust(iterate: Callable[..., Iterator[object]], *args: object, kernel: str) -> None:
    for _ in iterate(*args, kernel=kernel):
        pass


def _launch_seconds(device: torch.device, count: int = 1000) -> float:
    """Seconds per launch of an almost empty kernel."""
    x = torch.zeros(1, device=device)
    begin = time.perf_counter()
    for _ in range(count):
        x.add_(1)
    return (time.perf_counter() - begin) / count


def _min_seconds(device: torch.device, call: Callable[[], object]) -> float:
    """The shortest time of a call over REPEATS, after WARMUPS."""
    seconds = []
    for _ in range(WARMUPS + REPEATS):
        watch = Stopwatch(device)
        watch.start()
        call()
        watch.stop()
        seconds.append(watch.seconds())
    # Disturbances only add time, so the minimum is closest to the rate.
    return min(seconds[WARMUPS:])
