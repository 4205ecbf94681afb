"""Whole runs on one GPU, for the GPU benchmark: checkpoints, kill -9, resume, trace, two ranks,
calibration of the planner.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch

from benchmarks.gpu_bench import ROOT, Bench, K
from benchmarks.gpu_steps import MODELS, TINY
from trainer.hardware.spec_tables import find_table

STEPS = 8
KILLED_AFTER = 5
FARTHEST = 0.01
"""Of a loss: in bfloat16, gradients of two ranks are summed in another order."""
INTERVAL = 3


def calibrate(bench: Bench) -> None:
    """The rates of a device table, as `longhaul plan calibrate` measures them."""
    table = bench.folder / "device.toml"
    extended = (find_table(torch.cuda.get_device_name()) if bench.cuda else None) or "h100-80gb"
    command = [
        sys.executable,
        "-m",
        "trainer.plan",
        "calibrate",
        "--extends",
        extended,
        "--output",
        str(table),
    ]
    run_to_end(table.with_suffix(".log"), command)
    for line in table.read_text().splitlines():
        if "value =" in line or "forward =" in line:
            bench.row(what="calibrated", result=line.partition(", source")[0])


def command(bench: Bench, run: Path, more: Mapping[str, object] | None = None) -> list[str]:
    model = TINY if bench.rehearse else f"{MODELS['parity']} --model.num_layers 8"
    options: dict[str, object] = {
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
    options |= more or {}
    given = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [str(ROOT / "run_train.sh"), "--config", "debug", *model.split(), *given]


def start(
    words: Sequence[str], log: Path, *, own_group: bool = False, ranks: int = 1
) -> subprocess.Popen[bytes]:
    """`own_group`: in a process group that can be killed as one."""
    environment = os.environ | {"NGPU": str(ranks)}
    with log.open("ab") as file:
        return subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=own_group,
        )


def run_to_end(log: Path, words: Sequence[str], **options: Any) -> float:
    """Seconds. Raises RuntimeError with the end of the log of a command that fails."""
    begin = time.perf_counter()
    if status := start(words, log, **options).wait():
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        raise RuntimeError(f"status {status}: {' / '.join(lines[-3:])}")
    return time.perf_counter() - begin


def kill_and_resume(bench: Bench) -> None:
    """Losses of a run that was killed and started again, beside those of an undisturbed one, which
    writes a trace.
    """
    whole, killed = (bench.folder / name for name in ("whole", "killed"))
    for run in (whole, killed):
        rmtree(run, ignore_errors=True)
    seconds = run_to_end(
        whole.with_suffix(".log"), command(bench, whole, {"profiler.trace_step": 3})
    )
    expected = losses(whole)
    traces = [path for path in whole.rglob("*trace*") if path.is_file()]
    if not expected or not traces:
        raise RuntimeError("the undisturbed run wrote no losses or no trace")
    megabytes = traces[0].stat().st_size / 1e6
    bench.row(
        what=f"{STEPS} steps with checkpoints",
        result=f"{seconds:.0f} s with start-up, last loss {[*expected.values()][-1]:.4f}, trace of {megabytes:.3g} MB",
    )
    compare_after_kill(bench, killed, expected)


def compare_after_kill(bench: Bench, run: Path, expected: dict[str, float]) -> None:
    """Kills every process of a run and starts it again.

    Raises RuntimeError unless losses equal those expected.
    """
    child = start(command(bench, run), run.with_suffix(".log"), own_group=True)
    try:
        while str(KILLED_AFTER) not in losses(run):
            if child.poll() is not None:
                raise RuntimeError(f"the run ended with {child.poll()} before step {KILLED_AFTER}")
            time.sleep(0.02)  # Before a tiny run ends.
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    begin = max(
        (int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*")),
        default=0,
    )
    seconds = run_to_end(run.with_suffix(".log"), command(bench, run))
    after = {step: loss for step, loss in losses(run).items() if int(step) > begin}
    same = sum(loss == expected.get(step) for step, loss in after.items())
    result = f"{seconds:.0f} s; {same} of {len(after)} losses after step {begin} bitwise those of an undisturbed run"
    if not same == len(after) > 0:
        raise RuntimeError(result)
    bench.row(what=f"killed in step {KILLED_AFTER}, started again", result=result)


def two_ranks(bench: Bench) -> None:
    """Losses of two ranks that share the GPU, beside those of one.

    Raises RuntimeError if they are more than `FARTHEST` apart.
    """
    found = []
    options = {
        "training.seq_len": bench.size(8 * K),
        "training.steps": 3,
        "checkpoint.enabled": "false",
        "distributed.through_host": "true",
    }
    for ranks in (1, 2):
        run = bench.folder / f"ranks-{ranks}"
        run_to_end(run.with_suffix(".log"), command(bench, run, options), ranks=ranks)
        found.append(losses(run))
    alone, together = found
    far = max(abs(together[step] / loss - 1) for step, loss in alone.items())
    result = f"losses of {len(alone)} steps within {far:.1e} of those of one rank"
    if not far < FARTHEST:
        raise RuntimeError(result)
    bench.row(what="two ranks on one GPU, bfloat16, FSDP", result=result)


def losses(run: Path) -> dict[str, float]:
    """By step; of a step that was run twice, the last.

    A line that is being written is left out.
    """
    found = {}
    for path in run.rglob("metrics.jsonl"):
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):
                entry = json.loads(line)
                if "loss" in entry and "step" in entry:
                    found[str(entry["step"])] = float(entry["loss"])
    return found
