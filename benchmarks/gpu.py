"""What one GPU makes of Longhaul: speeds, peaks and parity, each row printed as it is found, in ten minutes.

    python -m benchmarks.gpu [--minutes 10] [--phases 0,1,3] [--out rows.jsonl] [--attention fastest]
    python -m benchmarks.gpu --record 1048576 --model 1b-128 [--memory.head_groups 4 ...]      one whole exact step
    python -m benchmarks.gpu --longest 8b [...]       the longest sequence that a device holds, found with two of the layers
    python -m benchmarks.gpu --rehearse               everything on tiny sizes, also on a CPU: a test of this script

Phases: 0 environment and ceilings, 1 parity, 2 attention and the head, 3 1B with heads of 128, 4 levers at 64K, 5 1B with
heads of 64, 6 slices of 8B, 7 slices of 8B at 1M, 8 another library's step. Options of a configuration reach every step of
training, over what the phase says. Models are Longhaul's own, built from a `Config` and trained by its `Trainer` in this
process; only initial weights are drawn on the device, which takes a tenth of the time. What fails, or would take longer
than is left, becomes a row that says so. Times come from device events; FLOP/s of attention count 4 per pair and number
of a head forward, 10 backward.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_parts import KEPT, attention, environment, output, parity
from benchmarks.gpu_parts import report as report_result
from benchmarks.gpu_rows import Bench, K, Report
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
from trainer.hardware.device import choose_device, peak_flops
from trainer.hardware.host import GIB
from trainer.launch.cluster import LaunchWorld, set_worker_environment

LEAN = "--memory.offload inputs_and_attention --memory.head_groups 4 --memory.mlp_tile_mib 1024"


# ---- 3 to 8: steps


def ladder(bench: Bench) -> None:
    for tokens, room in ((32 * K, 12), (128 * K, 35), (256 * K, 85)):
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
    flops = config.model.build().flops(tokens=tokens, pairs=tokens * (tokens + 1) / 2)
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
    """Hugging Face's Llama of the same widths: autocast over float32 weights, checkpointed blocks, AdamW."""
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError as error:
        report_result(bench, "transformers", f"not installed: {error}")
        return
    for tokens in (128 * K, 64 * K, 32 * K):
        config = configured(bench, "1b-128", tokens, "--memory.recompute full --training.attention auto")
        job = partial(their_step, bench, library, config)
        tokens = config.training.seq_len
        needs = 3 * seconds_of(bench, config, tokens**2 / 2) + 20 * bench.cuda
        if bench.attempt(f"transformers {library.__version__}, {tokens}", job, needs=needs):
            return


def their_step(bench: Bench, library: Any, config: Any) -> bool:
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

    def step() -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            loss = net(input_ids=words, labels=words, use_cache=False).loss
        loss.backward()
        adamw.step()
        adamw.zero_grad()

    begin_memory(bench)
    times = bench.timed(step, warmups=1, rounds=2)
    seconds = median(times)
    flops, peak = model.flops(tokens=tokens, pairs=tokens * (tokens + 1) / 2), peak_flops(bench.device)
    used = torch.cuda.max_memory_allocated() if bench.cuda else None
    bench.report.row(
        model=f"1b-128, transformers {library.__version__}, gradient checkpointing, sdpa",
        seq_len=tokens,
        s_step=seconds,
        n=len(times),
        tok_s=tokens / seconds,
        mfu=flops / seconds / peak if peak else None,
        peak_gib=gib(used),
    )
    return True


PHASES = (
    environment,
    parity,
    attention,
    ladder,
    ablation,
    narrow_heads,
    slices,
    long_rows,
    transformers_step,
)


# ---- one long call each


def record(bench: Bench, model: str, tokens: int) -> None:
    """One whole exact step, after a warm-up on short documents that pins the memory."""
    levers = f"{KEPT} --memory.offload inputs --memory.head_groups 4 --memory.mlp_tile_mib 1024"
    train(bench, model, tokens, levers, rounds=(1, 1, True), note="one exact step")


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


def options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--phases", default=",".join(map(str, range(len(PHASES)))))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--attention", default="fastest", help="or one of training.attention, for all steps")
    parser.add_argument("--record", type=int, metavar="SEQ_LEN")
    parser.add_argument("--model", default="1b-128", choices=MODELS)
    parser.add_argument("--longest", choices=MODELS)
    parser.add_argument("--host-gib", type=float, help="where the machine shows less memory than it can have")
    parser.add_argument("--rehearse", action="store_true")
    return parser.parse_known_args(argv)


def main(argv: list[str]) -> int:
    given, more = options(argv)
    device = choose_device(0)
    if device.type == "cpu" and not given.rehearse:
        sys.stdout.write("no CUDA device: nothing measured\n")
        return 0
    set_worker_environment(os.environ, LaunchWorld(nproc_per_node=1))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # A machine without a network has a name that nobody resolves.
    if device.type == "cpu":
        torch.set_num_threads(1)  # Nothing there is large enough to be shared.
    warnings.filterwarnings("ignore")
    common = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "commit": output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        "command": shlex.join(argv),
    }
    begin = time.monotonic()
    report = Report(given.out, **common)
    bench = Bench(device, report, begin + 60 * given.minutes, given.rehearse, given.attention, more)
    bench.host = given.host_gib * GIB if given.host_gib else bench.host
    if given.record:
        jobs: dict[Any, Callable[[], None]] = {"record": partial(record, bench, given.model, given.record)}
    elif given.longest:
        jobs = {"longest": partial(longest, bench, given.longest)}
    else:
        jobs = {number: partial(PHASES[number], bench) for number in map(int, given.phases.split(","))}
    for name, job in jobs.items():
        report.phase = name
        bench.attempt(f"phase {name}", job)
        bench.clear()
    report_result(bench, "all of it", f"{(time.monotonic() - begin) / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
