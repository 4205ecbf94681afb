"""What one GPU makes of Longhaul: truth, speed and memory, in five parts that each fit into nine minutes.

    python -m benchmarks.gpu --part 1     alive and right: gpu tests, kernels against float64, copies, parity
    python -m benchmarks.gpu --part 2     attention and the head; a 1B with heads of 128 from 8K to 256K, option by option
    python -m benchmarks.gpu --part 3     Llama 3.2 1B, slices of 8B, peaks at 1M, another library's step
    python -m benchmarks.gpu --part 4     the product: calibrate, a run with checkpoints, kill -9, resume, trace
    python -m benchmarks.gpu --part 5     the record: one exact step of 786,432 tokens; called again, of 1M
    python -m benchmarks.gpu --longest 8b     the longest sequence that a device holds, found with two of the layers
    python -m benchmarks.gpu --part 1 --rehearse     tiny sizes, also on a CPU: a test of this script, which fails if a row does

Every row is on disk (`--output`, else outputs/gpu/part_N.jsonl) as soon as it is known, with commit, torch, clocks, kernel, and
memory and seconds predicted and measured. Called again, a part resumes where it ended. A row that fails, hangs, loses the
device or would take longer than is left becomes a row that says so, and the next is measured in a new process. Options of
a configuration reach every step of training. Models are built from a `Config` and trained by the `Trainer`; only initial
weights are drawn on the device, which takes a tenth of the time. FLOP/s of attention count 4 per pair and number of a
head forward, 10 backward.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_parts import KEPT, ROOT, attention, environment, gpu_tests, parity, truth
from benchmarks.gpu_parts import report as report_result
from benchmarks.gpu_product import product
from benchmarks.gpu_rows import Bench, K, Report, entries, failed_rows, found_host_bytes, output
from benchmarks.gpu_steps import (
    MODELS,
    begin_memory,
    configured,
    gib,
    ledger_of,
    seconds_of,
    state_bytes,
    train,
    with_length,
)
from trainer.config.job_config import Config
from trainer.hardware.device import choose_device, peak_flops
from trainer.hardware.host import GIB
from trainer.launch.cluster import LaunchWorld, set_worker_environment

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
THEIR_CHUNK = 2 * K
"""Tokens whose logits exist at a time in the other library's step."""
LEAN = "--memory.offload inputs_and_attention --memory.head_groups 4 --memory.mlp_tile_mib 1024"


# ---- steps


def ladder(bench: Bench) -> None:
    for tokens, room in ((8 * K, 6), (32 * K, 12), (64 * K, 15), (128 * K, 35), (256 * K, 85)):
        train(bench, "1b-128", tokens, room=room)
    train(bench, "1b-128", 32 * K, "--training.compile true", room=12)


def ablation(bench: Bench) -> None:
    ways = (
        "--memory.recompute none",
        "--memory.recompute full",
        KEPT,
        f"{KEPT} --memory.offload inputs",
        f"{KEPT} --memory.offload inputs_and_attention",
        f"{KEPT} --memory.mlp_tile_mib 512",
        f"{KEPT} --memory.head_groups 2",
        f"{KEPT} --memory.head_groups 4",
        f"{KEPT} --memory.blocks_per_checkpoint 4",
        f"{KEPT} {LEAN} --memory.blocks_per_checkpoint 4",
    )
    for levers in ways:
        train(bench, "1b-128", 64 * K, levers, room=9)


def narrow_heads(bench: Bench) -> None:
    train(bench, "1b", 128 * K, room=40)


def slices(bench: Bench) -> None:
    """Two depths of 8B; their difference is what a layer takes."""
    found = [train(bench, "8b", 256 * K, f"--model.num_layers {layers}", room=40) for layers in (2, 4)]
    if found[0] is None or found[1] is None:
        return
    layer, config = (found[1] - found[0]) / 2, configured(bench, "8b", 256 * K, "--model.num_layers 32")
    tokens, peak = config.training.seq_len, peak_flops(bench.device)
    seconds = found[1] + 28 * layer
    model = config.model.build()
    flops = model.flops(tokens=tokens, pairs=model.mean_pairs(tokens))
    mfu = f", MFU {flops / seconds / peak:.1%}" if peak else ""
    result = f"{seconds:.4g} s, {tokens / seconds:.4g} tokens/s{mfu}; {layer:.4g} s a layer"
    report_result(bench, f"8b, 32 layers, {tokens}: PREDICTED from 2 and 4 layers, without memory", result)


def long_rows(bench: Bench) -> None:
    """Peaks at 1M against the estimate, in documents of 128K to keep steps short; with and without offload."""
    apart = "two layers, documents of 128K"
    for offload in ("none", "inputs_and_attention"):
        levers = f"--model.num_layers 2 {LEAN} --memory.offload {offload}"
        train(bench, "8b", 1024 * K, levers, room=30, document=bench.size(128 * K), note=apart)


def transformers_step(bench: Bench) -> None:
    """Hugging Face's Llama of the same widths: autocast over float32 weights, checkpointed blocks, a chunked loss, AdamW.

    On the attention kernel that our steps take.
    """
    for tokens in (128 * K, 64 * K, 32 * K):
        config = bench.guard("transformers", partial(configured, bench, "1b-128", tokens, "--memory.recompute full"))
        if config is None:
            return
        needs = 3 * seconds_of(bench, config, config.training.seq_len**2 / 2) + 20 * bench.cuda
        job = partial(their_step, bench, config)
        if bench.attempt(f"transformers, {config.training.seq_len}", job, needs=needs):
            return


def their_step(bench: Bench, config: Config) -> float:
    library: Any = importlib.import_module("transformers")
    model, tokens = config.model.build(), config.training.seq_len
    theirs = library.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.ffn_dim,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        tie_word_embeddings=model.tie_embeddings,
        max_position_embeddings=tokens,
        attn_implementation="sdpa",
    )
    with bench.device:
        net = library.LlamaForCausalLM(theirs).float().train()
        words = torch.randint(model.vocab_size, (1, tokens))
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adamw = torch.optim.AdamW(net.parameters(), fused=True)
    backend = SDPA_BACKENDS.get(config.training.attention, SDPBackend.MATH)

    def chunk_loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(net.lm_head(hidden).float(), labels, reduction="sum")

    def step() -> None:
        with torch.autocast(bench.device.type, torch.bfloat16), sdpa_kernel([backend]):
            hidden = net.model(input_ids=words, use_cache=False).last_hidden_state[0, :-1]
            chunks = zip(hidden.split(THEIR_CHUNK), words[0, 1:].split(THEIR_CHUNK), strict=True)
            losses = [checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]
            (torch.stack(losses).sum() / (tokens - 1)).backward()
        adamw.step()
        adamw.zero_grad()

    begin_memory(bench)
    times = bench.timed(step, warmups=1, rounds=2)
    seconds = median(times)
    flops, peak = model.flops(tokens=tokens, pairs=model.mean_pairs(tokens)), peak_flops(bench.device)
    used = torch.cuda.max_memory_allocated() if bench.cuda else None
    bench.report.row(
        model=f"1b-128, transformers {library.__version__}, gradient checkpointing, chunked loss",
        seq_len=tokens,
        kernel=f"sdpa, {backend.name.lower()}",
        s_step=seconds,
        n=len(times),
        tok_s=tokens / seconds,
        mfu=flops / seconds / peak if peak else None,
        peak_gib=gib(used),
    )
    return seconds


# ---- the record


def record(bench: Bench) -> None:
    """One whole exact step each, after a warm-up on short documents that pins the memory."""
    levers = f"{KEPT} --memory.offload inputs --memory.head_groups 4 --memory.mlp_tile_mib 1024"
    for tokens in (768 * K, 1024 * K):
        train(bench, "1b-128", tokens, levers, rounds=(1, 1, True), note="one exact step")


PARTS: dict[int, tuple[Callable[[Bench], None], ...]] = {
    1: (environment, truth, gpu_tests, parity),
    2: (environment, attention, ladder, ablation),
    3: (environment, narrow_heads, slices, long_rows, transformers_step),
    4: (environment, product),
    5: (environment, record),
}


def longest(bench: Bench, model: str) -> None:
    """Two layers, with memory reserved for the state of the others: rows grow until they do not fit, or shrink."""
    levers, unit = f"{KEPT} {LEAN} --memory.blocks_per_checkpoint 2", 64 * K
    room = 0.97 * torch.cuda.get_device_properties(bench.device).total_memory if bench.cuda else GIB / 64
    whole, cut = (configured(bench, model, unit, levers, more) for more in ("", "--model.num_layers 2"))
    layers, ballast = (
        whole.model.build().num_layers,
        int(state_bytes(ledger_of(whole)[0]) - state_bytes(ledger_of(cut)[0])),
    )

    def needed(units: int) -> tuple[float, float]:
        found, host = ledger_of(with_length(whole, bench.size(units * unit)))
        return found.device_bytes, host

    units = 1
    while needed(units + 1)[0] <= room and units < 512:
        units += 1
    report_result(bench, f"longest sequence of {model} by the estimate", f"{bench.size(units * unit)} tokens")
    note, best, grows = (
        f"TRUNCATED: 2 of {layers} layers, {ballast / GIB:.1f} GiB taken for the others' states",
        0,
        True,
    )
    for _ in range(6):
        options = (levers, "--model.num_layers 2")
        once, documents = (0, 1, False), bench.size(16 * K)
        seconds = train(
            bench, model, units * unit, *options, document=documents, rounds=once, ballast=ballast, note=note
        )
        best, grows = (units, grows) if seconds else (best, False)
        if (best and not grows) or units < 2:
            break
        units += max(1, units // 20) * (1 if seconds else -1)
    host = needed(best)[1] / GIB if best else 0
    result = f"{bench.size(best * unit)} tokens; all layers keep {host:.0f} GiB on the host" if best else "none found"
    report_result(bench, f"longest sequence of {model} by device memory, from truncated depth", result)


# ---- processes


def options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--part", type=int, choices=PARTS)
    what.add_argument("--longest", choices=MODELS)
    parser.add_argument("--minutes", type=float, default=9, help="that the part may take")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--attention", default="fastest", help="or one of training.attention, for all steps")
    parser.add_argument("--host-gib", type=float, help="host memory; it is found by itself")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    given, more = parser.parse_known_args(argv)
    name = "longest" if given.part is None else f"part_{given.part}"
    given.output = given.output or Path("outputs", "gpu", f"{name}.jsonl")
    return given, more


def main(argv: Sequence[str]) -> int:
    given, more = options(argv)
    if given.worker is not None:
        measure(given, more, argv)
        return 0
    if not torch.cuda.is_available() and not given.rehearse:
        sys.stdout.write("no CUDA device: nothing measured\n")
        return 0
    run, deadline = uuid.uuid4().hex[:8], time.time() + 60 * given.minutes
    worker = [sys.executable, "-m", "benchmarks.gpu", *argv, f"--worker={run}", f"--deadline={deadline}"]
    status = supervise(worker, given.output, run)
    return status or (given.rehearse and report_failed(given.output, run))


def report_failed(path: Path, run: str) -> int:
    """The status of a rehearsal: 1, with their names, if rows failed or were left out."""
    failed = failed_rows(path, run)
    for row in failed:
        sys.stderr.write(f"error: {row.get('what', row)}: {row.get('result', '')}\n")
    return int(bool(failed))


def supervise(worker: Sequence[str], path: Path, run: str) -> int:
    """Measures in child processes: a new one after each that a job has ended, or that hangs in one."""
    report = Report(path, run)
    while True:
        child = subprocess.Popen(worker, start_new_session=True)
        try:
            while child.poll() is None:
                job = begun_job(path, run)
                if job is not None and time.time() > job["time"] + job["limit"]:
                    break
                time.sleep(0.2)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # With what it has started.
            child.wait()
        job = begun_job(path, run)
        if job is None:
            return child.returncode
        report.part = job["part"]
        report.row(what=job["job"], result=f"failed: ended its process with status {child.returncode}")
        report.end(job["job"], "failed")


def begun_job(path: Path, run: str) -> dict[str, Any] | None:
    """The last job that has begun in this run and not ended; a job may measure others first."""
    begun: dict[str, dict[str, Any]] = {}
    for entry in entries(path):
        if "job" in entry and entry["run"] == run:
            begun.pop(entry["job"], None)
            if entry["state"] == "begun":
                begun[entry["job"]] = entry
    return next(reversed(begun.values()), None)


def measure(given: argparse.Namespace, more: Sequence[str], argv: Sequence[str]) -> None:
    device = choose_device(0)
    set_worker_environment(os.environ, LaunchWorld(nproc_per_node=1))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # A machine without a network has a name that nobody resolves.
    if device.type == "cpu":
        torch.set_num_threads(1)  # Nothing there is large enough to be shared.
    warnings.filterwarnings("ignore")
    common = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "commit": output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "sources": source_digest(),
        "command": shlex.join(argv),
    }
    report = Report(given.output, given.worker, **common)
    host = given.host_gib * GIB if given.host_gib else found_host_bytes()
    bench = Bench(device, report, given.deadline, given.rehearse, given.attention, more, host)
    report.part = given.part or "longest"
    for job in PARTS[given.part] if given.part else [partial(longest, model=given.longest)]:
        bench.guard(getattr(job, "__name__", "longest"), partial(job, bench))
    report_result(bench, "left", f"{bench.left() / 60:.1f} minutes")


def source_digest() -> str:
    """Of the code that is measured, also where there is no git."""
    digest = blake2b(digest_size=4)
    for folder in ("benchmarks", "models", "parallelisms", "trainer"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
