"""Attention over a sequence that four processes share, forward and backward, against the whole of it in one.

    torchrun --nproc-per-node 4 -m examples.context_parallel [--rotation ring|alltoall|allgather] [--compile]

What PyTorch's context-parallel tutorial shows, without replacing anything that the model calls: the sequence is cut,
attention is called on the parts, and what comes out is put together again.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from parallelisms.context.context_parallel import ContextParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rotation", choices=["ring", "alltoall", "allgather"], default="ring")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()

    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    torch.manual_seed(0)  # The same on all ranks.
    q, k, v = (torch.randn(2, 4096, heads, 64, requires_grad=True) for heads in (8, 4, 4))

    cp = ContextParallel(mesh, method=given.rotation, heads=8, kv_heads=4)
    attention = torch.compile(cp, fullgraph=True) if given.compile else cp
    mine = [cp.shard(x) for x in (q, k, v)]  # [2, 4096 / ranks, heads, 64]: differentiable, like any indexing
    out = attention(*mine)
    grads = torch.autograd.grad(out.square().sum(), mine)

    whole = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    expected = torch.autograd.grad(whole.square().sum(), (q, k, v))
    together = [cp.unshard(x) for x in (out, *grads)]
    for name, ours, right in zip(["out", "dq", "dk", "dv"], together, (whole.transpose(1, 2), *expected), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)
        if mesh.get_local_rank() == 0:
            print(f"{name:>4}: largest difference {(ours - right).abs().max():.1e} of {right.abs().max():.1f}")
    if mesh.get_local_rank() == 0:
        print(f"{cp.plan.summary()}{', compiled' if given.compile else ''}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
