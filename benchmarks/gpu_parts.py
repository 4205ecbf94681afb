"""The machine, truth and speed of kernels, parity, attention and the head by themselves, for the GPU benchmark."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_rows import BACKENDS, Bench, K, is_right_when_wide, output, rate_of
from benchmarks.gpu_steps import begin_memory, configured, draw_weights
from models import attention_op, kernel_check
from models.kernel_check import Heads
from models.loss_head import LossHead
from models.score_blocks import ScoreBlock, ScoreBlocks
from parallelisms.collectives import to_local
from parallelisms.context import ring
from parallelisms.context.attention_plan import RankAttentionPlan
from parallelisms.context.batch_layout import BatchLayout
from tests.build_datasets import build_train_dataset
from trainer.distributed import process_group
from trainer.hardware.host import GIB
from trainer.trainer import Trainer

KEPT = "--memory.recompute keep_attention"
ROOT = Path(__file__).resolve().parents[1]
GPU_TESTS = ("tests/models",)
ROUNDED = 1e-6
"""Of the largest norm: what rounding leaves of a gradient that vanishes."""


# ---- 0: the machine


def environment(bench: Bench) -> None:
    row = partial(report, bench)
    row("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    row(
        "processor",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    )
    row("host memory", f"{bench.host / GIB:.0f} GiB")
    if bench.cuda:
        found = torch.cuda.get_device_properties(bench.device)
        row(
            "device", f"{found.name}, {found.total_memory / GIB:.1f} GiB, {found.multi_processor_count} multiprocessors"
        )
        row(
            "triton",
            getattr(bench.guard("triton", partial(importlib.import_module, "triton")), "__version__", "none"),
        )
        fields = "driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
        row("driver, clocks, heat", output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"))
    size = 8192 if bench.cuda else 512
    a, b = bench.draw(size, size), bench.draw(size, size)
    seconds = median(bench.timed(lambda: a @ b))
    row(f"product of {size} x {size} in bfloat16", f"{2 * size**3 / seconds / 1e12:.4g} TFLOP/s")
    x, y = (
        torch.empty((4 * GIB if bench.cuda else GIB // 64), dtype=torch.uint8, device=bench.device) for _ in range(2)
    )
    seconds = median(bench.timed(lambda: x.copy_(y)))
    row("copy on the device", f"{2 * x.numel() / seconds / 1e9:.4g} GB/s, read and written")
    if bench.cuda:
        bench.attempt("copies and page-locking", partial(transfers, bench, a, b), needs=20)


def gpu_tests(bench: Bench) -> None:
    """The project's tests that need a CUDA device."""

    def run() -> str:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *GPU_TESTS]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=bench.left(), check=False)
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        for line in (line for line in lines if line.startswith(("FAILED", "ERROR"))):
            report(bench, "gpu tests", line)
        summary = lines[-1] if lines else done.stderr[-160:]
        if done.returncode:
            raise RuntimeError(summary)
        report(bench, "gpu tests", summary)
        return summary

    bench.attempt("gpu tests", run, needs=60 * bench.cuda)


def truth(bench: Bench) -> None:
    """Every kernel at ten lengths, and where a tensor has more elements than 32 bits count."""
    dtypes = {"efficient": torch.float32, "plain": torch.float64, "auto": torch.float32}
    for kernel in (*BACKENDS, "plain") if bench.cuda else ("auto",):
        for heads in (Heads(8, 2, 128), Heads(8, 2, 64), Heads(2, 2, 128)):
            job = partial(report_errors, bench, kernel, dtypes.get(kernel, torch.bfloat16), heads)
            bench.attempt(f"truth of {kernel}, heads {heads}", job, needs=5)
    for kernel in BACKENDS if bench.cuda else ("auto",):
        is_right_when_wide(bench, kernel)


def report_errors(bench: Bench, kernel: str, dtype: torch.dtype, heads: Heads) -> bool:
    lengths = kernel_check.SHORT_LENGTHS if bench.rehearse else kernel_check.LENGTHS
    errors = kernel_check.verify_kernel(kernel, bench.device, dtype, heads=heads, lengths=lengths)
    shown = {name: f"{error:.1e}" for name, error in errors.items()}
    bench.report.row(kernel=kernel, heads=f"{heads.num}:{heads.kv} x {heads.dim}", dtype=str(dtype)[6:], **shown)
    return True


def report(bench: Bench, what: str, result: str) -> None:
    bench.report.row(what=what, result=result)


def transfers(bench: Bench, a: Tensor, b: Tensor) -> None:
    """Copies to and from pinned memory, alone and under matrix products; and how fast memory is pinned."""
    begin = time.perf_counter()
    host = torch.empty(4 * GIB, dtype=torch.uint8, pin_memory=True)
    report(bench, "page-locking", f"{4 / (time.perf_counter() - begin):.3g} GiB/s")
    there, side = torch.empty_like(host, device=bench.device), torch.cuda.Stream()
    products = median(bench.timed(lambda: [a @ b for _ in range(100)], rounds=3))
    for name, to, source in (("host to device", there, host), ("device to host", host, there)):
        alone = median(bench.timed(partial(to.copy_, source, non_blocking=True)))
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def both(to: Tensor = to, source: Tensor = source, marks: tuple[Any, Any] = (begun, done)) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                marks[0].record()
                to.copy_(source, non_blocking=True)
                marks[1].record()
            for _ in range(100):
                a @ b

        beside = median(bench.timed(both, rounds=3))
        torch.cuda.synchronize()
        beneath = begun.elapsed_time(done) / 1e3
        slower = f"products {beside / products - 1:+.1%}"
        rates = f"{host.numel() / alone / 1e9:.3g} GB/s alone, {host.numel() / beneath / 1e9:.3g} under products"
        report(bench, f"{name}, pinned", f"{rates}, {slower}")


# ---- 1: parity


Seen = tuple[float, float, dict[str, Tensor]]
# What is compared, with what, and how it is configured.
VARIANTS = {
    "float32": ("", "--training.dtype float32 --memory.recompute none"),
    "none": ("float32", "--memory.recompute none"),
    "none, once more": ("none", "--memory.recompute none"),
    "keep_attention": ("none", KEPT),
    "full": ("none", "--memory.recompute full"),
    "inputs on the host": ("keep_attention", f"{KEPT} --memory.offload inputs"),
    "all on the host": ("keep_attention", f"{KEPT} --memory.offload inputs_and_attention"),
    "one input of 2": ("keep_attention", f"{KEPT} --memory.blocks_per_checkpoint 2"),
    "2 head groups": ("keep_attention", f"{KEPT} --memory.head_groups 2"),
    "4 head groups": ("keep_attention", f"{KEPT} --memory.head_groups 4"),
    "tiles": ("keep_attention", f"{KEPT} --memory.mlp_tile_mib 1"),
    "states on the host": ("keep_attention", f"{KEPT} --memory.optimizer_placement host"),
    "cudnn": ("keep_attention", f"{KEPT} --training.attention cudnn"),
    "efficient": ("keep_attention", f"{KEPT} --training.attention efficient"),
}


def parity(bench: Bench) -> None:
    bench.attempt("parity of memory options and kernels", partial(compare_variants, bench), needs=40 * bench.cuda)
    bench.attempt("4 ranks of a ring", partial(ring_parity, bench))


def compare_variants(bench: Bench) -> bool:
    """Loss, norm and gradients of the first step of each variant, compared with another."""
    seen: dict[str, Seen] = {}
    torch.use_deterministic_algorithms(True, warn_only=True)  # noqa: FBT003
    try:
        for name, (other, options) in VARIANTS.items():
            needs_cuda = name in ("cudnn", "efficient")
            found = None if needs_cuda and not bench.cuda else bench.guard(name, partial(seen_by, bench, options))
            if found is not None:
                seen[name] = found
                loss, norm, _ = found
                far = distance(found[2], seen[other][2]) if other in seen else None
                bench.report.row(
                    variant=name, loss=f"{loss:.7f}", norm=f"{norm:.6f}", beside=other or None, gradients=far
                )
    finally:
        torch.use_deterministic_algorithms(False)  # noqa: FBT003
    return True


def seen_by(bench: Bench, options: str) -> Seen:
    default = "" if "--training.attention" in options else "--training.attention auto"
    config = configured(bench, "parity", 4 * K, options, default)
    with process_group(config.distributed) as world:
        trainer = Trainer(config, world, build_train_dataset(config), kernel=bench.trusted_kernel(config))
        draw_weights(trainer, world.device)
        reading = trainer.loader.steps(0)
        vector = trainer.accumulate_gradients(next(reading))
        reading.close()
        named = trainer.optimizer.parameters_by_name.items()
        grads = {name: to_local(x.grad).to(bench.device, copy=True) for name, x in named if x.grad is not None}
        parts = trainer.accumulator.layout.split(trainer.optimizer_step(vector, 1e-3))
        return float(parts["loss"] / parts["targets"]), float(parts["grad_norm"]), grads


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> str:
    if ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours):
        return "bitwise the same"
    far = torch.tensor([*distances(ours, theirs).values()])
    return f"{float(far.max()):.1e} of a tensor's norm apart" if far.isfinite().all() else "WRONG: not finite"


def distances(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Between tensors of a name, over the norm of theirs. One of rounding errors beside the largest counts as none."""
    norms = {name: x.double().norm() for name, x in theirs.items()}
    least = ROUNDED * torch.stack([*norms.values()]).max()
    return {
        name: float((ours[name].double() - x.double()).norm() / norms[name].clamp(min=least))
        for name, x in theirs.items()
    }


@dataclass(frozen=True)
class Wire:
    wait: Callable[[], Tensor]


def ring_job(bench: Bench, kernel: str, tokens: int, ranks: int = 4) -> tuple[Callable[[], list[Tensor]], ...]:
    """Forward and backward of a row by one call, and by ranks in threads that share the device; what both give is in order."""
    q, grad = (bench.draw(tokens, 32, 128) for _ in range(2))
    k, v = (bench.draw(tokens, 8, 128) for _ in range(2))
    work = ScoreBlocks([ScoreBlock(0, tokens, 0, tokens)], causal=True)
    layout = BatchLayout("headtail", ranks, torch.tensor([[0, tokens]]))
    shares = [RankAttentionPlan(layout, rank) for rank in range(ranks)]
    order = layout.permutation()[0].to(bench.device)
    back = order.argsort()
    parts = list(zip(*(x[order].chunk(ranks) for x in (grad, q, k, v)), strict=True))

    def alone() -> list[Tensor]:
        out, lse = attention_op.forward(q, k, v, work, kernel=kernel)
        return [out, *attention_op.backward(grad, q, k, v, out, lse, work, kernel=kernel)]

    def one(rank: int, hops: dict[tuple[int, int], SimpleQueue[Tensor]]) -> list[Tensor]:
        number = count()

        def rotate(x: Tensor) -> Wire:
            hop = next(number)
            hops[(rank + 1) % ranks, hop].put(x)
            return Wire(partial(hops[rank, hop].get, timeout=20))

        grad, q, k, v = (x[None] for x in parts[rank])
        kv, exchange = torch.cat((k, v)), ring.Ring(shares[rank], rotate, torch.float32)
        out, lse = ring.forward(q, k, v, rotate(kv), exchange, kernel=kernel)
        dq, dk, dv, _ = ring.backward(grad, q, k, v, rotate(kv), out, lse, exchange, kernel=kernel)
        return [x[0] for x in (out, dq, dk, dv)]

    def shared() -> list[Tensor]:
        hops = {(rank, hop): SimpleQueue[Tensor]() for rank in range(ranks) for hop in range(4 * ranks)}
        with ThreadPoolExecutor(ranks) as pool:
            found = list(pool.map(lambda rank: one(rank, hops), range(ranks)))
        return [torch.cat(rows) for rows in zip(*found, strict=True)]

    return alone, lambda: [x[back] for x in shared()], shared


def ring_parity(bench: Bench) -> bool:
    alone, in_order, _ = ring_job(bench, "flash" if bench.cuda else "auto", bench.size(8 * K))
    names = ("output", "dq", "dk", "dv")
    far = distances(*(dict(zip(names, given(), strict=True)) for given in (in_order, alone)))
    report(bench, "4 ranks of a ring against one", ", ".join(f"{name} {error:.1e}" for name, error in far.items()))
    return True


# ---- 2: attention and the head by themselves


def attention(bench: Bench) -> None:
    for tokens in (16 * K, 64 * K):
        for width in (128, 64):
            for kernel in BACKENDS if bench.cuda else ("auto",):
                rate_of(bench, kernel, width, tokens)
    fastest = bench.kernel(configured(bench, "8b", 16 * K))
    for tokens in (2 * K, 8 * K, 32 * K):
        bench.attempt(f"virtual ring, {tokens} tokens per rank", partial(ring_row, bench, fastest, tokens), needs=10)
    for mib in (64, 256, 1024):
        bench.attempt(f"head, chunks of {mib} MiB", partial(head_row, bench, mib), needs=5)


def ring_row(bench: Bench, kernel: str, held: int) -> None:
    alone, _, shared = ring_job(bench, kernel, 4 * bench.size(held))
    one, four = (median(bench.timed(job, warmups=1, rounds=3)) for job in (alone, shared))
    result = f"{1e3 * four:.4g} ms over {1e3 * one:.4g} of one call, {four / one - 1:+.1%}, no transport, {kernel}"
    report(bench, f"forward and backward of 4 ranks with {bench.size(held)} tokens each", result)


def head_row(bench: Bench, mib: int) -> None:
    model, tokens = configured(bench, "8b", 16 * K).model.build(), bench.size(16 * K)
    head = LossHead(model, chunk_mib=mib).to(bench.device, torch.bfloat16)
    x = bench.draw(1, tokens, model.dim).requires_grad_()
    labels = torch.randint(model.vocab_size, (1, tokens), device=bench.device)
    begin_memory(bench)
    seconds = median(bench.timed(lambda: head(x, labels).sum().backward()))
    flops = 6 * tokens * model.dim * model.vocab_size / seconds
    peak = f", {torch.cuda.max_memory_allocated() / GIB:.3g} GiB" if bench.cuda else ""
    report(bench, f"head of 8B, {tokens} tokens, chunks of {mib} MiB", f"{flops / 1e12:.4g} TFLOP/s{peak}")
