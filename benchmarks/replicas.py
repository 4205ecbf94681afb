"""Cost of hashing copies for `health.replica_check_interval`: python -m benchmarks.replicas [--mib
512] [--rounds 5]

CPU seconds of one thread per GiB of weights or moments, the fastest of the rounds.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from trainer.resilience.replicas import CHUNK_ELEMENTS, MULTIPLIER, polynomial_hash


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512, help="size of the tensor")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    powers = torch.full((CHUNK_ELEMENTS,), MULTIPLIER, dtype=torch.int64).cumprod(0)
    sys.stdout.write("| dtype | CPU seconds per GiB |\n|---|---|\n")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros((options.mib << 20) // dtype.itemsize, dtype=dtype)
        seconds = []
        for _ in range(options.rounds):
            started = time.thread_time()
            polynomial_hash(x, powers)
            seconds.append(time.thread_time() - started)
        sys.stdout.write(
            f"| {str(dtype).removeprefix('torch.')} | {min(seconds) * 1024 / options.mib:.2f} |\n"
        )


if __name__ == "__main__":
    main()
