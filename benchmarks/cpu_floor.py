"""The matrix products and attention of a step of benchmarks/cpu_step.py, and nothing else: what no
trainer can go below.

    python -m benchmarks.cpu_step --only eager --rival 'python -m benchmarks.cpu_floor'

Products write to buffers of their own; attention is torch's kernel, forward and backward. Prints
the line of JSON that cpu_step reads.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

STARTED = time.time()
HEAD_DIM = 32


def products(tokens: int, dim_in: int, dim_out: int) -> Callable[[], None]:
    """Of a linear layer: output, gradient of the input, and gradient of the weight."""
    x, weight, out = (
        torch.randn(shape) for shape in ((tokens, dim_in), (dim_out, dim_in), (tokens, dim_out))
    )
    grad_x = torch.empty_like(x)
    grad_weight = torch.empty_like(weight)

    def run() -> None:
        torch.mm(x, weight.T, out=out)
        torch.mm(out, weight, out=grad_x)
        torch.mm(out.T, x, out=grad_weight)

    return run


def attention(batch: int, seq_len: int, heads: int) -> Callable[[], None]:
    q, k, v = (
        torch.randn(batch, seq_len, heads, HEAD_DIM).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    grad = torch.randn_like(q)

    def run() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), grad)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("steps", 6),
        ("seq-len", 2048),
        ("batch", 2),
        ("layers", 6),
        ("dim", 256),
        ("vocab", 2048),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = options.batch * options.seq_len
    dim = options.dim
    hidden = 3 * options.dim
    square = products(tokens, dim, dim)
    up = products(tokens, dim, hidden)
    down = products(tokens, hidden, dim)
    head = products(tokens, dim, options.vocab)
    block = [
        attention(options.batch, options.seq_len, dim // HEAD_DIM),
        *[square] * 4,
        *[up] * 2,
        down,
    ]
    ends = [(time.process_time(), time.time())]
    for _ in range(options.steps):
        for run in (*block * options.layers, head):
            run()
        ends.append((time.process_time(), time.time()))
    seconds = [after[0] - before[0] for before, after in pairwise(ends)]
    result = {
        "cpu_s_per_step": median(seconds[2:]),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "first_step_done_s": ends[1][1] - STARTED,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
