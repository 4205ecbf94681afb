"""What a job of the GPU benchmark measures with: the device, timers, and rows that leave as soon
as they are known.
"""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import kernels
from trainer.config.job_config import Config
from trainer.hardware.device import Stopwatch, peak_flops

K = 1 << 10
ROOT = Path(__file__).resolve().parents[1]
UNKNOWN = "unknown"
Row = dict[str, Any]
"""What JSON can hold, by column."""


@dataclass(frozen=True)
class Bench:
    device: torch.device
    send: Callable[[Row], None]
    """Takes a row."""
    folder: Path
    """For files that a job writes."""
    rehearse: bool = False
    """Tiny sizes and unchecked kernels, on any device: a test of the script and not of the
    machine.
    """

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def peak_flops(self) -> float | None:
        """Dense bfloat16 FLOP/s; None on a CPU or an unknown device."""
        return peak_flops(self.device)

    def row(self, **cells: Any) -> None:
        self.send(cells | {"clocks": clocks()} if self.cuda else cells)

    def size(self, tokens: int) -> int:
        return max(64, tokens // 512) if self.rehearse else tokens

    def timed(
        self, work: Callable[[], object], *, warmups: int = 3, rounds: int = 5
    ) -> list[float]:
        """Seconds of each round, by device events; a rehearsal has one."""
        warmups, rounds = (0, 1) if self.rehearse else (warmups, rounds)
        for _ in range(warmups):
            work()
        found = []
        for _ in range(rounds):
            watch = Stopwatch(self.device)
            watch.start()
            work()
            watch.stop()
            found.append(watch.seconds())
        return found

    def draw(self, *shape: int) -> Tensor:
        """Random numbers: matrix products of zeros run at higher clocks."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def trusted_kernel(self, config: Config) -> str | None:
        """That of a rehearsal, which may run where nothing is computed.

        None: the trainer verifies its kernel.
        """
        queries = torch.empty(0, device=self.device, dtype=getattr(torch, config.training.dtype))
        return kernels.select_kernel(queries, config.training.attention) if self.rehearse else None

    def begin_memory(self) -> None:
        """Peaks count from here."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_peak_host_memory_stats()

    def clear(self) -> None:
        """Frees memory and forgets compiled code, so that a job sees nothing of the one before
        it.
        """
        torch.compiler.reset()
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def clocks() -> str:
    """Of the first device, its heat and power, and what slows it down."""
    fields = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    return output("nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader")


def output(*command: str) -> str:
    """What a command prints; `UNKNOWN` if it fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
