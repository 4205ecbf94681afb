"""What this machine's device really does, measured: a table like those of `devices/`, for plans that are to be exact.

Takes a minute. Every figure is the best of several rounds on random numbers; nothing is measured of a network, whose
figures stay those of the table that is extended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial

import torch

from models import kernels
from models.kernels import Rectangle, Work
from trainer.hardware.device import GIB, Stopwatch, choose_device

ROUNDS, WARM = 5, 2
WIDTHS = (64, 128)
LARGE, SMALL = (8192, 16384, 2 * GIB), (1024, 1024, GIB // 4)
"""Side of matrices, tokens of attention and bytes of a copy, on a GPU and on a CPU."""

Figures = dict[str, dict[str, float | dict[str, float]]]
"""By section and key, in the units of a table."""


def calibrated(extends: str) -> str:
    """The text of a table of this machine's device, over another that says the rest."""
    device = choose_device(0)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    source = f"measured by trainer.plan calibrate on {name}, {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}"
    lines = [f"extends = {json.dumps(extends)}", f"description = {json.dumps(f'{name}, as measured')}"]
    for section, figures in _measured(device).items():
        lines += ["", f"[{section}]"]
        for key, figure in figures.items():
            values = figure if isinstance(figure, dict) else {"value": figure}
            told = ", ".join(f"{part} = {value:.4g}" for part, value in values.items())
            lines.append(f"{key} = {{ {told}, source = {json.dumps(source)} }}")
    return "\n".join(lines) + "\n"


def _measured(device: torch.device) -> Figures:
    cuda = device.type == "cuda"
    side, tokens, size = LARGE if cuda else SMALL
    dtype = torch.bfloat16
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    one, other = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    found: Figures = {
        "device": {
            "matmul_tflops": 2 * side**3 / _seconds(device, partial(torch.mm, a, b)) / 1e12,
            "memory_gbps": 2 * size / _seconds(device, partial(other.copy_, one)) / 1e9,
            "launch_us": 1e6 * _launch(device),
        }
    }
    if cuda:
        found["device"]["memory_gib"] = torch.cuda.get_device_properties(device).total_memory / GIB
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        found["host"] = {"gbps": size / _seconds(device, partial(host.copy_, one, non_blocking=True)) / 1e9}
        if torch.cuda.device_count() > 1:
            peer = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", 1))
            rate = size / _seconds(device, partial(peer.copy_, one, non_blocking=True)) / 1e9
            found["link"] = {"gbps": rate, "share": 1.0}
    for kernel in ("flash", "cudnn", "efficient") if cuda else ("plain",):
        rates = dict(_attention(device, kernel, tokens, dtype))
        if rates:
            found[f"attention.{kernel}"] = {**rates}
    return found


def _attention(
    device: torch.device, kernel: str, tokens: int, dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, float]]]:
    """Causal, 32 query and 8 key/value heads; nothing for widths at which the kernel does not work here."""
    asked = "cpu" if device.type == "cpu" else kernel
    heads, kv_heads = (32, 8) if device.type == "cuda" else (8, 2)
    work, pairs = Work([Rectangle(0, tokens, 0, tokens)], causal=True), tokens * (tokens + 1) / 2
    for width in WIDTHS:
        shapes = ((tokens, heads, width),) * 2 + ((tokens, kv_heads, width),) * 2
        grad, q, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        try:
            kernels.check(asked, device, dtype, width=width)
            ((_, out, lse),) = kernels.attend(q, k, v, work, kernel=asked)
        except (RuntimeError, ValueError):
            continue
        forward = _seconds(device, partial(_all, kernels.attend, q, k, v, work, kernel=asked))
        backward = _seconds(device, partial(_all, kernels.attend_backward, grad, q, k, v, out, lse, work, kernel=asked))
        flops = heads * width * pairs / 1e12
        yield f"width_{width}", {"forward": 4 * flops / forward, "backward": 10 * flops / backward}


def _all(parts: Callable[..., Iterator[object]], *given: object, kernel: str) -> None:
    for _ in parts(*given, kernel=kernel):
        pass


def _launch(device: torch.device, count: int = 1000) -> float:
    """Seconds between the beginnings of operations that have nothing to do."""
    x = torch.zeros(1, device=device)
    begin = time.perf_counter()
    for _ in range(count):
        x.add_(1)
    return (time.perf_counter() - begin) / count


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    """The shortest of several rounds."""
    found = []
    for _ in range(WARM + ROUNDS):
        watch = Stopwatch(device)
        watch.start()
        call()
        watch.stop()
        found.append(watch.seconds())
    return min(found[WARM:])
