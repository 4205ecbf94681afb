"""The product on one GPU, for the GPU benchmark: calibration, a run with checkpoints, kill -9, resume, trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import rmtree

import torch

from benchmarks.gpu_parts import ROOT, report
from benchmarks.gpu_rows import Bench, K, entries
from benchmarks.gpu_steps import B1, TINY
from trainer.hardware.specs import find_table

STEPS, KILLED_AFTER, INTERVAL = 12, 7, 3


def product(bench: Bench) -> None:
    with tempfile.TemporaryDirectory(prefix="longhaul-gpu-") as folder:
        place = Path(folder)
        bench.attempt("calibrate", partial(calibrate, bench, place), needs=60 * bench.cuda)
        whole = bench.attempt("an undisturbed run", partial(losses_of_run, bench, place / "whole"), needs=60)
        job = partial(resumed, bench, place / "killed", whole or {})
        bench.attempt("kill -9 and resume", job, needs=120)
        bench.attempt("a run with a trace", partial(traced, bench, place / "traced"), needs=60)


def calibrate(bench: Bench, folder: Path) -> None:
    table = folder / "device.toml"
    extended = (find_table(torch.cuda.get_device_name()) if bench.cuda else None) or "h100-80gb"
    command = [sys.executable, "-m", "trainer.plan", "calibrate", "--extends", extended, "--output", str(table)]
    run_to_end(bench, table, command)
    for line in table.read_text().splitlines():
        if "value =" in line or "forward =" in line:
            report(bench, "calibrated", line.partition(", source")[0])


def command(bench: Bench, run: Path, *more: str) -> list[str]:
    model = TINY if bench.rehearse else B1
    options = {
        "job.output_dir": run,
        "data.corpus": "copy",
        "training.seq_len": 256 if bench.rehearse else 32 * K,
        "training.global_batch_size": 2,
        "training.steps": STEPS,
        "training.deterministic": "true",
        "training.dtype": "bfloat16" if bench.cuda else "float32",
        "memory.recompute": "keep_attention",
        "checkpoint.interval": INTERVAL,
        "checkpoint.keep": 1,
        "metrics.log_interval": 1,
        "metrics.tensorboard": "false",
    }
    given = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [str(ROOT / "run_train.sh"), "--config", "debug", *model.split(), *given, *more]


def start(words: Sequence[str], log: Path, *, is_apart: bool = False) -> subprocess.Popen[bytes]:
    """`is_apart`: in a process group of its own, which can be killed as one."""
    environment = os.environ | {"NGPU": "1"}
    with log.open("ab") as file:
        return subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=is_apart
        )


def run_to_end(bench: Bench, output: Path, words: Sequence[str]) -> float:
    """Seconds. Raises RuntimeError with the end of the log, beside the output, of a command that fails."""
    begin, log = time.perf_counter(), output.with_suffix(".log")
    child = start(words, log)
    try:
        status = child.wait(max(1, bench.left()))
    finally:
        child.kill()
        child.wait()
    if status:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        raise RuntimeError(f"status {status}: {' / '.join(lines[-3:])}")
    return time.perf_counter() - begin


def losses_of_run(bench: Bench, run: Path) -> dict[str, float]:
    seconds = run_to_end(bench, run, command(bench, run))
    found = losses(run)
    report(bench, f"{STEPS} steps of 1B through run_train.sh, with checkpoints", f"{seconds:.0f} s, {shown(found)}")
    rmtree(run)  # A checkpoint of 1B has 15 GB.
    return found


def resumed(bench: Bench, run: Path, expected: dict[str, float]) -> None:
    """Kills every process of a run, starts it again, and compares its losses with those of an undisturbed one."""
    child = start(command(bench, run), run.with_suffix(".log"), is_apart=True)
    try:
        while str(KILLED_AFTER) not in losses(run):
            if child.poll() is not None or bench.left() < 0:
                raise RuntimeError(f"the run ended with {child.poll()} before step {KILLED_AFTER}")
            time.sleep(0.02)  # Before a tiny run ends.
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    begin = max((int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*")), default=0)
    seconds = run_to_end(bench, run, command(bench, run))
    after = {step: loss for step, loss in losses(run).items() if int(step) > begin}
    same = sum(loss == expected.get(step) for step, loss in after.items())
    result = (
        f"{seconds:.0f} s; of {len(after)} losses after step {begin}, {same} are bitwise those of an undisturbed run"
    )
    if not same == len(after) > 0:
        raise RuntimeError(result)
    report(bench, f"killed in step {KILLED_AFTER}, started again", result)
    rmtree(run)


def traced(bench: Bench, run: Path) -> None:
    run_to_end(bench, run, command(bench, run, "--profiler.trace_step", "3"))
    traces = [path for path in run.rglob("*") if "trace" in path.name and path.is_file()]
    if not traces:
        raise RuntimeError("no trace was written")
    report(bench, "trace of a step", ", ".join(f"{path.name}, {path.stat().st_size / 1e6:.3g} MB" for path in traces))


def losses(run: Path) -> dict[str, float]:
    """By step; of a step that was run twice, the last."""
    found = (entry for path in run.rglob("metrics.jsonl") for entry in entries(path))
    return {str(entry["step"]): entry["loss"] for entry in found if "loss" in entry and "step" in entry}


def shown(found: dict[str, float]) -> str:
    steps: Sequence[str] = sorted(found, key=int)
    return f"loss {found[steps[0]]:.4f} to {found[steps[-1]]:.4f}" if steps else "no losses"
