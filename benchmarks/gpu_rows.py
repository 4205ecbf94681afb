"""Shared parts of the GPU benchmark: report rows, a time budget, and attention alone."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any, TypeVar

import torch
from torch import Tensor

from models import kernel_check, kernels
from models.kernel_check import Heads
from models.kernel_reference import Sample, reference
from models.score_blocks import ScoreBlock, ScoreBlocks
from trainer.config.job_config import Config
from trainer.hardware.device import Stopwatch
from trainer.hardware.host import GIB, node_memory_bytes

T = TypeVar("T")
Given = tuple[Tensor, Tensor, Tensor, Tensor]
"""The gradient of attention's output, queries, keys and values."""
K = 1 << 10
BACKENDS = ("flash", "cudnn", "efficient")
EXIT_DEVICE_LOST = 70
LONGEST_WAIT = 120
"""Seconds that a job may take beyond three times its prediction."""
UNKNOWN = "unknown"


class Report:
    """Rows of a markdown table, a header whenever their columns change, and the same as JSON lines.

    The file also says which jobs have begun and how they ended. A job that was measured from the same sources is not
    measured again, and one that failed is not tried again in the same run.
    """

    def __init__(self, path: Path, run: str, **common: Any) -> None:
        self.part: int | str = ""
        self.path, self._run, self._common, self._columns = path, run, common, list[str]()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_text().endswith("\n"):
            path.write_text(path.read_text() + "\n")  # After a line that was cut off.

    def row(self, **cells: Any) -> None:
        if list(cells) != self._columns:
            self._columns = list(cells)
            self._say(f"\n| part | {' | '.join(cells)} |\n|{'---|' * (len(cells) + 1)}\n")
        self._say(f"| {self.part} | {' | '.join(map(_shown, cells.values()))} |\n")
        self._write(cells | {"clocks": clocks()} | self._common)

    def begin(self, job: str, limit: float) -> None:
        """`limit`: seconds after which the job counts as hung."""
        self._write({"job": job, "state": "begun", "limit": limit, "time": time.time()})

    def end(self, job: str, state: str, value: Any = None) -> None:
        self._write({"job": job, "state": state, "value": value, "sources": self._common.get("sources")})

    def ended(self, job: str) -> Entry | None:
        """How the job ended, if it is not to be tried again."""
        for entry in reversed([*entries(self.path)]):
            if (entry.get("part"), entry.get("job")) == (self.part, job) and entry["state"] != "begun":
                same = entry["sources"] == self._common.get("sources")
                if (entry["state"] == "measured" and same) or (
                    entry["state"] == "failed" and entry["run"] == self._run
                ):
                    return entry
        return None

    def _write(self, cells: dict[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with self.path.open("a") as file:
            file.write(json.dumps({"part": self.part, "run": self._run, "date": now, **cells}, default=str) + "\n")

    def _say(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


Entry = dict[str, Any]


def entries(path: Path) -> Iterator[Entry]:
    """Of a report; a line that was cut off is left out."""
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


FAILURES = ("failed", "out of memory", "skipped", "WRONG")
"""How a row begins what it says of something that was not measured, or is wrong."""


def failed_rows(path: Path, run: str) -> list[Entry]:
    """The rows of a run that say so."""
    rows = (entry for entry in entries(path) if entry["run"] == run and "job" not in entry)
    return [row for row in rows if any(str(cell).startswith(FAILURES) for cell in row.values())]


def clocks() -> str | None:
    """Of the first device, its heat and power, and what slows it down."""
    fields = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    said = output("nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader")
    return None if said == UNKNOWN else said


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "-" if value is None else str(value).replace("|", "/").replace("\n", " ")


@dataclass
class Bench:
    device: torch.device
    report: Report
    deadline: float
    """In seconds of `time.time`."""
    rehearse: bool = False
    attention: str = "fastest"
    given: Sequence[str] = ()
    """Options of a configuration from the command line."""
    host: float = field(default_factory=node_memory_bytes)
    """Bytes of host memory."""
    rates: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    """FLOP/s of attention, forward and backward, by kernel and head width: of kernels that were seen right."""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def left(self) -> float:
        return self.deadline - time.time()

    def size(self, tokens: int) -> int:
        return max(64, tokens // 512) if self.rehearse else tokens

    def attempt(self, job: str, work: Callable[[], T], *, needs: float = 0) -> T | None:
        """What the work gives, or gave when it was measured before: something that JSON holds.

        None, and a row that says why, where it fails or would take longer than is left.
        """
        earlier = self.report.ended(job)
        if earlier is not None:
            self.report.row(what=job, result=f"{earlier['state']} before")
            value: T | None = earlier["value"]
            return value
        if needs > self.left():
            self.report.row(what=job, result=f"skipped: about {needs:.0f} s, {max(0, self.left()):.0f} s are left")
            return None
        self.report.begin(job, limit=LONGEST_WAIT + 3 * needs)
        found = self.guard(job, lambda: (work(),))
        state, result = ("failed", None) if found is None else ("measured", found[0])
        self.report.end(job, state, result)
        self.clear()
        return result

    def guard(self, what: str, work: Callable[[], T]) -> T | None:
        """What the work gives; None, and a row that says why, where it fails."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other rows are still wanted
            lines = str(error).strip().splitlines() or [""]
            is_memory = isinstance(error, torch.OutOfMemoryError)
            said = f"{'out of memory' if is_memory else f'failed: {type(error).__name__}'}: {lines[0][:160]}"
            traceback.clear_frames(error.__traceback__)  # They hold tensors.
        self.report.row(what=what, result=said)
        self.clear()
        return None

    def clear(self) -> None:
        """Frees memory. Ends the process if the device is lost: what follows needs a new one."""
        gc.collect()
        if self.cuda:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise SystemExit(EXIT_DEVICE_LOST) from error
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

    def trusted_kernel(self, config: Config) -> str | None:
        """That of a rehearsal, which may run where nothing is computed. None: the trainer verifies it."""
        queries = torch.empty(0, device=self.device, dtype=getattr(torch, config.training.dtype))
        return kernels.select_kernel(queries, config.training.attention) if self.rehearse else None

    def kernel(self, config: Config) -> str:
        """The one that was asked for, or the fastest of those that were seen right at this width and size."""
        if self.rehearse:
            return "auto"
        if self.attention != "fastest":
            return self.attention
        model = config.model.build()
        elements = config.training.seq_len * model.num_heads * model.head_dim // config.memory.head_groups
        for name in () if any(width == model.head_dim for _, width in self.rates) else BACKENDS:
            rate_of(self, name, model.head_dim, 16 * K)
        times = {
            name: 4 / rate[0] + 10 / rate[1] for (name, width), rate in self.rates.items() if width == model.head_dim
        }
        if elements >= 1 << 31:
            times = {name: seconds for name, seconds in times.items() if is_right_when_wide(self, name)}
        return min(times, key=lambda name: times[name], default="auto")


TOUCH = "import torch\nheld = []\nwhile True: held.append(torch.ones(1 << 30, dtype=torch.uint8)); print(len(held), flush=True)"


def found_host_bytes() -> float:
    """Host memory. A sandbox may show less than there is: where that is less than the device has, a child process tries."""
    shown = float(node_memory_bytes())
    if not torch.cuda.is_available() or shown >= torch.cuda.get_device_properties(0).total_memory:
        return shown
    with TemporaryFile() as file:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, "-c", TOUCH], stdout=file, timeout=15, check=False)
        file.seek(0)
        gibs = len(file.read().split())
    return max(shown, 0.9 * gibs * GIB)  # Not all of it will be had again.


# ---- attention


def rate_of(bench: Bench, kernel: str, width: int, tokens: int) -> None:
    """Measures a kernel, unless it was; its rates count from now on."""
    job = partial(measure_attention, bench, kernel, width, bench.size(tokens))
    rates = bench.attempt(f"attention of {kernel}, {tokens} tokens, heads of {width}", job, needs=5)
    if rates is not None:
        bench.rates[kernel, width] = rates[0], rates[1]


def measure_attention(
    bench: Bench, kernel: str, width: int, tokens: int, heads: int = 32, kv_heads: int = 8
) -> tuple[float, float]:
    """A row; gives FLOP/s forward and backward. Raises ValueError for a wrong kernel."""
    if bench.cuda:
        kernel_check.verify_kernel(kernel, bench.device, torch.bfloat16, heads=Heads(2 * heads // kv_heads, 2, width))
    grad, q = (bench.draw(tokens, heads, width) for _ in range(2))
    k, v = (bench.draw(tokens, kv_heads, width) for _ in range(2))
    work, pairs = ScoreBlocks([ScoreBlock(0, tokens, 0, tokens)], causal=True), tokens * (tokens + 1) / 2
    forward, backward, error = _attending(bench, kernel, (grad, q, k, v), work, rounds=5)
    if not error < kernel_check.TOLERANCES[torch.bfloat16]:
        raise ValueError(f"{kernel}: the last of {tokens} queries errs by {error:.1e}")
    rates = (4 * heads * width * pairs / forward, 10 * heads * width * pairs / backward)
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
    return rates


def is_right_when_wide(bench: Bench, kernel: str) -> bool:
    """Whether a kernel is right about queries of 2**32 numbers."""

    def check() -> bool:
        heads, tokens = Heads(4, 2, 32) if bench.rehearse else Heads(32, 8, 128), bench.size(1 << 20)
        limit = tokens * heads.num * heads.dim // 2 if bench.rehearse else kernel_check.MAX_ELEMENTS
        kernel_check.verify_wide(
            kernel, bench.device, torch.bfloat16, heads=heads, num_tokens=tokens, max_elements=limit
        )
        bench.report.row(what=f"{kernel} on tensors of more than {limit:,} elements", result="right")
        return True

    return bool(bench.attempt(f"{kernel} on tensors of more than 2**31 elements", check, needs=10))


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
    """How far the last query's numbers are from those of matrix products in float64, as the start-up check says; or NaN."""
    grad, q, k, v = given
    last = slice(len(q) - 1, len(q))
    (right, right_lse, right_dq, _, _), terms = reference(
        Sample(grad[last], q[last], k, v), ScoreBlocks([ScoreBlock(0, 1, 0, len(k))])
    )
    results = (
        (out[last], right, terms[0]),
        (lse[:, last].T, right_lse.T, terms[1].T),
        (dq[last], right_dq, terms[2]),
    )
    return float(torch.cat([kernel_check.row_errors(*each) for each in results]).max())
