"""python -m benchmarks.cuda_memory: the memory estimate against what torch's CUDA allocator is asked for.

Runs three steps of a small model for each variant of options, each in a process of its own, and prints the most bytes
requested in the last step next to the estimate. Kernels may compute nothing, so a stand-in for the CUDA runtime does as
well as a GPU. Without either it prints the estimates. Exit status 1 if one is off by more than LIMIT.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta

from trainer.config.parse import load
from trainer.memory.estimator import estimate_memory

LIMIT = 0.03
MODEL = (
    "--data.corpus copy --checkpoint.enabled false --training.steps 4 --training.seq_len 16384"
    " --training.global_batch_size 1 --model.vocab_size 4096 --model.dim 512 --model.num_layers 3 --model.num_heads 16"
    " --model.num_kv_heads 4 --model.head_dim 64 --model.ffn_dim 1024 --memory.loss_chunk_mib 16"
    " --training.dtype bfloat16 --memory.recompute keep_attention"
)
NO_GROUPS = "--model.num_kv_heads 16"
VARIANTS = (
    "",
    "--memory.recompute none",
    "--memory.recompute none --model.qk_norm true",
    "--memory.recompute full",
    "--memory.head_groups 2",
    "--memory.head_groups 4 --memory.mlp_tile_mib 8",
    "--memory.offload inputs_and_attention --memory.mlp_tile_mib 8",
    "--memory.optimizer_placement host",
    "--memory.optimizer_dtype bfloat16",
    "--training.deterministic true",
    "--training.global_batch_size 4 --training.micro_batch_size 2",
    "--model.head_dim 96",
    NO_GROUPS,
    "--training.attention efficient",
    "--training.dtype float32",
    "--training.dtype float32 --training.global_batch_size 4 --training.micro_batch_size 2",
    f"--training.dtype float32 {NO_GROUPS}",
    "--training.dtype float64 --training.seq_len 1024",
)


def requested_bytes(variant: str) -> int:
    """The most that a step holds of what it asked the allocator for, on one device."""
    import torch
    from torch import distributed

    from models import kernels
    from trainer.data.copy_task import CopyDataset
    from trainer.data.sequences import BlendedDataset
    from trainer.distributed import World
    from trainer.trainer import Trainer

    config = load([*MODEL.split(), *variant.split()])
    training, vocabulary = config.training, config.model.build().vocab_size
    rows = CopyDataset(
        vocab_size=vocabulary,
        period=training.seq_len // 2,
        seq_len=training.seq_len,
        num_sequences=training.global_batch_size * training.steps,
        seed=0,
    )
    store = distributed.HashStore()
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    device, dataset = torch.device("cuda:0"), BlendedDataset([rows], seq_len=training.seq_len)
    queries = torch.empty(0, dtype=getattr(torch, training.dtype), device=device)
    kernel = kernels.select_kernel(queries, training.attention)  # Not verified: nothing may be computed.
    trainer = Trainer(config, World(0, 1, device), dataset, kernel=kernel)
    reading = trainer.loader.steps(0)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        trainer.step += 1
        trainer.train_step(next(reading), 1e-3)
    reading.close()
    peak: int = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    distributed.destroy_process_group()
    return peak


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_memory", description=(__doc__ or "").partition(": ")[2]
    )
    parser.add_argument("--variant", help="prints the bytes requested for one variant")
    options = parser.parse_args(argv)
    if options.variant is not None:
        sys.stdout.write(f"{requested_bytes(options.variant)}\n")
        return 0
    import torch

    has_cuda, failed = torch.cuda.is_available(), 0
    sys.stdout.write("| options | estimated MiB | requested MiB | off by |\n|---|---|---|---|\n")
    for variant in VARIANTS:
        predicted = estimate_memory(load([*MODEL.split(), *variant.split()]), 1).device_bytes
        requested, error = "", ""
        if has_cuda:
            command = [sys.executable, "-m", "benchmarks.cuda_memory", f"--variant={variant}"]
            counted = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
            off = predicted / counted - 1
            requested, error, failed = f"{counted / 2**20:.1f}", f"{off:+.1%}", failed + (abs(off) > LIMIT)
        sys.stdout.write(f"| `{variant}` | {predicted / 2**20:.1f} | {requested} | {error} |\n")
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
