"""The machine, and attention and the loss head by themselves, for the GPU benchmark: whether they
are right, how fast they are.

FLOP/s of attention count 4 per pair and number of a head forward, 10 backward.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_bench import Bench, K, output
from benchmarks.gpu_steps import StepCase
from models import attention_op, kernel_check, kernels
from models.kernel_check import Heads
from models.kernel_reference import Sample, reference
from models.loss_head import LossHead
from models.score_blocks import ScoreBlock, ScoreBlocks
from parallelisms.block_recompute import compiler
from parallelisms.context import ring
from parallelisms.context.attention_plan import RankAttentionPlan
from parallelisms.context.batch_layout import BatchLayout
from trainer.hardware.host import GIB, node_memory_bytes

DTYPES = {"efficient": torch.float32, "plain": torch.float64}
"""In which a kernel is compared with the reference; others in bfloat16."""
ROUNDED = 1e-6
"""Of the largest norm: what rounding leaves of a gradient that vanishes."""
Given = tuple[Tensor, Tensor, Tensor, Tensor]
"""The gradient of attention's output, queries, keys and values."""


# ---- the machine


def machine(bench: Bench) -> None:
    row = partial(_result, bench)
    row(
        "processor",
        f"{platform.machine()}, {os.cpu_count()} cores, {node_memory_bytes() / GIB:.0f} GiB",
    )
    if bench.cuda:
        found = torch.cuda.get_device_properties(bench.device)
        row(
            "device",
            f"{found.total_memory / GIB:.1f} GiB, {found.multi_processor_count} multiprocessors",
        )
        driver = output(
            "nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"
        )
        row(
            "software",
            f"driver {driver}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        )
    size = 8192 if bench.cuda else 512
    a = bench.draw(size, size)
    b = bench.draw(size, size)
    seconds = median(bench.timed(lambda: a @ b))
    row(f"product of {size} x {size} in bfloat16", f"{2 * size**3 / seconds / 1e12:.4g} TFLOP/s")
    x, y = (
        torch.empty(4 * GIB if bench.cuda else GIB // 64, dtype=torch.uint8, device=bench.device)
        for _ in range(2)
    )
    seconds = median(bench.timed(lambda: x.copy_(y)))
    row("copy on the device", f"{2 * x.numel() / seconds / 1e9:.4g} GB/s, read and written")
    if bench.cuda:
        transfers(bench, a, b)


def transfers(bench: Bench, a: Tensor, b: Tensor) -> None:
    """Copies to and from pinned memory, by themselves and during matrix products; and how fast
    memory is pinned.
    """
    begin = time.perf_counter()
    host = torch.empty(4 * GIB, dtype=torch.uint8, pin_memory=True)
    _result(bench, "page-locking", f"{4 / (time.perf_counter() - begin):.3g} GiB/s")
    on_device = torch.empty_like(host, device=bench.device)
    side = torch.cuda.Stream()
    products = median(bench.timed(lambda: [a @ b for _ in range(100)], rounds=3))
    for name, to, source in (
        ("host to device", on_device, host),
        ("device to host", host, on_device),
    ):
        copy = partial(to.copy_, source, non_blocking=True)
        alone = median(bench.timed(copy))
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def both(copy: Callable[[], Tensor] = copy, begun: Any = begun, done: Any = done) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                begun.record()
                copy()
                done.record()
            for _ in range(100):
                a @ b

        beside = median(bench.timed(both, rounds=3))
        torch.cuda.synchronize()
        rates = [host.numel() / each / 1e9 for each in (alone, begun.elapsed_time(done) / 1e3)]
        result = f"{rates[0]:.3g} GB/s, {rates[1]:.3g} during products, which take {beside / products - 1:+.1%}"
        _result(bench, f"{name}, pinned", result)


# ---- right or wrong


def errors(bench: Bench, kernel: str) -> None:
    """A kernel's largest errors at ten lengths, for three layouts of heads.

    Raises ValueError if one is too large.
    """
    lengths = kernel_check.SHORT_LENGTHS if bench.rehearse else kernel_check.LENGTHS
    dtype = DTYPES.get(kernel, torch.bfloat16)
    for heads in (Heads(8, 2, 128), Heads(8, 2, 64), Heads(2, 2, 128)):
        found = kernel_check.verify_kernel(
            kernel, bench.device, dtype, heads=heads, lengths=lengths
        )
        cells = {name: f"{error:.1e}" for name, error in found.items()}
        bench.row(
            kernel=kernel,
            heads=f"{heads.num}:{heads.kv} x {heads.dim}",
            dtype=str(dtype)[6:],
            **cells,
        )


def wide(bench: Bench, kernel: str) -> None:
    """Queries of 2^32 numbers. Raises ValueError if the kernel is wrong about them."""
    heads = Heads(4, 2, 32) if bench.rehearse else Heads(32, 8, 128)
    tokens = bench.size(K * K)
    limit = tokens * heads.num * heads.dim // 2 if bench.rehearse else kernel_check.MAX_ELEMENTS
    options: Any = {"heads": heads, "num_tokens": tokens, "max_elements": limit}
    kernel_check.verify_wide(kernel, bench.device, torch.bfloat16, **options)
    _result(bench, f"{kernel} on tensors of more than {limit:,} elements", "right")


@dataclass(frozen=True)
class Transfer:
    """A tensor that another rank sends."""

    wait: Callable[[], Tensor]


def ring_job(
    bench: Bench, kernel: str, tokens: int, ranks: int = 4
) -> tuple[Callable[[], list[Tensor]], ...]:
    """Forward and backward of a sequence by one call, by ranks in threads that share the device,
    and the latter in order.
    """
    q, grad = (bench.draw(tokens, 32, 128) for _ in range(2))
    k, v = (bench.draw(tokens, 8, 128) for _ in range(2))
    work = ScoreBlocks([ScoreBlock(0, tokens, 0, tokens)], causal=True)
    layout = BatchLayout("headtail", ranks, torch.tensor([[0, tokens]]))
    plans = [RankAttentionPlan(layout, rank) for rank in range(ranks)]
    order = layout.permutation()[0].to(bench.device)
    shards = list(zip(*(x[order].chunk(ranks) for x in (grad, q, k, v)), strict=True))

    def one_call() -> list[Tensor]:
        out, lse = attention_op.forward(q, k, v, work, kernel=kernel)
        return [out, *attention_op.backward(grad, q, k, v, out, lse, work, kernel=kernel)]

    def one_rank(rank: int, hops: dict[tuple[int, int], SimpleQueue[Tensor]]) -> list[Tensor]:
        numbers = count()

        def rotate(x: Tensor) -> Transfer:
            hop = next(numbers)
            hops[(rank + 1) % ranks, hop].put(x)
            return Transfer(partial(hops[rank, hop].get, timeout=20))

        grad, q, k, v = (x[None] for x in shards[rank])
        kv = torch.cat((k, v))
        exchange = ring.Ring(plans[rank], rotate, torch.float32)
        out, lse = ring.forward((q, k, v, rotate(kv)), exchange, kernel=kernel)
        dq, dk, dv, _ = ring.backward(
            grad, (q, k, v, rotate(kv)), out, lse, exchange, kernel=kernel
        )
        return [x[0] for x in (out, dq, dk, dv)]

    def all_ranks() -> list[Tensor]:
        hops = {
            (rank, hop): SimpleQueue[Tensor]() for rank in range(ranks) for hop in range(4 * ranks)
        }
        with ThreadPoolExecutor(ranks) as pool:
            found = list(pool.map(lambda rank: one_rank(rank, hops), range(ranks)))
        return [torch.cat(rows) for rows in zip(*found, strict=True)]

    return one_call, all_ranks, lambda: [x[order.argsort()] for x in all_ranks()]


def ring_errors(bench: Bench) -> None:
    """Four ranks of a ring beside one call.

    Raises ValueError if they differ by more than 2 % of a norm.
    """
    one_call, _, in_order = ring_job(bench, "flash" if bench.cuda else "auto", bench.size(8 * K))
    names = ("output", "dq", "dk", "dv")
    far = distances(*(dict(zip(names, work(), strict=True)) for work in (in_order, one_call)))
    result = ", ".join(f"{name} {error:.1e}" for name, error in far.items())
    if not max(far.values()) < 0.02:
        raise ValueError(f"4 ranks of a ring differ from one call: {result}")
    _result(bench, "4 ranks of a ring against one call", result)


def distances(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Between tensors of a name, over the norm of theirs.

    One of rounding errors beside the largest counts as none.
    """
    norms = {name: x.double().norm() for name, x in theirs.items()}
    least = ROUNDED * torch.stack([*norms.values()]).max()
    return {
        name: float((ours[name].double() - x.double()).norm() / norms[name].clamp(min=least))
        for name, x in theirs.items()
    }


# ---- how fast


def rates(bench: Bench, kernel: str, width: int, tokens: int) -> None:
    """FLOP/s of causal attention forward and backward.

    Raises ValueError if the last query's numbers are wrong.
    """
    heads = 32
    kv_heads = 8
    tokens = bench.size(tokens)
    grad, q = (bench.draw(tokens, heads, width) for _ in range(2))
    k, v = (bench.draw(tokens, kv_heads, width) for _ in range(2))
    work = ScoreBlocks([ScoreBlock(0, tokens, 0, tokens)], causal=True)
    pairs = tokens * (tokens + 1) / 2
    ((_, out, lse),) = kernels.attend_blocks(q, k, v, work, kernel=kernel)
    backward = partial(
        kernels.attend_blocks_backward, grad, q, k, v, out, lse, work, kernel=kernel
    )
    ((_, _, dq, _, _),) = backward()
    error = last_query_error((grad, q, k, v), out, lse, dq)
    if not error < kernel_check.TOLERANCES[torch.bfloat16]:
        raise ValueError(f"{kernel}: the last of {tokens} queries errs by {error:.1e}")
    seconds = [
        median(bench.timed(lambda: [*kernels.attend_blocks(q, k, v, work, kernel=kernel)])),
        median(bench.timed(lambda: [*backward()])),
    ]
    forward_rate, backward_rate = (
        n * heads * width * pairs / s for n, s in zip((4, 10), seconds, strict=True)
    )
    bench.row(
        kernel=kernel,
        heads=f"{heads}:{kv_heads} x {width}",
        tokens=tokens,
        forward_tflops=forward_rate / 1e12,
        backward_tflops=backward_rate / 1e12,
        error_of_last_query=error,
    )


def last_query_error(given: Given, out: Tensor, lse: Tensor, dq: Tensor) -> float:
    """How far the last query's numbers are from those of matrix products in float64, as the
    start-up check says; or NaN.
    """
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


def ring_seconds(bench: Bench, kernel: str, tokens: int) -> None:
    """What dividing a sequence over four ranks costs where nothing is sent."""
    one_call, all_ranks, _ = ring_job(bench, kernel, 4 * bench.size(tokens))
    one, four = (median(bench.timed(work, warmups=1, rounds=3)) for work in (one_call, all_ranks))
    result = (
        f"{1e3 * four:.4g} ms over {1e3 * one:.4g} of one call, {four / one - 1:+.1%}, {kernel}"
    )
    _result(
        bench, f"forward and backward of 4 ranks with {bench.size(tokens)} tokens each", result
    )


def head_seconds(bench: Bench, case: StepCase, chunk_mib: int) -> None:
    """Final norm, projection and cross-entropy, both ways, compiled as in training."""
    tokens = bench.size(case.tokens)
    model = case.config(tiny=bench.rehearse).model.build()
    head = LossHead(model, chunk_mib=chunk_mib).to(bench.device, torch.bfloat16)
    head.compile_piece = compiler() if bench.cuda else None
    x = bench.draw(1, tokens, model.dim).requires_grad_()
    labels = torch.randint(model.vocab_size, (1, tokens), device=bench.device)
    bench.begin_memory()
    seconds = median(bench.timed(lambda: head(x, labels).sum().backward()))
    flops = 6 * tokens * model.dim * model.vocab_size / seconds
    peak = f", {torch.cuda.max_memory_allocated() / GIB:.3g} GiB" if bench.cuda else ""
    result = f"{1e3 * seconds:.4g} ms, {flops / 1e12:.4g} TFLOP/s{peak}"
    _result(bench, f"head of {tokens} tokens, chunks of {chunk_mib} MiB", result)


def _result(bench: Bench, what: str, result: str) -> None:
    bench.row(what=what, result=result)
