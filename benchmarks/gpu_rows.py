"""Shared parts of the GPU benchmark: report rows, a time budget, and attention alone."""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from models import kernel_check, kernels
from models.kernel_check import Heads
from models.kernels import ScoreBlock, ScoreBlocks
from trainer.config.job_config import Config
from trainer.hardware.device import Stopwatch
from trainer.hardware.host import node_memory_bytes

T = TypeVar("T")
Given = tuple[Tensor, Tensor, Tensor, Tensor]
"""The gradient of attention's output, queries, keys and values."""
K = 1 << 10
BACKENDS = ("flash", "cudnn", "efficient")


class Report:
    """Rows of a markdown table, a header whenever their columns change, and the same as JSON lines."""

    def __init__(self, out: Path | None, **common: Any) -> None:
        self.phase: int | str = ""
        self._out, self._common, self._columns = out, common, list[str]()

    def row(self, **cells: Any) -> None:
        if list(cells) != self._columns:
            self._columns = list(cells)
            self._say(f"\n| phase | {' | '.join(cells)} |\n|{'---|' * (len(cells) + 1)}\n")
        self._say(f"| {self.phase} | {' | '.join(map(_shown, cells.values()))} |\n")
        if self._out is not None:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            with self._out.open("a") as file:
                file.write(json.dumps({"phase": self.phase, **cells, "date": now, **self._common}, default=str) + "\n")

    def _say(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "-" if value is None else str(value).replace("|", "/").replace("\n", " ")


@dataclass
class Bench:
    device: torch.device
    report: Report
    deadline: float
    rehearse: bool = False
    attention: str = "fastest"
    given: Sequence[str] = ()
    """Options of a configuration from the command line."""
    host: float = field(default_factory=node_memory_bytes)
    """Bytes of host memory."""
    rates: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    """FLOP/s of attention, forward and backward, by kernel and head width: of kernels that were seen right."""
    wide: set[str] = field(default_factory=set)
    """Kernels seen right where a tensor has more elements than 32 bits count."""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def size(self, tokens: int) -> int:
        return max(64, tokens // 512) if self.rehearse else tokens

    def attempt(self, what: str, job: Callable[[], T], *, needs: float = 0) -> T | None:
        """What the job gives; None, and a row that says why, where it fails or would take longer than is left."""
        if needs > self.left():
            self.report.row(what=what, result=f"skipped: about {needs:.0f} s, {max(0, self.left()):.0f} s are left")
            return None
        try:
            return job()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other rows are still wanted
            lines = str(error).strip().splitlines() or [""]
            is_memory = isinstance(error, torch.OutOfMemoryError)
            said = f"{'out of memory' if is_memory else f'failed: {type(error).__name__}'}: {lines[0][:160]}"
            traceback.clear_frames(error.__traceback__)  # They hold tensors.
        self.report.row(what=what, result=said)
        self.clear()
        return None

    def clear(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            getattr(torch._C, "_host_emptyCache", bool)()

    def timed(self, job: Callable[[], object], *, warmups: int = 3, rounds: int = 5) -> list[float]:
        warmups, rounds = (min(1, warmups), min(1, rounds)) if self.rehearse else (warmups, rounds)
        for _ in range(warmups):
            job()
        found = []
        for _ in range(rounds):
            watch = Stopwatch(self.device)
            watch.start()
            job()
            watch.stop()
            found.append(watch.seconds())
        return found

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def kernel(self, config: Config) -> str:
        """The one that was asked for, or the fastest of those that were seen right at this width and size."""
        if not self.cuda:
            return "auto"
        if self.attention != "fastest":
            return self.attention
        model = config.model.build()
        elements = config.training.seq_len * model.num_heads * model.head_dim // config.memory.head_groups
        for name in () if any(width == model.head_dim for _, width in self.rates) else BACKENDS:
            self.attempt(f"attention of {name}", partial(measure_attention, self, name, model.head_dim, 16 * K))
        times = {
            name: 4 / rate[0] + 10 / rate[1] for (name, width), rate in self.rates.items() if width == model.head_dim
        }
        if elements >= 1 << 31:
            for name in () if self.wide else times:
                self.attempt(f"large attention of {name}", partial(measure_wide, self, name))
            times = {name: seconds for name, seconds in times.items() if name in self.wide}
        return min(times, key=lambda name: times[name], default="auto")


# ---- attention


def measure_attention(bench: Bench, kernel: str, width: int, tokens: int, heads: int = 32, kv_heads: int = 8) -> None:
    """A row; its rates count from now on. Raises ValueError for a wrong kernel."""
    if bench.cuda:
        kernel_check.verify_kernel(kernel, bench.device, torch.bfloat16, heads=Heads(2 * heads // kv_heads, 2, width))
    grad, q = (bench.draw(tokens, heads, width) for _ in range(2))
    k, v = (bench.draw(tokens, kv_heads, width) for _ in range(2))
    work, pairs = ScoreBlocks([ScoreBlock(0, tokens, 0, tokens)], causal=True), tokens * (tokens + 1) / 2
    forward, backward, error = _attending(bench, kernel, (grad, q, k, v), work, rounds=5)
    if not error < kernel_check.TOLERANCES[torch.bfloat16]:
        raise ValueError(f"{kernel}: the last of {tokens} queries errs by {error:.1e}")
    rates = (4 * heads * width * pairs / forward, 10 * heads * width * pairs / backward)
    bench.rates[kernel, width] = rates
    bench.report.row(
        kernel=kernel,
        heads=f"{heads}:{kv_heads} x {width}",
        tokens=tokens,
        forward_ms=1e3 * forward,
        backward_ms=1e3 * backward,
        forward_tflops=rates[0] / 1e12,
        backward_tflops=rates[1] / 1e12,
        error_of_last_query=error,
    )


def measure_wide(bench: Bench, kernel: str) -> None:
    """A row about queries of 2**32 numbers, which kernels that count in 32 bits get wrong; few keys make it quick."""
    tokens = bench.size(1 << 20)
    grad, q = (bench.draw(tokens, 32, 128) for _ in range(2))
    k, v = (bench.draw(tokens // 512, 8, 128) for _ in range(2))
    work = ScoreBlocks([ScoreBlock(0, tokens, 0, tokens // 512)], causal=False)
    _, _, error = _attending(bench, kernel, (grad, q, k, v), work, rounds=0)
    bench.report.row(what=f"{kernel}, queries of {q.numel():,} numbers", result=f"last query errs by {error:.1e}")
    if error < kernel_check.TOLERANCES[torch.bfloat16]:
        bench.wide.add(kernel)


def _attending(
    bench: Bench, kernel: str, given: Given, work: ScoreBlocks, *, rounds: int
) -> tuple[float, float, float]:
    """Seconds forward and backward, and the error of the last query."""
    grad, q, k, v = given
    ((_, out, lse),) = kernels.attend_blocks(q, k, v, work, kernel=kernel)
    ((_, _, dq, _, _),) = kernels.attend_blocks_backward(grad, q, k, v, out, lse, work, kernel=kernel)
    error = _last_query_error(given, out, lse, dq)
    del dq
    forward = bench.timed(
        lambda: list(kernels.attend_blocks(q, k, v, work, kernel=kernel)), warmups=min(3, rounds), rounds=rounds
    )
    backward = bench.timed(
        lambda: list(kernels.attend_blocks_backward(grad, q, k, v, out, lse, work, kernel=kernel)),
        warmups=min(3, rounds),
        rounds=rounds,
    )
    return median(forward or [0.0]), median(backward or [0.0]), error


def _last_query_error(given: Given, out: Tensor, lse: Tensor, dq: Tensor) -> float:
    """How far the last query's numbers are from those of matrix products, relative to the largest of its kind; or NaN."""
    grad, q, k, v = given
    last = slice(q.shape[0] - 1, q.shape[0])
    alone = ScoreBlocks([ScoreBlock(last.start, last.stop, 0, k.shape[0])], causal=False)
    ((_, right, right_lse),) = kernels.attend_blocks(q, k, v, alone, kernel="plain")
    ((_, _, right_dq, _, _),) = kernels.attend_blocks_backward(grad, q, k, v, out, lse, alone, kernel="plain")
    pairs = ((out[last], right), (lse[:, last], right_lse), (dq[last], right_dq))
    return float(torch.stack([(ours - exact).abs().max() / exact.abs().max() for ours, exact in pairs]).max())
